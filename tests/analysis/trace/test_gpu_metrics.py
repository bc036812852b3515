"""Each device: busy and idle add up to its span, and streams overlap only within it."""

from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.gpu_metrics import device_lines, device_name
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from trace_builders import Builder


def two_devices() -> Trace:
    """A step on two devices: device 0 works 100–200 on two streams and 300–350, device 1 works 150–400."""
    built = Builder()
    built.range(0, 90, "decode_step")
    for at, start, end, device, stream in (
        (10, 100, 180, 0, 7),
        (12, 120, 200, 0, 8),
        (14, 300, 350, 0, 7),
        (16, 150, 400, 1, 7),
    ):
        built.launch(at, start, end, device=device, stream=stream)
    return built.trace(facts={"device.0": "NVIDIA H200", "device.1": "NVIDIA H100"})


def test_devices_are_reported_next_to_the_whole() -> None:
    trace = two_devices()
    stages = find_stages(trace)
    whole = account(trace, stages)
    assert (whole.total.busy_ns, whole.total.idle_ns, whole.total.span_ns) == (300, 0, 300)
    first, second = device_lines(trace, stages, whole)
    assert (first.name, first.kernels, first.kernel_ns) == ("NVIDIA H200", 3, 210)
    assert (first.busy_ns, first.idle_ns, first.span_ns) == (150, 100, 250)
    assert (second.name, second.busy_ns, second.idle_ns, second.span_ns) == ("NVIDIA H100", 250, 0, 250)
    assert sum(line.ns for line in first.idle) == first.idle_ns
    on_first = {stage.name: stage for stage in first.stages}
    assert (on_first["decode_step"].busy_ns, on_first["decode_step"].idle_ns, on_first["decode_step"].kernels) == (150, 100, 3)


def test_torch_lists_all_devices_that_the_program_saw() -> None:
    trace = Builder().trace(facts={"devices": "NVIDIA H200, NVIDIA H100"})
    assert [device_name(trace, number) for number in (-1, 0, 1, 2)] == ["", "NVIDIA H200", "NVIDIA H100", ""]
    assert device_name(Builder().trace(), 0) == ""


WORK = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=25)


@given(WORK)
def test_every_device_adds_up_and_counts_each_moment_once(work: list[tuple[int, int, int, int]]) -> None:
    built = Builder()
    for start, length, device, stream in work:
        built.launch(0, start, start + length, device=device, stream=stream)
    trace = built.trace()
    stages = find_stages(trace)
    lines = device_lines(trace, stages, account(trace, stages))
    assert [line.device for line in lines] == sorted({device for _, _, device, _ in work})
    for line in lines:
        mine = [(start, start + length) for start, length, device, _ in work if device == line.device]
        covered = {moment for start, end in mine for moment in range(start, end)}
        assert line.busy_ns == len(covered)
        assert line.busy_ns + line.idle_ns == line.span_ns == max(end for _, end in mine) - min(start for start, _ in mine)
