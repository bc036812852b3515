"""Clock, meter, torch.profiler and measured peaks, inside the measured process."""
