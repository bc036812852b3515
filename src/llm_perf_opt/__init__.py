"""llm-perf-opt: where an LLM's inference time goes, how far it is from the limit, what to change first."""

import os
import sys
from itertools import pairwise

__version__ = "0.1.0"
__all__ = ["__version__"]


def _leave_out_working_folder() -> None:
    """Import nothing from the working folder, which `python -m llm_perf_opt` would search first: it may be anybody's project."""
    words = sys.orig_argv
    ours = any(first == "-m" and name.split(".")[0] == __name__ for first, name in pairwise(words))
    if ours and sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - as Python writes it
        del sys.path[0]


_leave_out_working_folder()
