"""What every room shares: records, run folder, errors, stages, units."""
