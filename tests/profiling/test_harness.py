"""The helpers of the profiling guides, used as the guides use them."""

import csv
import gzip
import json
import tempfile
import time
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling import harness
from llm_perf_opt.profiling.harness import NVMLSampler, nvtx_range, prof_to_csv, run_torch_profiler
from llm_perf_opt.runners.measure import nvml


def test_steps_are_profiled_with_their_ranges_and_written_as_a_table(tmp_path: Path) -> None:
    import torch

    calls = []

    def one_step(number: int) -> None:
        calls.append(number)
        with nvtx_range("prefill"):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        with nvtx_range("mine", domain="own"):
            pass

    prof = run_torch_profiler(one_step, steps=2, warmup=1, out_dir=tmp_path / "tb")
    prof_to_csv(prof, tmp_path / "ops.csv")
    assert calls == [0, 1, 2]
    events = json.loads(gzip.decompress((tmp_path / "tb" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "user_annotation"].count("prefill") == 2
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "ops.csv").read_text().splitlines())}
    assert rows["aten::mm"]["calls"] == "2"
    assert "prefill" not in rows, "a label is not an operator"


def test_the_sampler_writes_what_it_saw(tmp_path: Path) -> None:
    sampler = NVMLSampler(device_index=0, interval_s=0.01, out_csv=tmp_path / "nvml.csv")
    sampler.start()
    deadline = time.monotonic() + HANG_S
    while (sampler._folder / "samples.jsonl").read_text().count("cpu") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.stop()
    sampler.join()
    rows = list(csv.DictReader((tmp_path / "nvml.csv").read_text().splitlines()))
    assert rows
    assert {"at_ns", "power_mw", "machine_pct"} <= set(rows[0])
    if sampler.unavailable:
        assert all(row["power_mw"] == "" for row in rows), "missing, not zero"
    sampler.stop()


@pytest.mark.parametrize(
    ("gpus", "index", "why"),
    [(2, 1, ""), (2, 2, "no GPU 2"), (2, -1, "no GPU -1"), (0, 0, "no NVIDIA GPU"), (Missing("no driver"), 0, "no driver")],
)
def test_a_gpu_that_does_not_exist_is_said_and_not_sampled(
    gpus: int | Missing, index: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Recorded:
        def __init__(self, argv: list[str], *_: object) -> None:
            started.append(argv)

        def tell(self, line: str) -> None:
            """Take the process id."""

    monkeypatch.setattr(harness, "gpu_count", lambda: gpus)
    monkeypatch.setattr(harness, "Companion", Recorded)
    sampler = NVMLSampler(device_index=index, out_csv=tmp_path / "nvml.csv")
    sampler.start()
    sampler._open.close()
    assert why in sampler.unavailable
    assert bool(sampler.unavailable) == bool(why)
    assert started[0][-1] == ("none" if why else str(index))


def test_a_sampler_that_does_not_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nvml, "__name__", "no_such_module")
    with pytest.raises(CaptureError, match="did not start") as caught:
        NVMLSampler().start()
    assert "no_such_module" in caught.value.remedy, "the log is removed with the folder"
    assert list(tmp_path.iterdir()) == []
