"""The registry of passes, and a pass of another package in a single file."""

import json
import sys
from pathlib import Path

import pytest

from llm_perf_opt.config import passes
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.passes import known_passes, pass_named, planned_passes, sees_stages
from llm_perf_opt.core.errors import ConfigError, ResourceError
from plugins import ROOT, bring, installed, llm_perf, the_minimal_runner
from synthetic_traces import Recipe, write_trace

FAKE = '''
"""A profiler that leaves a trace it was given."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.config.passes import EVERY_STAGE, Pass, is_there
from llm_perf_opt.profiling.passes import plain_run, run_alone

RECORDED = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True)
class Settings:
    enable: bool = False
    steps: int = 2


def launch(capture):
    def run(plan, folder, on_message):
        finished = plain_run()(plan, folder, on_message)
        if RECORDED.exists():
            shutil.copy(RECORDED, folder.raw("fakeprof") / "trace.json")
        return finished

    steps = capture.settings("fakeprof").steps
    run_alone(capture, "fakeprof", capture.work("fakeprof", steps), "fakeprof 1.0", run=run)


PASS = Pass(
    "fakeprof",
    "a profiler of a test",
    45,
    launch,
    settings=Settings,
    leaves={"trace.json": is_there},
    trace="trace.json",
    tool="Fakeprof",
    stages=EVERY_STAGE,
    programs=True,
)
'''
SHORT = ["hardware=cpu", "profiling=none", "runtime.num_new_tokens=4", "runtime.max_repeats=6", "runtime.min_repeats=6"]
ENABLED = "profiling.passes.fakeprof.enable=true"


def brought(site: Path, *, recorded: bool = True) -> Path:
    """The one file, as a package brings it."""
    bring(site, "fakeprof", "fakeprof_pass:PASS", FAKE, "fakeprof", passes.GROUP)
    if recorded:
        write_trace(site / "recorded.json", Recipe(steps=3, kernels_per_step=4))
    return site


def test_the_passes_of_the_package_run_in_their_order() -> None:
    names = [one.name for one in known_passes()]
    assert names == sorted(names, key=lambda name: [one.order for one in known_passes() if one.name == name])
    assert planned_passes(compose(["profiling=full"]).config) == (
        "nvml",
        "clean",
        "ceilings",
        "torch",
        "nsys",
        "ncu_selftest",
        "ncu_prefill",
        "ncu_decode",
    )
    assert planned_passes(compose(["profiling=ncu", "runtime.num_new_tokens=1"]).config)[-1] == "ncu_prefill"
    assert planned_passes(compose(["profiling=none"]).config) == ("clean",)


def test_a_name_cannot_be_taken_twice(tmp_path: Path) -> None:
    site = bring(tmp_path / "site", "torch", "theirs:PASS", "PASS = None", "theirs", passes.GROUP)
    with installed(site), pytest.raises(ConfigError, match="'torch' is provided by theirs and by llm-perf-opt"):
        known_passes()


@pytest.mark.parametrize(("name", "remedy"), [("nsys_decode", r"profiling\.nsys\."), ("program", "llm-perf exec")])
def test_settings_of_a_built_in_pass_are_elsewhere(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        compose([f"profiling.passes.{name}.enable=true"])


def test_only_passes_that_run_the_model_under_a_profiler_have_an_overhead() -> None:
    assert [name for name in ("clean", "nvml", "ceilings", "ncu_selftest") if sees_stages(name)] == []
    assert [name for name in ("torch", "nsys", "ncu_decode", "of another machine") if not sees_stages(name)] == []


def test_a_pass_of_one_file_is_in_the_run_and_its_report(tmp_path: Path) -> None:
    """Next to a runtime of one file: neither needs a change anywhere else."""
    site = brought(tmp_path / "site")
    bring(site, "echo", "echo_runner:open_echo", the_minimal_runner())
    run = tmp_path / "run"
    words = ["run", "-q", "--json", "runtime=echo", *SHORT, ENABLED, f"hydra.run.dir={run}"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    entries = {entry["name"]: entry for entry in json.loads((run / "run.json").read_text())["passes"]}
    assert {name: entry["status"] for name, entry in entries.items()} == {"clean": "complete", "fakeprof": "complete"}
    assert entries["fakeprof"]["tool_version"] == "fakeprof 1.0"
    assert entries["fakeprof"]["argv"][-2:] == ["--decode-steps", "2"]
    findings = json.loads((run / "findings.json").read_text())
    assert findings["source"] == "raw/fakeprof/trace.json"
    assert findings["complete"]
    report = (run / "report.md").read_text()
    (row,) = [line for line in report.splitlines() if line.startswith("| fakeprof |")]
    assert "complete | fakeprof 1.0" in row
    assert "×" in row, "what it costs the stages is told"
    assert "Fakeprof" in (run / "kernels.md").read_text()
    assert "run by echo 1.0" in report
    again = llm_perf("report", str(run), cwd=tmp_path)
    assert again.returncode == 0, "where the package is not installed, the run still opens"
    assert "| fakeprof |" in (run / "report.md").read_text()


def test_a_program_is_run_under_the_pass_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    module = page.split("```python\n# myprof_pass.py\n")[1].split("```")[0]
    site = bring(tmp_path / "site", "myprof", "myprof_pass:PASS", module, "myprof", passes.GROUP)
    write_trace(tmp_path / "recorded.json", Recipe(steps=3, kernels_per_step=4))
    words = ["exec", "-q", "--passes", "myprof,program", "--out", str(tmp_path / "run"), "--", sys.executable, "-c", "print(1)"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert (done.returncode, "My profiler was requested, but there is no myprof" in done.stderr) == (3, True), done.stderr
    entries = json.loads((tmp_path / "run" / "run.json").read_text())["passes"]
    assert [(entry["name"], entry["status"]) for entry in entries] == [("program", "complete"), ("myprof", "skipped")]
    tool = tmp_path / "myprof"
    tool.write_text(f'#!/bin/sh\ncp "{tmp_path}/recorded.json" "$2" && shift 3 && exec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("MYPROF", str(tool))
    words[5] = str(tmp_path / "again")
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "again" / "run.json").read_text())["passes"]
    assert [(entry["name"], entry["status"]) for entry in entries] == [("program", "complete"), ("myprof", "complete")]
    assert entries[1]["argv"][-3:] == words[-3:]
    assert "nvjet" in (tmp_path / "again" / "kernels.md").read_text()


def test_what_it_must_leave_is_read_back(tmp_path: Path) -> None:
    site = brought(tmp_path / "site", recorded=False)
    run = tmp_path / "run"
    words = ["run", "-q", *SHORT, ENABLED, "profiling.clean=false", f"hydra.run.dir={run}"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 4
    (entry,) = json.loads((run / "run.json").read_text())["passes"]
    assert entry["status"] == "failed"
    assert "trace.json is missing" in entry["why"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("profiling.passes.fakeprf.enable=true", "profiling.passes.fakeprf: there is no such pass. Did you mean 'fakeprof'?"),
        ("profiling.passes.fakeprof.step=2", "'step' is not known in profiling.passes.fakeprof. Did you mean 'steps'?"),
        ("profiling.passes.fakeprof.steps=x", "profiling.passes.fakeprof: Expected `int`, got `str`"),
        ("profiling.passes.fakeprof=x", "profiling.passes.fakeprof='x': expected the fields enable, steps."),
        ("profiling.passes.nsys.enable=true", "profiling.passes.nsys has no effect."),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, words: str, said: str) -> None:
    with installed(brought(tmp_path / "site")), pytest.raises(ConfigError) as caught:
        compose([words])
    assert said in caught.value.fact
    assert caught.value.remedy or "expected the fields" in said


def test_no_pass_at_all_is_refused(tmp_path: Path) -> None:
    none = ["profiling=none", "profiling.clean=false"]
    with installed(brought(tmp_path / "site")):
        assert planned_passes(compose([*none, ENABLED]).config) == ("fakeprof",)
        with pytest.raises(ConfigError, match="requests no pass"):
            compose([*none, ENABLED.replace("true", "false")])


@pytest.mark.parametrize(
    ("target", "module", "said"),
    [
        ("gone:PASS", "", "cannot be loaded from gone:PASS"),
        ("half:PASS", "PASS = 3", "is not a Pass of this name"),
        ("broken:PASS", "raise ValueError('no')", "ValueError: no"),
    ],
)
def test_one_that_cannot_be_loaded_is_told_when_it_is_asked_for(tmp_path: Path, target: str, module: str, said: str) -> None:
    site = bring(tmp_path / "site", "fakeprof", target, module, "fakeprof", passes.GROUP)
    with installed(site):
        assert pass_named("fakeprof") is None
        assert planned_passes(compose(["profiling=none"]).config) == ("clean",), "the others do not mind"
        with pytest.raises(ResourceError) as caught:
            compose([ENABLED])
    assert said in caught.value.fact
