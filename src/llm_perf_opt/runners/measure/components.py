"""Label the forward of each module with its component of the model, by the module's name."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from llm_perf_opt.analysis.cost_model.work import ComponentName
from llm_perf_opt.core.records import PartTime
from llm_perf_opt.core.stages import PART_LABEL
from llm_perf_opt.runners.measure.annotations import labeled_forward

_ATTENTION = r"(self_attn|attn|attention|self_attention)"
RULES: tuple[tuple[str, bool, ComponentName], ...] = (
    # (end of the module's path, whether it must have a weight matrix, component)
    (r"(embed_tokens|embed_in|wte|wpe|embed_positions)", False, "embedding"),
    (r"(lm_head|embed_out)", False, "lm_head"),
    (rf"{_ATTENTION}\..*", True, "attention_projections"),
    (_ATTENTION, False, "attention_core"),
    (r"(\w*norm\w*|ln_\w+)", False, "norms"),
    (r"(mlp|block_sparse_moe|feed_forward|ffn)\.(gate|router)", False, "router"),
    (r"(shared_experts?|shared_expert_gate)", False, "shared_experts"),
    (r"experts", False, "experts"),
    (r"(mlp|feed_forward|ffn)", False, "mlp"),
)
"""The first matching rule applies. Time in an inner component does not count for the outer one."""

_PROJECTOR = r"(multi_modal_projector|aligner|merger|deepstack_merger_list)"
_ENCODER = r"(vision_tower|vision_model|visual|high_res_vision_\w+)"
IMAGE_RULES: tuple[tuple[str, ComponentName], ...] = (
    # (end of the path of a module inside an image encoder or a projector, component)
    (rf"{_PROJECTOR}(\..*)?", "projector"),
    (rf"{_ENCODER}\..*(position_embeddings?|pos_embed|pre_layrnorm|query_\w+)", "vision_norms"),
)
IN_ENCODER: dict[ComponentName, ComponentName] = {
    "attention_projections": "vision_attention_projections",
    "attention_core": "vision_attention_core",
    "mlp": "vision_mlp",
    "norms": "vision_norms",
}
"""Component of a text decoder → the same inside an image encoder."""

_COMPILED = [(re.compile(rf"(?:.*\.)?{pattern}"), matrix, part) for pattern, matrix, part in RULES]
_IMAGE_COMPILED = [(re.compile(rf"(?:.*\.)?{pattern}"), part) for pattern, part in IMAGE_RULES]
_IMAGE = re.compile(rf"(?:.*\.)?({_ENCODER}|{_PROJECTOR})\..+")


def part_of(path: str, multiplies: bool, convolves: bool = False) -> ComponentName | None:
    """Return the component of a module, by its path and whether its weight is that of a product or a convolution.

    None for a container.
    """
    inside = _IMAGE.fullmatch(path) is not None
    if inside and convolves:
        return "vision_convolutions"
    for rule, image_part in _IMAGE_COMPILED:
        if rule.fullmatch(path):
            return image_part
    part = next((part for rule, matrix, part in _COMPILED if rule.fullmatch(path) and (multiplies or not matrix)), None)
    return IN_ENCODER.get(part) if inside and part is not None else part


@contextmanager
def labeled_parts(model: Any) -> Iterator[None]:
    """Label every forward of a component's module while the context is open."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            dimensions = 0 if weight is None else weight.dim()
            part = part_of(path, dimensions == 2, dimensions > 2)
            if part is not None:
                hooks.enter_context(labeled_forward(module, PART_LABEL + part))
        yield


@dataclass(frozen=True)
class Range:
    """A labeled span of host time."""

    start_ns: int
    end_ns: int
    name: str


class Timeline:
    """The innermost range at any moment; ranges of one thread nest."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._moments: list[int] = []
        self._names: list[str] = []
        open_ranges: list[Range] = []
        for entry in sorted(ranges, key=lambda entry: (entry.start_ns, -entry.end_ns)):
            while open_ranges and open_ranges[-1].end_ns <= entry.start_ns:
                self._leave(open_ranges)
            self._mark(entry.start_ns, entry.name)
            open_ranges.append(entry)
        while open_ranges:
            self._leave(open_ranges)

    def _leave(self, open_ranges: list[Range]) -> None:
        left = open_ranges.pop()
        self._mark(left.end_ns, open_ranges[-1].name if open_ranges else "")

    def _mark(self, moment: int, name: str) -> None:
        self._moments.append(moment)
        self._names.append(name)

    def at(self, moment: int) -> str:
        """Return the name of the innermost range, or an empty string."""
        index = bisect_right(self._moments, moment) - 1
        return self._names[index] if index >= 0 else ""

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield each span with one innermost range: its name, start and end."""
        yield from zip(self._names, self._moments, self._moments[1:], strict=False)


def kernel_times(stages: Sequence[Range], parts: Sequence[Range], work: Sequence[tuple[int, int]]) -> tuple[PartTime, ...]:
    """Return the device time by stage and component; `work` holds (launch time, duration)."""
    by_stage, by_part = Timeline(stages), Timeline(parts)
    totals: dict[tuple[str, str], list[int]] = {}
    for launched, duration in work:
        stage = by_stage.at(launched)
        if stage:
            totals.setdefault((stage, _part_name(by_part.at(launched))), []).append(duration)
    return tuple(PartTime(stage, part, len(found), sum(found)) for (stage, part), found in totals.items())


def host_times(stages: Sequence[Range], parts: Sequence[Range]) -> tuple[PartTime, ...]:
    """Return the host time by stage and component for a run on the CPU, without inner components."""
    by_stage = Timeline(stages)
    totals: dict[tuple[str, str], list[int]] = {}
    for name, start, end in Timeline(parts).spans():
        stage = by_stage.at(start)
        if name and stage:
            totals.setdefault((stage, _part_name(name)), []).append(end - start)
    found = [PartTime(stage, part, len(times), sum(times)) for (stage, part), times in totals.items()]
    for name in dict.fromkeys(entry.name for entry in stages):
        known = sum(entry.time_ns for entry in found if entry.stage == name)
        whole = sum(entry.end_ns - entry.start_ns for entry in stages if entry.name == name)
        found.append(PartTime(name, OTHER, 1, whole - known))
    return tuple(found)


OTHER = "other"
"""Work outside every component: residual additions, positions, masks, sampling."""


def _part_name(label: str) -> str:
    return label.removeprefix(PART_LABEL) if label else OTHER
