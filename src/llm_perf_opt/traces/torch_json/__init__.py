"""Read the JSON traces of torch.profiler into the event model."""
