"""Times of an engine from the arrival of its tokens. Every number can be checked by eye."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.runners.measure.annotations import StageMarker
from llm_perf_opt.runners.measure.engine_meter import EngineMeter, Generated, is_mixed, is_out_of_step
from llm_perf_opt.runners.measure.meter import Effort


class Scripted:
    """An engine whose tokens arrive when the script says; token k of sequence s is 100 · s + k."""

    def __init__(self, *arrivals_ns: Sequence[int], started_ns: int = 1000) -> None:
        self.arrivals = tuple(tuple(row) for row in arrivals_ns)
        self.started = started_ns
        self.asked: list[int] = []
        self.read = 0

    def clock(self) -> int:
        """Before a request: when the script begins; after it: now, which is later than any script."""
        self.read += 1
        return self.started if self.read % 2 else time.monotonic_ns()

    def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
        self.asked.append(new_tokens)
        tokens = tuple(tuple(100 * row + place for place in range(len(times))) for row, times in enumerate(self.arrivals))
        return Generated(self.started, self.arrivals, tokens)


def metered(engine: Scripted, new_tokens: int = 3) -> EngineMeter:
    return EngineMeter(engine, None, len(engine.arrivals), new_tokens, clock=engine.clock)


def test_a_stage_ends_when_the_last_sequence_has_its_token() -> None:
    meter = metered(Scripted([1100, 1150, 1200], [1130, 1160, 1300]))
    iteration = meter.iterate()
    assert (iteration.started_ns, iteration.prefill_ns, iteration.steps_ns) == (1000, 130, (30, 140))
    assert iteration.total_ns == 300
    assert meter.tokens() == [[0, 1, 2], [100, 101, 102]]
    assert meter.inseparable == ""


class Slow(Scripted):
    """Does something else after the request."""

    def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
        return replace(super().generate(prompts, new_tokens, marker), ended_ns=1350)


def test_what_follows_a_request_is_not_timed() -> None:
    assert metered(Slow([1100, 1150, 1200])).iterate().wall_ns == 350
    with pytest.raises(CaptureError, match="after `generate` returned"):
        metered(Slow([1100, 1150, 1400])).iterate()


@pytest.mark.parametrize("early_ns", [1, 5 * 10**9, 10**12])
def test_an_engine_that_began_before_it_was_asked_is_refused(early_ns: int) -> None:
    engine = Scripted([1100, 1150, 1200], started_ns=1000)
    meter = EngineMeter(engine, None, 1, 3, clock=lambda: 1000 + early_ns)
    with pytest.raises(CaptureError, match="ms before `generate` was called"):
        meter.iterate()


def test_tokens_handed_over_at_once_have_no_gaps_of_their_own() -> None:
    meter = metered(Scripted([1100, 1150, 1200], [1130, 1160, 1300]))
    meter.iterate()
    assert meter.unstepped == ""
    meter = metered(Scripted([1100, 1200, 1200], [1130, 1210, 1300]))
    iteration = meter.iterate()
    assert (iteration.prefill_ns, iteration.decode_ns) == (130, 170)
    assert "in 1 of 1 requests the engine returned several tokens of a sequence at once" in meter.unstepped


def test_one_token_is_prefill_alone() -> None:
    iteration = metered(Scripted([1100], [1130]), 1).iterate()
    assert (iteration.prefill_ns, iteration.steps_ns) == (130, ())


@pytest.mark.parametrize(
    ("second_of_first", "mixed"),
    [(1150, True), (1200, True), (1201, False)],
    ids=["before the other's first", "in the same step", "after it"],
)
def test_prefill_and_decode_together_are_noticed(second_of_first: int, mixed: bool) -> None:
    meter = metered(Scripted([1100, second_of_first, 1300], [1200, 1250, 1300]))
    meter.iterate()
    meter.iterate()
    expected = "in 2 of 2 requests some sequences decoded while others were still in prefill"
    assert meter.inseparable == (expected if mixed else "")


HELD_BACK = "some sequences decoded while others were held back"


@pytest.mark.parametrize(
    ("rows", "apart"),
    [
        (([1100, 1200, 1300, 1400], [1100, 1200, 1450, 1460]), True),
        (([1100, 1200, 1450, 1460], [1100, 1200, 1300, 1400]), True),
        (([1100, 1200, 1300, 1400], [1100, 1200, 1400, 1500]), True),
        (([1100, 1200, 1300, 1401], [1100, 1200, 1400, 1500]), False),
        (([1100, 1200, 1300, 1400], [1100, 1200, 1300, 1400]), False),
        (([1100, 1200, 1200, 1200], [1100, 1200, 1300, 1400]), False),
        (([1100, 1200, 1200, 1300], [1100, 1400, 1400, 1500]), True),
        (([1100, 1200, 1300, 1400], [1110, 1210, 1410, 1410]), True),
        (([1100, 1200, 1300, 1400], [1110, 1210, 1390, 1390]), False),
    ],
    ids=[
        "the second was preempted", "the first was", "in the same step", "late by less than a step", "in step",
        "several tokens a step for one", "several a step, and one waited two",
        "a stream late by a step", "a stream that caught up",
    ],
)  # fmt: skip
def test_a_sequence_that_was_held_back_in_decode_is_noticed(rows: Sequence[Sequence[int]], apart: bool) -> None:
    meter = metered(Scripted(*rows), 4)
    meter.iterate()
    assert (HELD_BACK in meter.inseparable) == apart
    assert ("in 1 of 1 requests" in meter.inseparable) == apart
    assert "still in prefill" not in meter.inseparable


@pytest.mark.parametrize(
    ("rows", "held_back"),
    [
        (([1100, 1200, 1300, 1400], [1100, 1200, 1300, 1400]), False),
        (([1100, 1200, 1300, 1400], [1200, 1300, 1400, 1500]), False),
        (([1100, 1200, 1300, 1400], [1400, 1500, 1600, 1700]), False),
        (([1100, 1200, 1300, 1400], [1500, 1600, 1700, 1800]), True),
        (([1100, 1200, 1300, 1400], [1100, 1200, 1450, 1460]), True),
    ],
    ids=["in step", "chunked", "in the last step of another", "after the end of another", "preempted"],
)
def test_sequences_that_waited_are_told_apart_from_chunked_prompts(rows: Sequence[Sequence[int]], held_back: bool) -> None:
    meter = metered(Scripted(*rows), 4)
    meter.iterate()
    assert meter.held_back is held_back


def test_an_engine_that_knows_of_one_held_back_is_believed() -> None:
    in_step = Generated(0, ((5, 6), (5, 9)), ((1, 2), (3, 4)))
    assert not is_out_of_step(in_step), "late at the last token alone: arrivals do not tell"
    assert is_out_of_step(replace(in_step, held_back=True))


def test_what_an_engine_knows_counts_also_if_its_stages_are_mixed() -> None:
    """The second sequence begins late, as with chunked prompts, and is then skipped once; arrivals alone do not tell."""

    class Knowing(Scripted):
        def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
            return replace(super().generate(prompts, new_tokens, marker), held_back=True)

    rows = ([1010, 1020, 1030, 1040, 1050], [1020, 1030, 1060, 1070, 1080])
    for kind, held_back in ((Scripted, False), (Knowing, True)):
        meter = metered(kind(*rows), 5)
        meter.iterate()
        assert "still in prefill" in meter.inseparable
        assert meter.held_back is held_back


def test_both_kinds_of_mixing_are_counted_apart() -> None:
    engine = Scripted([1100, 1150, 1300], [1200, 1250, 1300])
    meter = metered(engine)
    meter.iterate()
    engine.arrivals = ((1100, 1200, 1300), (1100, 1300, 1400))
    meter.iterate()
    first, second = meter.inseparable.split("; ")
    assert first == "in 1 of 2 requests some sequences decoded while others were still in prefill"
    assert second.startswith(f"in 1 of 2 requests {HELD_BACK}")


@given(st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5, unique=True), min_size=1, max_size=4))
def test_one_token_at_a_time_is_out_of_step_as_every_pair_tells(rows: list[list[int]]) -> None:
    rows = [sorted(row) for row in rows]
    pairs = ((one, other) for one in range(len(rows)) for other in range(len(rows)) if one != other)
    expected = any(rows[one][place + 1] <= rows[other][place] for one, other in pairs for place in range(4))
    assert is_out_of_step(Generated(0, tuple(map(tuple, rows)), ((0,) * 5,) * len(rows))) == expected


def test_a_sequence_alone_cannot_be_mixed() -> None:
    assert not is_out_of_step(Generated(0, ((5, 6, 6, 7),), ((1, 2, 3, 4),)))
    assert not is_mixed(Generated(0, ((5, 6),), ((1, 2),)))
    assert not is_mixed(Generated(0, ((5,), (7,)), ((1,), (2,))))


@pytest.mark.parametrize("arrivals", [([1100, 1200],), ([1100, 1200, 1300, 1400],), ([1100, 1200, 1300], [1100, 1200])])
def test_an_engine_that_ends_early_or_late_is_refused(arrivals: Sequence[Sequence[int]]) -> None:
    with pytest.raises(CaptureError, match="tokens per sequence, not 3"):
        metered(Scripted(*arrivals)).iterate()


@pytest.mark.parametrize("given_back", [0, 1, 3])
def test_an_engine_that_drops_or_adds_sequences_is_refused(given_back: int) -> None:
    meter = EngineMeter(Scripted(*[[1100, 1200, 1300]] * given_back), None, 2, 3)
    with pytest.raises(CaptureError, match=f"tokens of {given_back} sequences; 2 were submitted"):
        meter.iterate()


def test_tokens_without_their_times_are_refused() -> None:
    class Untimed(Scripted):
        def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
            return replace(super().generate(prompts, new_tokens, marker), arrivals_ns=self.arrivals[:1])

    with pytest.raises(CaptureError, match="tokens of 2 sequences and times of 1; 2 were submitted"):
        metered(Untimed([1100, 1200, 1300], [1100, 1200, 1300])).iterate()


def test_tokens_that_arrive_after_the_engine_returned_are_refused() -> None:
    later = time.monotonic_ns() + 3600 * 10**9
    with pytest.raises(CaptureError, match="after `generate` returned"):
        metered(Scripted([1100, 1200, 1300], [1100, 1200, later])).iterate()


@pytest.mark.parametrize("arrivals", [[900, 1100, 1200], [1100, 1050, 1200]])
def test_times_that_cannot_be_are_refused(arrivals: Sequence[int]) -> None:
    with pytest.raises(CaptureError, match="before they were requested"):
        metered(Scripted(arrivals)).iterate()


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_stages_are_the_whole_request_whatever_the_order(rows: list[list[int]]) -> None:
    arrivals = [[1000 + time for time in sorted(row)] for row in rows]
    iteration = metered(Scripted(*arrivals), 4).iterate()
    assert iteration.total_ns == max(max(row) for row in arrivals) - 1000
    assert min(iteration.prefill_ns, *iteration.steps_ns) >= 0


def test_it_repeats_as_the_other_meter_does() -> None:
    engine = Scripted([1100, 1150, 1200])
    measured = metered(engine).measure(Effort(max_warmup=9, min_repeats=6, max_repeats=20, ci_target=0.02, time_limit_s=60))
    assert (len(measured.warmup), len(measured.iterations), measured.stable, measured.settled) == (4, 6, True, True)
    assert measured.tokens_repeat
    assert set(engine.asked) == {3}
