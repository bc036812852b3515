"""The parent side of a capture: plans the passes, starts each in a process of its own, keeps what it leaves in raw/."""
