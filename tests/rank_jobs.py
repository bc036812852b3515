"""Jobs of several ranks, simulated event by event, whose delays have a known price: the same job is run with and without them.

A rank has a host that launches kernels and collectives, and streams that run what was launched in order. A kernel begins when it
is launched, its stream is free, and all that it needs is done. A collective ends on all its ranks some time after the last has
begun it; a transfer between two ranks likewise. Nothing here knows how the analysis works.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llm_perf_opt.analysis.ranks.rank_trace import Occurrences, RankFile, RankGroup, RankStep, RankTrace, Work

LAUNCH_NS, LATENCY_NS = 4_000, 3_000
COMPUTE, GATHER, REDUCE, REPLICATE, PIPE = 7, 20, 21, 22, 23
BASE_NS = 1_000_000_000


@dataclass
class Call:
    """One call of a host, and what it makes its device do."""

    kind: str
    """`kernel`, `host` (time of the host alone), `sync` (the host waits for what it needs), or the kind of a collective."""
    ns: int = 0
    stream: int = COMPUTE
    needs: tuple[int, ...] = ()
    """Numbers of earlier calls of the rank."""
    group: tuple[int, ...] = ()
    name: str = ""
    size: int = 0
    step: int = 0
    launched: int = 0
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Delay:
    """Time that one rank loses."""

    rank: int
    number: int
    """Among the kernels of the rank."""
    ns: int
    on_host: bool


class Plan:
    """The calls of one rank. Times of work vary by a fixed choice of random numbers."""

    def __init__(self, rank: int, seed: int, jitter: float) -> None:
        self.rank, self.jitter = rank, jitter
        self.random = random.Random(f"{seed} {rank}")
        self.calls: list[Call] = []
        self.step = 0

    def kernel(self, ns: int, *needs: int) -> int:
        return self.add(Call("kernel", round(ns * self.random.lognormvariate(0, self.jitter)), needs=needs))

    def collective(self, kind: str, group: Sequence[int], ns: int, size: int, stream: int, *needs: int, name: str) -> int:
        """`ns` must be the same on all ranks."""
        return self.add(Call(kind, ns, stream, needs, tuple(group), name, size))

    def add(self, call: Call) -> int:
        call.step = self.step
        self.calls.append(call)
        return len(self.calls) - 1

    def sync(self, *needs: int) -> None:
        self.add(Call("sync", needs=needs))


def simulate(plans: Sequence[Plan], delays: Sequence[Delay] = ()) -> int:
    """Set the times of all calls; return when the last is done."""
    late = {(delay.rank, delay.number): delay for delay in delays}
    met: dict[tuple[object, ...], dict[int, int]] = {}
    running = [_rank(plan, late, met) for plan in plans]
    while running:
        before = len(running), sum(map(len, met.values()))
        running = [rank for rank in running if next(rank, "done") != "done"]
        assert (len(running), sum(map(len, met.values()))) != before or not running, "the ranks wait for each other"
    return max(call.end for plan in plans for call in plan.calls)


def _rank(plan: Plan, late: dict[tuple[int, int], Delay], met: dict[tuple[object, ...], dict[int, int]]) -> Iterator[None]:
    host, kernels, free = 0, 0, dict.fromkeys((COMPUTE, GATHER, REDUCE, REPLICATE, PIPE), 0)
    pending: dict[int, tuple[object, ...]] = {}
    counts: dict[tuple[object, ...], int] = {}
    last: dict[int, int] = {}
    calls = plan.calls

    def ended(number: int) -> bool:
        if number not in pending:
            return True
        key, call = pending[number], calls[number]
        if len(met[key]) < len(call.group):
            return False
        call.end = max(met[key].values()) + call.ns
        del pending[number]
        return True

    for number, call in enumerate(calls):
        extra = 0
        if call.kind == "kernel":
            delay = late.get((plan.rank, kernels))
            kernels += 1
            if delay is not None and delay.on_host:
                host += delay.ns
            elif delay is not None:
                extra = delay.ns
        needs = [*call.needs, *([last[call.stream]] if call.stream in last and call.kind != "sync" else [])]
        while not all(ended(need) for need in needs):
            yield
        ready = max([calls[need].end for need in needs], default=0)
        host += LAUNCH_NS if call.kind != "host" else call.ns
        call.launched = host
        if call.kind in ("host", "sync"):
            host = max(host, ready)
            call.start = call.end = host
            continue
        call.start = max(host + LATENCY_NS, ready, free[call.stream])
        last[call.stream] = number
        if call.kind == "kernel":
            call.end = free[call.stream] = call.start + call.ns + extra
            continue
        base = (call.group, call.name)
        counts[base] = counts.get(base, -1) + 1
        pending[number] = (*base, counts[base])
        met.setdefault(pending[number], {})[plan.rank] = call.start
    while not all(ended(number) for number in list(pending)):
        yield


# --- layouts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What a job does, step by step."""

    name: str
    world: int
    steps: int
    layers: int
    seed: int
    jitter: float = 0.01
    compute_ns: int = 120_000
    transfer_ns: int = 40_000
    tp: int = 1
    micro: int = 4
    one_stream: bool = True


def _axis(rank: int, size: int, stride: int) -> tuple[int, ...]:
    """The ranks of a group: `size` of them, `stride` apart."""
    first = rank - (rank // stride % size) * stride
    return tuple(range(first, first + size * stride, stride))


class _Program:
    """Writes the plan of one rank. Times of transfers are drawn from the seed and their number, the same on all ranks."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.plan = Plan(rank, layout.seed, layout.jitter)
        self.made: dict[tuple[object, ...], int] = {}

    def meet(self, kind: str, group: Sequence[int], stream: int, *needs: int, share: float = 1, name: str = "") -> int:
        key = (name or kind, tuple(group))
        self.made[key] = self.made.get(key, 0) + 1
        drawn = random.Random(f"{self.layout.seed} {key} {self.made[key]}").lognormvariate(0, self.layout.jitter)
        ns = round(self.layout.transfer_ns * share * drawn)
        return self.plan.collective(kind, group, ns, round(1e6 * share), stream, *needs, name=name or kind)

    def work(self, *needs: int, share: float = 1) -> int:
        return self.plan.kernel(round(self.layout.compute_ns * share), *needs)


def _tp(program: _Program) -> None:
    layout, group = program.layout, tuple(range(program.layout.world))
    needs: tuple[int, ...] = ()
    for _ in range(layout.layers):
        needs = (program.meet("all_reduce", group, GATHER, program.work(*needs)),)
        needs = (program.meet("all_reduce", group, GATHER, program.work(*needs, share=1.6)),)
    done = program.work(*needs, share=0.3)
    program.plan.sync(done)


def _dp(program: _Program, *, tp: int = 1) -> None:
    """Forward, then backward with gradients reduced next to it, then the optimizer; with tensor parallelism inside."""
    layout, rank = program.layout, program.rank
    inner, outer = _axis(rank, tp, 1), _axis(rank, layout.world // tp, tp)
    needs: tuple[int, ...] = ()
    for _ in range(layout.layers):
        done = program.work(*needs)
        needs = (program.meet("all_reduce", inner, GATHER, done),) if tp > 1 else ()
    reduced = []
    for _ in range(layout.layers):
        done = program.work(*needs, share=2)
        needs = (program.meet("all_reduce", inner, GATHER, done),) if tp > 1 else ()
        reduced.append(program.meet("all_reduce", outer, REDUCE, done, share=2.5, name="grads"))
    program.plan.sync(program.work(*reduced, *needs, share=0.5))


def _sharded(program: _Program, *, replicas: int = 1) -> None:
    """FSDP: weights are gathered one layer ahead, gradients are scattered during the backward pass, and reduced over replicas."""
    layout, rank = program.layout, program.rank
    size = layout.world // replicas
    shard, across = _axis(rank, size, 1), _axis(rank, replicas, size)
    scatter = GATHER if layout.one_stream else REDUCE
    ahead = program.meet("all_gather", shard, GATHER, share=1.5)
    for layer in range(layout.layers):
        gathered = ahead
        if layer + 1 < layout.layers:
            ahead = program.meet("all_gather", shard, GATHER, share=1.5)
        program.work(gathered)
    reduced = []
    ahead = program.meet("all_gather", shard, GATHER, share=1.5)
    for layer in range(layout.layers):
        gathered = ahead
        if layer + 1 < layout.layers:
            ahead = program.meet("all_gather", shard, GATHER, share=1.5)
        done = program.work(gathered, share=2)
        reduced.append(program.meet("reduce_scatter", shard, scatter, done, share=1.5))
        if replicas > 1:
            reduced[-1] = program.meet("all_reduce", across, REPLICATE, reduced[-1], share=0.5)
    program.plan.sync(program.work(*reduced, share=0.5))


def _hsdp(program: _Program) -> None:
    _sharded(program, replicas=2)


def _ep(program: _Program) -> None:
    """Tokens go to the experts and back, which no rank can begin without; gradients are reduced at the end."""
    layout, group = program.layout, tuple(range(program.layout.world))
    needs: tuple[int, ...] = ()
    for _ in range(layout.layers):
        sent = program.meet("all_to_all", group, GATHER, program.work(*needs))
        needs = (program.meet("all_to_all", group, GATHER, program.work(sent, share=1.5)),)
    done = program.work(*needs, share=0.5)
    program.plan.sync(program.work(program.meet("all_reduce", group, REDUCE, done, share=3), share=0.3))


def _pp(program: _Program, *, tp: int = 1) -> None:
    """A pipeline: forward of all microbatches, then backward of all; with tensor parallelism inside each stage."""
    layout, rank = program.layout, program.rank
    stages, stage = layout.world // tp, rank // tp
    inner = _axis(rank, tp, 1)

    def part(*needs: int, share: float) -> int:
        for _ in range(layout.layers):
            done = program.work(*needs, share=share)
            needs = (program.meet("all_reduce", inner, GATHER, done, share=0.5),) if tp > 1 else (done,)
        return needs[0]

    done = -1
    for forward in (True, False):
        first, last = (0, stages - 1) if forward else (stages - 1, 0)
        back, ahead = (rank - tp, rank + tp) if forward else (rank + tp, rank - tp)
        for _ in range(layout.micro):
            needs: tuple[int, ...] = ()
            if stage != first:
                needs = (program.meet("recv", sorted((back, rank)), PIPE, name=f"p2p{forward}", share=0.3),)
            done = part(*needs, share=0.6 if forward else 1.2)
            if stage != last:
                program.meet("send", sorted((rank, ahead)), PIPE, done, name=f"p2p{forward}", share=0.3)
    program.plan.sync(program.work(done, share=0.3))


LAYOUTS: dict[str, tuple[Callable[[_Program], None], int]] = {
    "tp": (_tp, 4),
    "dp": (_dp, 4),
    "fsdp": (_sharded, 4),
    "ep": (_ep, 4),
    "pp": (_pp, 4),
    "tp×dp": (lambda program: _dp(program, tp=2), 8),
    "tp×pp": (lambda program: _pp(program, tp=2), 8),
    "hsdp": (_hsdp, 8),
}


def plans(layout: Layout) -> list[Plan]:
    """The calls of all ranks."""
    found = []
    for rank in range(layout.world):
        program = _Program(layout, rank)
        for step in range(layout.steps):
            program.plan.step = step
            LAYOUTS[layout.name][0](program)
        found.append(program.plan)
    return found


# --- what the analysis reads ----------------------------------------------------------------------------------------------


def rank_files(made: Sequence[Plan], offsets: Sequence[int] = (), *, launches: bool = True) -> list[RankFile]:
    """What is read from the traces of the ranks. `offsets`: how far the clock of each is ahead; then no host is named."""
    return [
        RankFile(plan.rank, f"rank{plan.rank}.json", _trace(plan, len(made), offsets[at] if offsets else None, launches))
        for at, plan in enumerate(made)
    ]


def _trace(plan: Plan, world: int, offset: int | None, launches: bool) -> RankTrace:
    met = sorted((call for call in plan.calls if call.group and len(call.group) > 1), key=lambda call: call.start)
    kernels = sorted((call for call in plan.calls if call.kind == "kernel"), key=lambda call: call.start)
    names = tuple(sorted({call.kind for call in met}))
    groups = tuple(sorted({(*call.group, call.stream) for call in met}))
    launched = np.array([call.launched for call in met])
    ordered = launches and bool((np.diff(launched) > 0).all())
    base = BASE_NS + (offset or 0)
    starts = np.array([call.start for call in kernels])
    following = (
        np.searchsorted(launched, [call.launched for call in kernels])
        if ordered
        else np.searchsorted([call.start for call in met], starts, "right")
    )

    def column(values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int64)

    table = Occurrences(
        start_ns=column([call.start for call in met]) + base,
        end_ns=column([call.end for call in met]) + base,
        kind=np.array([names.index(call.kind) for call in met], np.int32),
        group=np.array([groups.index((*call.group, call.stream)) for call in met], np.int32),
        size_bytes=column([call.size for call in met]),
        sequence=np.full(len(met), -1),
        step=np.array([call.step for call in met], np.int32),
        stream=column([call.stream for call in met]),
    )
    steps = sorted({call.step for call in plan.calls})
    walls = [[call for call in plan.calls if call.step == step] for step in steps]
    first, last = min(call.start for call in (*met, *kernels)), max(call.end for call in plan.calls)
    return RankTrace(
        plan.rank, world, "" if offset is not None else "node", "x", True, last - first, last - first, 0, 0,
        first_ns=first + base, ordered_from=0 if ordered else None, names=names,
        groups=tuple(RankGroup(f"{group[-1]}:{group[:-1]}", group[:-1], len(group) - 1) for group in groups),
        steps=tuple(
            RankStep("step", at, max(call.end for call in mine) - min(call.launched for call in mine))
            for at, mine in enumerate(walls)
        ),
        collectives=table, work=Work(starts + base, column([call.end for call in kernels]) + base, following.astype(np.int32)),
    )  # fmt: skip


# --- jobs with delays -----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job, the delays that were planted in it, and what each delayed rank costs."""

    layout: Layout
    delays: list[Delay]
    made: list[Plan] = field(default_factory=list)
    span_ns: int = 0
    truth_ns: dict[int, int] = field(default_factory=dict)


def job(name: str, seed: int) -> Job:
    """A job with one late rank, or two: once, in every other step or in every step; on the host or the device.

    What no trace can show is left out: a host that is late before its first kernel (its recording begins later), a late host that
    another late rank hides, and a first or last stage of a pipeline that is slow in every step, whose work no other stage does.
    `with_delays` makes such jobs as well.
    """
    draw = random.Random(f"{name} {seed}")
    layout = Layout(
        name, LAYOUTS[name][1], steps=draw.randint(4, 5), layers=draw.randint(2, 4), seed=seed,
        jitter=draw.choice([0.002, 0.01, 0.03]), micro=draw.randint(3, 4),
        compute_ns=draw.choice([60_000, 120_000, 300_000]), transfer_ns=draw.choice([20_000, 40_000, 90_000]),
        one_stream=draw.random() < 0.5,
    )  # fmt: skip
    made = plans(layout)
    delays: list[Delay] = []
    late = draw.sample(range(layout.world), draw.choice([1, 1, 1, 2]))
    for rank in late:
        per_step = sum(call.kind == "kernel" for call in made[rank].calls) // layout.steps
        ns, on_host = draw.choice([300_000, 600_000, 1_500_000]), draw.random() < 0.4 and len(late) == 1
        place = draw.randrange(1, per_step)
        alone = name == "pp" and rank in (0, layout.world - 1)
        steps = draw.choice([[draw.randrange(1, layout.steps)], range(layout.steps), range(1, layout.steps, 2)])
        delays += [Delay(rank, step * per_step + place, ns, on_host) for step in (steps[:1] if alone else steps)]
    return with_delays(layout, delays)


def with_delays(layout: Layout, delays: list[Delay]) -> Job:
    """A job with these delays."""
    made = plans(layout)
    late = {delay.rank for delay in delays}
    without = {rank: simulate(made, [delay for delay in delays if delay.rank != rank]) for rank in late}
    span = simulate(made, delays)
    return Job(layout, delays, made, span, {rank: span - other for rank, other in without.items()})
