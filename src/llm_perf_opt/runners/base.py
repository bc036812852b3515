"""The contract between what is measured and what measures it."""

from typing import Any, Protocol

from llm_perf_opt.data.prompts import Prompts
from llm_perf_opt.profiling.meter import Steppable
from llm_perf_opt.records import ModelFacts


class SteppableRunner(Steppable, Protocol):
    """A runner whose prefill and decode steps can be called one by one."""

    facts: ModelFacts

    def place(self, prompts: Prompts) -> Any:
        """Put prompts on the device, in the form `prefill` takes."""
