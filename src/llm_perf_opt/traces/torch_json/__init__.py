"""A trace of torch.profiler, as JSON, → the event model."""
