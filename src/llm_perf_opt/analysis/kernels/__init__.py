"""Kernels by name, class and hardware counter."""
