"""Trace analysis: stages, steps, idle time, and attribution of work to operators and modules."""
