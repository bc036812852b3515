"""Shared by all tests."""

import os

# Each worker gets one thread: two workers with two threads each would fight over two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
