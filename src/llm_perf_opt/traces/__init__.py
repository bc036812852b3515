"""A tool's file becomes one event model."""
