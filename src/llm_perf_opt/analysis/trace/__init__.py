"""What a trace says: stages, steps, idle time and whose work it was."""
