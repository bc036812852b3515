"""NVTX regions and the work launched in them."""
