"""What the hardware allows, and how near a stage comes to it."""
