"""The command `llm-perf`: one file per verb."""
