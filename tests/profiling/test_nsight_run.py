"""Whole runs under NVIDIA's real nsys, and what is rejected before it starts."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from command import llm_perf
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.nsys_sqlite import read_nsys

MS = 1_000_000
SMALL = ["runtime.num_new_tokens=5", "runtime.prompt_tokens=32", "profiling.nvml.enable=false", "profiling.ceilings=false"]


def below_nsys(*argv: str, nsys: Path, cwd: Path) -> str:
    """Run the command with this nsys; its standard output."""
    return llm_perf(*argv, cwd=cwd, env={"NSYS": str(nsys)}).stdout


def durations_ns(trace: Trace, name: str) -> list[int]:
    rows = [row for row in range(len(trace.ranges)) if trace.name_of(int(trace.ranges.name[row])) == name]
    return [int(trace.ranges.end_ns[row] - trace.ranges.start_ns[row]) for row in rows]


@pytest.fixture(scope="module")
def sweep(real_nsys: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sweep of two models: the run of each, by the model's name."""
    folder = tmp_path_factory.mktemp("sweep")
    models = ("tiny", "tiny_qwen3_vl")
    words = ["profiling=nsys", "profiling.clean=false", *SMALL, "runtime.num_new_tokens=17", f"model={','.join(models)}"]
    below_nsys("run", "-m", "-q", *words, nsys=real_nsys, cwd=folder)
    runs = [report.parents[2] for report in folder.rglob("run.nsys-rep")]
    assert len(runs) == 2
    return {name: run for name in models for run in runs if model_of(run) == name}


def model_of(run: Path) -> str:
    return str(yaml.safe_load((run / "config.yaml").read_text())["model"]["name"])


def test_a_sweep_has_a_report_of_its_own_for_each_point(sweep: dict[str, Path]) -> None:
    """One tool around the whole sweep would gate on the first point alone."""
    assert len(sweep) == 2
    for run in sweep.values():
        assert len(durations_ns(read_nsys(run / "raw/nsys/run.sqlite"), "decode_step")) == 16
        manifest = json.loads((run / "run.json").read_text())
        assert manifest["status"] == "complete"
        (entry,) = manifest["passes"]
        assert (entry["name"], entry["status"]) == ("nsys", "complete")
        assert f"--config {run}/config.yaml" in " ".join(entry["argv"])


def test_a_gated_run_agrees_with_the_runners_own_clock(sweep: dict[str, Path]) -> None:
    run = sweep["tiny"]
    own = json.loads((run / "raw/nsys/stages.json").read_text())
    trace = read_nsys(run / "raw/nsys/run.sqlite")
    assert trace.complete
    theirs = [*durations_ns(trace, "prefill"), *durations_ns(trace, "decode"), *durations_ns(trace, "decode_step")]
    ours = [own["stage_wall_ns"]["prefill"], own["stage_wall_ns"]["decode"], *own["steps_ns"]]
    assert len(theirs) == len(ours) == 18
    apart = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    # Another program on the machine can come between the two readings of a clock, though not often.
    assert sum(difference < 2 * MS for difference in apart) >= 14, apart
    manifest = json.loads((run / "run.json").read_text())
    (entry,) = manifest["passes"]
    assert entry["tool_version"].startswith("nsys 20")
    assert "--nvtx-capture=profile@LLM" in entry["argv"]
    assert "| profile/decode/decode_step | 16 |" in (run / "regions.md").read_text()
    assert "n/a" in (run / "kernels.md").read_text(), "a CPU has no kernels, and the page says so"


def test_the_sub_stages_of_a_vision_language_model_are_ranges_in_prefill(sweep: dict[str, Path]) -> None:
    regions = (sweep["tiny_qwen3_vl"] / "regions.md").read_text()
    for inner, calls in {"vision": 1, "vision/deepstack": 2, "vision/projector": 1, "language": 1}.items():
        assert f"| profile/prefill/{inner} | {calls} |" in regions


def test_one_sub_stage_is_recorded_alone(real_nsys: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["profiling=nsys", "profiling.nsys.substage=vision", "profiling.clean=false", *SMALL, "model=tiny_qwen3_vl"]
    below_nsys("run", "-q", *words, "runtime.num_new_tokens=3", f"hydra.run.dir={run}", nsys=real_nsys, cwd=tmp_path)
    (entry,) = json.loads((run / "run.json").read_text())["passes"]
    assert (entry["name"], entry["status"]) == ("nsys_substage", "complete")
    trace = read_nsys(run / "raw" / "nsys_substage" / "run.sqlite")
    found = Counter(trace.name_of(index) for index in trace.ranges.name.tolist())
    assert found == {"vision": 1, "deepstack": 2, "projector": 1}, "neither the language model nor decode"


def test_stage2_on_a_machine_without_gpu_keeps_the_timeline_and_says_what_is_missing(real_nsys: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = below_nsys("run", "--json", "-q", "profiling=stage2", *SMALL, f"hydra.run.dir={run}", nsys=real_nsys, cwd=tmp_path)
    manifest = json.loads((run / "run.json").read_text())
    statuses = {entry["name"]: entry["status"] for entry in manifest["passes"]}
    if statuses["ncu_selftest"] == "complete":
        pytest.skip("this machine has a GPU")
    done = {name for name, status in statuses.items() if status == "complete"}
    assert done == {"clean", "torch", "nsys"}
    assert {status for name, status in statuses.items() if name not in done} == {"skipped"}, "ncu needs a GPU"
    assert all(entry["why"] for entry in manifest["passes"] if entry["status"] == "skipped")
    assert manifest["status"] == "partial"
    assert json.loads(text)["status"] == "partial"
    for name in ("operators.md", "kernels.md", "stakeholder_summary.md", "inputs.yaml", "ops.csv"):
        assert (run / name).stat().st_size > 0, name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("profiling.metrics.sets=[rooflin]", "No metric set is called 'rooflin'. Did you mean 'roofline'?"),
        ("profiling.metrics.add=[flop_count_xx]", "'flop_count_xx' cannot be collected on"),
    ],
)
def test_unknown_counters_are_refused_before_anything_starts(tmp_path: Path, asked: str, said: str) -> None:
    run = tmp_path / "run"
    done = llm_perf("run", "profiling=full", asked, f"hydra.run.dir={run}", env={"NSYS": "/none"})
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not run.exists()
