"""Stages of any trace: dialects, methods, and the work of each stage."""

import pytest

from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import RangeKind, Trace
from trace_builders import Builder


def served(*labels: str, domain: str | None = None) -> Trace:
    """One step per label, each with two kernels, a pause between the steps."""
    built = Builder()
    for number, label in enumerate(labels):
        begin = number * 100
        built.range(begin, begin + 50, label, domain)
        for place in (0, 1):
            built.launch(begin + 10 + place, begin + 20 + 10 * place, begin + 28 + 10 * place, f"kernel {place}")
    return built.trace()


def of_stages(trace: Trace) -> dict[str, list[int]]:
    """Return stage → index of its instance per row of work, -1 for none."""
    stages = find_stages(trace)
    found = {}
    for name in stages.names:
        rows = stages.rows_of(name).tolist()
        found[name] = [rows.index(row) if row >= 0 else -1 for row in stages.of_stage(name).tolist()]
    return found


def test_our_own_labels_nest() -> None:
    built = Builder()
    built.range(0, 100, "profile")
    built.range(0, 40, "prefill")
    built.range(50, 100, "decode")
    built.range(50, 70, "decode_step")
    built.range(75, 95, "decode_step")
    for at in (10, 55, 72, 80):
        built.launch(at, at + 200, at + 201)
    trace = built.trace()
    found = find_stages(trace)
    assert (found.method, found.names, found.coverage) == ("labels", ("profile", "prefill", "decode", "decode_step"), 1.0)
    assert of_stages(trace) == {
        "profile": [0, 0, 0, 0],
        "prefill": [0, -1, -1, -1],
        "decode": [-1, 0, 0, 0],
        "decode_step": [-1, 0, -1, 1],
    }
    assert found.step_stage == "decode_step"


@pytest.mark.parametrize(
    ("method", "prefill", "decode"),
    [
        ("vllm", "execute_context_1(9)_generation_0(0)", "execute_context_0(0)_generation_4(4)"),
        ("sglang", "step[EXTEND bs=1 toks=9]", "step[DECODE bs=1]"),
        (
            "tensorrt_llm",
            "[Executor] _forward_step 1: 1 ctx reqs, 0 gen reqs",
            "[Executor] _forward_step 2: 0 ctx reqs, 1 gen reqs",
        ),
        ("atom", "prefill[bs=1 tok=9]", "decode[bs=1 tok=1]"),
    ],
)
def test_an_engines_steps_become_prefills_and_decodes(method: str, prefill: str, decode: str) -> None:
    trace = served(prefill, decode, decode, prefill, decode)
    found = find_stages(trace)
    assert (found.method, found.names) == (method, ("prefill", "decode", "decode_step"))
    assert of_stages(trace) == {
        "prefill": [0, 0, -1, -1, -1, -1, 1, 1, -1, -1],
        "decode": [-1, -1, 0, 0, 0, 0, -1, -1, 1, 1],
        "decode_step": [-1, -1, 0, 0, 1, 1, -1, -1, 2, 2],
    }
    decodes = found.instances.rows(found.rows_of("decode"))
    assert list(zip(decodes.start_ns.tolist(), decodes.end_ns.tolist(), strict=True)) == [(100, 250), (400, 450)]


def test_steps_of_two_threads_are_two_decodes() -> None:
    built = Builder()
    for thread in (1, 2):
        for begin in (0, 100):
            built.range(begin + thread, begin + 50 + thread, "step[DECODE bs=1]", None, thread=thread)
            built.launch(begin + 10, begin + 20, begin + 30, thread=thread)
    assert len(find_stages(built.trace()).rows_of("decode")) == 2


def test_inner_labels_of_a_step_do_not_end_a_run() -> None:
    built = Builder()
    for begin in (0, 100):
        built.range(begin, begin + 50, "step[DECODE bs=1]", None)
        built.range(begin + 5, begin + 20, "step[DRAFT_EXTEND bs=1]", None)
        built.launch(begin + 10, begin + 20, begin + 30)
        built.launch(begin + 30, begin + 40, begin + 45)
    found = find_stages(built.trace())
    assert len(found.rows_of("decode")) == 1
    assert (found.of_stage("decode") >= 0).all()


def test_mixed_steps_are_separate() -> None:
    trace = served("execute_context_1(9)_generation_3(3)", "execute_context_0(0)_generation_4(4)")
    assert find_stages(trace).names == ("decode", "decode_step", "mixed_step")


def test_profiler_steps_are_used_without_better_labels() -> None:
    assert find_stages(served("ProfilerStep#1", "ProfilerStep#2")).method == "profiler_step"
    built = Builder()
    built.range(0, 200, "ProfilerStep#1", None)
    built.range(10, 60, "step[DECODE bs=1]", None)
    built.launch(20, 30, 40)
    assert find_stages(built.trace()).method == "sglang"


def test_a_bare_profile_label_is_a_last_resort() -> None:
    built = Builder()
    built.range(0, 200, "profile")
    built.range(10, 60, "step[DECODE bs=1]", None)
    built.launch(20, 30, 40)
    assert find_stages(built.trace()).method == "sglang"
    alone = Builder()
    alone.range(0, 200, "profile")
    alone.launch(20, 30, 40)
    assert (find_stages(alone.trace()).method, find_stages(alone.trace()).names) == ("labels", ("profile",))


def test_a_label_set_twice_is_one_stage() -> None:
    built = Builder()
    built.range(0, 50, "prefill")
    built.range(1, 49, "prefill", None)
    built.launch(10, 20, 30)
    found = find_stages(built.trace())
    assert len(found.rows_of("prefill")) == 1
    assert (found.instances.end_ns - found.instances.start_ns).tolist() == [50]


def test_plain_names_of_another_domain_are_somebody_elses() -> None:
    trace = served("decode", "decode", domain="VideoCodec")
    assert find_stages(trace).method == "none"
    assert find_stages(served("decode", "decode")).method == "labels", "a torch trace has no domains"


def test_labels_that_own_no_work_give_way_but_are_kept_for_want_of_better() -> None:
    built = Builder()
    built.range(0, 5, "prefill")
    built.range(100, 150, "step[DECODE bs=1]", None)
    built.launch(110, 120, 130)
    assert find_stages(built.trace()).method == "sglang"
    alone = Builder()
    alone.range(0, 5, "prefill")
    alone.launch(10, 12, 20)
    found = find_stages(alone.trace())
    assert (found.method, found.coverage) == ("labels", 0.0)


def test_work_without_a_known_launch_belongs_to_no_stage() -> None:
    built = Builder()
    built.range(0, 50, "prefill")
    built.launch(10, 20, 30)
    built.kernel(30, 40)
    found = find_stages(built.trace())
    assert found.of_work.tolist() == [0, -1]
    assert found.coverage == 0.5


def test_start_end_ranges_may_carry_a_stage() -> None:
    built = Builder()
    built.range(0, 50, "prefill", kind=RangeKind.START_END)
    built.launch(10, 20, 30)
    assert find_stages(built.trace()).of_work.tolist() == [0]


def test_nothing_to_go_by() -> None:
    found = find_stages(Builder().trace())
    assert (found.method, found.names, found.coverage, found.step_stage) == ("none", (), None, None)
    built = Builder()
    for at in range(5):
        built.launch(at, 10 * at + 10, 10 * at + 15, f"kernel {at}")
    found = find_stages(built.trace())
    assert (found.method, found.coverage) == ("none", 0.0)
    assert "repeating" in found.why
