"""Torch traces of several ranks with known truth: each computes, enters a collective, and leaves it when all are done."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
KINDS = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}
KERNEL = "ncclDevKernel_{}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Job:
    """What a job does."""

    ranks: int = 4
    collectives: int = 30
    seed: int = 0
    hosts: int = 1
    on_device: bool = True
    per_step: int = 5
    group: int = 0
    """Ranks per process group; 0 for one group of all."""
    end_noise_ns: int = 0
    """How much later than the end a rank may leave a collective."""
    late: dict[int, int] = field(default_factory=dict)
    """Rank → how much longer its operator `aten::mm` takes in every third round."""
    drop: dict[int, list[int]] = field(default_factory=dict)
    """Rank → collectives that its trace lacks."""
    double: dict[int, list[int]] = field(default_factory=dict)
    """Rank → collectives to which it gives twice the data."""
    numbered: bool = False
    """Whether the library numbers its collectives."""
    gloo: bool = False
    """Whether collectives run on the host, next to kernels on the device."""
    operators: int = 2
    """Operators between two collectives."""
    blocking: bool = True
    """Whether computing waits for collectives. If not, all ranks begin together, and the same operator takes as long on each."""


@dataclass
class Truth:
    """What an analysis must find."""

    collectives: list[dict[str, Any]]
    busy_ns: list[int]
    idle_ns: list[int]
    exposed_ns: list[int]
    offset_ns: list[int]
    files: list[Path]


def union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals, the obvious way."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def length(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def minus(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """The time in the first but not in the second."""
    return length(union([*first, *second])) - length(union(second))


def write_job(folder: Path, job: Job) -> Truth:
    """Write the trace of every rank."""
    made = _Job(job)
    files = []
    for rank in range(job.ranks):
        files.append(folder / f"trace_rank{rank}.json")
        files[-1].write_text(_in_layout(made.trace(rank)))
    return made.truth(files)


def _in_layout(trace: dict[str, Any]) -> str:
    """The trace as torch writes it."""
    events = []
    for event in trace.pop("traceEvents"):
        head = {key: event[key] for key in ("cat", "name", "pid", "tid")}
        times = f'"ts": {microseconds(event["ts"])}, "dur": {microseconds(event["dur"])}'
        lines = [
            f'    "ph": "X", {json.dumps(head)[1:-1]},',
            f"    {times},",
            '    "args": {',
            f"      {json.dumps(event['args'])[1:-1]}",
        ]
        events.append("\n".join(["  {", *lines, "    }", "  }"]))
    around = json.dumps(trace, indent=2)
    return around.rstrip("}\n") + ',\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}\n"


def microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


class _Job:
    def __init__(self, job: Job) -> None:
        self.job = job
        random_ = random.Random(job.seed)
        self.offsets = [0] + [random_.randrange(-5_000_000, 5_000_000) for _ in range(job.hosts - 1)]
        self.free = [20_000_000 + (random_.randrange(20_000) if job.blocking else 0) for _ in range(job.ranks)]
        self.sent = [0] * job.ranks
        self.work: list[list[tuple[int, int, str]]] = [[] for _ in range(job.ranks)]
        self.comm: list[list[dict[str, Any]]] = [[] for _ in range(job.ranks)]
        self.windows: list[list[tuple[int, int]]] = [[] for _ in range(job.ranks)]
        self.rows: list[dict[str, Any]] = []
        size = job.group or job.ranks
        self.groups = [list(range(first, first + size)) for first in range(0, job.ranks, size)]
        for number in range(job.collectives):
            kind, data = random_.choice(sorted(KINDS)), 1024 * random_.randrange(1, 4)
            for rank in range(job.ranks):
                self._compute(rank, number, random_ if job.blocking else random.Random(number))
            for group in self.groups:
                self._collective(number, kind, data, group, random_)

    def host(self, rank: int) -> int:
        return rank * self.job.hosts // self.job.ranks

    def _compute(self, rank: int, number: int, random_: random.Random) -> None:
        """Operators with gaps between them; the last may run on while the collective begins."""
        for place in range(self.job.operators):
            name = "aten::mm" if place == self.job.operators - 1 else "aten::add"
            start = self.free[rank] + random_.randrange(50, 3_000)
            end = start + random_.randrange(500, 20_000)
            if name == "aten::mm" and number % 3 == 0:
                end += self.job.late.get(rank, 0)
            self.work[rank].append((start, end, name))
            self.free[rank] = end

    def _collective(self, number: int, kind: str, data: int, group: list[int], random_: random.Random) -> None:
        overlap = random_.random() < 0.3 and self.job.on_device
        start = {rank: self.free[rank] + random_.randrange(100, 2_000) - (400 if overlap else 0) for rank in group}
        if not self.job.blocking:
            start = {rank: max(self.free[rank], self.sent[rank]) + 100 for rank in group}
        end = max(start.values()) + random_.randrange(1_000, 30_000)
        present = [rank for rank in group if number not in self.job.drop.get(rank, [])]
        for rank in group:
            left = end + (random_.randrange(self.job.end_noise_ns) if self.job.end_noise_ns else 0)
            doubled = 2 if number in self.job.double.get(rank, []) else 1
            if rank in present:
                launched = start[rank] - 90 if self.job.blocking else self.free[rank]
                entry = {"kind": kind, "data": data * doubled, "group": group, "number": number, "launched": launched}
                self.comm[rank].append({"start": start[rank], "end": left, **entry})
            self.sent[rank] = left
            if self.job.blocking:
                self.free[rank] = left
            if number % self.job.per_step == 0 or not self.windows[rank]:
                before = self.windows[rank][-1][1] if self.windows[rank] else 0
                self.windows[rank].append((before, left))
            else:
                self.windows[rank][-1] = (self.windows[rank][-1][0], left)
        self.rows.append(
            {
                "kind": kind,
                "group": group[0] // len(group),
                "bytes": data * 2 * (len(group) if kind != "all_reduce" else 1),
                "ranks": present,
                "start": {rank: start[rank] for rank in present},
                "end": end,
                "missing": [rank for rank in group if rank not in present],
            }
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def trace(self, rank: int) -> dict[str, Any]:
        offset = self.offsets[self.host(rank)]
        events: list[dict[str, Any]] = []

        def event(category: str, name: str, start: int, end: int, thread: int, **arguments: Any) -> None:
            where = {"cat": category, "name": name, "pid": 100 + rank, "tid": thread}
            arguments = {"External id": len(events), **arguments}
            events.append({**where, "ts": start + offset, "dur": end - start, "args": arguments})

        correlation = 0
        for start, end, name in self.work[rank]:
            correlation += 1
            if self.job.on_device:
                event("cpu_op", name, start - 40, start - 10, 1, **{"Input Dims": [[8, 8]]})
                event("cuda_runtime", "cudaLaunchKernel", start - 30, start - 20, 1, correlation=correlation)
                event("kernel", f"{name[6:]}_kernel", start, end, 7, device=rank, stream=7, correlation=correlation)
            else:
                event("cpu_op", name, start, end, 1, **{"Input Dims": [[8, 8]]})
        for entry in self.comm[rank]:
            correlation += 1
            self._write_collective(event, rank, entry, correlation)
        for number, (start, end) in enumerate(self.windows[rank]):
            event("user_annotation", f"ProfilerStep#{number}", start, end, 1)
        return {
            "schemaVersion": 1,
            "distributedInfo": self._distributed(rank),
            "host_name": f"node{self.host(rank)}",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": events,
        }

    def _write_collective(self, event: Any, rank: int, entry: dict[str, Any], correlation: int) -> None:
        kind, size = entry["kind"], len(entry["group"])
        whole = entry["data"] * (1 if kind == "all_reduce" else size)
        elements = {"all_gather": (entry["data"], whole), "reduce_scatter": (whole, entry["data"])}.get(kind, (whole, whole))
        if not self.job.on_device or self.job.gloo:
            where = {"Input Dims": [[elements[0]]], "Input type": ["c10::BFloat16"]}
            event("user_annotation", f"gloo:{kind}", entry["start"], entry["end"], 2, **where)
            return
        stated = {
            "Collective name": KINDS[kind], "dtype": "BFloat16", "In msg nelems": elements[0], "Out msg nelems": elements[1],
            "Group size": size, "Process Group Name": str(self.groups.index(entry["group"])),
            "Process Group Ranks": str(entry["group"]),
            **({"Seq": entry["number"] + 7} if self.job.numbered else {}),
        }  # fmt: skip
        start = entry["start"]
        launched = entry["launched"]
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 8, 1, correlation=correlation)
        name = KERNEL.format(kind.title().replace("_", ""))
        event("kernel", name, start, entry["end"], 20, device=rank, stream=20, correlation=correlation, **stated)

    def _distributed(self, rank: int) -> dict[str, Any]:
        groups = [{"pg_name": str(number), "ranks": group} for number, group in enumerate(self.groups) if rank in group]
        return {"backend": "nccl", "rank": rank, "world_size": self.job.ranks, "pg_config": groups}

    # --- truth --------------------------------------------------------------------------------------------------------

    def truth(self, files: list[Path]) -> Truth:
        rows = sorted((row for row in self.rows if row["ranks"]), key=lambda row: (max(row["start"].values()), row["group"]))
        busy, idle, exposed = [], [], []
        for rank in range(self.job.ranks):
            work = [(start, end) for start, end, _ in self.work[rank]]
            comm = [(entry["start"], entry["end"]) for entry in self.comm[rank]]
            whole = union([*work, *comm])
            busy.append(length(whole))
            idle.append(whole[-1][1] - whole[0][0] - busy[-1])
            exposed.append(minus(union(comm), union(work)))
        offsets = [self.offsets[self.host(rank)] for rank in range(self.job.ranks)]
        return Truth(rows, busy, idle, exposed, offsets, files)
