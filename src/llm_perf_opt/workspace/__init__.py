"""The user's files: datasets, models, third-party references."""
