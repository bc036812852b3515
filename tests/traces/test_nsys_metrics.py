"""GPU metric samples in an export of Nsight Systems.

No recorded export with samples is at hand. The two tables are created with the statements that nsys 2023.4.4 itself writes when
it is told to make every table (`nsys export --lazy=false`), beside the tables of a real report; the samples are made by hand.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from command import llm_perf
from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.report.trace_document import trace_text
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.trace_cache import cached_trace
from llm_perf_opt.workflows.analyze_trace import analyze_source
from nsys_databases import DECODE, altered

METRICS = """CREATE TABLE GPU_METRICS (
    -- GPU Metrics, events and values.

    timestamp                   INTEGER,                               -- Event timestamp (ns).
    typeId                      INTEGER   NOT NULL,                    -- REFERENCES TARGET_INFO_GPU_METRICS(typeId)
    metricId                    INTEGER   NOT NULL,                    -- REFERENCES TARGET_INFO_GPU_METRICS(metricId)
    value                       INTEGER   NOT NULL                     -- Counter data value
)"""
NAMES = """CREATE TABLE TARGET_INFO_GPU_METRICS (
    -- GPU Metrics, metric names and ids.

    typeId                      INTEGER   NOT NULL,                    -- REFERENCES GENERIC_EVENT_TYPES(typeId)
    sourceId                    INTEGER   NOT NULL,                    -- REFERENCES GENERIC_EVENT_SOURCES(sourceId)
    typeName                    TEXT      NOT NULL,                    -- Name of event type.
    metricId                    INTEGER   NOT NULL,                    -- Id of metric in event; not assumed to be stable.
    metricName                  TEXT      NOT NULL                     -- Definitive name of metric.
)"""
TYPE = 0x0100_0000_0000_0000
"""The type of the first GPU; the low byte is its number."""
SM, CLOCK = 3, 9


def sampled(to: Path, samples: list[tuple[object, int, int, object]], more: tuple[str, ...] = ()) -> Path:
    rows = ", ".join(f"({'NULL' if time is None else time}, {kind}, {metric}, {value})" for time, kind, metric, value in samples)
    return altered(
        to,
        [
            METRICS,
            NAMES,
            f"INSERT INTO TARGET_INFO_GPU_METRICS VALUES ({TYPE}, 1, 'GPU Metrics', {SM}, 'SMs Active [Throughput %]')",
            f"INSERT INTO TARGET_INFO_GPU_METRICS VALUES ({TYPE}, 1, 'GPU Metrics', {CLOCK}, 'SYS Clock Frequency [MHz]')",
            f"INSERT INTO GPU_METRICS VALUES {rows}",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, int]]:
    """Return the device time of each decode step of the recorded report."""
    trace = read_nsys(DECODE)
    found = analyze_source(DECODE, use_cache=False).document
    begun = np.sort(trace.work.start_ns)
    bounds = np.cumsum([0, *[step.span_ns or 0 for step in found.steps]]) + int(begun[0])
    return [(int(low), int(high)) for low, high in itertools.pairwise(bounds)]


def test_means_of_the_samples_that_fall_into_a_stage(tmp_path: Path) -> None:
    """Three samples during the first step, one of each metric before and after all work, and one in the gap after the step."""
    trace = read_nsys(DECODE)
    first, last = int(trace.work.start_ns.min()), int(trace.work.end_ns.max())
    inside = [first + 10, first + 1000, first + 2000]
    samples: list[tuple[object, int, int, object]] = [
        *[(time, TYPE, SM, value) for time, value in zip(inside, (10, 20, 60), strict=True)],
        *[(time, TYPE, CLOCK, 1980) for time in inside],
        (first - 1_000_000, TYPE, SM, 99), (last + 1_000_000, TYPE, SM, 99), (None, TYPE, SM, 99),
    ]  # fmt: skip
    source = sampled(tmp_path / "run.sqlite", samples)
    found = analyze_source(source, use_cache=False).document
    lines = {(line.stage, line.metric): line for line in found.gpu_metrics}
    active = lines[("decode_step", "SMs Active [Throughput %]")]
    assert (active.device, active.samples, active.mean, active.least, active.most) == (0, 3, 30.0, 10, 60)
    assert lines[("decode", "SYS Clock Frequency [MHz]")].mean == 1980
    assert lines[("", "SMs Active [Throughput %]")].samples == 3  # none from outside the work
    shown = trace_text(found)
    assert "GPU metrics, sampled" in shown
    assert "30.0 (3)" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 100


def test_samples_between_two_steps_are_of_the_decode_and_of_no_step(tmp_path: Path, steps: list[tuple[int, int]]) -> None:
    trace = read_nsys(DECODE)
    stop = steps[0][1]
    before = int(trace.work.end_ns[trace.work.start_ns < stop].max())
    assert before + 10 < stop  # the device waits between the steps
    source = sampled(tmp_path / "run.sqlite", [(before + 5, TYPE, SM, 7)])
    found = analyze_source(source, use_cache=False).document
    assert {line.stage for line in found.gpu_metrics} == {"", "decode"}


def test_a_second_gpu_and_a_metric_without_a_name(tmp_path: Path) -> None:
    first = int(read_nsys(DECODE).work.start_ns.min())
    second = ("INSERT INTO TARGET_INFO_GPU (vmId, id, name, cuDevice) VALUES (1, 5, 'NVIDIA H200', 1)",)
    samples: list[tuple[object, int, int, object]] = [(first + 5, TYPE, SM, 1), (first + 5, TYPE + 5, 77, 2)]
    trace = read_nsys(sampled(tmp_path / "run.sqlite", samples, second))
    assert trace.samples.device.tolist() == [0, 1]  # as CUDA numbers them
    assert [trace.name_of(int(index)) for index in trace.samples.metric] == [
        "SMs Active [Throughput %]",
        "[metric 77 is not in the report]",
    ]


def test_samples_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    first = int(read_nsys(DECODE).work.start_ns.min())
    trace = read_nsys(sampled(tmp_path / "run.sqlite", [(first + 5, TYPE, SM, 1), (first + 6, TYPE, SM, "'much'")]))
    assert len(trace.samples) == 1
    assert [problem.id for problem in trace.problems] == ["unreadable_samples"]
    assert trace.complete


def test_samples_are_kept_with_the_trace_and_can_be_asked(tmp_path: Path) -> None:
    first = int(read_nsys(DECODE).work.start_ns.min())
    source = sampled(tmp_path / "run.sqlite", [(first + 5 + number, TYPE, SM, number) for number in range(4)])
    parsed, kept = (cached_trace(source, columns=stage_columns) for _ in range(2))
    assert (parsed.parsed, kept.parsed) == (True, False)
    for name, column in parsed.trace.samples.columns().items():
        assert np.array_equal(column, kept.trace.samples.columns()[name])
    query = "select metric, count(*), avg(value) from gpu_metrics group by all"
    done = llm_perf("sql", source, query, "--json")
    assert "SMs Active" in json.dumps(json.loads(done.stdout))


def test_a_report_without_samples_has_none() -> None:
    assert len(read_nsys(DECODE).samples) == 0
    assert analyze_source(DECODE, use_cache=False).document.gpu_metrics == []
