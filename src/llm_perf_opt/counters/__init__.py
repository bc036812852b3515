"""Hardware counters of Nsight Compute: which exist on which chip, what they mean, and named sets of them."""
