"""How a run is captured: its passes, each in a process of its own."""
