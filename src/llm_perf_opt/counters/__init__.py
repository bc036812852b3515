"""Names of ncu counters per chip, and named sets of them."""
