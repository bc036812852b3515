"""Two sides held against each other."""
