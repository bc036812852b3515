"""What a run must say of its inputs so that its times are not taken for more than they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.runtime_records import TextUse, WeightFacts


class InputKind(str, Enum):
    """What is said."""

    PROMPTS = "prompts"
    RANDOM_WEIGHTS = "random_weights"
    CAST_WEIGHTS = "cast_weights"
    CUT_PROMPTS = "cut_prompts"
    UNUSED_RECORDS = "unused_records"


@dataclass(frozen=True)
class InputNote:
    """One thing to know, as a fact and as a sentence."""

    kind: InputKind
    text: str


_CASTABLE = ("fp32", "bf16", "fp16", "f64")
"""Formats that a loader turns into another; packed weights stay as they are."""


def measured_inputs(timings: Maybe[CleanTimings], config: Mapping[str, Any]) -> tuple[InputNote, ...]:
    """From what the run recorded; of one made before that, from what it was asked for."""
    if isinstance(timings, Missing):
        return ()
    found = [InputNote(InputKind.PROMPTS, f"Prompts: {timings.workload.source}.")]
    texts = timings.workload.texts
    found += [] if texts is None else _texts(texts)
    weights = timings.model.weights
    asked = config.get("model")
    if weights is None and isinstance(asked, Mapping) and asked.get("source") == "random":
        weights = WeightFacts("random")
    found += [] if weights is None else _weights(weights, timings.model.dtype)
    return tuple(found)


def _texts(texts: TextUse) -> list[InputNote]:
    found = []
    if texts.cut:
        words = f"{texts.cut} of {texts.used} texts were cut to {texts.limit} tokens; the longest had {texts.longest:,}."
        found.append(InputNote(InputKind.CUT_PROMPTS, words))
    if texts.unused is None or texts.unused:
        many = "An uncounted number of" if texts.unused is None else f"{texts.unused:,}"
        words = f"{many} further records of the dataset were not used: the batch holds the first {texts.used}."
        found.append(InputNote(InputKind.UNUSED_RECORDS, words))
    return found


def _weights(weights: WeightFacts, dtype: str) -> list[InputNote]:
    if weights.source == "random":
        words = "The weights are random: the times are those of the architecture, and what it wrote means nothing."
        return [InputNote(InputKind.RANDOM_WEIGHTS, words)]
    cast = {name: size for name, size in weights.stored_bytes.items() if name in _CASTABLE and name != dtype}
    if not cast or dtype not in _CASTABLE:
        return []
    whole = sum(weights.stored_bytes.values())
    share = "The weights are" if sum(cast.values()) == whole else f"{sum(cast.values()) / whole:.0%} of the weights are"
    return [InputNote(InputKind.CAST_WEIGHTS, f"{share} stored in {' and '.join(cast)}, and were cast to {dtype}.")]
