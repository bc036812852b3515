"""Datasets, models and prompts."""
