"""The parent side of a capture: plans the passes, runs each in a separate process and keeps its files in raw/."""
