"""The user's own files: datasets, models, third-party references."""
