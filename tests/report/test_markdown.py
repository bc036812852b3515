"""The reports: every section stands whatever is missing, tables stay tables, and names stay names."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import (
    HOSTILE_NAMES,
    MS,
    clean_timings,
    cpu_sample,
    empty_analysis,
    gpu_sample,
    iteration,
    manifest,
    model_facts,
    operator,
    run_analysis,
    telemetry,
    torch_pass,
    workload,
)
from llm_perf_opt.analysis.metrics import NO_DECODE, context_drift, metrics, stage_timings
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import summarize_telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, PassRecord, SubstageSpan, TorchPass
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.kernel_tables import MOST_ROWS
from llm_perf_opt.report.run_tables import other_figures_table
from markdown_reader import Page, read, uneven_tables
from rendered import operators_page, report, stakeholder_summary

SECTIONS = [
    "Summary",
    "What to change first",
    "Where the time goes",
    "Stages and steps",
    "Roofline",
    "Kernels and counters",
    "Operators",
    "Model by time",
    "Power, clocks and load",
    "Environment and passes",
    "Assumptions",
    "Definitions",
    "To repeat",
]
"""The sections a reader can rely on; others may be between them."""
OURS = {"strong", "image of waterfall.svg", "image of roofline.svg"}
"""The only inline markup the reports themselves use."""


def of_timings(timings: CleanTimings, torch: Maybe[TorchPass] | None = None, **changes: Any) -> RunAnalysis:
    """The analysis that follows from these timings."""
    seen = torch_pass() if torch is None else torch
    return run_analysis(
        timings=timings,
        metrics=metrics(timings),
        stages=stage_timings(timings, seen),
        drift=context_drift(timings),
        torch=seen,
        **changes,
    )


def read_all(analysis: RunAnalysis) -> tuple[Page, Page, Page]:
    """The three pages, each checked to be sound Markdown with nothing in it but our own markup."""
    sources = report(analysis), stakeholder_summary(analysis), operators_page(analysis)
    pages = tuple(read(source) for source in sources)
    for source, page in zip(sources, pages, strict=True):
        assert uneven_tables(source) == []
        assert set(page.markup) <= OURS
        assert source.endswith("\n")
        assert page.headings
    return pages[0], pages[1], pages[2]


def sections(page: Page) -> list[str]:
    return [heading for heading in page.headings if heading in SECTIONS]


def row(page: Page, name: str) -> list[str]:
    return next(cells for table in page.tables for cells in table if cells[0].strip("\xa0 ") == name)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_whole_run_shows_every_section_once_and_in_order() -> None:
    page, _, _ = read_all(run_analysis())
    assert page.headings[0] == "baseline/tiny/2026-01-02_03-04-05"
    assert sections(page) == SECTIONS
    assert len(set(page.headings)) == len(page.headings)


def test_figures_come_with_interval_spread_and_n() -> None:
    page, _, _ = read_all(run_analysis())
    # ten repeats of 100 + 10 + 20 + 30 ms: no spread at all
    ttft = row(page, "Time to first token (TTFT)")
    assert ttft[1:4] == ["100.0 ms", "100.0 – 100.0 ms", "0 ms"]
    assert ttft[4:] == ["10"], "p90 and p99 are left out: there is nothing in them"
    assert "p90: n/a: 10 values; p90 needs 50" in page.text
    assert "p99: n/a: 10 values; p99 needs 500" in page.text
    assert row(page, "Time per output token (TPOT)")[1] == "20.00 ms"
    assert row(page, "Decode throughput")[1] == "100.0 tokens/s"
    gap = row(page, "Inter-token latency, p90 gap")
    assert gap[-1] == "0"
    assert f"{gap[1]}: 3 values; p90 needs 50" in page.text


def test_stages_come_with_their_share_and_inflation() -> None:
    page, _, _ = read_all(run_analysis())
    assert row(page, "prefill")[1:] == ["1", "100.0 ms", "100.0 – 100.0 ms", "0 ms", "10", "62.5 %", "200.0 ms", "× 2.00"]
    assert row(page, "decode_step")[1:3] == ["3", "20.00 ms"]
    table = next(table for table in page.tables if table[0][0] == "stage")
    indents = [cells[0].count("\xa0") // 2 for cells in table[1:]]
    assert indents == [0, 1, 1, 2], "profile holds prefill and decode, decode holds its steps"


def test_percentiles_stand_where_the_repeats_carry_them() -> None:
    page, _, _ = read_all(of_timings(clean_timings([iteration(prefill_ns=ms * MS) for ms in range(1, 51)])))
    # of 1 … 50 ms the p90 is 1 + 0.9 · 49
    assert row(page, "Time to first token (TTFT)")[4:] == ["45.10 ms", "50"]
    assert "p99: n/a: 50 values; p99 needs 500" in page.text


def test_operators_are_shown_by_share_and_the_rest_is_pointed_to() -> None:
    many = tuple(operator(f"op{number}") for number in range(MOST_ROWS + 5))
    page, _, all_operators = read_all(run_analysis(torch=torch_pass(operators=many)))
    shown = next(table for table in page.tables if table[0][0] == "operator")
    assert len(shown) == 1 + MOST_ROWS
    assert f"The {MOST_ROWS} longest; operators.md and ops.csv have 5 more" in page.text
    assert len(all_operators.tables[0]) == 1 + MOST_ROWS + 5


def test_an_operators_row_to_the_eye() -> None:
    _, _, page = read_all(run_analysis())
    # 6 ms and 2 ms of self time, 8 ms in all; 8 ms in 4 calls
    assert row(page, "aten::mm") == ["aten::mm", "4", "6.000 ms", "8.000 ms", "2.000 ms", "75.0 %"]
    assert row(page, "aten::add")[-1] == "25.0 %"
    assert "device self, device total" in page.text
    assert "n/a: the run is on the CPU\n" in page.text


def test_operators_on_a_gpu_are_weighed_by_device_time() -> None:
    rows = tuple(
        operator(name, device_self_ns=ns, device_total_ns=ns, cpu_memory_bytes=0, device_memory_bytes=-(2**30), calls=calls)
        for name, ns, calls in (("gemm", 3 * MS, 2), ("copy", 1 * MS, 0))
    )
    _, _, page = read_all(run_analysis(torch=torch_pass(operators=rows)))
    assert row(page, "operator")[5:] == ["device self", "device total", "CPU memory", "device memory", "share of self time"]
    assert row(page, "gemm")[5:] == ["3.000 ms", "3.000 ms", "0 B", "-1.00 GiB", "75.0 %"]
    assert row(page, "copy")[4] == "n/a (a)"
    assert "n/a (a): no call" in page.text


def test_the_summary_says_what_was_run_how_fast_and_what_dominates() -> None:
    _, page, _ = read_all(run_analysis())
    assert "tiny (5 M parameters, fp32) on a processor: batch 2, 6 to 10 prompt tokens, 4 new tokens" in page.text
    assert "The first token takes 100.0 ms (median of 10, ± 0.0 %)." in page.text
    assert "Each further token takes 20.00 ms (median of 10, ± 0.0 %): 100.0 tokens/s for the batch of 2." in page.text
    assert "Of the 160.0 ms of a request, prefill is 62 % and decode 38 %: most of the time goes to prefill." in page.text
    assert "The operator with the most CPU time is aten::mm: 75 % of the total over 4 calls." in page.text
    assert "No warnings" in page.text


def test_growth_is_claimed_only_where_the_interval_excludes_none() -> None:
    growing = [iteration(steps_ns=[MS + 1000 * step for step in range(20)])] * 10
    _, page, _ = read_all(of_timings(clean_timings(growing)))
    assert (
        "1.000 µs per cached token (95 % interval 1.000 – 1.000 µs), +1.9 % from context" in page.text
    )  # 19,000 of 1,009,500 ns
    _, page, _ = read_all(of_timings(clean_timings([iteration(steps_ns=[MS] * 20)] * 10)))
    assert "no growth measurable" in page.text


@pytest.mark.parametrize(("repeats", "step_ns"), [(10, -1_183_044), (10, 0), (2, 1000)])
def test_a_slope_that_may_be_none_is_no_figure(repeats: int, step_ns: int) -> None:
    """Steps that become shorter do not grow, and two repeats do not carry an interval of 95 %."""
    steps = [iteration(steps_ns=[100 * MS + step_ns * step for step in range(20)])] * repeats
    analysis = of_timings(clean_timings(steps))
    pages = [*read_all(analysis)[:2]]
    cells = other_figures_table(analysis, clean_timings(steps)).rows[0]
    for text in (*(page.text + str(page.tables) for page in pages), cells[1].text):
        assert ("unknown from context" if repeats < 6 else "no growth measurable from context") in text
        assert "per cached token" not in text


def test_warnings_stand_on_the_first_page_of_both() -> None:
    page, summary, _ = read_all(run_analysis(warnings=(RunWarning(WarningId.THROTTLED, "The GPU was throttled."),)))
    assert "See 1 warning below." in page.text.split("What to change first")[0]
    assert "Warnings" in page.headings
    assert "The GPU was throttled." in page.text
    assert "The GPU was throttled." in summary.text
    assert "No warnings" not in summary.text


def test_a_partial_run_says_so_first() -> None:
    partial = manifest(status="partial", why="The torch.profiler pass was killed (SIGKILL).", remedy="Try less.")
    page, _, _ = read_all(run_analysis(manifest=partial))
    assert "This run is partial: The torch.profiler pass was killed (SIGKILL)." in page.text


def test_the_command_to_repeat_is_whole() -> None:
    command = ("llm-perf", "run", "model=tiny", "hydra.run.dir=a b", "x='`")
    page, _, _ = read_all(run_analysis(manifest=manifest(command=command)))
    assert page.fences[0] == "llm-perf run model=tiny 'hydra.run.dir=a b' 'x='\"'\"'`'\n"


def test_readings_and_energy_of_a_gpu() -> None:
    samples = [gpu_sample(at * 100 * MS, energy_mj=30_000 * at) for at in range(17)]
    timings = clean_timings(model=model_facts(device="cuda:0"))
    summary = summarize_telemetry(telemetry(samples, [cpu_sample(0)]), timings)
    page, _, _ = read_all(run_analysis(telemetry=summary))
    assert row(page, "GPU power") == ["GPU power", "300", "300", "300", "17", "W"]
    # 300 W for 1.6 s; every prefill of 100 ms is too short to be told apart
    assert row(page, "measured repeats") == ["measured repeats", "1.60 s", "480.0 J", "480.0 J"]
    assert f"{row(page, 'prefill, all repeats')[2]}: it lasts 100 ms" in page.text


def test_the_environment_of_a_gpu_machine() -> None:
    gpu = {
        "name": "NVIDIA H200",
        "memory_bytes": 141 * 2**30,
        "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980,
        "power_limit_w": 700.0,
    }
    env = {**run_analysis().env, "gpu": gpu, "gpu_driver": "580.1", "gpu_driver_cuda": "13.0"}
    page, _, _ = read_all(run_analysis(env=env))
    assert row(page, "GPU")[1] == "NVIDIA H200, 141 GiB, SM clock 1980 of 1980 MHz, power limit 700.0 W"
    assert row(page, "Driver")[1] == "580.1 (CUDA 13.0)"
    assert row(page, "llm-perf-opt")[1] == "0.1.0, commit 0123456789ab with changes"


# --- whatever is missing ----------------------------------------------------------------------------------------------


def test_a_failed_run_shows_every_section_with_its_reason() -> None:
    page, summary, operators = read_all(empty_analysis())
    assert sections(page) == SECTIONS
    assert page.text.count("n/a: the clean pass is failed: The unprofiled reference pass was killed (SIGKILL).") >= 5
    assert "This run is failed: The unprofiled reference pass was killed (SIGKILL)." in page.text
    assert "n/a: env.json was not written before the run ended, or is damaged" in page.text
    assert "This run has no timings: the clean pass is failed" in summary.text
    assert "Try a smaller model." in summary.text
    assert "n/a: the clean pass is failed" in operators.text
    assert row(page, "none"), "a run without passes has a table all the same"


NOTHING = Missing("lost | <b>all</b>\n# of it")
PARTS: dict[str, dict[str, Any]] = {
    "timings": {"timings": NOTHING, "metrics": (), "stages": (), "drift": NOTHING},
    "torch": {"torch": NOTHING, "stages": stage_timings(clean_timings(), NOTHING)},
    "telemetry": {"telemetry": NOTHING},
    "env": {"env": {}},
    "passes": {"manifest": manifest(passes=(), command=())},
    "words": {"assumptions": (), "warnings": (), "config": {}},
}


@pytest.mark.parametrize("lost", [c for n in (0, 1, 2, len(PARTS)) for c in itertools.combinations(PARTS, n)], ids="-".join)
def test_any_part_may_be_missing(lost: tuple[str, ...]) -> None:
    changes = {key: value for part in lost for key, value in PARTS[part].items()}
    if {"timings", "torch"} <= set(lost):
        changes["stages"] = ()
    page, _, _ = read_all(run_analysis(**changes))
    assert sections(page) == SECTIONS
    assert ("n/a: lost | <b>all</b> # of it" in page.text) == bool({"timings", "torch", "telemetry"} & set(lost))


def test_a_point_of_a_sweep_says_when_its_command_runs_nothing() -> None:
    page, _, _ = read_all(run_analysis(manifest=manifest(command=["llm-perf", "run", "--point", "sw", "0"])))
    assert "A point that is complete is not run again" in page.text
    page, _, _ = read_all(run_analysis(manifest=manifest(command=["llm-perf", "run"])))
    assert "A point that is complete" not in page.text


def test_timings_without_a_repeat_still_render() -> None:
    timings = clean_timings([], warmup=())
    page, summary, _ = read_all(of_timings(timings))
    assert row(page, "Warm-up iterations")[1] == "0"
    assert f"{row(page, 'First iteration')[1]}: no warm-up" in page.text
    assert "n/a: no iteration was measured" in page.text
    assert summary.text


def test_one_new_token_has_no_decode_and_the_reason_is_shown() -> None:
    page, summary, _ = read_all(of_timings(clean_timings([iteration(steps_ns=())] * 8)))
    assert f"{row(page, 'Time per output token (TPOT)')[1]}: {NO_DECODE}" in page.text
    assert "Each further token" not in summary.text


def test_one_repeat_has_no_interval_and_the_reason_is_shown() -> None:
    page, summary, _ = read_all(of_timings(clean_timings([iteration()])))
    assert "95 % interval of the median: n/a: 1 values; a 95 % interval of the median needs 6" in page.text
    assert "The first token takes 100.0 ms (one value)." in summary.text


def test_a_torch_pass_without_operators_still_renders() -> None:
    page, _, operators = read_all(run_analysis(torch=torch_pass(operators=())))
    assert "0 operators" in page.text
    assert operators.tables[0][1][0] == "none"


def test_without_inflation_the_operators_say_so() -> None:
    _, _, page = read_all(run_analysis(stages=()))
    assert "inflation n/a: no unprofiled time to compare" in page.text


# --- whatever things are called ---------------------------------------------------------------------------------------


def called(name: str) -> RunAnalysis:
    """A run in which everything that has a name, a note or a reason of its own is called `name`."""
    none = Missing(name)
    span = SubstageSpan(name, "prefill", -1, 0, 10)
    timings = clean_timings(
        [iteration(substages=(span,))] * 8,
        model=model_facts(name=name, device_name=name, attention=name),
        workload=workload(source=name),
        stopped=name,
        framework={name: name},
    )
    timings = replace(timings, memory=replace(timings.memory, allocated_bytes=none))
    torch = torch_pass(operators=(operator(name), operator(name, cpu_memory_bytes=none)), trace_file=name)
    rows = summarize_telemetry(telemetry([gpu_sample(0, temperature_c=none)], [cpu_sample(0)], gpu_note=name), timings)
    return of_timings(
        timings,
        torch,
        run=name,
        manifest=manifest(
            status="partial", why=name, remedy=name, command=("llm-perf", name), passes=(PassRecord("clean", "failed", why=name),)
        ),
        env={**run_analysis().env, "host": name, "gpu": {"name": name, "memory_bytes": name}, "packages": {name: name}},
        telemetry=rows,
        warnings=(RunWarning(WarningId.THROTTLED, name),),
        assumptions=(name,),
    )


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_stay_names(name: str) -> None:
    page, _, operators = read_all(called(name))
    shown = " ".join(one_line(name).split()) or "(no name)"
    assert sections(page) == SECTIONS
    plain = read(report(called("plain")))
    assert page.headings[1:] == plain.headings[1:], "no name became a heading"
    assert page.markup == plain.markup, "nor anything bold"
    assert " ".join(operators.tables[0][1][0].split()) == shown


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_reasons_stay_reasons(name: str) -> None:
    page, summary, operators = read_all(empty_analysis(name))
    assert page.headings[1:] == read(report(empty_analysis("plain"))).headings[1:]
    assert len(summary.headings) == len(operators.headings) == 1


@settings(deadline=None, max_examples=20)
@given(st.text(alphabet="\\`*_[]()<>|#~$!&;=+-.:a1 \n\t", min_size=1, max_size=12))
@pytest.mark.slow
def test_any_names_stay_names(name: str) -> None:
    page, _, _ = read_all(called("x" + name))
    assert page.headings[1:] == read(report(called("plain"))).headings[1:]


@pytest.mark.parametrize("word", ["```", "````", "\n```\n# heading\n", "~~~", "`" * 7])
def test_no_word_of_the_command_ends_its_block(word: str) -> None:
    page, _, _ = read_all(run_analysis(manifest=manifest(command=("llm-perf", word))))
    assert page.headings[-1] == "To repeat"
    assert len(page.fences) == 2


@pytest.mark.parametrize("words", [["--point", "sweep", "0"], ["--point=sweep", "0"]])
def test_the_command_of_a_point_says_that_a_complete_one_is_not_run_again(words: list[str]) -> None:
    found = run_analysis()
    point = replace(found, manifest=replace(found.manifest, command=("llm-perf", "run", *words)))
    assert "A point that is complete is not run again" in report(point)
    assert "A point that is complete" not in report(found)
