"""A tool's file → records."""
