"""What the sampler's readings say: energy to the joule, and who else was there."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, SECOND, clean_timings, cpu_sample, gpu_sample, in_a_row, iteration, model_facts, telemetry
from llm_perf_opt.analysis.telemetry import (
    Energy,
    Reading,
    TelemetrySummary,
    device_busy_share,
    measured_window,
    summarize_telemetry,
    throttle_names,
)
from llm_perf_opt.core.machine_records import ExporterReading, GpuSample, Telemetry
from llm_perf_opt.core.records import CleanTimings, Iteration, Missing, RuntimeFacts
from llm_perf_opt.core.warnings import WarningId

ON_GPU = model_facts(device="cuda:0", device_name="NVIDIA H200")


def on_gpu(iterations: Sequence[Iteration], **changes: Any) -> CleanTimings:
    return clean_timings(iterations, model=ON_GPU, **changes)


def one_repeat(begin_ns: int, end_ns: int, prefill_ns: int | None = None) -> CleanTimings:
    """One request in its own window, by default all prefill."""
    prefill = end_ns - begin_ns if prefill_ns is None else prefill_ns
    rest = end_ns - begin_ns - prefill
    return on_gpu([iteration(prefill, (rest,) if rest else (), started_ns=begin_ns)])


def energy(summary: TelemetrySummary, window: str = "measured repeats") -> Energy:
    return next(row for row in summary.energy if row.window == window)


def reading(summary: TelemetrySummary, name: str) -> Reading:
    return next(row for row in summary.readings if row.name == name)


def constant(watts: int, until_ns: int, every_ns: int = 100 * MS) -> list[GpuSample]:
    """Readings of a constant power and of the counter it drives: `watts` mJ in every millisecond."""
    return [
        gpu_sample(at, power_mw=watts * 1000, energy_mj=watts * (at // MS) + 12_345) for at in range(0, until_ns + 1, every_ns)
    ]


# --- the window -------------------------------------------------------------------------------------------------------


def test_the_window_goes_from_the_first_repeat_to_the_end_of_the_last() -> None:
    timings = clean_timings([iteration(started_ns=1000, wall_ns=50), iteration(started_ns=2000, wall_ns=70)])
    assert measured_window(timings) == (1000, 2070)


def test_only_readings_inside_the_window_count() -> None:
    samples = [gpu_sample(at * MS, temperature_c=at) for at in (0, 99, 100, 150, 200, 201, 500)]
    found = reading(summarize_telemetry(telemetry(samples), one_repeat(100 * MS, 200 * MS)), "GPU temperature")
    assert (found.n, found.low, found.median, found.high) == (3, 100, 150, 200)


# --- energy -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 1000), st.integers(0, 900), st.integers(200, 1000))
def test_constant_power_gives_power_times_time_both_ways(watts: int, begin_ms: int, length_ms: int) -> None:
    timings = one_repeat(begin_ms * MS, (begin_ms + length_ms) * MS)
    found = energy(summarize_telemetry(telemetry(constant(watts, 2 * SECOND)), timings))
    joules = watts * length_ms / 1000
    assert found.seconds == pytest.approx(length_ms / 1000)
    assert found.from_power_j == pytest.approx(joules, rel=1e-9)
    assert found.from_counter_j == pytest.approx(joules, rel=1e-9)


def test_the_window_is_cut_between_two_readings() -> None:
    # 100 W at 0 s, 200 W at 1 s; from 0.25 s to 0.75 s the line goes from 125 W to 175 W: 150 W for half a second
    samples = [gpu_sample(0, power_mw=100_000, energy_mj=1000), gpu_sample(SECOND, power_mw=200_000, energy_mj=151_000)]
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(SECOND // 4, 3 * SECOND // 4)))
    assert found.from_power_j == pytest.approx(75)
    assert found.from_counter_j == pytest.approx(75)  # half of the 150 J between the two
    assert found.seconds == 0.5


def test_between_the_cuts_every_reading_counts() -> None:
    # 100 W, a peak of 300 W at 1 s, 100 W: two trapezoids of 200 W over 1 s each
    samples = [gpu_sample(at * SECOND, power_mw=watts * 1000) for at, watts in enumerate([100, 300, 100])]
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(0, 2 * SECOND)))
    assert found.from_power_j == pytest.approx(400)


POWERS = st.lists(st.integers(0, 10**6), min_size=3, max_size=12)


@settings(deadline=None)
@given(POWERS, st.data())
def test_the_energy_of_two_neighboring_windows_is_that_of_both(powers: list[int], data: st.DataObject) -> None:
    samples = [gpu_sample(number * 100 * MS, power_mw=power) for number, power in enumerate(powers)]
    begin, middle, end = sorted(data.draw(st.lists(st.integers(0, (len(powers) - 1) * 100 * MS), min_size=3, max_size=3)))

    def joules(window: tuple[int, int]) -> float:
        found = energy(summarize_telemetry(telemetry(samples), one_repeat(*window))).from_power_j
        assert not isinstance(found, Missing)
        return found

    assert joules((begin, middle)) + joules((middle, end)) == pytest.approx(joules((begin, end)), abs=1e-9)


def test_counter_and_power_may_disagree_and_both_are_kept() -> None:
    samples = [gpu_sample(at * SECOND, power_mw=100_000, energy_mj=50_000 * at) for at in range(3)]
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(0, 2 * SECOND)))
    assert found.from_power_j == pytest.approx(200)
    assert found.from_counter_j == pytest.approx(100)


def test_stages_get_their_own_energy() -> None:
    # three requests in a row, each 400 ms of prefill and 600 ms of decode, at 100 W and 300 W: 40 J and 180 J
    repeats = in_a_row(3, 400 * MS, (300 * MS, 300 * MS))
    samples = [gpu_sample(at * MS, power_mw=100_000 if at % 1000 < 400 else 300_000, energy_mj=0) for at in range(3001)]
    found = summarize_telemetry(telemetry(samples, interval_s=0.001), on_gpu(repeats))
    assert [row.window for row in found.energy] == ["measured repeats", "prefill, all repeats", "decode, all repeats"]
    prefill, decode = energy(found, "prefill, all repeats"), energy(found, "decode, all repeats")
    assert prefill.seconds == pytest.approx(1.2)
    assert decode.seconds == pytest.approx(1.8)
    # the readings step from one level to the other within 1 ms, which smears at most 0.1 J over each edge
    assert prefill.from_power_j == pytest.approx(3 * 40, abs=0.7)
    assert decode.from_power_j == pytest.approx(3 * 180, abs=0.7)
    assert energy(found).from_power_j == pytest.approx(3 * 220, abs=0.7)


def test_a_stage_shorter_than_two_readings_has_no_energy() -> None:
    found = summarize_telemetry(telemetry(constant(300, 5 * SECOND)), on_gpu(in_a_row(10, 199 * MS, (250 * MS,))))
    why = Missing("it lasts 199 ms, less than 2 sampling intervals of 100 ms")
    assert energy(found, "prefill, all repeats").from_power_j == why
    assert energy(found, "prefill, all repeats").from_counter_j == why
    assert energy(found, "decode, all repeats").from_power_j == pytest.approx(300 * 2.5)
    assert energy(found).from_power_j == pytest.approx(300 * 4.49)
    exactly_two = summarize_telemetry(telemetry(constant(300, 5 * SECOND)), on_gpu(in_a_row(10, 200 * MS, (250 * MS,))))
    assert energy(exactly_two, "prefill, all repeats").from_power_j == pytest.approx(300 * 2)


def test_without_decode_there_is_no_energy_of_it() -> None:
    found = summarize_telemetry(telemetry(constant(300, 5 * SECOND)), on_gpu(in_a_row(2, 500 * MS, ())))
    assert [row.window for row in found.energy] == ["measured repeats", "prefill, all repeats"]


@pytest.mark.parametrize(("begin", "end"), [(-50 * MS, 500 * MS), (500 * MS, 1001 * MS)])
def test_readings_that_do_not_reach_over_the_window_give_no_energy(begin: int, end: int) -> None:
    found = energy(summarize_telemetry(telemetry(constant(300, SECOND)), one_repeat(begin, end)))
    assert found.from_power_j == found.from_counter_j == Missing("the readings do not cover the window")


def test_a_driver_without_a_counter_is_quoted() -> None:
    samples = [gpu_sample(at * 100 * MS, energy_mj=Missing("NVML: Not Supported")) for at in range(11)]
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(0, SECOND)))
    assert found.from_counter_j == Missing("NVML: Not Supported")
    assert found.from_power_j == pytest.approx(300)


def test_a_driver_without_power_is_quoted() -> None:
    samples = [gpu_sample(at * 100 * MS, power_mw=Missing("NVML: Not Supported"), energy_mj=at * 100) for at in range(11)]
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(0, SECOND)))
    assert found.from_power_j == Missing("NVML: Not Supported")
    assert found.from_counter_j == pytest.approx(1)


def test_one_lost_reading_is_bridged() -> None:
    samples = constant(300, SECOND)
    samples[4] = gpu_sample(400 * MS, power_mw=Missing("NVML: Timeout"), energy_mj=Missing("NVML: Timeout"))
    found = energy(summarize_telemetry(telemetry(samples), one_repeat(0, SECOND)))
    assert found.from_power_j == pytest.approx(300)
    assert found.from_counter_j == pytest.approx(300)


def test_without_a_gpu_there_is_no_energy_and_the_note_says_why() -> None:
    found = summarize_telemetry(telemetry(gpu_note="the run is on the CPU"), clean_timings())
    assert found.note == "No GPU readings: the run is on the CPU."
    (row,) = found.energy
    assert row.from_power_j == row.from_counter_j == Missing("no GPU readings: the run is on the CPU")
    assert row.seconds == pytest.approx(1.6)  # ten requests of 160 ms


# --- readings ---------------------------------------------------------------------------------------------------------


def test_readings_come_in_the_units_people_read() -> None:
    samples = [gpu_sample(0, power_mw=250_000, memory_used_bytes=3 * 2**30)]
    processors = [cpu_sample(0, machine_pct=150.0, ours_pct=125.0, rss_bytes=2**29)]
    found = summarize_telemetry(telemetry(samples, processors), one_repeat(0, SECOND))
    shown = {row.name: (row.median, row.unit) for row in found.readings}
    assert shown["GPU power"] == (250.0, "W")
    assert shown["GPU memory in use"] == (3.0, "GiB")
    assert shown["processors busy, whole machine"] == (1.5, "processors")
    assert shown["processors busy, measured process"] == (1.25, "processors")
    assert shown["resident memory, measured process"] == (0.5, "GiB")
    assert found.note == ""


def test_a_quantity_the_driver_does_not_tell_is_missing_not_zero() -> None:
    samples = [gpu_sample(at * MS, temperature_c=Missing("NVML: Not Supported")) for at in range(3)]
    found = reading(summarize_telemetry(telemetry(samples), one_repeat(0, SECOND)), "GPU temperature")
    assert (found.n, found.low, found.median, found.high) == (0, *[Missing("NVML: Not Supported")] * 3)


def test_a_quantity_that_is_sometimes_missing_counts_its_known_readings() -> None:
    told: list[int | Missing] = [40, Missing("NVML: Timeout"), 44]
    samples = [gpu_sample(at * MS, temperature_c=value) for at, value in enumerate(told)]
    found = reading(summarize_telemetry(telemetry(samples), one_repeat(0, SECOND)), "GPU temperature")
    assert (found.n, found.low, found.median, found.high) == (2, 40, 42, 44)


def test_a_window_without_readings_says_so() -> None:
    found = summarize_telemetry(telemetry(cpu=[cpu_sample(5 * SECOND)]), one_repeat(0, SECOND))
    assert reading(found, "processor frequency").median == Missing("there is no reading in the window")
    assert found.warnings == ()


# --- warnings ---------------------------------------------------------------------------------------------------------


def warnings_of(gpu: Sequence[GpuSample] = (), cpu: Sequence[Any] = (), timings: CleanTimings | None = None) -> tuple[str, ...]:
    found = summarize_telemetry(telemetry(gpu, cpu), timings or one_repeat(0, SECOND)).warnings
    return tuple(warning.text for warning in found)


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        # NVML's nvmlClocksEventReasons: idle 0x1, application clocks 0x2, sync boost 0x10 and display 0x100 are no throttling
        (0x0, []),
        (0x1, []),
        (0x2 | 0x10 | 0x100, []),
        (0x4, ["power cap"]),
        (0x8, ["hardware slowdown"]),
        (0x20 | 0x40, ["software thermal slowdown", "hardware thermal slowdown"]),
        (0x80 | 0x1, ["hardware power brake"]),
    ],
)
def test_only_reasons_that_slow_the_gpu_are_throttling(bits: int, names: list[str]) -> None:
    assert throttle_names(bits) == names


def test_throttling_is_counted_over_known_readings() -> None:
    told: list[int | Missing] = [0x4, 0x4 | 0x40, 0x0, Missing("NVML: Timeout")]
    found = warnings_of([gpu_sample(at * MS, throttle_bits=bits) for at, bits in enumerate(told)])
    assert found == (
        "The GPU was throttled (power cap) in 2 of 3 readings while measuring.",
        "The GPU was throttled (hardware thermal slowdown) in 1 of 3 readings while measuring.",
    )


def test_throttling_outside_the_window_does_not_count() -> None:
    assert warnings_of([gpu_sample(0), gpu_sample(2 * SECOND, throttle_bits=0x4)]) == ()


@pytest.mark.parametrize(("others_pct", "warned"), [(0.0, False), (25.0, False), (26.0, True), (100.0, True)])
def test_a_busy_neighbor_on_the_processors(others_pct: float, warned: bool) -> None:
    found = warnings_of(cpu=[cpu_sample(at * MS, machine_pct=100 + others_pct, ours_pct=100.0) for at in range(4)])
    assert bool(found) == warned
    if warned:
        assert found == (f"Other processes used {others_pct / 100:.2f} of 2 processors on average while measuring.",)


def test_our_own_work_counted_late_is_no_negative_neighbor() -> None:
    # The two counters are read one after the other; one reading may show more for us than for the machine.
    samples = [cpu_sample(0, machine_pct=100.0, ours_pct=150.0), cpu_sample(MS, machine_pct=160.0, ours_pct=100.0)]
    assert warnings_of(cpu=samples) == ("Other processes used 0.30 of 2 processors on average while measuring.",)


@pytest.mark.parametrize(("processes", "warned"), [(0, False), (1, False), (2, True), (Missing("NVML: Not Supported"), False)])
def test_another_process_on_the_gpu(processes: Any, warned: bool) -> None:
    found = warnings_of([gpu_sample(0), gpu_sample(MS, processes=processes)])
    assert found == (("2 processes shared the GPU while measuring.",) if warned else ())


@pytest.mark.parametrize(("busy", "warned"), [(0, False), (5, False), (6, True), (Missing("NVML: Not Supported"), False)])
def test_a_gpu_that_was_busy_before_we_touched_it(busy: Any, warned: bool) -> None:
    timings = on_gpu([iteration(SECOND, (), started_ns=10 * SECOND)], device_untouched_until_ns=2 * SECOND)
    samples = [gpu_sample(SECOND, gpu_utilisation_pct=busy), gpu_sample(3 * SECOND, gpu_utilisation_pct=99)]
    found = warnings_of(samples, timings=timings)
    assert found == ((f"The GPU was {busy} % busy before this run used it: another process is using it.",) if warned else ())


def test_telemetry_of_an_unused_gpu_is_a_warning() -> None:
    assert warnings_of([gpu_sample(0)], timings=clean_timings([iteration()])) == (
        "The telemetry is that of the GPU, but the model ran on the CPU.",
    )


def test_a_quiet_machine_has_no_warnings() -> None:
    assert warnings_of(constant(300, SECOND), [cpu_sample(at * 100 * MS) for at in range(10)]) == ()


def test_a_driver_without_readings_is_no_error() -> None:
    silence = {field.name: Missing("NVML: Unknown Error") for field in fields(GpuSample) if field.name != "at_ns"}
    samples = [gpu_sample(at * 100 * MS, **silence) for at in range(11)]
    found = summarize_telemetry(telemetry(samples), one_repeat(0, SECOND))
    assert found.warnings == ()
    assert all(row.n == 0 for row in found.readings if "GPU" in row.name)
    assert energy(found).from_power_j == Missing("NVML: Unknown Error")


def test_stages_that_ran_together_have_no_energy_of_their_own() -> None:
    together = clean_timings(
        [iteration(prefill_ns=SECOND, steps_ns=(SECOND,))], runtime=RuntimeFacts("vllm", "1", "by arrival", inseparable="mixed")
    )
    summary = summarize_telemetry(telemetry(constant(100, 2 * SECOND)), together)
    assert not isinstance(energy(summary).from_power_j, Missing)
    for stage in ("prefill", "decode"):
        assert energy(summary, f"{stage}, all repeats").from_power_j == Missing("mixed")


def test_one_sampled_device_of_several_is_a_warning() -> None:
    runtime = RuntimeFacts("vllm", "1", "by arrival", devices=4)
    watched = telemetry(gpu=[gpu_sample(0)])
    timings = clean_timings(runtime=runtime)
    assert any(one.id is WarningId.ONE_OF_SEVERAL_WATCHED for one in summarize_telemetry(watched, timings).warnings)
    assert not any(one.id is WarningId.ONE_OF_SEVERAL_WATCHED for one in summarize_telemetry(watched, clean_timings()).warnings)


def test_all_gpus_of_a_run_are_read_and_their_energy_is_summed() -> None:
    """Two GPUs at 100 W and 300 W for two seconds: 800 J."""
    first, second = constant(100, 2 * SECOND), [replace(sample, device=3) for sample in constant(300, 2 * SECOND)]
    timings = replace(one_repeat(0, 2 * SECOND), runtime=RuntimeFacts("pytorch", "1", "stepped", devices=2))
    mixed = sorted([*first, *second], key=lambda sample: sample.at_ns)
    found = summarize_telemetry(telemetry(mixed), timings)
    assert energy(found).from_power_j == pytest.approx(800)
    assert energy(found).from_counter_j == pytest.approx(800)
    assert reading(found, "GPU power, GPU 0").median == 100
    assert reading(found, "GPU power, GPU 3").high == 300
    assert not any(one.id is WarningId.ONE_OF_SEVERAL_WATCHED for one in found.warnings)
    assert "only one was sampled" in summarize_telemetry(telemetry(first), timings).warnings[0].text


def test_the_energy_of_all_gpus_is_missing_if_that_of_one_is() -> None:
    silent = [replace(sample, device=1, energy_mj=Missing("NVML: Not Supported")) for sample in constant(100, 2 * SECOND)]
    found = energy(summarize_telemetry(telemetry([*constant(100, 2 * SECOND), *silent]), one_repeat(0, 2 * SECOND)))
    assert found.from_counter_j == Missing("NVML: Not Supported")
    assert found.from_power_j == pytest.approx(400)


def repeats(count: int, length_ns: int) -> CleanTimings:
    made = [iteration(length_ns // 2, (length_ns // 2,), started_ns=number * length_ns) for number in range(count)]
    return on_gpu(made)


def utilization(values: Sequence[Any], **changes: Any) -> Telemetry:
    return telemetry(
        gpu=[gpu_sample(number * 100 * MS, gpu_utilisation_pct=value, **changes) for number, value in enumerate(values)]
    )


def test_the_device_was_at_work_as_the_readings_of_the_repeats_alone_say() -> None:
    """A reading covers up to a second before it: readings of the first second may include earlier time."""
    assert device_busy_share(utilization([0] * 10 + [80] * 10), repeats(10, 200 * MS)) == pytest.approx(0.8)
    assert device_busy_share(utilization([0] * 10 + [80, Missing("lost")] * 5), repeats(20, 100 * MS)) == pytest.approx(0.8)


def test_readings_that_do_not_stand_for_the_repeats_say_why() -> None:
    def why(found: Any) -> str:
        assert isinstance(found, Missing)
        return found.why

    assert why(device_busy_share(Missing("no sampler"), repeats(10, 200 * MS))) == "no sampler"
    assert "too short" in why(device_busy_share(utilization([90] * 12), repeats(10, 110 * MS)))
    assert "too short" in why(device_busy_share(utilization([90] * 20), repeats(2, 1000 * MS))), "less than three requests"
    assert why(device_busy_share(utilization([Missing("not told")] * 30), repeats(10, 200 * MS))) == "not told"
    assert "other processes" in why(device_busy_share(utilization([90] * 30, processes=2), repeats(10, 200 * MS)))
    on_cpu = clean_timings(repeats(10, 200 * MS).iterations)
    assert "on the CPU" in why(device_busy_share(utilization([90] * 30), on_cpu))
    spread = replace(repeats(10, 200 * MS), runtime=RuntimeFacts("vllm", "1", "", devices=2))
    assert "one of 2 devices" in why(device_busy_share(utilization([90] * 30), spread))


# --- an exporter --------------------------------------------------------------------------------------------------------


def exported(at_ns: int, energy: float, why: str = "") -> ExporterReading:
    return ExporterReading(at_ns, 0, {'E{gpu="0"}': energy, "T": energy / 2}, {"E": "counter", "T": "gauge"}, why)


def test_a_file_is_valid_until_it_changes() -> None:
    readings = (exported(0, 2), exported(SECOND, 10), exported(3 * SECOND, 14), exported(9 * SECOND, 99))
    found = summarize_telemetry(replace(telemetry(), exporter=readings), one_repeat(2 * SECOND, 4 * SECOND))
    counter, gauge = found.exporter
    assert (counter.name, counter.kind, counter.n) == ('E{gpu="0"}', "counter", 2)
    assert isinstance(counter.increase, Missing), "the version before the repeats does not count"
    assert (gauge.low, gauge.median, gauge.high) == (5.0, 6.0, 7.0)
    assert isinstance(gauge.increase, Missing)
    assert "changed once" in found.exporter_note


def test_the_increase_of_a_counter_is_that_of_the_repeats() -> None:
    readings = (exported(SECOND, 10), exported(3 * SECOND, 14), exported(4 * SECOND, 15), exported(5 * SECOND, 21))
    found = summarize_telemetry(replace(telemetry(), exporter=readings), one_repeat(2 * SECOND, 6 * SECOND))
    counter, gauge = found.exporter
    assert (counter.n, counter.increase, counter.increase_s) == (4, 7.0, 2.0)
    assert isinstance(gauge.increase_s, Missing)
    assert "changed 3 times" in found.exporter_note


def test_a_counter_that_restarted_has_no_increase() -> None:
    readings = (exported(2 * SECOND, 14), exported(3 * SECOND, 1), exported(4 * SECOND, 20))
    counter = summarize_telemetry(replace(telemetry(), exporter=readings), one_repeat(2 * SECOND, 4 * SECOND)).exporter[0]
    for value in (counter.increase, counter.increase_s):
        assert isinstance(value, Missing)
        assert "restarted" in value.why


def test_a_file_that_did_not_change_is_told() -> None:
    found = summarize_telemetry(replace(telemetry(), exporter=(exported(0, 2, "odd"),)), one_repeat(SECOND, 2 * SECOND))
    assert "did not change" in found.exporter_note
    assert "odd" in found.exporter_note
    assert found.exporter[0].n == 1
    assert summarize_telemetry(telemetry(), one_repeat(SECOND, 2 * SECOND)).exporter_note == ""
