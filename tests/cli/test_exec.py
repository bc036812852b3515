"""llm-perf exec, as a user types it."""

import csv
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import command
from command import HANG_S
from llm_perf_opt.cli.app import app
from llm_perf_opt.cli.exec import run_name
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling import python_program
from llm_perf_opt.profiling.program import only_pass
from llm_perf_opt.profiling.vendor import probe
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, nsys_log_problems
from llm_perf_opt.profiling.vendor.tool_pass import STARTS

SCRIPT = """
import sys, time, nvtx
with nvtx.annotate("outer", domain="mine"):
    for _ in range(3):
        with nvtx.annotate("inner", domain="mine"):
            time.sleep(0.01)
print("said", sys.argv[1:])
"""


def llm_perf(cwd: Path, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return command.llm_perf(*argv, cwd=cwd, env=environment)


def below_nsys(cwd: Path, nsys: Path, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command, again if nsys loses its agent: `exec` itself does not start a user's program twice for one pass."""
    for _start in range(STARTS):
        shutil.rmtree(cwd / "runs", ignore_errors=True)
        done = llm_perf(cwd, *argv, NSYS=str(nsys), **environment)
        run, _ = only_run(cwd)
        if AGENT_LOST not in {problem.id for problem in nsys_log_problems((run / "raw/nsys/log.txt").read_text())}:
            break
    return done


def only_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    (run,) = folder.glob("runs/exec/*/*")
    return run, json.loads((run / "run.json").read_text())


def test_a_program_alone_keeps_its_time_its_arguments_and_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('said', sys.argv[1:])")
    done = llm_perf(tmp_path, "exec", "--passes", "program", "--", sys.executable, "script.py", "--json", "a b; rm -rf $HOME")
    assert done.returncode == 0, done.stderr
    run, manifest = only_run(tmp_path)
    assert manifest["status"] == "complete"
    assert manifest["passes"][0]["seconds"] > 0
    assert "said ['--json', 'a b; rm -rf $HOME']" in (run / "raw/program/log.txt").read_text()
    assert "# llm-perf exec" in (run / "report.md").read_text()
    assert "said [" in (run / "report.html").read_text()
    assert f"report: {run.resolve()}/report.html" in done.stdout
    assert llm_perf(tmp_path, "runs", "--html").returncode == 0
    assert f"{run.name}/report.html" in (tmp_path / "runs" / "index.html").read_text(), "the page of all runs links to it"


def test_a_program_keeps_its_own_environment(tmp_path: Path, real_nsys: Path) -> None:
    """A script that fetches its model works below `exec` as it does by itself."""
    code = "import os; print('hub', os.environ.get('HF_HUB_OFFLINE'), os.environ.get('CUDA_DEVICE_ORDER'))"
    environment = {"HF_HUB_OFFLINE": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    done = below_nsys(tmp_path, real_nsys, "exec", "--passes", "nsys,program", "--", sys.executable, "-c", code, **environment)
    assert done.returncode == 0, done.stderr
    run, manifest = only_run(tmp_path)
    assert [entry["name"] for entry in manifest["passes"]] == ["program", "nsys"]
    before = (run / "report.md").read_bytes()
    again = llm_perf(tmp_path, "report", str(run))
    assert again.returncode == 0, again.stderr
    assert (run / "report.md").read_bytes() == before, "made anew, it is the report of a program still"
    for name in ("program", "nsys"):
        assert "hub 0 FASTEST_FIRST" in (run / "raw" / name / "log.txt").read_text()


def test_regions_of_a_program_below_the_real_nsys(tmp_path: Path, real_nsys: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = below_nsys(tmp_path, real_nsys, "exec", "--json", "--passes", "program,nsys", "--", sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (group,) = found["regions"]["groups"]
    assert {tuple(region["path"]): region["instances"] for region in group["regions"]} == {
        ("mine@outer",): 1,
        ("mine@outer", "mine@inner"): 3,
    }


def test_the_regions_that_are_asked_for(tmp_path: Path, real_nsys: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = below_nsys(
        tmp_path, real_nsys, "exec", "--json", "--passes", "nsys", "--aggregate", "--without-regions", "*inner", "--",
        sys.executable, "script.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (group,) = json.loads(done.stdout)["regions"]["groups"]
    assert [region["path"] for region in group["regions"]] == [["mine@outer"]]
    run, _ = only_run(tmp_path)
    before = (run / "regions.md").read_bytes()
    assert llm_perf(tmp_path, "report", str(run)).returncode == 0
    assert (run / "regions.md").read_bytes() == before, "made anew, it shows what was asked for"


def test_a_gate_on_a_range_of_the_program(tmp_path: Path, real_nsys: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = below_nsys(tmp_path, real_nsys, "exec", "--passes", "nsys", "--range", "outer@mine", "--", sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    _, manifest = only_run(tmp_path)
    assert "--nvtx-capture=outer@mine" in manifest["passes"][0]["argv"]


def test_a_gate_that_never_opens_is_told(tmp_path: Path, real_nsys: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = below_nsys(
        tmp_path, real_nsys, "exec", "--passes", "nsys", "--range", "absent@mine", "--", sys.executable, "script.py"
    )
    assert done.returncode != 0
    _, manifest = only_run(tmp_path)
    assert manifest["passes"][0]["status"] == "failed"
    assert "recorded nothing" in manifest["passes"][0]["why"]


def test_a_program_that_fails_alone_is_not_run_again(tmp_path: Path) -> None:
    done = llm_perf(tmp_path, "exec", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode != 0
    _, manifest = only_run(tmp_path)
    assert [entry["status"] for entry in manifest["passes"]] == ["failed", "skipped", "skipped"]
    assert "exit code 7" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["exec", "--passes", "program,nvprof", "--", "x"], "nvprof"),
        (["exec", "--passes", ",", "--", "x"], "No pass"),
        (["exec", "--metrics", "rooflin", "--", "x"], "roofline"),
        (["exec", "--section", "no such", "--", "x"], "not the name of a section"),
        (["exec", "--regions", "regex:(", "--", "x"], "regex:("),
        (["exec", "--range", "decode*", "--", "x"], "asterisk"),
        (["exec", "--passes", "program", "--", "no-such-program-anywhere"], "cannot be run"),
        (["exec"], "PROGRAM"),
    ],
)
def test_what_cannot_work_is_refused_in_words(tmp_path: Path, argv: list[str], words: str) -> None:
    done = llm_perf(tmp_path, *argv)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_remedy_names_options_of_exec(tmp_path: Path) -> None:
    done = llm_perf(tmp_path, "exec", "--timeout-s", "1", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert done.returncode == 4
    assert "Raise --timeout-s" in done.stderr
    assert "profiling." not in done.stderr


def test_a_missing_tool_is_left_out_by_an_option_of_exec(tmp_path: Path) -> None:
    done = llm_perf(tmp_path, "exec", "--passes", "nsys", "--", sys.executable, "-c", "pass", NSYS="", PATH="/none")
    if done.returncode == 0:
        pytest.skip("nsys is in one of its usual folders")
    assert "--passes program" in done.stderr
    done = llm_perf(tmp_path, "exec", "--passes", "nsys", "--", sys.executable, "-c", "pass", NSYS="/no/nsys", PATH="/none")
    assert "the variable NSYS is /no/nsys" in done.stderr


@pytest.mark.slow
def test_sigterm_ends_a_program_in_order(tmp_path: Path) -> None:
    """As a scheduler ends it: nothing runs on, and the run says how it ended."""
    code = "import os, sys, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid'); time.sleep(600)"
    argv = [sys.executable, "-m", "llm_perf_opt", "exec", "--passes", "program", "--", sys.executable, "-c", code]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 143
    assert "error: Ended by SIGTERM." in errors
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    _, manifest = only_run(tmp_path)
    assert (manifest["status"], manifest["passes"][0]["status"]) == ("failed", "failed")
    assert manifest["why"] == manifest["passes"][0]["why"] == "Ended by SIGTERM."


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["python", "my_script.py", "--data", "other.py"], "my_script"),
        (["/usr/bin/python3.11", "-u", "jobs/train.py"], "train"),
        (["python", "-m", "package.module", "x.py"], "package.module"),
        (["python", "-c", "import x.py"], "python"),
        (["torchrun", "--nproc_per_node", "2", "train.py"], "train"),
        (["uv", "run", "bench.py"], "bench"),
        (["bash", "job.sh"], "job"),
        (["bash", "-c", "python x.py"], "bash"),
        (["python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py"], "train"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg.train"], "pkg.train"),
        (["python", "-mpkg.mod", "x.py"], "pkg.mod"),
        (["python", "-X", "dev", "-W", "ignore", "/x/train"], "train"),
        (["time", "python", "x.py"], "x"),
        (["time", "./bench", "notes.py"], "bench"),
        (["nsys", "profile", "-o", "out", "python", "x.py"], "x"),
        (["env", "A=1", "torchrun", "train.py"], "train"),
        (["uv", "run", "python", "-m"], "python"),
        (["./bench", "notes.py"], "bench"),
        (["python"], "python"),
        (["python", "../.hidden.py"], "hidden"),
        (["python", "a b;$.py"], "a_b__"),
        (["..."], "program"),
        (["x" * 300], "x" * 100),
    ],
)
def test_a_run_is_named_after_the_script(argv: list[str], name: str) -> None:
    assert run_name(argv) == name


@pytest.fixture
def without_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "_on_path_or_installed", lambda name: None)
    for name in ("NSYS", "NCU"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.py").write_text(
        "import sys\nprint('\\x1b[31mlast words')\nprint('loud', file=sys.stderr)\nsys.exit(len(sys.argv) - 1)"
    )
    return tmp_path


def test_tools_that_are_not_here_are_left_out_and_named(without_tools: Path) -> None:
    done = CliRunner().invoke(app, ["exec", "--json", "--quiet", "--", sys.executable, "job.py"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["status"] == "complete"
    assert Path(found["output"]).read_text().splitlines()[-1] == "loud"
    run, manifest = only_run(without_tools)
    assert run.parent.name == "job"
    assert {entry["name"]: entry["status"] for entry in manifest["passes"]} == {
        "program": "complete", "nsys": "skipped", "ncu": "skipped",
    }  # fmt: skip
    for entry in manifest["passes"][1:]:
        assert f"there is no {entry['name']}" in entry["why"]
        assert "Install it" in entry["remedy"]
    page = (run / "report.md").read_text()
    assert "raw/program/log.txt" in page
    assert "last words\nloud\n" in page
    assert "\x1b" not in page


@pytest.mark.parametrize(("words", "code"), [(["--passes", "program,nsys"], 3), (["--passes", "nsys"], 3)])
def test_a_pass_that_is_asked_for_by_name_must_run(without_tools: Path, words: list[str], code: int) -> None:
    done = CliRunner().invoke(app, ["exec", "--quiet", *words, "--", sys.executable, "job.py"])
    assert isinstance(done.exception, LlmPerfError)
    assert done.exception.exit_code == code
    assert "was requested" in done.exception.fact


def test_a_program_that_fails_is_an_error_whatever_tools_are_here(without_tools: Path) -> None:
    done = CliRunner().invoke(app, ["exec", "--quiet", "--", sys.executable, "job.py", "x"])
    assert isinstance(done.exception, LlmPerfError)
    assert done.exception.exit_code == 4
    assert "output: " in done.stdout, "where to look is said all the same"


def test_the_page_is_laid_out_wherever_it_is_printed(without_tools: Path) -> None:
    done = CliRunner().invoke(app, ["exec", "--quiet", "--", sys.executable, "job.py"])
    folder = RunFolder.open(only_run(without_tools)[0])
    assert not re.search(r"\||##|```|\\[_*`]", done.stdout), "Markdown is in report.md"
    assert "## Output" in folder.report_file.read_text()
    assert "last words" in done.stdout
    assert str(folder.log_file("program")) in done.stdout


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ([], "once, in the pass program"),
        (["--once"], "once, in the pass program"),
        (["--passes", "program,nsys"], "2 times, once per pass: program, nsys"),
    ],
)
def test_how_often_the_program_runs_is_said_before_it_starts(without_tools: Path, words: list[str], times: str) -> None:
    done = CliRunner().invoke(app, ["exec", *words, "--", "sh", "-c", "echo x >> ran"])
    first, *later = done.stderr.splitlines()
    assert times in first
    assert any(line.startswith("program: running the program") for line in later)
    assert not any("starting" in line for line in later)
    assert (without_tools / "ran").read_text() == "x\n", "nsys is not here"


def test_a_python_program_that_runs_once_does_so_under_torch(without_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_program, "ask", lambda *_, **__: "torch")
    assert only_pass([sys.executable, "job.py"]) == "torch"
    assert only_pass(["sh", "job.sh"]) == "program"
    monkeypatch.setattr(python_program, "ask", lambda *_, **__: "")
    assert only_pass([sys.executable, "job.py"]) == "program", "its interpreter has no torch"
    done = CliRunner().invoke(app, ["exec", "--once", "--passes", "program,torch", "--", sys.executable, "job.py"])
    assert isinstance(done.exception, ConfigError)
    assert "--passes" in done.exception.fact
    assert not (without_tools / "runs").exists()
    done = CliRunner().invoke(app, ["exec", "--once", "--passes", "program", "--", sys.executable, "job.py"])
    assert [entry["name"] for entry in only_run(without_tools)[1]["passes"]] == ["program"]


@pytest.mark.slow
def test_a_terminal_shows_colors_and_no_escapes(tmp_path: Path) -> None:
    """What draws reaches the terminal as it is; what the program printed does not."""
    parent, terminal = pty.openpty()
    program = [sys.executable, "-c", r"print('\x1b[31mred')"]
    argv = [sys.executable, "-m", "llm_perf_opt", "exec", "--passes", "program", "--", *program]
    seen = b""
    with subprocess.Popen(argv, cwd=tmp_path, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL) as process:
        os.close(terminal)
        try:
            while chunk := os.read(parent, 65536):
                seen += chunk
        except OSError:  # the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0, seen
    assert b"\x1b[" in seen
    assert b"\\x1b[" not in seen.replace(b"\\x1b[31mred", b""), "the display is not printed as escapes"
    assert b"\x1b[31mred" not in seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--passes", "program", "--metrics", "roofline"], "Nothing collects the metric set roofline"),
        (["--passes", "program,nsys", "--add", "lts__t_bytes.sum"], "Add ncu to --passes"),
        (["--nsys-args=--output=x"], "--nsys-args"),
        (["--ncu-args", "--set full"], "--ncu-set"),
        (["--ncu-args", "'"], "--ncu-args"),
        (["--sample", "all"], "--sample"),
        (["--capture", "nvtx"], "--range"),
        (["--capture", "cudaProfilerApi", "--range", "a@b"], "--range and --capture"),
        (["--kernel-regex", "("], "--kernel-regex"),
        (["--torch-preset", "most"], "--torch-preset"),
        (["--passes", "program,torch"], "Python programs only"),
    ],
)
def test_what_cannot_be_collected_is_refused_with_the_option_that_asked_for_it(
    without_tools: Path, options: list[str], words: str
) -> None:
    done = CliRunner().invoke(app, ["exec", *options, "--", "true"])
    assert isinstance(done.exception, LlmPerfError), done.output
    assert words in f"{done.exception.fact} {done.exception.remedy}"
    assert "profiling." not in done.exception.fact
    assert not (without_tools / "runs").exists()


def test_a_program_has_an_environment_and_its_own_metric_set(without_tools: Path) -> None:
    (without_tools / "conf/metrics").mkdir(parents=True)
    (without_tools / "conf/metrics/mine.yaml").write_text("ncu: [lts__t_bytes.sum]\n")
    done = CliRunner().invoke(app, ["exec", "--quiet", "--metrics", "mine", "--", sys.executable, "job.py"])
    assert done.exit_code == 0, done.output
    run, _ = only_run(without_tools)
    assert json.loads((run / "env.json").read_text())["cpu"]["usable"] >= 1
    assert yaml.safe_load((run / "config.yaml").read_text())["profiling"]["metrics"]["sets"] == ["mine"]
    page = (run / "report.md").read_text()
    assert "## Environment" in page
    assert "n/a: the run was made without the torch pass" in page


@pytest.mark.slow
def test_operators_of_a_python_program(without_tools: Path) -> None:
    (without_tools / "job.py").write_text("import torch\nfor _ in range(3):\n    torch.mm(torch.ones(4, 8), torch.ones(8, 16))\n")
    words = ["exec", "--quiet", "--passes", "program,torch", "--torch-preset", "full", "--", sys.executable, "job.py"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    run, manifest = only_run(without_tools)
    assert {entry["name"]: entry["status"] for entry in manifest["passes"]} == {"program": "complete", "torch": "complete"}
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO((run / "ops.csv").read_text()))}
    assert (rows["aten::mm"]["calls"], rows["aten::mm"]["flops"]) == ("3", str(3 * 2 * 4 * 8 * 16))
    assert "aten::mm" in (run / "operators.md").read_text()


def test_what_holds_arguments_or_output_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Folders and tables follow the umask, so that others can be given access."""
    before = os.umask(0o002)
    try:
        code = "import torch, sys; print(sys.argv[1]); torch.ones(2) + 1"
        done = llm_perf(tmp_path, "exec", "--passes", "program,torch", "--", sys.executable, "-c", code, "plant" + "ed-word")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    run, _ = only_run(tmp_path)
    holding = {path for path in run.rglob("*") if path.is_file() and b"planted-word" in path.read_bytes()}
    assert {path.name for path in holding} >= {"run.json", "cmd.txt", "log.txt"}
    assert {path.relative_to(run): oct(path.stat().st_mode & 0o777) for path in holding if path.stat().st_mode & 0o077} == {}
    assert {path.stat().st_mode & 0o777 for path in (run, *run.rglob("*")) if path.is_dir()} == {0o775}


@pytest.fixture(scope="session")
def profiled_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a program of a user's own, with a model of its own, under torch.profiler."""
    folder = tmp_path_factory.mktemp("profiled_program")
    (folder / "job.py").write_text("import torch\nfor _ in range(20):\n    torch.relu(torch.ones(4, 4))\n")
    done = command.llm_perf("exec", "--quiet", "--once", "--", sys.executable, "job.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return only_run(folder)[0]


def test_a_program_is_not_a_model_of_llm_perf(profiled_program: Path) -> None:
    done = command.llm_perf("analyze", "--json", str(profiled_program), cwd=profiled_program)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "config.yaml" not in done.stdout + done.stderr, "it is valid: a program has no model and no runtime"
    assert [problem["id"] for problem in found["problems"]] == [], "there is no GPU, and no use of shapes"
    assert all(not finding["overrides"] for finding in found["findings"]), "the settings are not those of this program"
