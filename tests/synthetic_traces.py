"""Torch traces whose truth is known: a small machine is played through, and what it did is added up while it is written.

The arithmetic here is plain Python on integers and shares nothing with the package: sums while writing, and one sweep over sorted
intervals for what was busy. The text is laid out as torch.profiler lays it out, space for space.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PROCESS = 4242
THREAD = 4243
BASE_NS = 1790857026000000000
ORIGIN_NS = 3851303535517651
"""Where a real trace of torch 2.11 began: 13 digits of µs before the point."""


@dataclass(frozen=True)
class Recipe:
    """What to play through."""

    steps: int = 8
    kernels_per_step: int = 20
    graph: bool = False
    """Decode steps are one cudaGraphLaunch each, the prefill stays eager."""
    streams: int = 1
    """Above one, kernels go to the streams in turn and overlap."""
    devices: int = 1
    """Above one, kernels go to the devices in turn, to as many streams on each."""
    copies: bool = False
    """Each step begins with a host-to-device copy and a memset."""
    shapes: bool = True
    line_a_value: bool = False
    """As torch 2.13 writes it, not as 2.11 does."""
    seed: int = 0


@dataclass
class StageTruth:
    """One stage or step: what its launches started."""

    name: str
    wall_ns: int
    launches: int
    work: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of kernels, copies and memsets."""
    kernels: int = 0
    kernel_ns: int = 0

    @property
    def busy_ns(self) -> int:
        return union_ns(self.work)

    @property
    def span_ns(self) -> int:
        return max(end for _, end in self.work) - min(start for start, _ in self.work)

    @property
    def idle_ns(self) -> int:
        return self.span_ns - self.busy_ns


@dataclass
class Truth:
    """What is true of a generated trace."""

    events: int = 0
    """All events of the file, of every phase and category."""
    operators: int = 0
    calls: int = 0
    launches: int = 0
    kernels: int = 0
    kernel_ns: int = 0
    copies: int = 0
    copy_ns: int = 0
    copy_bytes: int = 0
    memsets: int = 0
    memset_ns: int = 0
    by_name: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Kernel → [calls, ns]."""
    stages: list[StageTruth] = field(default_factory=list)
    """prefill, decode, then each decode_step, in time order within each."""
    work: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, start of the call that launched it) of all device work."""
    on_device: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Device → (start, end) of its work."""

    @property
    def busy_ns(self) -> int:
        return union_ns([(start, end) for start, end, _ in self.work])

    @property
    def span_ns(self) -> int:
        return max(end for _, end, _ in self.work) - min(start for start, _, _ in self.work)

    @property
    def idle_ns(self) -> int:
        return self.span_ns - self.busy_ns

    def gaps(self) -> list[tuple[int, int, bool]]:
        """(start, end, whether the work that ended it was launched only after the device had gone idle) of each idle gap."""
        found = []
        reached = min(start for start, _, _ in self.work)
        for start, end, launched in sorted(self.work):
            if start > reached:
                found.append((reached, start, launched >= reached))
            reached = max(reached, end)
        return found


def union_ns(intervals: list[tuple[int, int]]) -> int:
    """Time covered by at least one interval."""
    covered = 0
    reached = -1
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def kernel_name(number: int) -> str:
    """Names as long as real ones: templates, commas, angle brackets."""
    if number % 3 == 0:
        return f"nvjet_sm90_tst_{64 << number % 2}x{8 + number}_64x16_2x1_v_bz_coopA_TNT"
    functor = f"at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::MulFunctor{number}<float> >"
    return f"void at::native::elementwise_kernel<128, {number}, {functor}>(int, at::native::gpu_kernel_impl::lambda(int)#1)"


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


class _Machine:
    """A host thread that launches and a device whose streams run what they are given, in order."""

    def __init__(self, recipe: Recipe, out: IO[bytes]) -> None:
        self.recipe = recipe
        self.random = random.Random(recipe.seed)
        self.truth = Truth()
        self.now = ORIGIN_NS
        self.free = [0] * recipe.streams * recipe.devices
        self.correlation = 0
        self.external = 0
        self._out = out
        self._first = True

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, event: str) -> None:
        self._out.write(("" if self._first else ",").encode() + b"\n  {\n    " + event.encode() + b"\n  }")
        self._first = False
        self.truth.events += 1

    def span(self, category: str, name: str, process: int, thread: int, start: int, end: int, arguments: str) -> None:
        part, last = (",\n    ", "\n    ") if self.recipe.line_a_value else (", ", "")
        self.write(
            f'"ph": "X"{part}"cat": "{category}"{part}"name": "{name}"{part}"pid": {process}{part}"tid": {thread},\n'
            f'    "ts": {_us(start)}{part}"dur": {_us(end - start)}{last},\n    "args": {{\n      {arguments}\n    }}'
        )

    def flow(self, phase: str, thread: int, process: int, at: int) -> None:
        part, last = (",\n    ", "\n    ") if self.recipe.line_a_value else (", ", "")
        binding = ', "bp": "e"' if phase == "f" else ""
        self.write(
            f'"ph": "{phase}"{part}"id": {self.correlation}{part}"pid": {process}{part}"tid": {thread}{part}"ts": {_us(at)},\n'
            f'    "cat": "ac2g"{part}"name": "ac2g"{last}{binding}'
        )

    # --- what a host does -----------------------------------------------------------------------------------------

    def passes(self, least: int, most: int) -> int:
        self.now += self.random.randint(least, most)
        return self.now

    def call(self, name: str, least: int = 2_000, most: int = 9_000) -> tuple[int, int]:
        """A runtime call with a correlation of its own."""
        self.correlation += 1
        start = self.now
        end = self.passes(least, most)
        self.span("cuda_runtime", name, PROCESS, THREAD, start, end,
                  f'"External id": {self.external},      "cbid": 211, "correlation": {self.correlation}')  # fmt: skip
        self.flow("s", THREAD, PROCESS, start)
        self.truth.calls += 1
        return start, end

    def operator(self, name: str, start: int, end: int) -> None:
        self.external += 1
        shapes = ""
        if self.recipe.shapes:
            shapes = (
                f', "Concrete Inputs": ["", "", "-1"], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"], '
                f'"Input Strides": [[1536, 1], [512, 1], []], "Input Dims": [[{1 + self.external % 7}, 1536], [1536, 512], []]'
            )
        arguments = f'"External id": {self.external},"Record function id": 0{shapes}, "Ev Idx": {self.external}'
        self.span("cpu_op", name, PROCESS, THREAD, start, end, arguments)
        self.truth.operators += 1

    # --- what a device does ---------------------------------------------------------------------------------------

    def device_work(
        self, stage: list[StageTruth], launched: tuple[int, int], lane: int, least: int, most: int
    ) -> tuple[int, int]:
        """`lane` counts the streams of the first device, then those of the next."""
        start = max(launched[1] + self.random.randint(500, 3_000), self.free[lane] + self.random.choice([0, 0, 700]))
        end = start + self.random.randint(least, most)
        self.free[lane] = end
        self.truth.work.append((start, end, launched[0]))
        self.truth.on_device[lane // self.recipe.streams].append((start, end))
        for one in stage:
            one.work.append((start, end))
        return start, end

    def kernel(self, stage: list[StageTruth], launched: tuple[int, int], number: int, node: int = 0) -> None:
        device, stream = number % self.recipe.devices, number // self.recipe.devices % self.recipe.streams
        start, end = self.device_work(stage, launched, device * self.recipe.streams + stream, 800, 12_000)
        name = kernel_name(number % 24)
        graph = f', "graph id": 5, "graph node id": {node}' if node else ""
        self.span(
            "kernel", name, device, 7 + stream, start, end,
            f'"External id": {self.external},      "queued": 0, "device": {device}, "context": 1,      "stream": {7 + stream}, '
            f'"correlation": {self.correlation},      "registers per thread": 32,      "shared memory": 0,      '
            f'"blocks per SM": 3.878788,      "warps per SM": 23.272728,      "grid": [{number + 1}, 2, 1],      '
            f'"block": [128, 1, 1],      "est. achieved occupancy %": 36{graph}',
        )  # fmt: skip
        self.flow("f", 7 + stream, device, start)
        self.truth.kernels += 1
        self.truth.kernel_ns += end - start
        self.truth.by_name[name][0] += 1
        self.truth.by_name[name][1] += end - start
        for one in stage:
            one.kernels += 1
            one.kernel_ns += end - start

    def transfer(self, stage: list[StageTruth]) -> None:
        """A copy from the host and a memset."""
        size = self.random.randrange(4, 1 << 20)
        common = f'"External id": {self.external},      "device": 0, "context": 1,      "stream": 7, "correlation"'
        launched = self.call("cudaMemcpyAsync")
        start, end = self.device_work(stage, launched, 0, 900, 30_000)
        self.span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, 7, start, end,
                  f'{common}: {self.correlation},      "bytes": {size}, "memory bandwidth (GB/s)": 1.5')  # fmt: skip
        self.truth.copies += 1
        self.truth.copy_ns += end - start
        self.truth.copy_bytes += size
        launched = self.call("cudaMemsetAsync")
        start, end = self.device_work(stage, launched, 0, 400, 2_000)
        self.span("gpu_memset", "Memset (Device)", 0, 7, start, end,
                  f'{common}: {self.correlation},      "bytes": 4, "memory bandwidth (GB/s)": "N/A"')  # fmt: skip
        self.truth.memsets += 1
        self.truth.memset_ns += end - start
        for one in stage:
            one.launches += 2
        self.truth.launches += 2

    # --- what a model does ----------------------------------------------------------------------------------------

    def eager(self, stage: list[StageTruth]) -> None:
        for number in range(self.recipe.kernels_per_step):
            outer = self.now
            view = self.passes(200, 900)
            self.operator("aten::view", view, self.passes(200, 900))
            inner = self.passes(100, 400)
            self.passes(100, 800)
            launched = self.call("cudaLaunchKernel")
            self.kernel(stage, launched, number)
            self.operator("aten::mm", inner, self.passes(100, 300))
            self.operator("aten::linear", outer, self.passes(100, 300))
            for one in stage:
                one.launches += 1
            self.truth.launches += 1

    def replay(self, stage: list[StageTruth]) -> None:
        launched = self.call("cudaGraphLaunch", 8_000, 20_000)
        for number in range(self.recipe.kernels_per_step):
            self.kernel(stage, launched, number, node=17179869184 + number)
        for one in stage:
            one.launches += 1
        self.truth.launches += 1

    def annotation(self, name: str, start: int) -> int:
        self.external += 1
        end = self.passes(300, 900)
        self.span("user_annotation", name, PROCESS, THREAD, start, end,
                  f'"External id": {self.external},"Record function id": 0, "Ev Idx": {self.external}')  # fmt: skip
        return end - start

    def stage(self, name: str) -> StageTruth:
        return StageTruth(name, 0, 0)

    def play(self) -> None:
        """A prefill, then decode steps inside a decode range, all inside `profile`."""
        begun = self.now
        self.passes(500, 3_000)
        prefill, decode = self.stage("prefill"), self.stage("decode")
        started = self.now
        self.passes(300, 900)
        if self.recipe.copies:
            self.transfer([prefill])
        self.eager([prefill])
        prefill.wall_ns = self.annotation("prefill", started)
        self.passes(5_000, 40_000)
        decode_started = self.now
        self.passes(300, 900)
        steps = []
        for _ in range(self.recipe.steps):
            step = self.stage("decode_step")
            started = self.now
            self.passes(300, 900)
            if self.recipe.copies:
                self.transfer([decode, step])
            (self.replay if self.recipe.graph else self.eager)([decode, step])
            step.wall_ns = self.annotation("decode_step", started)
            self.passes(4_000, 60_000)
            steps.append(step)
        self.call("cudaDeviceSynchronize")
        decode.wall_ns = self.annotation("decode", decode_started)
        self.annotation("profile", begun)
        self.truth.stages = [prefill, decode, *steps]


def write_trace(path: Path, recipe: Recipe) -> Truth:
    """A trace of this recipe at `path`, uncompressed, written as it is made; and what is true of it."""
    with path.open("wb", buffering=1 << 20) as out:
        shapes = '\n    "record_shapes": 1,' if recipe.shapes else ""
        cards = ", ".join(f'{{"id": {device}, "name": "NVIDIA H200"}}' for device in range(recipe.devices))
        out.write(
            f'{{\n    "schemaVersion": 1,\n    "deviceProperties": [\n    {cards}\n    ],{shapes}'
            f'\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {BASE_NS},\n  "traceEvents": ['.encode()
        )
        machine = _Machine(recipe, out)
        machine.write(
            f'"name": "process_name", "ph": "M", "ts": {_us(ORIGIN_NS)}, "pid": {PROCESS}, "tid": 0, "args": {{"name": "python"}}'
        )
        machine.play()
        machine.write(f'"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": {_us(machine.now)}')
        out.write(b'\n  ],\n  "traceName": "synthetic.json"\n}')
    return machine.truth


def sized(events: int) -> Recipe:
    """An eager recipe of about so many events, shaped like a real decode: 191 kernels a step, seven events a kernel."""
    return Recipe(steps=max(1, round(events / (7 * 191)) - 1), kernels_per_step=191)


def kinds(seed: int) -> Iterator[Recipe]:
    """One recipe of each kind, about 10⁴ events each."""
    yield Recipe(steps=70, kernels_per_step=20, seed=seed)
    yield Recipe(steps=200, kernels_per_step=24, graph=True, seed=seed)
    yield Recipe(steps=35, kernels_per_step=40, streams=4, seed=seed)
    yield Recipe(steps=400, kernels_per_step=3, copies=True, seed=seed)
    yield Recipe(steps=60, kernels_per_step=24, streams=2, devices=2, seed=seed)
    yield Recipe(steps=100, kernels_per_step=24, streams=2, devices=3, graph=True, copies=True, seed=seed)
    yield Recipe(steps=110, kernels_per_step=40, streams=3, copies=True, graph=True, shapes=False, seed=seed)
    yield Recipe(steps=35, kernels_per_step=40, streams=2, copies=True, line_a_value=True, seed=seed)


# --- a program on the CPU ---------------------------------------------------------------------------------------------

_CPU_OPERATORS = {
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::native_layer_norm": "norm",
    "aten::silu": "elementwise",
    "aten::cat": "memory",
    "aten::view": "framework",
}
"""Operator → the row of its own time."""


@dataclass
class CpuTruth:
    """What a trace of a program on the CPU contains, by stage, in ns."""

    wall_ns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    events: dict[str, dict[str, int]] = field(default_factory=dict)
    components: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0


def write_cpu_trace(path: Path, seed: int, steps: int = 3) -> CpuTruth:
    """Write the trace of a prefill and some decode steps on a CPU, with component labels, and return what it contains."""
    draw, truth, events = random.Random(seed), CpuTruth(steps=steps), []
    now = 1_000_000

    def span(category: str, name: str, start: int, end: int) -> None:
        place = f'"pid": 1, "tid": 1, "ts": {_us(start)}, "dur": {_us(end - start)}'
        events.append(f'{{"ph": "X", "cat": "{category}", "name": "{name}", {place}}}')

    def passes() -> int:
        nonlocal now
        length = draw.randint(1, 5_000)
        now += length
        return length

    def add(stage: str, component: str, row: str, ns: int) -> None:
        of_stage = truth.rows.setdefault(stage, {})
        of_stage[row] = of_stage.get(row, 0) + ns
        of_component = truth.components.setdefault(stage, {})
        of_component[component] = of_component.get(component, 0) + ns

    def count(stage: str, row: str) -> None:
        of_stage = truth.events.setdefault(stage, {})
        of_stage[row] = of_stage.get(row, 0) + 1

    def operator(stage: str, component: str, around: str) -> None:
        name = draw.choice(list(_CPU_OPERATORS))
        start, row = now, _CPU_OPERATORS[name]
        add(stage, component, row, passes())
        span("cpu_op", name, start, now)
        count(stage, around)

    def wrapper(stage: str, component: str) -> None:
        start = now
        add(stage, component, "framework", passes())
        for _ in range(draw.randint(1, 3)):
            operator(stage, component, "framework")
            add(stage, component, "framework", passes())
        span("cpu_op", "aten::linear", start, now)
        count(stage, "python")

    def forward(stage: str) -> None:
        for _ in range(draw.randint(1, 4)):
            add(stage, "other", "python", passes())
            component, start = draw.choice(["mlp", "lm_head"]), now
            add(stage, component, "python", passes())
            (wrapper if draw.random() < 0.5 else lambda where, what: operator(where, what, "python"))(stage, component)
            add(stage, component, "python", passes())
            span("cpu_op", f"part:{component}", start, now)
        add(stage, "other", "python", passes())

    begun = now
    forward("prefill")
    span("user_annotation", "prefill", begun, now)
    truth.wall_ns["prefill"] = now - begun
    begun = now
    for _ in range(steps):
        start = now
        forward("decode")
        span("user_annotation", "decode_step", start, now)
    span("user_annotation", "decode", begun, now)
    truth.wall_ns["decode"] = now - begun
    path.write_text('{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(events) + "\n]}\n")
    return truth
