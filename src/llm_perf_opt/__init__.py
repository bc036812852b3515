"""llm-perf-opt: where an LLM's inference time goes, how far it is from the limit, what to change first."""

__version__ = "0.1.0"
__all__ = ["__version__"]
