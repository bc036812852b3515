"""The meter with a runner that takes an exact time and a clock that shows it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, SECOND
from builders import iteration as made
from llm_perf_opt.core.records import Iteration, SubstageSpan
from llm_perf_opt.runners.measure import meter
from llm_perf_opt.runners.measure.clock import ClockName
from llm_perf_opt.runners.measure.meter import Effort, Measured, Meter, Progress, is_stable

Request = tuple[int, Sequence[int]]
"""How long prefill and each decode step of one request take, in nanoseconds."""

BEGIN_NS = 1_000
"""What emptying the cache takes; nobody may count it."""


@dataclass
class Machine:
    """Runner, clock and time of day in one; the last request of the script goes on for ever."""

    script: Sequence[Request]
    tokens: Sequence[int] = (5,)
    """First token of each request; the last goes on for ever."""
    now_ns: int = 1_000_000
    log: list[str] = field(default_factory=list)
    name: ClockName = "host clock"
    requests: int = 0
    meter: Meter | None = None
    substages: Sequence[tuple[str, int]] = ()
    """Sub-stages inside every forward, each with its time; the forward lasts that much longer."""
    fails_in_request: int = 0
    cpu_share: int = 0
    """CPU time of the thread as a share of the time, one part in this many; 0: the clock does not record it."""
    _marks: list[int] = field(default_factory=list)
    _step: int = 0

    # the runner

    def begin(self) -> None:
        self.log.append("begin")
        self.now_ns += BEGIN_NS
        self.requests += 1
        self._step = 0

    def prefill(self, prompts: Any) -> int:
        assert prompts == "prompts"
        self.log.append("prefill")
        if self.requests == self.fails_in_request:
            raise RuntimeError("CUDA out of memory")
        self._forward(self._request[0])
        return self.tokens[min(self.requests, len(self.tokens)) - 1]

    def decode_step(self, token: int) -> int:
        self.log.append("step")
        self._forward(self._request[1][self._step])
        self._step += 1
        return token + 1

    def to_lists(self, tokens: list[Any]) -> list[list[int]]:
        return [list(tokens)]

    # the clock

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def mark(self) -> int:
        self.log.append("mark")
        self._marks.append(self.now_ns)
        return len(self._marks) - 1

    def read_ns(self) -> list[int]:
        return [mark - self._marks[0] for mark in self._marks]

    def read_cpu_ns(self) -> list[int]:
        return [time // self.cpu_share for time in self.read_ns()] if self.cpu_share else []

    # the time of day

    def monotonic(self) -> float:
        return self.now_ns / SECOND

    def monotonic_ns(self) -> int:
        return self.now_ns

    @property
    def _request(self) -> Request:
        return self.script[min(self.requests, len(self.script)) - 1]

    def _forward(self, duration_ns: int) -> None:
        for name, inside_ns in self.substages:
            assert self.meter is not None
            with self.meter.substage(name):
                self.now_ns += inside_ns
        self.now_ns += duration_ns


class MarksOf:
    """The machine as a clock: its `begin` forgets the marks, not the cache."""

    name: ClockName = "host clock"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.synchronize, self.mark, self.read_ns = machine.synchronize, machine.mark, machine.read_ns
        self.read_cpu_ns = machine.read_cpu_ns

    def begin(self) -> None:
        self._machine.log.append("forget marks")
        self._machine._marks.clear()


def metered(machine: Machine, monkeypatch: pytest.MonkeyPatch, new_tokens: int | None = None, **marker: Any) -> Meter:
    monkeypatch.setattr("llm_perf_opt.runners.measure.meter.time", machine)
    steps = len(machine.script[0][1])
    machine.meter = Meter(machine, "prompts", steps + 1 if new_tokens is None else new_tokens, MarksOf(machine), **marker)
    return machine.meter


def effort(**changes: Any) -> Effort:
    values = {"max_warmup": 20, "min_repeats": 6, "max_repeats": 60, "ci_target": 0.02, "time_limit_s": 1e6, **changes}
    return Effort(**values)


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Measured:
    return metered(machine, monkeypatch).measure(effort(**changes))


STEADY: list[Request] = [(100 * MS, (10 * MS, 10 * MS))]


# --- one request ------------------------------------------------------------------------------------------------------


def test_every_stage_is_timed_to_the_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(1234, (10, 20, 30))])
    found = metered(machine, monkeypatch).iterate()
    assert found == Iteration(
        started_ns=1_000_000 + BEGIN_NS, wall_ns=1234 + 60, prefill_ns=1234, steps_ns=(10, 20, 30), substages=()
    )


def test_the_cpu_time_of_the_thread_is_read_at_the_same_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metered(Machine([(1000, (10, 20))], substages=[("mlp", 4)], cpu_share=2), monkeypatch).iterate()
    assert (found.prefill_cpu_ns, found.steps_cpu_ns) == (502, (7, 12))
    without = metered(Machine([(1000, (10, 20))]), monkeypatch).iterate()
    assert (without.prefill_cpu_ns, without.steps_cpu_ns) == (None, ())


def test_a_context_is_open_during_the_repeats_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(STEADY)
    seen: list[int] = []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append(machine.requests)
        yield
        seen.append(machine.requests)

    found = metered(machine, monkeypatch).measure(effort(), around=around)
    assert seen == [len(found.warmup), len(found.warmup) + len(found.iterations)]


@settings(deadline=None)
@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12), max_size=20))
def test_prefill_and_steps_are_the_whole_request(prefill: int, steps: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = metered(Machine([(prefill, steps)]), monkeypatch).iterate()
    assert (found.prefill_ns, found.steps_ns) == (prefill, tuple(steps))
    assert found.prefill_ns + found.decode_ns == found.total_ns == found.wall_ns


def test_nothing_waits_for_the_device_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(100, (10, 20))])
    metered(machine, monkeypatch).iterate()
    assert machine.log == [
        *("begin", "forget marks", "synchronize"),
        *("mark", "prefill", "mark", "step", "mark", "step", "mark"),
        "synchronize",
    ]


def test_one_new_token_is_prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(100, ())])
    found = metered(machine, monkeypatch).iterate()
    assert (found.prefill_ns, found.steps_ns) == (100, ())
    assert "step" not in machine.log


def test_stages_are_marked_for_profilers_as_they_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def marker(name: str) -> Iterator[None]:
        said.append(f"<{name}>")
        yield
        said.append(f"</{name}>")

    machine = Machine([(100, (10, 20))], substages=[("mlp", 1)])
    metered(machine, monkeypatch, marker=marker).iterate()
    step = "<decode_step><mlp></mlp></decode_step>"
    assert "".join(said) == f"<profile><prefill><mlp></mlp></prefill><decode>{step}{step}</decode></profile>"


# --- sub-stages -------------------------------------------------------------------------------------------------------


def test_a_substage_belongs_to_the_stage_and_step_it_ran_in(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(100, (10, 20))], substages=[("sam", 7), ("mlp", 3)])
    found = metered(machine, monkeypatch).iterate()
    assert (found.prefill_ns, found.steps_ns) == (110, (20, 30)), "ten more in every forward"
    assert found.substages == (
        SubstageSpan("sam", "prefill", -1, 0, 7),
        SubstageSpan("mlp", "prefill", -1, 7, 3),
        SubstageSpan("sam", "decode_step", 0, 110, 7),
        SubstageSpan("mlp", "decode_step", 0, 117, 3),
        SubstageSpan("sam", "decode_step", 1, 130, 7),
        SubstageSpan("mlp", "decode_step", 1, 137, 3),
    )


def test_a_substage_inside_another_is_timed_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(0, ())])
    meter = metered(machine, monkeypatch)

    def prefill(_: Any) -> int:
        with meter.substage("outer"):
            machine.now_ns += 5
            with meter.substage("inner"):
                machine.now_ns += 2
        return 1

    monkeypatch.setattr(machine, "prefill", prefill)
    assert set(meter.iterate().substages) == {
        SubstageSpan("outer", "prefill", -1, 0, 7),
        SubstageSpan("inner", "prefill", -1, 5, 2),
    }


def test_substages_of_one_request_are_not_seen_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(100, (10,))], substages=[("sam", 7)])
    meter = metered(machine, monkeypatch)
    first = meter.iterate()
    machine.substages = ()
    assert len(first.substages) == 2
    assert meter.iterate().substages == ()


def test_a_forward_that_fails_closes_its_substage(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([(100, (10,))])
    meter = metered(machine, monkeypatch)
    with pytest.raises(RuntimeError, match="boom"), meter.substage("sam"):
        raise RuntimeError("boom")
    assert machine.log == ["mark", "mark"]
    assert meter.iterate().substages == ()


# --- how often --------------------------------------------------------------------------------------------------------


def test_a_steady_machine_is_measured_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine(STEADY), monkeypatch, min_repeats=1)
    assert len(found.warmup) == 4, "the first never counts, then three that agree"
    assert len(found.iterations) == 6, "fewer carry no 95 % interval"
    assert found.stable
    assert found.settled
    assert found.stopped == "the target of ±2.0 % was reached after 6 repeats"


@pytest.mark.parametrize("fewest", [6, 7, 25])
def test_no_fewer_repeats_than_asked_for(monkeypatch: pytest.MonkeyPatch, fewest: int) -> None:
    found = measured(Machine(STEADY), monkeypatch, min_repeats=fewest)
    assert len(found.iterations) == fewest
    assert found.stable


def series(*values: int) -> Sequence[Request]:
    """Requests after a steady warm-up of four."""
    return [(100, (100,))] * 4 + [(value, (100,)) for value in values]


def test_an_unsteady_machine_is_measured_until_the_most_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine(series(*[100, 200] * 50)), monkeypatch, max_repeats=33)
    assert len(found.iterations) == 33
    assert not found.stable
    assert found.settled, "the warm-up was steady"
    assert found.stopped == "runtime.max_repeats=33 was reached before the target of ±2.0 %"


def test_three_slow_repeats_are_outweighed_by_twelve_steady_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interval of 15 values goes from the 4th to the 12th: the first number that leaves the three slow ones out
    found = measured(Machine(series(900, 900, 900, 100)), monkeypatch)
    assert len(found.iterations) == 15
    assert found.stable


def test_decode_must_be_known_as_well_as_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [(100, (50, 50))] * 4 + [(100, (50, 50)), (100, (50, 90))] * 20
    found = measured(Machine(script), monkeypatch, max_repeats=20)
    assert len(found.iterations) == 20
    assert not found.stable


def test_without_decode_prefill_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine([(100, ())]), monkeypatch)
    assert len(found.iterations) == 6
    assert found.stable


def test_a_wider_target_is_reached_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    # 90 … 110: half of the widest interval is 10 of 100
    script = series(90, 110, 95, 105, 100, 100, 92, 108, 100)
    found = measured(Machine(script), monkeypatch, ci_target=0.1)
    assert len(found.iterations) == 6
    assert len(measured(Machine(script), monkeypatch, ci_target=0.01).iterations) > 6


def test_stability_to_the_eye() -> None:
    steady = [made(100, (100,))] * 6
    assert is_stable(steady, 0.0)
    assert not is_stable(steady[:5], 1.0)
    assert not is_stable([], 1.0)
    assert not is_stable([*steady[:5], made(100, (200,))], 0.02), "of six the interval is the whole range"


# --- time -------------------------------------------------------------------------------------------------------------


def test_no_repeat_is_begun_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # requests of 3 and 4 s in turn never agree; two are warm-up, then the repeats have taken 3, 7, 10, 14, 17 and 21 s
    found = measured(Machine([(3 * SECOND, ()), (4 * SECOND, ())] * 50), monkeypatch, time_limit_s=20)
    assert [iteration.total_ns // SECOND for iteration in found.warmup] == [3, 4]
    assert [iteration.total_ns // SECOND for iteration in found.iterations] == [3, 4, 3, 4, 3, 4]
    assert found.stopped == "runtime.time_limit_s=20 was reached after 6 repeats"
    assert not found.stable


def test_even_the_shortest_limit_leaves_one_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine([(60 * SECOND, (SECOND,))]), monkeypatch, time_limit_s=0.001)
    assert (len(found.warmup), len(found.iterations)) == (2, 1)
    assert "time_limit_s=0.001" in found.stopped


# --- warm-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([900, 100, 100, 100], 4),
        ([100, 100, 100, 100], 4),  # the first compiles and allocates, even if it does not look like it
        ([900, 500, 300, 200, 100, 100, 100], 7),
        ([900, 100, 105, 95, 100], 4),  # 95 and 105 are within 5 % of 100
        ([900, 100, 106, 100, 100, 100], 6),  # 106 is not
        ([900, 100, 94, 100, 100, 100], 6),
    ],
)
def test_warm_up_ends_when_three_requests_agree(monkeypatch: pytest.MonkeyPatch, totals: list[int], expected: int) -> None:
    found = measured(Machine([(total, ()) for total in totals]), monkeypatch)
    assert [iteration.total_ns for iteration in found.warmup] == totals[:expected]
    assert found.settled


def test_warm_up_that_never_settles_ends_and_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine([(100, ()), (200, ())] * 50), monkeypatch, max_warmup=7, max_repeats=8)
    assert len(found.warmup) == 7
    assert not found.settled


@pytest.mark.parametrize("most", [1, 2, 3])
def test_too_short_a_warm_up_cannot_settle(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    found = measured(Machine(STEADY), monkeypatch, max_warmup=most)
    assert len(found.warmup) == most
    assert not found.settled
    assert found.stable, "which says nothing about the repeats"


def test_warm_up_takes_at_most_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # a tenth of 10 s is 1 s; requests of 0.4 and 0.5 s in turn: after the first, 0.5, 0.9 and 1.4 s, so the fourth was the last
    script = [(400 * MS, ()), (500 * MS, ())] * 50
    found = measured(Machine(script), monkeypatch, time_limit_s=10, max_repeats=6)
    assert len(found.warmup) == 4


# --- interruption and failure -----------------------------------------------------------------------------------------


def interrupt_when(due: Callable[[], bool]) -> Callable[[Progress], None]:
    """Ctrl-C, as it reaches the meter between two iterations."""

    def on_progress(_: Progress) -> None:
        if due():
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("after", [1, 3, 9])
def test_an_interruption_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    machine = Machine(STEADY)
    found = metered(machine, monkeypatch).measure(effort(min_repeats=20), interrupt_when(lambda: machine.requests >= 4 + after))
    assert len(found.iterations) == after
    assert found.stopped == f"interrupted after {after} repeats"
    assert found.stable == (after >= 6)


def test_an_interruption_while_warming_up_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(STEADY)
    with pytest.raises(KeyboardInterrupt):
        metered(machine, monkeypatch).measure(effort(), interrupt_when(lambda: machine.requests >= 2))
    assert machine.requests == 2


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real garbage collector, with nothing frozen."""
    monkeypatch.setattr(meter, "gc", gc)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("request_number", [1, 3, 5, 8])
def test_a_failure_is_passed_on_and_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch, request_number: int) -> None:
    machine = Machine(STEADY, fails_in_request=request_number)
    with pytest.raises(RuntimeError, match="out of memory"):
        metered(machine, monkeypatch).measure(effort(min_repeats=20))
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_the_collector_has_little_to_look_at_while_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    metered(Machine(STEADY), monkeypatch).measure(
        effort(), on_progress=lambda progress: seen.append((progress.phase, gc.get_freeze_count() > 0))
    )
    assert set(seen) == {("warm-up", False), ("repeats", True)}
    assert gc.get_freeze_count() == 0


# --- tokens and progress ----------------------------------------------------------------------------------------------


def test_equal_tokens_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine(STEADY, tokens=(5,)), monkeypatch)
    assert found.tokens == [[5, 6, 7]], "one from prefill, one from each step"
    assert found.tokens_repeat


@pytest.mark.parametrize("odd_one", [5, 8, 10])
def test_one_request_with_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch, odd_one: int) -> None:
    tokens = [5] * 20
    tokens[odd_one - 1] = 9
    found = measured(Machine(STEADY, tokens=tokens), monkeypatch)
    assert len(found.warmup) + len(found.iterations) == 10
    assert not found.tokens_repeat
    assert found.tokens == [[5, 6, 7]]


def test_other_tokens_after_the_last_repeat_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(Machine(STEADY, tokens=[5] * 10 + [9]), monkeypatch).tokens_repeat


def test_progress_is_told_after_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    metered(Machine(STEADY), monkeypatch).measure(effort(max_warmup=15, max_repeats=50), on_progress=told.append)
    assert told == [
        *[Progress("warm-up", number, 15, 120 * MS) for number in range(1, 5)],
        *[Progress("repeats", number, 50, 120 * MS) for number in range(1, 7)],
    ]


TIMES = st.integers(1, 10**9)
SCRIPTS = st.lists(st.tuples(TIMES, st.tuples(TIMES, TIMES)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=10)
@given(SCRIPTS, st.integers(1, 10), st.integers(1, 20), st.integers(0, 20))
def test_whatever_the_times_the_effort_is_kept(script: list[Request], warmup: int, fewest: int, more: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = measured(Machine(script), monkeypatch, max_warmup=warmup, min_repeats=fewest, max_repeats=fewest + more)
    assert 1 <= len(found.warmup) <= warmup
    assert fewest <= len(found.iterations) <= fewest + more
    assert found.stable == is_stable(found.iterations, 0.02)
    assert found.stable or len(found.iterations) == fewest + more, "given up only at the most repeats"
    assert found.stopped
