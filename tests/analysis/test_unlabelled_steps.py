"""A decode without step labels: per token if its kernels show the steps, else per decode, never mixed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import clean_timings
from llm_perf_opt.analysis.evidence import RunFacts, StageEvidence, gather
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from trace_builders import Builder

REAL = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"
STEPS = 8
LAYERS = 6


@pytest.fixture(scope="module")
def labeled() -> Trace:
    return read_torch_trace(REAL)


def without(trace: Trace, label: str) -> Trace:
    return replace(trace, ranges=trace.ranges.rows(np.flatnonzero(trace.ranges.name != trace.names.index(label))))


def decode_of(trace: Trace, facts: RunFacts | None = None) -> StageEvidence:
    stages = find_stages(trace)
    found = gather(trace, stages, account(trace, stages), facts or RunFacts()).stage("decode")
    assert found is not None
    return found


def test_steps_of_a_real_decode_are_found_by_its_kernels(labeled: Trace) -> None:
    """Eight steps of 191 kernels: the same figures with the steps' labels and without them."""
    bare = without(labeled, "decode_step")
    stages = find_stages(bare)
    assert stages.method == "labels, steps by kernel sequence"
    assert "8 periods of 191 kernels" in stages.why
    known, found = decode_of(labeled), decode_of(bare)
    assert (found.unit, found.units, found.wall_ns) == ("token", STEPS, known.wall_ns)
    assert (found.budget, found.kernels, found.fusion) == (known.budget, known.kernels, known.fusion)
    ours, theirs = (find_stages(trace).of_stage("decode_step") for trace in (bare, labeled))
    assert (np.diff(ours) != 0).tolist() == (np.diff(theirs) != 0).tolist()


def test_a_label_around_every_step_is_no_decode_of_as_many_layers(labeled: Trace) -> None:
    """`decode` set around each step: the layers' rhythm is not taken for steps, and nothing is called a token."""
    outer = without(labeled, "decode")
    names = tuple("decode" if name == "decode_step" else name for name in outer.names)
    each = replace(outer, names=names)
    stages = find_stages(each)
    assert "decode_step" not in stages.names
    assert "no figures per token" in stages.why
    found = decode_of(each)
    assert (found.unit, found.units) == ("decode", STEPS)
    said = [one for one in find(gather(each, stages, account(each, stages), RunFacts())) if one.stage == "decode"]
    assert said
    for one in said:
        assert "token" not in one.claim + " ".join(one.evidence)
        assert one.saving_ns is None or one.saving_per == "decode"


def looped(requests: int, steps: int, sampled: bool = True, before: int = 0) -> Trace:
    """Decodes of some steps of six layers each, with a product and an attention that is not recognized as one, and a head."""
    built = Builder()
    at = 0
    for _ in range(requests):
        begin = at
        step = [name for _ in range(LAYERS) for name in ("norm", "gemm_qkv", "softmax", "gemm_up", "mul")]
        kernels = ["fill"] * before + (["embed", *step, "gemm_head", *(["ArgMaxOps"] if sampled else [])]) * steps
        for name in kernels:
            built.launch(at + 1, at + 50, at + 55, name)
            at += 10
        built.range(begin, at, "decode")
        at += 100
    return built.trace()


@pytest.mark.parametrize("before", [0, 1, 5])
def test_every_decode_is_cut_into_its_steps(before: int) -> None:
    trace = looped(requests=3, steps=7, before=before)
    found = find_stages(trace)
    assert len(found.rows_of("decode_step")) == 21
    steps = found.instances.rows(found.rows_of("decode_step"))
    assert np.bincount(steps.parent)[found.rows_of("decode")].tolist() == [7, 7, 7]
    assert decode_of(trace).units == 21


@pytest.mark.parametrize(("steps", "sampled"), [(1, True), (1, False), (2, True), (7, False)])
def test_where_no_token_is_seen_to_be_chosen_again_and_again_there_are_no_steps(steps: int, sampled: bool) -> None:
    assert decode_of(looped(requests=2, steps=steps, sampled=sampled)).unit == "decode"


def test_a_decode_of_unknown_steps_has_no_time_or_roofline_per_step() -> None:
    found = decode_of(looped(requests=1, steps=1), RunFacts(timings=clean_timings()))
    assert not found.unprofiled
    assert "does not show the steps" in found.budget.wall_source
