"""What the measurements mean. Pure functions of records."""
