"""How it is measured: clocks, profilers, samplers."""
