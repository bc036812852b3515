"""The recorded logits of a run: what the model answered to the same tokens as another configuration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_perf_opt.core.missing import Maybe

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray


@dataclass(frozen=True)
class LogitFacts:
    """What was recorded, or why nothing was."""

    why: str = ""
    """Why there are no logits; empty if they are in logits.npz."""
    method: str = ""
    """Where the logits come from."""
    reference: str = ""
    """The run whose tokens were fed; empty: those of the run itself."""
    prompts_sha256: str = ""
    sequences: int = 0
    """The first sequences of the batch, all of them unless there are very many positions."""
    batch_size: int = 0
    positions: int = 0
    """New tokens of each sequence."""
    vocabulary: int = 0
    dtype: str = ""
    fp32_why: str = ""
    """Why there are no logits in fp32; empty if there are."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits at every new token. Before position p, the tokens `fed[:, :p]` follow the prompt, whatever the model chose."""

    facts: LogitFacts
    fed: "Array"
    """Tokens of the reference, [sequence, position]."""
    chosen: "Array"
    """The token with the largest logit of the whole vocabulary, [sequence, position]."""
    top: "Array"
    """Ids with the largest logits in the reference, [sequence, position, id]; none if `common` has the whole vocabulary."""
    common: "Array"
    """Ids that are recorded at every position, drawn with a fixed seed."""
    values: "Array"
    """The logits of `top`, then of `common`, fp32, [sequence, position, id]."""
    fp32: "Maybe[Array]"
    """The same with all weights and operations in fp32; only for a reference."""
