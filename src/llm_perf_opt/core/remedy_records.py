"""Records of what could be changed in an engine: a runner writes them, findings read them."""

from dataclasses import dataclass
from enum import Enum


class Remedy(str, Enum):
    """A change that engines have in common. `before` and `after` are those of `EngineRemedy`."""

    OVERLAP = "overlap_scheduling"
    """Prepare a step while the previous one runs."""
    GRAPHS = "cuda_graphs"
    """Run decode in CUDA graphs, not eagerly."""
    FULL_GRAPHS = "full_graphs"
    """Run a decode step in one CUDA graph, not in one per piece."""
    GRAPH_SIZES = "graph_sizes"
    """Capture a graph of this batch. Before: the batch it is padded to, 0 if it runs without a graph. After: the batch."""
    LARGER_STEP = "larger_step"
    """Before: most tokens of a step. After: the tokens of all prompts."""
    MORE_SEQUENCES = "more_sequences"
    """Before: sequences that run at once. After: the batch."""
    CACHE_FORMAT = "cache_format"
    """Store the KV cache in fewer bits. Before and after: bits per value."""
    WEIGHT_FORMAT = "weight_format"
    """Quantize the weights of linear layers and experts. Before and after: bits per weight."""
    ATTENTION = "attention_backend"
    """Run attention with other kernels."""
    PREFIX_CACHE = "prefix_cache"
    """Compute a shared prefix once. Before: tokens of all prompts. After: tokens that remain to be computed."""
    SPECULATION = "speculation"
    """Propose several tokens and verify them in one step. Before: 1. After: most tokens of a step."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class EngineRemedy:
    """A change of its arguments that an engine accepts in this run and does not already run with.

    Findings decide whether it would help.
    """

    kind: str
    """A value of `Remedy`; findings ignore others."""
    overrides: tuple[str, ...]
    """Settings of `llm-perf run`, `runtime.engine.NAME=VALUE`."""
    change: str
    """The change as a sentence, in the words of the engine."""
    now: str
    """The current setting, as the engine names it."""
    before: float = 0.0
    after: float = 0.0
    condition: str = ""
    """A sentence on what the change needs or costs elsewhere; empty if nothing is known."""
    alters_output: bool = False
    """Whether the model computes with less precision afterwards."""
    implied: tuple[str, ...] | None = None
    """Settings that the engine changes with it, as NAME=VALUE; a profiled pass that changes them, too, measures their cost. None
    if that is not recorded."""
