"""Datasets and prompts."""
