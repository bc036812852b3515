"""`python -m llm_perf_opt` is the same as `llm-perf`."""

from llm_perf_opt.cli.__main__ import main

if __name__ == "__main__":
    main()
