"""`python -m llm_perf_opt.runners.deep_profile_runner [OVERRIDES…]`: the same as `llm-perf run profiling=stage2 [OVERRIDES…]`."""

import os
import sys

from llm_perf_opt.core.processes import module_argv


def main() -> None:
    """Replace this process with `llm-perf run profiling=stage2`."""
    argv = module_argv("llm_perf_opt", "run", "profiling=stage2", *sys.argv[1:])
    os.execv(sys.executable, argv)  # noqa: S606 - an argv list, never a shell


if __name__ == "__main__":
    main()
