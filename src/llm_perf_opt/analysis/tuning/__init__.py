"""The search for a faster configuration: goals, candidates, decisions, calibration. No files, no processes."""
