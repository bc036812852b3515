"""The command as a user types it: real processes, the real model, real failures."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import HANG_S, llm_perf, llm_perf_process
from llm_perf_opt.runners.llm_profile_runner import read_config, run_pass

SMALL = ("runtime.num_new_tokens=5", "runtime.prompt_tokens=16", "runtime.max_repeats=7", "runtime.min_repeats=6")
LONG = ("runtime.num_new_tokens=200", "runtime.max_repeats=100000", "runtime.min_repeats=100000", "runtime.max_warmup=1")


def run_json(*words: str, cwd: Path, start: Callable[..., "subprocess.CompletedProcess[str]"] = llm_perf) -> dict[str, Any]:
    done = start("run", "--json", "--quiet", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def only_run(folder: Path) -> Path:
    (found,) = folder.glob("runs/*/*/*")
    return found


def manifest(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "run.json").read_text())
    return values


def statuses(run: Path) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in manifest(run)["passes"]}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One complete run, with sub-stages and prompts of different lengths, that several tests look at."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_json(
        *SMALL, "dataset=sample_prompts", "runtime.prompt_tokens=150", "runtime.batch_size=3",
        "model.substages.first=model.layers.0", "profiling.torch.preset=default", "profiling.nvml.interval_s=0.02",
        "profiling.ceilings=false", cwd=folder,
    )  # fmt: skip
    return Path(outcome["run"]), outcome


def test_run_leaves_everything_needed_to_repeat_it(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, outcome = whole_run
    assert outcome["status"] == "complete"
    assert statuses(run) == {"nvml": "complete", "clean": "complete", "torch": "complete"}
    for name in (
        "config.yaml",
        "env.json",
        "inputs.yaml",
        "report.md",
        "stakeholder_summary.md",
        "operators.md",
        "ops.csv",
        "nvml.csv",
    ):
        assert (run / name).stat().st_size > 0, name
    for name in ("clean", "torch", "nvml"):
        assert (run / "raw" / name / "cmd.txt").exists()
        assert (run / "raw" / name / "log.txt").exists()
    assert (run / "raw" / "torch" / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    environment = json.loads((run / "env.json").read_text())
    assert {"cpu", "memory", "gpu", "gpu_driver", "packages", "tool", "python"} <= set(environment)
    assert manifest(run)["command"][:2] == ["llm-perf", "run"]
    assert not list(run.rglob("*.part"))


def test_lengths_really_used_are_recorded(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, _ = whole_run
    inputs = yaml.safe_load((run / "inputs.yaml").read_text())
    assert inputs["lengths"] == [len(ids) for ids in inputs["ids"]]
    assert len(set(inputs["lengths"])) > 1
    timings = json.loads((run / "raw/clean/timings.json").read_text())
    assert timings["workload"]["prompt_tokens"] == inputs["lengths"]
    assert timings["workload"]["padded_tokens"] == max(inputs["lengths"])


def test_stages_nest_and_sum_exactly(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, outcome = whole_run
    assert list(outcome["stages"]) == ["profile", "prefill", "prefill/first", "decode", "decode_step", "decode_step/first"]
    for iteration in json.loads((run / "raw/clean/timings.json").read_text())["iterations"]:
        assert len(iteration["steps_ns"]) == 4
        spans = iteration["substages"]
        assert [span["step"] for span in spans] == [-1, 0, 1, 2, 3]
        assert spans[0]["duration_ns"] < iteration["prefill_ns"]
        for span in spans[1:]:
            assert span["duration_ns"] < iteration["steps_ns"][span["step"]]
        assert iteration["prefill_ns"] + sum(iteration["steps_ns"]) <= iteration["wall_ns"]


def test_report_has_its_sections_and_no_empty_table(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, _ = whole_run
    text = (run / "report.md").read_text()
    for section in ("Summary", "Stages and steps", "Operators", "Environment and passes", "Assumptions"):
        assert f"## {section}" in text
    assert "aten::" in text
    assert "× " in text.split("## Stages and steps")[1].split("\n## ")[0], "inflation is shown per stage"
    assert "None" not in text
    assert "nan" not in re.split(r"\W+", text)


def test_trace_holds_the_stages_and_the_sub_stage(whole_run: tuple[Path, dict[str, Any]]) -> None:
    import gzip

    run, _ = whole_run
    events = json.loads(gzip.decompress((run / "raw/torch/trace.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("prefill") == 1
    assert names.count("decode_step") == 4
    assert names.count("first") == 5


def test_report_verb_makes_it_anew(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, _ = whole_run
    before = (run / "report.md").read_text()
    (run / "report.md").unlink()
    done = llm_perf("report", str(run), cwd=run)
    assert done.returncode == 0
    assert (run / "report.md").read_text() == before


@pytest.mark.slow
def test_a_whole_run_in_processes_of_its_own(tmp_path: Path) -> None:
    """As a user starts it: the command is a process, and so is each pass. Its configuration runs again."""
    prompts = ("dataset=sample_prompts", "runtime.prompt_tokens=150", "runtime.batch_size=3")
    outcome = run_json(*SMALL, *prompts, "profiling.ceilings_s=0.2", cwd=tmp_path, start=llm_perf_process)
    run = Path(outcome["run"])
    assert outcome["status"] == "complete"
    assert statuses(run) == {"nvml": "complete", "clean": "complete", "ceilings": "complete", "torch": "complete"}
    assert (run / "raw/torch/trace.json.gz").stat().st_size > 0
    assert run_pass(read_config(run / "config.yaml"), "clean", tmp_path / "again")
    first, second = (json.loads((folder / "timings.json").read_text()) for folder in (run / "raw/clean", tmp_path / "again"))
    assert len(set(first["workload"]["prompt_tokens"])) > 1
    assert second["workload"] == first["workload"]
    assert second["tokens_sha256"] == first["tokens_sha256"]


def test_prefill_alone(tmp_path: Path) -> None:
    outcome = run_json(*SMALL, "runtime.num_new_tokens=1", "profiling=none", cwd=tmp_path)
    assert set(outcome["stages"]) == {"profile", "prefill"}
    assert "the only new token comes from prefill" in (Path(outcome["run"]) / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["modle=tiny"], 2, "Did you mean 'model'?"),
        (["model=tinny"], 2, "Did you mean 'tiny'?"),
        (["runtime.batch_size=many"], 2, "expected an integer"),
        (["runtime.num_new_tokens=0"], 2, "runtime.num_new_tokens=0 is out of range"),
        (["--config-dir", "nowhere"], 2, "no such folder"),
        (["experiment=../../x"], 2, "cannot be used as a folder name"),
        (["model=hf", "model.path=missing"], 2, "no such folder"),
        (["dataset=sample_prompts", "dataset.path=gone.jsonl"], 2, "no such file"),
        (["dataset=sample_prompts", "dataset.text_field=tex"], 2, "no text in the field 'tex'"),
        (["runtime.prompt_tokens=5000"], 2, "the model has 4096 positions"),
        (["model=llama3_70b", "model.architecture.num_hidden_layers=9000"], 3, "does not fit"),
        (["runtime.batch_size=900000", "runtime.prompt_tokens=4000"], 3, "does not fit"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_made(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    done = llm_perf("run", *words, cwd=tmp_path)
    assert done.returncode == code
    assert (done.stdout + done.stderr).count(said) == 1, "it is said once"
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = llm_perf("run", "hardware=single_gpu", "hardware.device_index=1023", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["model.substages.x=model.layer"], 2, "Did you mean 'model.layers'?"),
    ],
)
def test_a_request_that_cannot_be_met_fails_with_one_message(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    done = llm_perf("run", "profiling=none", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert manifest(only_run(tmp_path))["status"] == "failed"
    assert said in manifest(only_run(tmp_path))["why"]


@contextmanager
def long_run(folder: Path, line: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long run that has printed this line."""
    argv = [sys.executable, "-m", "llm_perf_opt", "run", *LONG]
    process = subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for said in process.stderr:
        if line in said:
            break
    yield process, only_run(folder)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long run that is measuring by now."""
    with long_run(tmp_path, "repeats") as found:
        yield found


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run whose measured process has been started and has not yet loaded PyTorch, which takes most of the time."""
    with long_run(tmp_path, "clean: ") as found:
        yield found


def measured_pid(run: Path) -> int:
    """The measured process, found by its own command line as soon as it is there."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"--pass" in words and str(run / "config.yaml").encode() in words:
                    return int(entry.name)
        time.sleep(0.1)
    raise AssertionError("the measured process is not there")


def gone(pid: int) -> bool:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_interrupt_keeps_what_was_measured(running: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = running
    pid = measured_pid(run)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert gone(pid)
    assert manifest(run)["status"] == "partial"
    assert statuses(run) == {"nvml": "complete", "clean": "failed", "ceilings": "skipped", "torch": "skipped"}
    assert len(json.loads((run / "raw/clean/timings.json").read_text())["iterations"]) >= 1
    assert "interrupted after" in (run / "report.md").read_text()
    assert "report:" in out


def ended_by(number: int, process: subprocess.Popen[str], run: Path) -> str:
    """Send a signal twice and check how the run ends; its standard output."""
    pid = measured_pid(run)
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + number
    assert f"error: Ended by {signal.Signals(number).name}" in err
    assert "Traceback" not in err
    assert signal.Signals(number).name in manifest(run)["why"]
    assert gone(pid)
    assert statuses(run) == {"nvml": "complete", "clean": "failed", "ceilings": "skipped", "torch": "skipped"}
    return out


@pytest.mark.slow
def test_a_signal_ends_a_run_as_an_interrupt_does(running: tuple[subprocess.Popen[str], Path]) -> None:
    """As a scheduler ends it."""
    process, run = running
    out = ended_by(signal.SIGTERM, process, run)
    assert manifest(run)["status"] == "partial"
    assert "interrupted after" in (run / "report.md").read_text()
    assert "report:" in out


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_that_begins(starting: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = starting
    ended_by(signal.SIGHUP, process, run)
    measured = (run / "raw/clean/timings.json").exists()  # only if the machine stalled this process for seconds
    assert manifest(run)["status"] == ("partial" if measured else "failed")


@pytest.mark.slow
def test_a_killed_child_is_called_that(starting: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = starting
    os.kill(measured_pid(run), signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 4
    assert "was killed (SIGKILL)" in err
    assert manifest(run)["status"] == "failed"
    assert statuses(run)["nvml"] == "complete"


@pytest.mark.slow
def test_killing_us_leaves_a_truthful_folder_and_no_process(starting: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = starting
    pid = measured_pid(run)
    process.kill()
    process.wait()
    assert gone(pid)
    assert manifest(run)["status"] == "partial"
    assert statuses(run) == {"nvml": "started", "clean": "started", "ceilings": "pending", "torch": "pending"}
    done = llm_perf("report", str(run), cwd=run)
    assert done.returncode == 0
    assert "This run is partial" in (run / "report.md").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_before_and_during(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 30_000_000)
    done = llm_perf("run", *SMALL, "profiling.ceilings=false", cwd=small_disk)
    assert done.returncode == 3
    assert "a run needs at least" in done.stderr
    (small_disk / "filler").unlink()
    argv = [sys.executable, "-m", "llm_perf_opt", "run", "profiling=none", *SMALL]
    process = subprocess.Popen(argv, cwd=small_disk, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # the pass has begun
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(b"x" * 1_000_000):
                pass
        except OSError:
            pass
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 3, err
    assert "No space left" in err
    assert "Traceback" not in err
    run = only_run(small_disk)
    assert manifest(run)["status"] in ("partial", "failed")
    assert not (run / "raw/clean/timings.json").exists()


@pytest.mark.slow
def test_runs_never_share_a_folder(tmp_path: Path) -> None:
    same = f"hydra.run.dir={tmp_path / 'mine'}"
    first = run_json(*SMALL, "profiling=none", same, cwd=tmp_path)
    before = (tmp_path / "mine" / "run.json").read_bytes()
    second = run_json(*SMALL, "profiling=none", same, cwd=tmp_path)
    assert (first["run"], second["run"]) == (str(tmp_path / "mine"), str(tmp_path / "mine-2"))
    assert (tmp_path / "mine" / "run.json").read_bytes() == before


def test_config_dir_brings_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        "defaults:\n  - tiny\n  - _self_\nname: mine\narchitecture:\n  num_hidden_layers: 1\n"
    )
    done = llm_perf("run", "--dry-run", "--json", "--config-dir", "conf", "model=mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["config"]["model"]["architecture"]["num_hidden_layers"] == 1
    assert plan["config"]["model"]["architecture"]["hidden_size"] == 256
    assert plan["run_dir"].startswith("runs/baseline/mine/")


def test_doctor_names_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    done = llm_perf("doctor", "--json", cwd=tmp_path, env={"PATH": str(tmp_path), "NSYS": "", "NCU": ""})
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["torch"]["status"] == "ok"
    for check in checks.values():
        assert check["found"]
        assert check["status"] == "ok" or (check["costs"] and check["remedy"])
    plain = llm_perf("doctor", cwd=tmp_path)
    assert all(name in plain.stdout for name in checks)


def test_options_lists_every_group(tmp_path: Path) -> None:
    done = llm_perf("options", "--json", cwd=tmp_path)
    listed = json.loads(done.stdout)
    assert set(listed) == {"model", "dataset", "runtime", "hardware", "profiling", "launcher"}
    assert "tiny" in listed["model"]
    assert "random" not in listed["model"]


@pytest.mark.parametrize("verb", ["run", "report", "compare", "runs", "doctor", "options"])
def test_every_verb_has_help(tmp_path: Path, verb: str) -> None:
    done = llm_perf(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    done = llm_perf("report", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 5
    assert "is not a run" in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in llm_perf("report", "--debug", str(tmp_path), cwd=tmp_path).stderr


def test_a_tool_that_is_missing_leaves_a_partial_run(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "NSYS": "", "NCU": ""}
    done = llm_perf(
        "run", "profiling=nsys", "profiling.nvml.enable=false", "profiling.ceilings=false", *SMALL, cwd=tmp_path, env=environment
    )
    if "nsys" in statuses(only_run(tmp_path)) and statuses(only_run(tmp_path))["nsys"] == "complete":
        pytest.skip("nsys is in one of its usual folders")
    assert done.returncode == 3
    assert "there is no nsys" in done.stderr
    assert statuses(only_run(tmp_path)) == {"clean": "complete", "nsys": "skipped"}
    assert manifest(only_run(tmp_path))["status"] == "partial"


@pytest.mark.slow
def test_a_figure_that_cannot_be_ends_with_what_to_check_and_keeps_the_rest(tmp_path: Path) -> None:
    limits = ("hardware.peak_tflops=0.000001", "hardware.bandwidth_gbs=0.000001")
    done = llm_perf("run", "--json", "profiling=none", *SMALL, *limits, cwd=tmp_path)
    assert done.returncode == 6
    assert "against the datasheet peak" in done.stderr
    assert "hardware.peak_tflops" in done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["status"] == "complete"
    text = (Path(outcome["run"]) / "report.md").read_text()
    assert "Time to first token" in text
    assert "MFU of prefill against the datasheet peak" in text.split("## Findings")[0], "it is on the first page"
    assert llm_perf("report", outcome["run"], cwd=tmp_path).returncode == 6
    assert llm_perf("report", outcome["run"], "--peak-tflops=1000", cwd=tmp_path).returncode == 2
    mended = llm_perf("report", outcome["run"], "--peak-tflops=1000", "--bandwidth-gbs=5000", cwd=tmp_path)
    assert mended.returncode == 0, mended.stderr
    assert "1,000 TFLOP/s" in (Path(outcome["run"]) / "report.md").read_text()
