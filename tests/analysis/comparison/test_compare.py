"""Two sides: errors, differences, comparisons."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from builders import MS, clean_timings, in_a_row, iteration, model_facts, operator, run_analysis, torch_pass, workload
from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare, gate_names
from llm_perf_opt.analysis.comparison.effects import Effect, Judgement
from llm_perf_opt.analysis.comparison.figures import ComparedFigure
from llm_perf_opt.analysis.comparison.gates import NO_REMEDY, parse_gates
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel
from llm_perf_opt.analysis.comparison.sides import side_of, typical_run
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.analysis.metrics import metrics as run_metrics
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stability import Movement
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Iteration, Maybe, MemoryPeaks, Missing, SubstageSpan
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.core.weight_records import WeightFacts

CONFIG: dict[str, Any] = {
    "experiment": "one",
    "model": {"name": "tiny", "dtype": "auto"},
    "dataset": {"name": "synthetic"},
    "runtime": {"batch_size": 2, "prompt_tokens": 10, "num_new_tokens": 4, "compile": "none"},
    "hardware": {"device": "auto"},
}


def repeats(slower: float = 1.0, count: int = 10) -> list[Iteration]:
    """Nearly equal repeats: a tenth of a percent up and down."""
    one = [1.0, 1.001, 0.999, 1.0005, 0.9995]
    return [
        iteration(
            round(100 * MS * slower * one[index % 5]), [round(step * MS * slower * one[index % 5]) for step in (10, 20, 30)]
        )
        for index in range(count)
    ]


def run(
    slower: float = 1.0, setting: tuple[str, str, Any] | None = None, timings: CleanTimings | None = None, **more: Any
) -> RunAnalysis:
    config = {name: dict(group) if isinstance(group, dict) else group for name, group in CONFIG.items()}
    if setting:
        config[setting[0]][setting[1]] = setting[2]
    return run_analysis(config=config, timings=timings or clean_timings(repeats(slower)), **more)


def one_to_one(base: RunAnalysis, new: RunAnalysis, **more: Any) -> Comparison:
    """The runs are on a CPU, for which nothing is assumed unless stated."""
    return compare(Side((base,)), Side((new,)), judgement=Judgement(process_spread=ACCELERATOR_SPREAD), **more)


def found_effect(comparison: Comparison, key: str) -> Effect:
    found = comparison.row(key).effect
    assert not isinstance(found, Missing)
    return found


def test_every_metric_and_stage_is_compared() -> None:
    found = one_to_one(run(), run(1.1))
    assert [row.key for row in found.metrics] == [metric.key for metric in METRICS]
    assert [row.key for row in found.stages] == ["prefill", "decode", "decode_step"]
    for key in ("ttft", "tpot", "e2e", "prefill", "decode", "decode_step"):
        one = found_effect(found, key)
        assert one.change == pytest.approx(0.1, abs=0.002)
        assert one.verdict == "slower"
    assert found_effect(found, "decode_rate").verdict == "slower"
    assert found_effect(found, "decode_rate").change == pytest.approx(1 / 1.1 - 1, abs=0.002)
    assert found_effect(found, "decode_step").paired_steps == 3
    p99 = found.row("itl_p99").effect
    assert isinstance(p99, Missing)
    assert "p99 needs 500" in p99.why


def test_the_same_run_again_is_not_distinguishable() -> None:
    found = one_to_one(run(), run())
    assert {row.effect.verdict for row in (*found.metrics, *found.stages) if isinstance(row.effect, Effect)} == {
        "not distinguishable"
    }
    assert (found.settings, found.facts, found.environment) == ((), (), ())


BATCH_4 = clean_timings(repeats(), workload=workload(batch_size=4, prompt_tokens=(10, 6, 10, 6), new_tokens=4))
OTHER_MODEL = clean_timings(repeats(), model=model_facts(parameters=6_000_000))
OTHER_DEVICE = clean_timings(repeats(), model=model_facts(device_name="another processor"))
LARGER_BATCH = run(timings=BATCH_4, setting=("runtime", "batch_size", 4))
OTHER_DTYPE = run(timings=OTHER_MODEL, setting=("model", "dtype", "bf16"))


@pytest.mark.parametrize(
    ("new", "kind", "option", "named"),
    [
        (LARGER_BATCH, "workload", "--experiment runtime.batch_size", {"experiment": ["runtime.batch_size"]}),
        (LARGER_BATCH, "workload", "--experiment runtime.batch_size", {"allow": ["workload"]}),
        (LARGER_BATCH, "workload", "--experiment runtime.batch_size", {"experiment": ["runtime"]}),
        (OTHER_DTYPE, "model", "--experiment model.dtype", {"experiment": ["model"]}),
        (run(timings=OTHER_DEVICE), "hardware", "--allow hardware", {"allow": ["hardware"]}),
    ],
)  # fmt: skip
def test_runs_of_different_kinds_are_refused_until_the_difference_is_named(
    new: RunAnalysis, kind: str, option: str, named: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        one_to_one(run(), new)
    assert f"differ in their {kind}" in caught.value.fact
    assert option in caught.value.remedy
    assert caught.value.exit_code == 2
    found = one_to_one(run(), new, **named)
    assert {fact.kind for fact in found.facts} == {kind}


def test_naming_one_difference_does_not_excuse_another() -> None:
    both = run(timings=replace(BATCH_4, model=model_facts(parameters=6_000_000)), setting=("runtime", "batch_size", 4))
    with pytest.raises(ConfigError, match="model"):
        one_to_one(run(), both, experiment=["runtime.batch_size"])
    two = run(timings=BATCH_4, setting=("runtime", "batch_size", 4))
    two.config["runtime"]["prompt_tokens"] = 99
    with pytest.raises(ConfigError) as caught:
        one_to_one(run(), two, experiment=["runtime.batch_size"])
    assert "--experiment runtime.prompt_tokens" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experiment": ["runtime.batch_sise"]}, "Did you mean 'runtime.batch_size'?"),
        ({"experiment": ["runtime.batch_size"]}, "the same on both sides"),
        ({"allow": ["hardwear"]}, "Did you mean 'hardware'?"),
    ],
)
def test_an_invalid_experiment_is_an_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        one_to_one(run(), run(), **options)
    assert said in caught.value.fact


def test_how_it_runs_may_differ_and_is_listed() -> None:
    found = one_to_one(run(), run(0.8, setting=("runtime", "compile", "default")))
    assert [(row.key, row.base, row.new) for row in found.settings] == [("runtime.compile", "none", "default")]
    assert found_effect(found, "tpot").verdict == "faster"
    newer = run()
    newer.env["packages"] = {"torch": "2.14.0"}
    assert [row.key for row in one_to_one(run(), newer).environment] == ["packages.torch"]


def test_the_reason_of_a_missing_fact_is_not_compared() -> None:
    earlier, later = (
        replace(run(), env={**run().env, "cpu": {"governor": f"n/a: {why}"}}) for why in ("not told", "not reported")
    )
    assert [row.key for row in one_to_one(earlier, later).environment] == []


def test_other_differences_than_the_experiment_are_a_caution() -> None:
    new = run(timings=BATCH_4, setting=("runtime", "batch_size", 4))
    new.config["runtime"]["compile"] = "default"
    found = one_to_one(run(), new, experiment=["runtime.batch_size"])
    assert any("runtime.compile" in text for text in found.cautions)


def test_cautions_name_other_tokens_and_disturbed_runs() -> None:
    other = run(
        timings=replace(clean_timings(repeats()), tokens_sha256="1" * 64),
        warnings=(RunWarning(WarningId.BUSY_PROCESSORS, "The machine was busy."),),
    )
    cautions = " ".join(one_to_one(run(), other).cautions)
    assert "different tokens" in cautions
    assert "The machine was busy." in cautions
    assert "2 runs per side would measure it roughly; 3 would detect smaller changes" in cautions


def test_several_runs_per_side_must_be_repeats() -> None:
    found = compare(Side((run(), run(1.002), run(1.001))), Side((run(1.1), run(1.101), run(1.102))))
    assert found_effect(found, "tpot").verdict == "slower"
    assert found_effect(found, "tpot").runs == (3, 3)
    assert found_effect(found, "tpot").uncertainty.measured
    assert not any("Too few runs" in text for text in found.cautions)
    with pytest.raises(ConfigError, match=r"not repeats .*runtime\.compile"):
        compare(Side((run(), run(setting=("runtime", "compile", "default")))), Side((run(),)))


GPU = {
    "name": "a card",
    "uuid": "GPU-1",
    "power_limit_w": 700.0,
    "sm_clock_max_mhz": 1980,
    "memory_bytes": 80 * 2**30,
    "mig": False,
}
"""What the record of the environment says of a card."""


def on_gpu(**changes: Any) -> RunAnalysis:
    """A run on a card; what is changed is of the card, the processor's name or the host's."""
    env = {
        "host": changes.pop("host", "node1"),
        "cpu": {"name": changes.pop("cpu", "a processor"), "usable": 8},
        "gpu": {**GPU, "sm_clock_mhz": 345, **changes},
    }
    return run(timings=clean_timings(repeats(), model=model_facts(device="cuda:0", device_name="a card")), env=env)


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (run(timings=OTHER_DEVICE, run="runs/other"), "hardware: device_name is"),
        (run(timings=OTHER_MODEL, run="runs/other"), "model: parameters is"),
        (run(timings=BATCH_4, run="runs/other"), "workload: batch_size is 2"),
    ],
)
def test_every_run_of_a_side_must_match_the_first(other: RunAnalysis, fact: str) -> None:
    """Although the settings are the same: on another machine, with another file behind the model's name."""
    first = run(run="runs/first")
    for sides in ((Side((first, run(), other)), Side((run(),))), (Side((run(),)), Side((first, other)))):
        with pytest.raises(ConfigError) as caught:
            compare(*sides, allow=["hardware", "model", "workload"])
        assert fact in caught.value.fact
        assert "in runs/first and" in caught.value.fact
        assert caught.value.fact.endswith("in runs/other.")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"power_limit_w": 500.0}, "gpu.power_limit_w"),
        ({"sm_clock_max_mhz": 1500}, "gpu.sm_clock_max_mhz"),
        ({"memory_bytes": 40 * 2**30}, "gpu.memory"),
        ({"mig": True}, "gpu.mig"),
        ({"cpu": "another processor"}, "cpu.name"),
    ],
)
def test_limits_of_the_machine_are_hardware(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"hardware: {key} is") as caught:
        one_to_one(on_gpu(), on_gpu(**change))
    assert "--allow hardware" in caught.value.remedy
    found = one_to_one(on_gpu(), on_gpu(**change), allow=["hardware"])
    assert [(row.kind, row.key) for row in found.facts] == [("hardware", key)]
    with pytest.raises(ConfigError, match=f"not repeats .*{key}"):
        compare(Side((on_gpu(), on_gpu(**change))), Side((on_gpu(),)))


def test_what_is_read_at_a_moment_or_not_known_is_no_hardware() -> None:
    for new in (on_gpu(sm_clock_mhz=1980), on_gpu(power_limit_w="n/a: no permission"), on_gpu(memory_bytes=80 * 2**30 - 2**20)):
        assert one_to_one(on_gpu(), new).facts == ()
    with pytest.raises(ConfigError, match=r"gpu\.power_limit_w"):
        compare(Side((on_gpu(power_limit_w="n/a: no permission"), on_gpu())), Side((on_gpu(power_limit_w=500.0),)))
    on_cpu = [run(env={"gpu": {**GPU, "power_limit_w": limit}}) for limit in (700.0, 500.0)]
    assert one_to_one(*on_cpu).facts == (), "the card was not used"


def test_machines_of_one_kind_are_a_caution() -> None:
    assert not any("were made on" in text for text in one_to_one(on_gpu(), on_gpu()).cautions)
    for new, names in ((on_gpu(host="node2"), "node1, node2"), (on_gpu(uuid="GPU-2"), "GPU-1, GPU-2")):
        assert any("were made on 2" in text and names in text for text in one_to_one(on_gpu(), new).cautions)
    last = compare(Side((on_gpu(), on_gpu())), Side((on_gpu(), on_gpu(host="node2"), on_gpu(host="node3"))))
    assert any("were made on 3 machines" in text for text in last.cautions)
    assert [(row.key, row.base, row.new) for row in last.environment] == [("host", "node1", "node1; node2; node3")]


@pytest.mark.parametrize(
    ("devices", "others", "verdict", "caution"),
    [
        (
            ("cuda:0", "cuda:0"),
            (Missing("not sampled"), 1.5),
            "slower",
            "is assumed, not measured. 2 runs per side would measure it roughly; 3",
        ),
        (("cpu", "cpu"), (0.02, 0.1), "slower", "is assumed, not measured. 3 runs per side would measure it."),
        (("cpu", "cpu"), (0.02, 0.4), "not distinguishable", "Too few runs for a verdict: other processes used this CPU"),
        (("cpu", "cpu"), (0.02, Missing("not sampled")), "not distinguishable", "its load was not sampled"),
        (
            ("cpu", "cuda:0"),
            (0.4, 0.0),
            "not distinguishable",
            "3 alternating runs per side, or state the spread",
        ),
    ],
)
def test_one_run_per_side_is_judged_on_an_accelerator_and_on_a_quiet_cpu(
    devices: tuple[str, str], others: tuple[Maybe[float], Maybe[float]], verdict: str, caution: str
) -> None:
    runs = [
        run(
            timings=clean_timings(repeats(slower), model=model_facts(device=device)),
            telemetry=TelemetrySummary((), (), "", (), busy),
        )
        for device, slower, busy in zip(devices, (1.0, 2.1), others, strict=True)
    ]
    found = compare(Side((runs[0],)), Side((runs[1],)), allow=["hardware"])
    assert found_effect(found, "tpot").verdict == verdict
    assert any(caution in text for text in found.cautions)
    assert isinstance(found_effect(found, "tpot").interval, Missing) == (verdict == "not distinguishable")


def test_a_run_without_times_is_refused_by_name() -> None:
    for timings in (Missing("the clean pass is failed: killed"), clean_timings([])):
        with pytest.raises(ConfigError, match="has no times to compare"):
            one_to_one(run(), run_analysis(config=CONFIG, timings=timings))


def test_steps_at_other_contexts_are_not_paired() -> None:
    longer = clean_timings(repeats(), workload=workload(prompt_tokens=(20, 20), padded_tokens=20, new_tokens=4))
    found = one_to_one(run(), run(timings=longer), allow=["workload"])
    assert found_effect(found, "decode_step").paired_steps == 0


def test_sub_stages_are_rows_of_their_own() -> None:
    def with_block(duration: int) -> list[Iteration]:
        span = SubstageSpan("block", "prefill", -1, 0, duration)
        return [replace(one, substages=(span,)) for one in in_a_row(8)]

    found = one_to_one(run(timings=clean_timings(with_block(10 * MS))), run(timings=clean_timings(with_block(12 * MS))))
    assert found_effect(found, "prefill/block").change == pytest.approx(0.2)
    alone = one_to_one(run(timings=clean_timings(in_a_row(8))), run(timings=clean_timings(with_block(12 * MS))))
    assert isinstance(alone.row("prefill/block").effect, Missing)


def test_memory_and_operators() -> None:
    none = Missing("the run is on the CPU")
    heavier = replace(clean_timings(repeats()), memory=MemoryPeaks(none, none, none, 6 * 2**30))
    torch = torch_pass(operators=(operator("aten::mm", cpu_self_ns=9 * MS), operator("aten::new", cpu_self_ns=1 * MS)))
    found = one_to_one(run(), run(timings=heavier, torch=torch))
    memory = {row.key: row.change for row in found.memory}
    assert memory["memory.process"] == pytest.approx(1.0)
    assert memory["memory.allocated"] == none
    assert not isinstance(found.operators, Missing)
    assert [(row.name, row.base_ns, row.new_ns) for row in found.operators] == [
        ("aten::mm", 6 * MS, 9 * MS), ("aten::add", 2 * MS, None), ("aten::new", None, 1 * MS),
    ]  # fmt: skip
    shorter = one_to_one(run(), run(torch=torch_pass(decode_steps=2)))
    assert isinstance(shorter.operators, Missing)
    assert "decode steps" in shorter.operators.why


def test_a_run_has_the_medians_of_its_own_report() -> None:
    """An even count, far apart: a mean of logarithms would say 173."""
    times = clean_timings([iteration(first * MS, [first * MS] * 2) for first in (100, 300) * 4])
    found = found_effect(one_to_one(run(timings=times), run(timings=times)), "ttft")
    report = next(metric.value for metric in run_metrics(times) if metric.key == "ttft")
    assert not isinstance(report, Missing)
    assert found.base == pytest.approx(report.median)
    assert found.new == pytest.approx(200 * MS)


def test_operators_inside_graphs_are_noted_as_unseen() -> None:
    graphed = on_gpu()
    graphed.config["runtime"]["compile"] = "reduce-overhead"
    assert one_to_one(on_gpu(), graphed).unseen.startswith("new: decode is replayed from CUDA graphs.")
    assert one_to_one(on_gpu(), on_gpu()).unseen == ""
    assert one_to_one(run(), run(setting=("runtime", "compile", "reduce-overhead"))).unseen == "", "a CPU has no graphs"
    many = torch_pass(operators=(operator("aten::mm", calls=900),))
    few = torch_pass(operators=(operator("aten::mm", calls=100),))
    assert one_to_one(run(torch=many), run(torch=few)).unseen.startswith("new has far fewer operator calls (900 and 100)")


def test_other_figures_are_compared_if_both_sides_have_them() -> None:
    kernels = [ComparedKernel("a", "decode", "gemm", 4, 100)]
    budget: Sequence[ComparedFigure] = [ComparedFigure("decode/busy", "ns", 60.0), ComparedFigure("decode/idle", "ns", 40.0)]
    after = [ComparedFigure("decode/busy", "ns", 60.0), ComparedFigure("decode/copies", "ns", 5.0)]
    found = compare(Side((run(),), kernels, budget), Side((run(),), kernels, after))
    assert not isinstance(found.kernels, Missing)
    assert len(found.kernels.pairs) == 1
    assert not isinstance(found.budget, Missing)
    assert [(row.key, row.change if not isinstance(row.change, Missing) else "n/a") for row in found.budget] == [
        ("decode/busy", 0.0), ("decode/idle", "n/a"), ("decode/copies", "n/a"),
    ]  # fmt: skip
    half = compare(Side((run(),), kernels), Side((run(),)))
    assert isinstance(half.kernels, Missing)
    assert half.kernels.why.startswith("new: ")


def test_counters_that_no_side_has_give_one_reason() -> None:
    none = [
        ComparedFigure("decode/FLOPs", "FLOP", Missing("no Nsight Compute")),
        ComparedFigure("decode/bytes", "byte", Missing("no Nsight Compute")),
    ]
    some = [ComparedFigure("decode/FLOPs", "FLOP", 5.0), none[1]]
    other = [replace(row, value=Missing("it failed")) for row in none]

    def counters(base: Sequence[ComparedFigure], new: Sequence[ComparedFigure]) -> Any:
        return compare(Side((run(),), counters=base), Side((run(),), counters=new)).counters

    assert counters(none, none) == Missing("no Nsight Compute")
    assert counters(none, other) == Missing("base: no Nsight Compute; new: it failed")
    assert [row.key for row in counters(some, none)] == ["decode/FLOPs", "decode/bytes"]


def test_of_several_runs_the_typical_one_is_looked_into() -> None:
    runs = [run(slower, run=f"runs/{slower}") for slower in (1.3, 1.0, 1.1)]
    side = side_of(runs)
    assert (side.typical, typical_run(runs[:1])) == (2, 0)
    other = side_of([run(2.0, run="runs/new")])
    assert compare(side, other).looked_into == ("runs/1.1", "runs/new")
    without = [replace(one, torch=Missing("not asked for")) for one in runs]
    assert typical_run([runs[0], *without[1:]]) == 0, "a run that can be looked into comes before one that cannot"
    untimed = [replace(runs[0], timings=Missing("killed")), runs[1]]
    assert typical_run(untimed) == 1


def test_gates_are_checked_against_their_rows() -> None:
    gates = parse_gates(["tpot=3%", "ttft=20%", "throughput=3%", "memory.process=10%", "energy=5%", "itl_p99=3%"], gate_names())
    found = one_to_one(run(), run(1.1), gates=gates)
    assert [result.outcome for result in found.gates] == [
        "regression", "pass", "regression", "pass", "cannot tell", "cannot tell",
    ]  # fmt: skip


def test_a_gate_on_too_short_a_decode_says_how_many_tokens_it_takes() -> None:
    gates = parse_gates(["itl_p90=3%", "itl_p99=3%", "energy=3%"], gate_names())
    assert [result.needed for result in one_to_one(run(), run(), gates=gates).gates] == [
        "at least 51 new tokens (runtime.num_new_tokens=51)",
        "at least 501 new tokens (runtime.num_new_tokens=501)",
        NO_REMEDY,
    ]
    one_token = clean_timings([iteration(100 * MS, []) for _ in range(8)], workload=workload(new_tokens=1))
    (tpot,) = one_to_one(run(timings=one_token), run(timings=one_token), gates=parse_gates(["tpot=3%"], gate_names())).gates
    assert tpot.needed == "at least 2 new tokens (runtime.num_new_tokens=2)"


def test_every_gate_name_has_a_row() -> None:
    found = one_to_one(run(), run())
    rows = {row.key for row in (*found.metrics, *found.stages)} | {row.key for row in (*found.memory, *found.energy)}
    assert set(gate_names().values()) <= rows


# --- the order of the runs, and machines that move ----------------------------------------------------------------------


def made(hour: int, slower: float = 1.0) -> RunAnalysis:
    """A run of this hour."""
    found = run(slower, timings=clean_timings(in_a_row(10, round(100 * MS * slower))))
    return replace(
        found, run=f"at {hour}", manifest=replace(found.manifest, created=f"2026-01-02T{hour:02}:00:00+00:00")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("base", "new", "order", "said"),
    [
        ((1,), (2,), "base first", False),
        ((2,), (1,), "new first", False),
        ((1,), (1,), "in turn", False),
        ((1, 3), (2, 4), "in turn", False),
        ((1, 2), (3, 4), "base first", True),
        ((3, 4), (1, 2), "new first", True),
        ((2, 1), (4, 3), "base first", True),
        ((1, 2, 3), (4,), "base first", True),
    ],
)
def test_the_order_of_the_runs_is_known(base: tuple[int, ...], new: tuple[int, ...], order: str, said: bool) -> None:
    sides = [side_of([made(hour) for hour in hours]) for hours in (base, new)]
    found = compare(sides[0], sides[1], judgement=Judgement(process_spread=ACCELERATOR_SPREAD))
    assert found.judgement.order == order
    assert found.base_runs == tuple(f"at {hour}" for hour in sorted(base)), "rivals are looked for along one timeline"
    assert any("Alternate the runs" in caution and "All runs of" in caution for caution in found.cautions) == said


def at_level(factors: Sequence[float]) -> RunAnalysis:
    """A run whose repeats take these times the usual, up to a tenth of a percent."""
    one = [1.0, 1.001, 0.999, 1.0005, 0.9995]
    times = [factor * one[index % 5] for index, factor in enumerate(factors)]
    return run(timings=clean_timings([iteration(round(100 * MS * time), [round(20 * MS * time)] * 3) for time in times]))


def test_a_switch_inside_a_run_keeps_every_row_without_a_verdict() -> None:
    """And is there as data: what each run did, and what explains the difference."""
    gates = parse_gates(["tpot=3%", "throughput=3%"], gate_names())
    base, new = at_level([1.0] * 24 + [1.07] * 6), at_level([1.07] * 30)
    found = one_to_one(base, new, gates=gates)
    assert {row.effect.verdict for row in (*found.metrics, *found.stages) if isinstance(row.effect, Effect)} == {
        "not distinguishable"
    }
    assert [result.outcome for result in found.gates] == ["cannot tell", "cannot tell"]
    effect = found_effect(found, "e2e")
    assert [one.movement for one in effect.base_stability] == [Movement.SHIFT]
    assert [one.at for one in effect.base_stability] == [25]
    assert [one.movement for one in effect.new_stability] == [Movement.STEADY]
    told = msgspec.json.decode(msgspec.json.encode(found))
    row = next(row for row in told["metrics"] if row["key"] == "e2e")["effect"]
    assert row["base_stability"][0]["movement"] == "level shift"
    assert told["judgement"]["order"] == "in turn"


def test_a_switch_between_the_runs_looks_like_a_change() -> None:
    """Neither run shows it, as the documentation says about one run per side."""
    found = one_to_one(at_level([1.0] * 30), at_level([1.07] * 30))
    assert found_effect(found, "e2e").verdict == "slower"
    assert found_effect(found, "e2e").rival is None


def test_the_order_decides_which_ends_meet() -> None:
    """The later run ends at the other's level, for a repeat: with the runs the other way round that is where they meet."""
    base, new = at_level([1.0] * 30), at_level([1.07] * 29 + [1.0])
    early, late = (replace(base.manifest, created=f"2026-01-0{day}T00:00:00+00:00") for day in (1, 2))
    first = one_to_one(replace(base, manifest=early), replace(new, manifest=late))
    other = one_to_one(replace(base, manifest=late), replace(new, manifest=early))
    assert (first.judgement.order, other.judgement.order) == ("base first", "new first")
    assert found_effect(other, "e2e").verdict == "not distinguishable"
    rival = found_effect(other, "e2e").rival
    assert rival is not None
    assert (rival.movement, rival.side, rival.first, rival.last) == (Movement.SHIFT, "new", 30, 30)


def test_random_and_real_weights_are_compared_only_on_purpose() -> None:
    def made(kind: str | None, source: str) -> RunAnalysis:
        weights = None if kind is None else WeightFacts("random" if kind == "random" else "stored")
        return run(setting=("model", "source", source), timings=clean_timings(repeats(), model=model_facts(weights=weights)))

    random, real, unknown = made("random", "random"), made("real", "pretrained"), made(None, "random")
    with pytest.raises(ConfigError, match="weights is random on one side and real on the other") as caught:
        one_to_one(random, real)
    assert "--experiment model.source" in caught.value.remedy
    allowed = one_to_one(random, real, experiment=["model.source"])
    assert "The weights are random in base and real in new." in allowed.cautions
    assert one_to_one(random, unknown).metrics, "what is unknown is no difference"
