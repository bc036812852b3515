"""An engine's settings, the cost of changes for profiled passes, and its memory, in the report."""

from dataclasses import replace

from builders import MS, clean_timings, model_facts, run_analysis, torch_pass
from llm_perf_opt.analysis.overhead import overheads
from llm_perf_opt.core.engine_records import ChangedEngine, EngineMemory, EngineSetting
from llm_perf_opt.core.records import MemoryPeaks, Missing, RuntimeFacts, WrappedPass
from llm_perf_opt.report.document import Table
from llm_perf_opt.report.engine_tables import engine_memory_tables, engine_tables
from rendered import report

IN_PROCESS = EngineSetting("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "ranges enclose the work")
SAMPLES = {"prefill": tuple(110 * MS + each * MS for each in range(-12, 13, 4)), "decode": (33 * MS,) * 7}
CHANGED = ChangedEngine((IN_PROCESS,), {"prefill": 110 * MS, "decode": 33 * MS}, 2, 7, SAMPLES)
GIB = 2**30


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_each_setting_and_the_cost_of_changes_are_stated() -> None:
    runtime = RuntimeFacts("vllm", "0.32", "by step", settings=(EngineSetting("max_model_len", "-1", "what fits"),))
    timings = clean_timings(runtime=runtime)  # prefill 100 ms; steps of 10, 20 and 30 ms
    costs = overheads(timings, torch_pass(engine=CHANGED), {"nsys": WrappedPass({}, (), CHANGED)})
    analysis = run_analysis(timings=timings, overheads=costs)
    settings, cost = engine_tables(analysis)
    assert [row[:3] for row in texts(settings)] == [
        ["max_model_len", "-1", "all"],
        ["VLLM_ENABLE_V1_MULTIPROCESSING", "0", "torch, nsys"],
    ]
    assert texts(cost)[0][1:3] == ["100.0 ms", "110.0 ms"]
    assert texts(cost)[0][3].startswith("not distinguishable (-")
    assert texts(cost)[0][4:] == ["15.00 ms", "16.50 ms", "+1.500 ms (+1.500 ms to +1.500 ms)", "7"]
    assert "unknown" not in cost.foot
    assert cost.caption in report(analysis)
    assert engine_tables(run_analysis()) == []


def test_a_cost_without_a_spread_is_explained() -> None:
    timings = clean_timings(runtime=RuntimeFacts("vllm", "0.24", "by step"))
    costs = overheads(timings, torch_pass(engine=replace(CHANGED, samples_ns={})), {})
    (cost,) = [table for table in engine_tables(run_analysis(timings=timings, overheads=costs)) if table.id == "engine-changes"]
    assert texts(cost)[0][3] == "+10.00 ms (spread unknown)"
    assert "Spread unknown" in cost.foot


def test_memory_is_shown_as_reserved_and_as_needed() -> None:
    reserved = EngineMemory(0.9, 100_000, 110 * GIB, 640, GIB // 2)
    none = Missing("the engine allocates in other processes")
    timings = clean_timings(
        runtime=RuntimeFacts("vllm", "0.24", "by step", memory=reserved, elsewhere=True),
        memory=MemoryPeaks(none, none, 127 * GIB, GIB),
        model=model_facts(weight_bytes=15 * GIB),
    )
    (table,) = engine_memory_tables(timings)
    assert [row[:2] for row in texts(table)] == [
        ["Reserved: in use on the device", "127 GiB"],
        ["Reserved: cache", "110 GiB"],
        ["Needed: weights", "15.0 GiB"],
        ["Needed: cache of the request", "512 MiB"],
        ["Needed: both", "15.5 GiB"],
    ]
    assert "90 %" in texts(table)[0][2]
    assert table.caption in report(run_analysis(timings=timings))
    assert engine_memory_tables(clean_timings()) == []


def test_sizes_that_are_not_known_are_not_added() -> None:
    quantized = EngineMemory(0.9, 100_000, 110 * GIB, 640, GIB // 2, Missing("the weights are quantized"))
    (table,) = engine_memory_tables(clean_timings(runtime=RuntimeFacts("vllm", "0.24", "by step", memory=quantized)))
    needed = {row[0].text: row[1].text for row in table.rows if row[0].text.startswith("Needed")}
    assert needed["Needed: cache of the request"] == "512 MiB"
    assert needed["Needed: weights"].startswith("n/a")
    assert needed["Needed: both"].startswith("n/a")
