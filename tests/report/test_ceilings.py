"""The table of ceilings, to the letter."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.ceilings import age_s, ceilings_json
from rendered import ceilings_text

TAKEN = datetime(2026, 1, 1, tzinfo=timezone.utc)
ROWS = (
    CeilingRow("gemm_bf16", "GEMM bf16", "FLOP/s", summarize([796e12] * 9), "8192×8192×8192", "SM 1980 MHz, 92 W"),
    CeilingRow("gemm_fp32", "GEMM fp32", "FLOP/s", summarize([230e9] * 3 + [240e9] * 3 + [250e9] * 3), "1024×1024×1024"),
    CeilingRow("gemm_fp8", "GEMM fp8", "FLOP/s", Missing("compute capability 8.0 has none"), ""),
    CeilingRow("read", "read bandwidth", "B/s", summarize([4348e9] * 9), "sum of 1024 MiB"),
    CeilingRow("launch_graph", "kernel interval, CUDA graph", "ns", summarize([917.0] * 9), "one graph"),
)
CEILINGS = Ceilings(
    "cuda", "NVIDIA H200", "GPU-1", "580.95", "2.11.0", 16, TAKEN.isoformat(), 9.0, 7.25, ("before measuring: 92 W",), ROWS
)
GROUPS = ("Matrix products", "Bandwidth", "Number of threads", "Linear layers of the model", "Calls and launches")
FOUND = FoundCeilings(CEILINGS, True, "/cache/ab.json", ("something to know.",))


def test_the_table() -> None:
    assert ceilings_text(FOUND, TAKEN + timedelta(hours=3)) == (
        "NVIDIA H200 (cuda, GPU-1), driver 580.95, torch 2.11.0\n"
        "cached 3 h ago; --refresh measures again (2026-01-01T00:00:00+00:00, in 7.25 s)\n"
        "\n"
        "- before measuring: 92 W\n"
        "\n"
        "Matrix products\n"
        "quantity          median  95 % interval      IQR        n  how\n"
        "GEMM bf16  796.0 TFLOP/s  796.0 – 796.0    0.0 %        9  8192×8192×8192 [SM 1980 MHz, 92 W]\n"
        "GEMM fp32  240.0 GFLOP/s  230.0 – 250.0    8.3 %        9  1024×1024×1024\n"
        "GEMM fp8         n/a (a)        n/a (a)  n/a (a)  n/a (a)  n/a (a)\n"
        "n/a (a): compute capability 8.0 has none\n"
        "\n"
        "Bandwidth\n"
        "quantity            median  95 % interval    IQR  n  how\n"
        "read bandwidth  4,348 GB/s  4,348 – 4,348  0.0 %  9  sum of 1024 MiB\n"
        "\n"
        "Calls and launches\n"
        "quantity                     median  95 % interval    IQR  n  how\n"
        "kernel interval, CUDA graph  917 ns      917 – 917  0.0 %  9  one graph\n"
        "\n"
        "IQR: interquartile range, in percent of the median. The interval is that of the median.\n"
        "cached in /cache/ab.json\n"
        "note: something to know.\n"
    )


def test_a_cpu_has_groups_for_threads_and_the_model_and_no_rows_of_a_gpu() -> None:
    rows = (
        CeilingRow("gemm_bf16", "GEMM bf16", "FLOP/s", summarize([6e9] * 9), "512×512×512", "", "AVX2", False),
        CeilingRow("threads_2_gemv", "GEMV fp32, 2 threads", "B/s", summarize([30e9] * 9), "mv"),
        CeilingRow("model_gemm_fp32", "prefill", "ns", summarize([2e9] * 9), "linear", "", "AVX2", True, 100e9),
        CeilingRow("threads_2_model_gemv", "decode, 2 threads", "ns", summarize([2e6] * 9), "linear", work=60e6),
        CeilingRow("sync", "synchronize", "ns", Missing("the run is on the CPU"), ""),
    )
    lines = ceilings_text(replace(FOUND, ceilings=replace(CEILINGS, device_kind="cpu", rows=rows)), TAKEN).splitlines()
    assert [line for line in lines if line in GROUPS] == ["Matrix products", "Number of threads", "Linear layers of the model"]
    shown = "\n".join(lines)
    assert "GEMM bf16 (AVX2, emulated)" in shown
    assert "linear: 50.00 GFLOP/s" in shown
    assert "linear: 30.00 GB/s" in shown
    assert "synchronize" not in shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86400, "1 day"), (86400 * 40 + 5, "40 days")],
)
def test_the_age_is_shown(seconds: int, said: str) -> None:
    assert f"cached {said} ago" in ceilings_text(FOUND, TAKEN + timedelta(seconds=seconds))


def test_what_is_new_has_no_age_and_a_clock_set_back_none_below_zero() -> None:
    fresh = replace(FOUND, cached=False, cache_file=Missing("not kept"))
    text = ceilings_text(fresh, TAKEN)
    assert "measured now" in text
    assert "cached" not in text
    assert age_s(FOUND, TAKEN - timedelta(days=1)) == 0


def test_the_json_holds_the_records() -> None:
    shown = ceilings_json(FOUND, TAKEN + timedelta(seconds=5))
    assert shown == {
        "cached": True,
        "age_s": 5.0,
        "cache_file": "/cache/ab.json",
        "notes": ("something to know.",),
        "ceilings": CEILINGS,
    }
