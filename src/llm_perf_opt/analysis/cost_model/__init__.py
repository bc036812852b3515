"""What a forward step must compute and move, from the model's configuration."""
