"""Hardware peaks, roofline times, and how close each stage comes to them."""
