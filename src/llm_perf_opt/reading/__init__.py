"""What a run folder holds, read back."""
