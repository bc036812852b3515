import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.kernels.selection import Launch, Selection, Wanted, expected_passes, select
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage


def step(number: int, layers: int = 3) -> list[Launch]:
    """A decode step: per layer a large and a small GEMM, a norm and an addition, then the output layer."""
    made = []
    for _ in range(layers):
        made += [
            Launch(number, "gemm_large", "gemm_large<1>", 64, 128, 100),
            Launch(number, "gemm_small", "gemm_small<1>", 8, 128, 40),
            Launch(number, "norm", "norm<float>", 1, 256, 5),
            Launch(number, "add", "add<bf16>", 4, 256, 5),
        ]
    return [*made, Launch(number, "gemm_large", "gemm_large<1>", 999, 128, 150)]


STEPS = [launch for number in range(5) for launch in step(number)]


def chosen(**changes: object) -> Selection:
    budget_s = float(str(changes.pop("budget_s", 1000.0)))
    wanted = Wanted(**{"top": 1, "coverage": 0.8, **changes})  # type: ignore[arg-type]
    found = select(Stage.DECODE_STEP, STEPS, source="test", wanted=wanted, passes=10, budget_s=budget_s)
    assert isinstance(found, Selection)
    return found


def test_takes_the_functions_that_carry_the_time_and_skips_to_a_steady_step() -> None:
    found = chosen()
    # Of 600 ns in a step: gemm_large 3·100 + 150 = 450 (75 %), gemm_small 120 (20 %): both are needed for 80 %.
    assert [(kernel.function, kernel.calls, kernel.total_ns) for kernel in found.kernels] == [
        ("gemm_large", 4, 450),
        ("gemm_small", 3, 120),
    ]
    assert found.coverage == 0.95
    assert (found.step, found.launch_skip, found.launch_count, found.steps_needed) == (2, 2 * 7, 7, 3)
    assert found.seconds == pytest.approx(7 * 10 * 0.03)


def test_at_least_top_functions() -> None:
    assert len(chosen(top=3).kernels) == 3
    assert chosen(top=50).coverage == 1.0


def test_a_tight_budget_takes_the_launches_that_cover_the_most_time() -> None:
    found = chosen(budget_s=3 * 10 * 0.03 + 0.001)
    # The last layer's two GEMMs and the output layer: launches 4, 5 and 6 of the seven that match.
    assert (found.launch_skip, found.launch_count) == (14 + 4, 3)
    assert found.coverage == 0.95


def test_a_tighter_budget_drops_functions_and_notes_it() -> None:
    found = chosen(budget_s=2 * 10 * 0.03 + 0.001)
    # Two launches: the large GEMM in a layer and in the output layer (75 %) beat the large and the small in a layer (70 %).
    assert [kernel.function for kernel in found.kernels] == ["gemm_large"]
    assert found.coverage == 0.75
    assert "gemm_small" in found.notes[0]
    assert "75 %" in found.notes[1]


def test_a_pattern_restricts_the_functions_and_the_coverage_stays_that_of_the_stage() -> None:
    found = chosen(pattern="small|norm")
    assert [kernel.function for kernel in found.kernels] == ["gemm_small", "norm"]
    assert found.coverage == (120 + 15) / 600
    assert len(found.notes) == 1, "the share that was asked for cannot be reached, and is not missed"
    assert "22 %" in found.notes[0]


def test_a_pattern_that_matches_nothing_names_what_ran() -> None:
    found = select(Stage.PREFILL, STEPS, source="test", wanted=Wanted(1, 0.8, pattern="conv"), passes=1, budget_s=1.0)
    assert found == Missing("no kernel of prefill matches 'conv'; it ran gemm_large, gemm_small, add, norm")


@pytest.mark.parametrize(
    ("skip", "count", "pattern", "expected"),
    [
        (15, 4, None, (15, 4, 2, 2)),  # step 1 has launches 13 to 25
        (None, 3, "gemm", (0, 3, 1, 1)),
        (34, 5, "gemm", (34, 1, 5, 5)),  # of 35 GEMMs, one is left
        (3, None, "norm", (3, 3, 2, 2)),  # the budget allows three
    ],
)
def test_launches_by_number(skip: int | None, count: int | None, pattern: str | None, expected: tuple[int, ...]) -> None:
    found = chosen(skip=skip, count=count, pattern=pattern, budget_s=3 * 10 * 0.03 + 0.001)
    assert (found.launch_skip, found.launch_count, found.step + 1, found.steps_needed) == expected
    assert found.seconds == pytest.approx(found.launch_count * 10 * 0.03, abs=0.05)
    assert {kernel.function for kernel in found.kernels} == {
        launch.function for launch in STEPS if pattern is None or pattern in launch.function
    }


def test_too_many_skipped_launches_leave_none() -> None:
    found = select(Stage.PREFILL, STEPS, source="test", wanted=Wanted(1, 0.8, skip=65), passes=1, budget_s=1.0)
    assert found == Missing("prefill has 65 matching launches, so none is left after skipping 65")


def test_nothing_fits() -> None:
    found = select(Stage.PREFILL, STEPS, source="test", wanted=Wanted(1, 0.8), passes=10, budget_s=0.1)
    assert found == Missing("no launch of prefill fits in 0.1 s at 10 passes")


def test_an_empty_timeline_has_a_reason() -> None:
    assert "no kernel of prefill" in str(select(Stage.PREFILL, [], source="test", wanted=Wanted(1, 0.8), passes=1, budget_s=1.0))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
        ),
        ("cross_device_reduce_1stage", "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, int)"),
        ("nvshmem_barrier_kernel", "nvshmem_barrier_kernel(int)"),
        ("mscclpp_kernel", "mscclpp_kernel<float>(float*)"),
        ("moeAlltoAllKernel", "tensorrt_llm::kernels::moeAlltoAllKernel(int)"),
        ("lamport_kernel", "void lamport_kernel<8>(int*)"),
        ("userbuffers_fp16_sum_inplace_gpu_rw", "userbuffers_fp16_sum_inplace_gpu_rw(int)"),
        ("barrier_kernel", "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int)"),
        ("dispatch", "void deep_ep::internode::dispatch<false, 8>(int4*)"),
    ],
)
def test_collectives_are_never_replayed(function: str, name: str) -> None:
    """A replay would hang. Some are recognizable by their namespace only."""
    launches = [Launch(0, function, name, 1, 1, 900), Launch(0, "gemm", "g", 1, 1, 100)]
    found = select(Stage.PREFILL, launches, source="test", wanted=Wanted(5, 0.8), passes=1, budget_s=10.0)
    assert isinstance(found, Selection)
    assert [kernel.function for kernel in found.kernels] == ["gemm"]
    assert found.coverage == 0.1
    assert any(f"Collectives are not replayed: {function}." in note for note in found.notes)


@pytest.mark.parametrize(
    ("collective_ns", "budget_s", "said", "unsaid"),
    [
        (900, 10.0, "collectives take 64 % of it, so at most 36 % can be counted.", "budget_s"),
        (900, 0.1, "at most 36 % can be counted; to count more of that, raise profiling.ncu.budget_s", "nothing"),
        (10, 0.1, "requested 80 %; raise profiling.ncu.budget_s", "collectives take"),
    ],
)
def test_the_remedy_for_low_coverage_depends_on_its_cause(collective_ns: int, budget_s: float, said: str, unsaid: str) -> None:
    reduce = Launch(0, "ncclDevKernel_AllReduce", "ncclDevKernel_AllReduce()", 1, 1, collective_ns)
    gemms = [Launch(0, "gemm", "g", size, 1, 100) for size in range(1, 6)]
    found = select(Stage.PREFILL, [reduce, *gemms], source="test", wanted=Wanted(5, 0.8), passes=1, budget_s=budget_s)
    assert isinstance(found, Selection)
    assert said in found.notes[-1]
    assert unsaid not in found.notes[-1]


def test_instrumented_counters_cost_a_pass_each() -> None:
    few = expected_passes(["gpu__time_duration.sum", "dram__bytes_read.sum"])
    assert few == 1
    assert expected_passes(["gpu__time_duration.sum", *[f"smsp__sass_{n}.sum" for n in range(6)]]) == 7


launch_lists = st.lists(
    st.builds(
        Launch,
        step=st.integers(0, 3),
        function=st.sampled_from("abcd"),
        name=st.sampled_from("xy"),
        grid=st.integers(1, 2),
        block=st.just(1),
        duration_ns=st.integers(1, 1000),
    ),
    max_size=60,
).map(lambda made: sorted(made, key=lambda launch: launch.step))


@given(launch_lists, st.integers(1, 4), st.floats(0.1, 1.0), st.floats(0.03, 3.0))
def test_counted_launches_are_within_the_step_and_the_budget(
    launches: list[Launch], top: int, coverage: float, budget_s: float
) -> None:
    found = select(Stage.DECODE_STEP, launches, source="test", wanted=Wanted(top, coverage), passes=1, budget_s=budget_s)
    if isinstance(found, Missing):
        return
    names = {kernel.function for kernel in found.kernels}
    matching = [launch for launch in launches if launch.function in names]
    counted = matching[found.launch_skip : found.launch_skip + found.launch_count]
    assert len(counted) == found.launch_count
    assert {launch.step for launch in counted} == {found.step}
    assert found.seconds <= budget_s + 0.06
    whole = sum(launch.duration_ns for launch in launches if launch.step == found.step)
    variants = {launch.variant for launch in counted}
    carried = sum(launch.duration_ns for launch in matching if launch.step == found.step and launch.variant in variants)
    assert found.coverage == pytest.approx(carried / whole)
