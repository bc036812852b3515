"""Runs over a grid of settings: made, kept, shown."""
