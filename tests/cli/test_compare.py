"""compare, baseline and runs as a user types them: real runs, the page of documentation line by line."""

import json
import random
import re
import shlex
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import clean_timings, iteration, manifest
from command import llm_perf
from llm_perf_opt.cli.app import BUG, app
from llm_perf_opt.core.run_folder import RunFolder
from unreadable import locked
from writing import write_record

DOCUMENT = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", DOCUMENT, re.S) for line in block.splitlines()]
SMALL = (
    "profiling=none", "hardware.threads=1", "runtime.num_new_tokens=4", "runtime.prompt_tokens=8", "runtime.min_repeats=6",
    "runtime.max_repeats=8", "runtime.max_warmup=5",
)  # fmt: skip
NONE = "not distinguishable"
TIMINGS = "raw/clean/timings.json"


def run(*words: str, cwd: Path) -> None:
    done = llm_perf("run", "--quiet", *words, *SMALL, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that the page makes, small and with known times: main and change are the same thing three times each.

    A run with the settings of an earlier one is a copy of it.
    """
    folder = tmp_path_factory.mktemp("project")
    made: dict[tuple[str, ...], Path] = {}
    for line in COMMANDS:
        _, verb, *words = shlex.split(line, comments=True)
        if verb != "run":
            continue
        (place,) = (folder / word.partition("=")[2] for word in words if word.startswith("hydra.run.dir="))
        settings = tuple(word for word in words if not word.startswith("hydra.run.dir="))
        if settings in made:
            shutil.copytree(made[settings], place)
        else:
            run(*words, cwd=folder)
            made[settings] = place
    for number, file in enumerate(sorted(folder.glob("runs/*/*/raw/clean/timings.json"))):
        noise = random.Random(number)
        own = 1 + noise.gauss(0, 0.002)
        write_times(file, [own * (1 + noise.gauss(0, 0.01)) for _ in range(20)], begun_ns=number * 10**12)
    return folder


def write_times(file: Path, factors: Sequence[float], begun_ns: int) -> None:
    """Give a run known times: a repeat per factor, of 20 ms prefill and 5 ms steps times it."""
    timings = json.loads(file.read_text())
    first = timings["iterations"][0]
    timings["iterations"] = []
    for number, factor in enumerate(factors):
        prefill, step = round(20_000_000 * factor), round(5_000_000 * factor)
        steps = [step] * len(first["steps_ns"])
        taken = {"prefill_ns": prefill, "steps_ns": steps, "wall_ns": prefill + sum(steps) + 10_000}
        timings["iterations"].append({**first, "started_ns": begun_ns + number * 10**9, **taken})
    file.write_text(json.dumps(timings))


def compare_json(*words: str, cwd: Path) -> dict[str, Any]:
    done = llm_perf("compare", *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1, 2), done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_says(project: Path) -> None:
    assert {line.split()[1] for line in COMMANDS} == {"run", "compare", "baseline", "runs"}
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[1] == "run":
            continue
        done = llm_perf(*words[1:], cwd=project)
        if "# rejected" in line:
            assert done.returncode == 2, line
            assert "--experiment runtime.batch_size" in done.stderr
        else:
            assert done.returncode in ((0, 1, 2) if "--gate" in line else (0,)), f"{line}\n{done.stderr}"
            assert "error" not in done.stderr, line
            assert done.stdout, line
    assert "<title>Comparison" in (project / "comparison.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "new", "intervals"), [("runs/main/*", "runs/change/*", True), ("runs/main/1", "runs/change/1", False)]
)
def test_the_same_thing_twice_is_not_distinguishable(project: Path, base: str, new: str, intervals: bool) -> None:
    """Three runs a side, made in turn, measure how much processes differ; one a side does not."""
    rows = [row for row in compare_json(base, new, cwd=project)["metrics"] if row["key"] in ("ttft", "tpot", "e2e")]
    assert {row["effect"]["verdict"] for row in rows} == {NONE}
    assert {"low" in row["effect"]["interval"] for row in rows} == {intervals}


def test_an_experiment_is_compared_and_says_what_differs(project: Path) -> None:
    found = compare_json("runs/main/1", "runs/batch4/1", "--experiment", "runtime.batch_size", cwd=project)
    assert [row["key"] for row in found["settings"]] == ["runtime.batch_size"]
    assert {(row["kind"], row["key"]) for row in found["facts"]} == {("workload", "batch_size")}
    assert found["cautions"]


# --- figures that are known: copies of a real run with times written into it --------------------------------------------


def with_times(project: Path, name: str, slower: float = 1.0, scatter: float = 0.001) -> str:
    """A copy of a real run whose every repeat takes the same time, up to `scatter`."""
    copy = project / "made" / name
    if not copy.exists():
        shutil.copytree(project / "runs" / "main" / "1", copy)
    factors = [slower * (1 + scatter * (number * 7 % 5 - 2)) for number in range(20)]
    write_times(copy / TIMINGS, factors, begun_ns=zlib.crc32(name.encode()))  # at another time than the run it is made of
    return str(copy.relative_to(project))


@pytest.mark.parametrize(
    ("slower", "scatter", "gates", "code", "said"),
    [
        (1.0, 0.001, ["decode.tpot=4%"], 0, "gate pass"),
        (0.8, 0.001, ["decode.tpot=0%", "throughput=0%"], 0, "new is faster"),
        (1.1, 0.001, ["tpot=4%", "memory.process=1%"], 1, "gate regression"),
        (1.1, 0.001, ["tpot=20%"], 0, "new is slower"),
        (1.04, 0.001, ["tpot=4%"], 2, "gate cannot tell"),
        (1.0, 0.1, ["tpot=4%"], 2, "runs per side"),
        (1.1, 0.001, [], 0, "new is slower"),
    ],
)
def test_exit_codes_of_gates(project: Path, slower: float, scatter: float, gates: list[str], code: int, said: str) -> None:
    base, new = with_times(project, "base", 1.0, scatter), with_times(project, "new", slower, scatter)
    words = ["compare", base, new, *[f"--gate={gate}" for gate in gates]]
    done = llm_perf(*words, "--process-spread=1", cwd=project)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert done.stderr == ""


def edited(project: Path, name: str, path: str, change: Callable[[Any], Any] | str) -> str:
    """A copy of a made run with one file of it changed: by a function of its values, or to a text."""
    source = project / with_times(project, f"{name}-source", 1.3)
    copy = project / "made" / name
    shutil.rmtree(copy, ignore_errors=True)
    source.rename(copy)
    file = copy / path
    file.write_text(change if isinstance(change, str) else json.dumps(change(json.loads(file.read_text()))))
    return str(copy.relative_to(project))


def _first_steps(values: Any, steps: Callable[[list[int]], list[int]]) -> Any:
    values["iterations"][0]["steps_ns"] = steps(values["iterations"][0]["steps_ns"])
    return values


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (TIMINGS, ""),
        (TIMINGS, '{"model":'),
        (TIMINGS, "[]"),
        (TIMINGS, lambda values: _first_steps(values, lambda steps: steps[:1])),
        (TIMINGS, lambda values: _first_steps(values, lambda _: [])),
        (TIMINGS, lambda values: _first_steps(values, lambda steps: [10**400, *steps[1:]])),
        (TIMINGS, lambda values: values | {"workload": values["workload"] | {"batch_size": 0}}),
        (TIMINGS, lambda values: values | {"workload": values["workload"] | {"padded_tokens": 1}}),
        (TIMINGS, lambda values: values | {"load_s": -1.0}),
        (TIMINGS, lambda values: values | {"model": values["model"] | {"parameters": -1}}),
        (TIMINGS, lambda values: _first_steps(values, lambda steps: [0, *steps[1:]])),
        (TIMINGS, lambda values: values | {"warmup": [values["warmup"][0] | {"wall_ns": 0}]}),
        (TIMINGS, lambda values: values | {"iterations": [values["iterations"][0] | {"started_ns": -5}]}),
        ("config.yaml", "a: ["),
        ("run.json", "[]"),
    ],
)
def test_a_damaged_run_is_never_a_regression(project: Path, path: str, change: Callable[[Any], Any] | str) -> None:
    base, damaged = with_times(project, "base"), edited(project, "damaged", path, change)
    for words in ((base, damaged), (damaged, base)):
        done = llm_perf("compare", *words, "--gate=tpot=4%", "--process-spread=1", cwd=project)
        assert done.returncode == 5, done.stdout + done.stderr
        assert "error: " in done.stderr
        assert Path(path).name in done.stderr
        assert BUG not in done.stderr


def test_times_that_may_not_be_read_are_not_called_damaged(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, denied = with_times(project, "base"), with_times(project, "denied")
    locked(monkeypatch, project / denied / TIMINGS)
    done = llm_perf("compare", base, project / denied, cwd=project)
    assert done.returncode == 5, done.stderr
    assert "timings.json cannot be read: Permission denied" in done.stderr
    assert "Check its permissions." in done.stderr
    assert "damaged" not in done.stderr


def test_a_run_without_the_times_its_manifest_promises_is_damaged(project: Path) -> None:
    damaged = edited(project, "emptied", TIMINGS, "")
    (project / damaged / TIMINGS).unlink()
    done = llm_perf("compare", with_times(project, "base"), damaged, "--gate=tpot=4%", cwd=project)
    assert done.returncode == 5, done.stderr
    assert "timings.json is missing" in done.stderr


def test_a_run_of_an_unknown_machine_or_unknown_settings_is_said_to_be(project: Path) -> None:
    base = with_times(project, "base")
    for path, text in (
        ("env.json", "[]"),
        *(("config.yaml", text) for text in ("- 1\n", "", "a: b\n", "model: tiny\nruntime: {}\n")),
    ):
        made = edited(project, "unknown", path, text)
        done = llm_perf("compare", base, made, cwd=project)
        if path == "env.json":
            assert done.returncode == 2
            assert "is unknown" in done.stderr
            done = llm_perf("compare", base, made, "--allow", "hardware", cwd=project)
        assert done.returncode == 0, done.stderr
        assert "made/unknown" in next(line for line in done.stdout.splitlines() if " unknown: " in line)
        assert "(not there)" not in done.stdout
        assert "setting " not in done.stdout


def test_a_copy_of_a_run_is_no_repeat_and_no_other_side(project: Path) -> None:
    for name in ("copy1", "copy2"):
        if not (project / "copies" / name).exists():
            shutil.copytree(project / "runs" / "main" / "1", project / "copies" / name)
    for words in (["runs/main/1", "copies/copy1"], ["copies/copy1,copies/copy2", "runs/change/1"]):
        done = llm_perf("compare", *words, "--gate=tpot=4%", cwd=project)
        assert done.returncode == 2
        assert "are one run" in done.stderr
    done = llm_perf("baseline", "set", "copies", "copies/copy1", "copies/copy2", cwd=project)
    assert done.returncode == 2
    assert "are one run" in done.stderr


def test_other_prompts_behind_one_path_are_refused(project: Path) -> None:
    other = edited(project, "reprompted", "raw/clean/inputs.json", lambda values: values | {"sha256": "f" * 64})
    done = llm_perf("compare", with_times(project, "base"), other, cwd=project)
    assert done.returncode == 2
    assert "differ in their workload: prompts" in done.stderr
    (project / other / "raw/clean/inputs.json").unlink()
    done = llm_perf("compare", with_times(project, "base"), other, cwd=project)
    assert done.returncode == 0
    assert "made/reprompted are unknown and may differ" in done.stdout


def test_a_gate_on_one_run_a_side_of_a_cpu_cannot_be_told(project: Path) -> None:
    base, new = with_times(project, "base"), with_times(project, "new", 1.5)
    done = llm_perf("compare", base, new, "--gate=tpot=4%", cwd=project)
    assert done.returncode == 2
    assert "To decide: 3 runs per side" in done.stdout
    assert "Too few runs for a verdict: other processes used this CPU during a run, or its load was not sampled" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["runs/main/1"], 2, "The new side has no run"),
        (["runs/main/1", "runs/main/1"], 2, "is on both sides"),
        (["runs/main/1,runs/main/1", "runs/change/1"], 2, "is given twice"),
        (["runs/main", "runs/change/1"], 2, "contains 3 runs"),
        (["runs/main/1", "mian"], 2, "neither a run nor a baseline"),
        (["runs/nothing*", "runs/change/1"], 2, "No run matches"),
        (["runs/main/1", "runs/change/1", "--gate", "tpto=3%"], 2, "Did you mean 'tpot'?"),
        (["runs/main/1", "runs/change/1", "--experiment", "runtime.batch"], 2, "no such setting"),
        (["runs/main/1", "runs/change/1", "--json", "--markdown"], 2, "standard output"),
        (["runs/main/1", "runs/change/1", "--out", "page.pdf"], 2, ".html, .md or .json"),
        (["runs/main/1", "damaged"], 5, "cannot be read"),
    ],
)
def test_a_wrong_request_is_refused(project: Path, words: list[str], code: int, said: str) -> None:
    (project / "damaged").mkdir(exist_ok=True)
    (project / "damaged" / "run.json").write_text("{")
    done = llm_perf("compare", *words, cwd=project)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_baseline_whose_run_is_gone_says_so(project: Path) -> None:
    shutil.copytree(project / "runs" / "main" / "1", project / "runs" / "short-lived")
    assert llm_perf("baseline", "set", "gone", "runs/short-lived", cwd=project).returncode == 0
    shutil.rmtree(project / "runs" / "short-lived")
    done = llm_perf("compare", "gone", "runs/change/1", cwd=project)
    assert done.returncode == 2
    assert "no longer a run" in done.stderr
    assert "(gone: " in llm_perf("baseline", "list", cwd=project).stdout
    assert llm_perf("baseline", "set", "../x", "runs/main/1", cwd=project).returncode == 2
    assert llm_perf("baseline", "remove", "gone", cwd=project).returncode == 0


def test_a_baseline_is_refused_what_a_side_is(project: Path) -> None:
    sweep = project / "runs" / "swept"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    for words, said in (
        (["runs/main/1", "runs/batch4/1"], "The runs of the baseline 'mixed' are not repeats of one configuration"),
        (["runs/swept"], "is a sweep of several configurations"),
        (["runs/main"], "contains 3 runs"),
    ):
        done = llm_perf("baseline", "set", "mixed", *words, cwd=project)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
    sweep.joinpath("sweep.json").unlink()
    assert not (project / "runs" / "baselines.json").exists() or "mixed" not in (project / "runs" / "baselines.json").read_text()


def test_runs_are_listed_as_data(project: Path) -> None:
    done = llm_perf("runs", "--json", "--limit", "0", cwd=project)
    rows = json.loads(done.stdout)
    assert {"runs/main/1", "runs/change/2", "runs/batch4/1"} <= {row["path"] for row in rows}
    assert [row["created"] for row in rows] == sorted((row["created"] for row in rows), reverse=True)
    assert all(row["model"] == "tiny" and row["tpot_ns"] > 0 for row in rows)


# --- a machine that changes its speed: times written into runs that need no model ----------------------------------------


def a_run_of(path: Path, factors: Sequence[float], created: str, begun: int) -> str:
    """A run whose repeats take these times the usual."""
    folder = RunFolder.create(path)
    folder.write_manifest(manifest(created=created))
    times = [factor * (1 + index % 3 * 0.002) for index, factor in enumerate(factors)]
    repeats = [iteration(round(100e6 * time), [round(10e6 * time)] * 3, begun + index) for index, time in enumerate(times)]
    write_record(folder.clean_file, clean_timings(repeats))
    return str(path)


@pytest.mark.parametrize(
    ("base", "code", "said"),
    [
        ([1.0] * 30, 1, "gate regression"),
        ([1.0] * 28 + [1.08] * 2, 2, "repeats 29 to 30 of base ran at the level of new"),
        ([1.0] * 20 + [1.08] * 10, 2, "repeats shift by +8."),
        ([1.0 + 0.08 * index / 29 for index in range(30)], 2, "from first to last"),
    ],
    ids=["steady", "a switch at the very end", "a switch inside", "a drift"],
)
def test_a_machine_that_changed_its_speed_ends_no_gate_with_1(tmp_path: Path, base: list[float], code: int, said: str) -> None:
    one = a_run_of(tmp_path / "base", base, "2026-01-01T00:00:00+00:00", 0)
    other = a_run_of(tmp_path / "new", [1.08] * 30, "2026-01-02T00:00:00+00:00", 1_000_000)
    words = ["compare", one, other, "--gate=tpot=3%", "--process-spread=1", "--allow=hardware"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    assert said in done.stdout


def test_a_plan_states_the_runs_their_time_and_the_commands(project: Path) -> None:
    pilots = ["runs/main/1", "runs/main/2", "runs/main/3"]
    done = llm_perf("compare", "--plan", *pilots, "--effect", "5%", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["effect"], plan["power"], plan["repeats"], plan["runs"]) == (0.05, 0.9, 20, 3)
    rows = {metric["key"]: metric["forecast"]["table"] for metric in plan["metrics"]}
    assert set(rows) == {"e2e", "ttft", "tpot"}
    assert all(table[0]["runs"] == 3 and table[0]["power"] > 0.99 for table in rows.values())
    assert plan["seconds"] == pytest.approx(6 * plan["run_seconds"])
    assert [pilot["forecast"]["noise"]["runs"] for pilot in plan["metrics"]] == [3, 3, 3]
    made = [shlex.split(line) for line in plan["commands"]]
    folders = [words[-1].removeprefix("hydra.run.dir=") for words in made[:-1]]
    assert folders == [f"runs/plan1-{side}/{number}" for number in (1, 2, 3) for side in ("base", "new")]
    assert made[-1][1:] == ["compare", "runs/plan1-base/*", "runs/plan1-new/*"]
    shown = llm_perf("compare", "--plan", *pilots, cwd=project).stdout
    assert "hydra.run.dir=runs/plan1-new/3" in shown
    assert "Make the runs in turn" in shown


def test_a_plan_from_one_pilot_says_what_it_assumes_and_what_cannot_be_reached(project: Path) -> None:
    words = ["compare", "--plan", "runs/main/1", "--json"]
    plan = json.loads(llm_perf(*words, "--process-spread=1", "--repeats=12", cwd=project).stdout)
    assert plan["repeats"] == 12
    assert plan["metrics"][0]["forecast"]["noise"]["process"] == 0.01
    assert "One pilot does not show how much processes differ" in plan["cautions"][0]
    assert all("runtime.min_repeats=12" in line for line in plan["commands"][:-1])
    busy = json.loads(llm_perf(*words, cwd=project).stdout)
    assert "too few runs to measure" in busy["runs"]["why"]
    far = json.loads(llm_perf(*words, "--process-spread=50", cwd=project).stdout)
    assert "30 runs per side do not reach it" in far["runs"]["why"]
    assert far["commands"] == far["runs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "runs/main/1", "--effect", "0.5%"], "--smallest"),
        (["--plan", "runs/main/1", "--effect", "much"], "--effect"),
        (["--plan", "runs/main/1", "--effect", "-100%"], "--effect"),
        (["--plan", "runs/main/1", "--power", "100%"], "--power"),
        (["--plan", "runs/main/1", "--repeats", "3"], "--repeats"),
        (["--plan", "runs/main/1", "--gate", "tpot=3%"], "--gate"),
        (["--plan", "runs/main/1", "runs/batch4/1"], "batch_size"),
        (["--plan"], "no run"),
        (["runs/main/1", "runs/change/1", "--effect", "5%"], "--plan"),
        (["runs/main/1", "runs/change/1", "runs/change/2"], "two sides"),
    ],
)
def test_what_a_plan_cannot_use_is_rejected(project: Path, words: list[str], said: str) -> None:
    done = llm_perf("compare", *words, cwd=project)
    assert done.returncode == 2
    assert said in done.stderr
