"""NVTX regions: what each launched."""
