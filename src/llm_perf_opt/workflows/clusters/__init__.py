"""Run the points of a sweep on a cluster. Each point is one `llm-perf run --point SWEEP N` on a node."""
