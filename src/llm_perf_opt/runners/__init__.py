"""What is measured: models and the loops that run them."""
