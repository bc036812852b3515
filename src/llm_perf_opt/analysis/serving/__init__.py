"""A server under load: latencies, goodput, the saturation curve and its knee, and checks of the load generator."""
