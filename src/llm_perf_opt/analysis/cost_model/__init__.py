"""FLOPs and bytes of a forward step, from the model's configuration."""
