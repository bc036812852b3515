"""What the measurements mean: records in, records out, no files."""
