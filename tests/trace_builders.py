"""Small traces built by hand, for tests of what is made of a trace."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llm_perf_opt.traces.events import (
    NO_NAME,
    DeviceWork,
    HostCalls,
    Operators,
    RangeKind,
    Ranges,
    Trace,
    TraceProblem,
    WorkKind,
)

PROCESS = 7
THREAD = 70


class Builder:
    """Collects rows in any order; `trace()` sorts them as a parser would."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.work: list[tuple[Any, ...]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.ranges: list[tuple[Any, ...]] = []
        self.operators: list[tuple[Any, ...]] = []

    def name(self, text: str | None) -> int:
        if text is None:
            return NO_NAME
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def kernel(
        self,
        start: int,
        end: int,
        name: str = "kernel",
        correlation: int = 0,
        process: int = PROCESS,
        device: int = 0,
        stream: int = 7,
        kind: WorkKind = WorkKind.KERNEL,
        graph_node: int = 0,
        size: int = -1,
        grid: int = 1,
        block: int = 32,
    ) -> None:
        self.work.append((start, end, kind, self.name(name), process, device, stream, correlation, graph_node, size, grid, block))

    def call(
        self,
        start: int,
        end: int,
        name: str = "cudaLaunchKernel",
        correlation: int = 0,
        process: int = PROCESS,
        thread: int = THREAD,
    ) -> None:
        self.calls.append((start, end, self.name(name), process, thread, correlation))

    def range(
        self,
        start: int,
        end: int,
        name: str,
        domain: str | None = "LLM",
        kind: RangeKind = RangeKind.PUSH_POP,
        process: int = PROCESS,
        thread: int = THREAD,
    ) -> None:
        self.ranges.append((start, end, self.name(name), self.name(domain), kind, process, thread))

    def operator(self, start: int, end: int, name: str, process: int = PROCESS, thread: int = THREAD) -> None:
        self.operators.append((start, end, self.name(name), process, thread, NO_NAME))

    def launch(self, at: int, start: int, end: int, name: str = "kernel", correlation: int = 0, **more: Any) -> None:
        """A launch call of one nanosecond and its kernel."""
        correlation = correlation or len(self.calls) + 1
        host = {key: more.pop(key) for key in ("thread",) if key in more}
        self.call(at, at + 1, correlation=correlation, process=more.get("process", PROCESS), **host)
        self.kernel(start, end, name, correlation, **more)

    def trace(self, problems: Sequence[TraceProblem] = (), facts: dict[str, str] | None = None) -> Trace:
        return Trace(
            "nsys",
            tuple(self.names),
            _table(DeviceWork, sorted(self.work, key=lambda row: row[:2])),
            _table(HostCalls, sorted(self.calls, key=lambda row: row[:2])),
            _table(Ranges, sorted(self.ranges, key=lambda row: (row[0], -row[1]))),
            _table(Operators, sorted(self.operators, key=lambda row: (row[0], -row[1]))),
            tuple(problems),
            facts or {},
        )


def _table(kind: Any, rows: Iterable[tuple[Any, ...]]) -> Any:
    rows = list(rows)
    empty = kind.none()
    return kind(*(np.array([row[place] for row in rows], column.dtype) for place, column in enumerate(empty.columns().values())))


PACKED = [
    ("fused_add_rms_norm_kernel", "norms"),
    ("nvjet_qkv", "attention_projections"),
    ("rotary_embedding_kernel", "attention_core"),
    ("reshape_and_cache_flash_kernel", "attention_core"),
    ("flash_fwd_splitkv_kernel", "attention_core"),
    ("flash_fwd_splitkv_combine_kernel", "attention_core"),
    ("nvjet_o", "attention_projections"),
    ("cublasLt::splitKreduce_kernel", "attention_projections"),
    ("fused_add_rms_norm_kernel", "norms"),
    ("nvjet_gate_up", "mlp"),
    ("act_and_mul_kernel", "mlp"),
    ("nvjet_down", "mlp"),
]
"""Kernels of a decoder layer as engines run it, each with its component; HEAD runs before the layers, TAIL after them."""
HEAD = [
    ("multi_tensor_apply_kernel", "other"),
    ("flash::prepare_varlen_num_blocks_kernel", "attention_core"),
    ("embedding_kernel", "other"),
]
TAIL = [("rms_norm_kernel", "norms"), ("nvjet_head", "lm_head"), ("reduce_kernel<ArgMaxOps>", "other"), ("Memcpy", "other")]
