"""Labels the forward of each module with the part of the model it belongs to, by name: the rules are data."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from llm_perf_opt.analysis.cost_model.work import ComponentName
from llm_perf_opt.core.records import PartTime
from llm_perf_opt.core.stages import PART_LABEL

_ATTENTION = r"(self_attn|attn|attention|self_attention)"
RULES: tuple[tuple[str, bool, ComponentName], ...] = (
    # (the module's path ends so, it multiplies a weight matrix, the part)
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
"""The first rule that fits names the part; a part inside another is counted where it stands, not in the outer one."""

_COMPILED = [(re.compile(rf"(?:.*\.)?{pattern}"), matrix, part) for pattern, matrix, part in RULES]


def part_of(path: str, multiplies: bool) -> ComponentName | None:
    """The part a module belongs to, or None for one that only holds others."""
    return next((part for rule, matrix, part in _COMPILED if rule.fullmatch(path) and (multiplies or not matrix)), None)


@contextmanager
def labeled_parts(model: Any) -> Iterator[None]:
    """While the context lasts, every forward of a part's module runs inside a record_function range of the part's name."""
    from torch.profiler import record_function

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            part = part_of(path, weight is not None and weight.dim() == 2)
            if part is None:
                continue
            opened: list[Any] = []

            def enter(_: Any, __: Any, label: str = PART_LABEL + part, opened: list[Any] = opened) -> None:
                entered = record_function(label)
                entered.__enter__()
                opened.append(entered)

            def leave(_: Any, __: Any, ___: Any, opened: list[Any] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@dataclass(frozen=True)
class Range:
    """A labeled stretch of the host's time."""

    start_ns: int
    end_ns: int
    name: str


class Timeline:
    """Which range is the innermost at any moment; ranges nest, as those of one thread do."""

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
        """The innermost range's name; empty where there is none."""
        index = bisect_right(self._moments, moment) - 1
        return self._names[index] if index >= 0 else ""

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Every stretch with one innermost range: its name, start and end."""
        yield from zip(self._names, self._moments, self._moments[1:], strict=False)


def kernel_times(stages: Sequence[Range], parts: Sequence[Range], work: Sequence[tuple[int, int]]) -> tuple[PartTime, ...]:
    """Device time by stage and part: `work` holds (when the launch was made, how long what it started took)."""
    by_stage, by_part = Timeline(stages), Timeline(parts)
    totals: dict[tuple[str, str], list[int]] = {}
    for launched, duration in work:
        stage = by_stage.at(launched)
        if stage:
            totals.setdefault((stage, _part_name(by_part.at(launched))), []).append(duration)
    return tuple(PartTime(stage, part, len(found), sum(found)) for (stage, part), found in totals.items())


def host_times(stages: Sequence[Range], parts: Sequence[Range]) -> tuple[PartTime, ...]:
    """Host time by stage and part, for a run on the CPU: what a part's own code takes, inner parts left out."""
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
"""Work outside every part: residual additions, positions, masks, sampling."""


def _part_name(label: str) -> str:
    return label.removeprefix(PART_LABEL) if label else OTHER
