"""Kernels by name, class and hardware counters."""
