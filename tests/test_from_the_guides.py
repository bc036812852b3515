"""A project laid out as the guides describe it, driven by the guides' own commands.

Each command stands here as the guides write it. It works, or its answer says where it moved. `SHORT` follows the commands that
profile, so that they take seconds; nothing else is added.
"""

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import tomli
import yaml

from command import HANG_S, clean_end, llm_perf, profile_runner
from guide_project import lay_out
from llm_perf_opt.profiling import passes
from llm_perf_opt.profiling.vendor.probe import Located
from llm_perf_opt.runners import deep_profile_runner
from llm_perf_opt.runners.measure.device import most_cuda_devices, torch_build

ROOT = Path(__file__).parent.parent
TASKS: dict[str, str] = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["pixi"]["tasks"]
PAGE = (ROOT / "docs" / "from-the-guides.md").read_text()
SHORT = (
    *("runtime.prompt_tokens=8", "runtime.num_new_tokens=3", "runtime.max_repeats=2", "runtime.max_warmup=2"),
    *("profiling.ceilings=false", "profiling.nvml.interval_s=0.05"),
)
PEAKS = ("profiling.ceilings=true", "profiling.ceilings_s=0.1")
"""Measured in one session; they take as long as the rest."""
RUNNER = "llm_perf_opt.runners.llm_profile_runner"
STAGE2 = "tmp/stage2/2025-10-29T15-20-01Z"
FOR_A_GPU = f"hydra.run.dir={STAGE2} hydra.job.chdir=true device=cuda:0 repeats=1 profiling.activities=[cpu,cuda] +run.mode=deep"
NSYS = (
    "nsys profile --trace=cuda,nvtx,osrt --sample=none --capture-range=nvtx --nvtx-capture=range@LLM "
    f"-o tmp/stage2/nsys/run python -m {RUNNER} profiling=@profiling/torch/torch-profiler.min +run.mode=deep "
    "+inputs.manifest=/abs/path/inputs.yaml hydra.run.dir=$(pwd)/tmp/stage2/$(date +%Y%m%d-%H%M%S) hydra.job.chdir=true"
)

SESSION = "tests/manual/stage2_profile/manual_stage2_profile.py"

PROFILES = pytest.mark.slow
COMMANDS = [
    # The guide to the structure of a project.
    pytest.param("pixi run profile", 0, "report:", marks=PROFILES),
    pytest.param("pixi run nsys", 3, "Nsight Systems was requested", marks=PROFILES),
    pytest.param("pixi run ncu", 3, "Nsight Compute was requested", marks=PROFILES),
    pytest.param("pixi run profile model=llama3_70b runtime=vllm profiling=full", 3, "vllm"),
    pytest.param("python -m llm_perf_opt.cli experiment=baseline profiling=minimal", 0, "report:", marks=PROFILES),
    pytest.param("pixi run externals:init", 2, "llm-perf externals init --template"),
    pytest.param("pixi run externals:update", 2, "llm-perf externals init --template"),
    pytest.param("pixi run externals:snapshot", 2, "llm-perf externals init --template"),
    # How to manage nsys and ncu: the work that both wrap.
    pytest.param(f"python -m {RUNNER} {FOR_A_GPU} +inputs.manifest=/abs/path/to/inputs.yaml", 2, "the inputs.yaml of a run"),
    pytest.param(f"python -m {RUNNER} -m {FOR_A_GPU}", 3, "hardware=cpu"),
    pytest.param(
        f"python -m {RUNNER} hydra.run.dir={STAGE2}-deep run.mode=deep hydra.job.chdir=true", 0, f"files: {STAGE2}-deep"
    ),
    pytest.param(f"python -m {RUNNER} hydra.run.dir={STAGE2}-light run.mode=light hydra.job.chdir=true", 0, "profiling=minimal"),
    # Setup, and the deep profiling session.
    pytest.param("pixi run stage2-profile", 3, "Nsight Systems was requested", marks=PROFILES),
    pytest.param("pixi run python -c \"import llm_perf_opt; print('ok')\"", 0, "ok", marks=PROFILES),
    pytest.param("pixi run python -c \"print('stage2-profile' in open('pyproject.toml').read())\"", 0, "True"),
    pytest.param(f"pixi run python {SESSION}", 0, "status partial", marks=PROFILES),
]
IN_FILES = [
    # These read the option files and the datasets of the project.
    pytest.param("python -m llm_perf_opt.cli model=llama3_70b dataset=c4 profiling=full", 3, "Nsight", marks=PROFILES),
    pytest.param("python -m llm_perf_opt.cli dataset=openwebtext", 0, "report:", marks=PROFILES),
]
VARIANT = [
    "python scripts/prepare_dataset.py --dataset openwebtext --variant subset-1k",
    "python -m llm_perf_opt.cli dataset=openwebtext dataset.variant=subset-1k",
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without option files."""
    return lay_out(tmp_path_factory.mktemp("plain"), conf=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with the option files of the guide."""
    return lay_out(tmp_path_factory.mktemp("whole"), conf=True)


def drive(command: str, project: Path, more: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run a command of the guides in a project, without Nsight tools."""
    words = shlex.split(command)
    if words[:2] == ["pixi", "run"]:
        words = [*shlex.split(TASKS[words[2]]), *words[3:]] if words[2] in TASKS else words[2:]
    assert words[0] == "python"
    if words[1] == SESSION:
        return session_script(project)
    if words[1] != "-m":
        argv = [sys.executable, *words[1:]]
        environment = {**os.environ, "NSYS": "/none", "NCU": "/none", "PATH": str(Path(sys.executable).parent)}
        return subprocess.run(argv, cwd=project, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    module, rest = words[2], words[3:]
    if module == RUNNER:
        return profile_runner(*rest, *SHORT, cwd=project)
    if module == deep_profile_runner.__name__:
        rest = replaced_by(deep_profile_runner.main, rest)
    runs = not rest or "=" in rest[0] or rest[0] in ("run", "-m")
    with patch.object(passes, "locate", lambda _: Located(None)):
        return llm_perf(*rest, *((*SHORT, *more) if runs else ()), cwd=project)


def session_script(project: Path) -> "subprocess.CompletedProcess[str]":
    """Run the script that makes a deep session and checks it; the session itself is made in this process."""

    errors: list[str] = []

    def start(argv: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        assert argv[:3] == [sys.executable, "-m", deep_profile_runner.__name__]
        with patch.object(passes, "locate", lambda _: Located(None)):
            done = llm_perf(*replaced_by(deep_profile_runner.main, argv[3:]), cwd=project)
        errors.append(done.stderr)
        return done

    main, out = runpy.run_path(str(project / SESSION))["main"], io.StringIO()
    with pytest.MonkeyPatch.context() as place, redirect_stdout(out):
        place.chdir(project)
        place.setitem(main.__globals__, "subprocess", SimpleNamespace(run=start))
        code = main([*SHORT])
    return subprocess.CompletedProcess([SESSION], code, out.getvalue(), "".join(errors))


def replaced_by(main: object, rest: list[str]) -> list[str]:
    """The arguments of llm-perf that a runner replaces itself with."""
    seen: list[list[str]] = []
    with patch.object(sys, "argv", ["x", *rest]), patch.object(os, "execv", lambda _, argv: seen.append(argv)):
        assert callable(main)
        main()
    assert seen[0][1:3] == ["-m", "llm_perf_opt"]
    return seen[0][3:]


def without_gpu() -> None:
    if most_cuda_devices(torch_build()) != 0:
        pytest.skip("the answers are those of a machine without a GPU")


WITHOUT_FILES = [case for case in COMMANDS if not case.marks or "baseline" in str(case.values[0])]
"""Those that profile run with the option files; one and a deep session run without them, too."""


@pytest.mark.parametrize(("command", "code", "says"), WITHOUT_FILES)
def test_a_command_of_the_guides_works_or_says_where_it_moved(plain: Path, command: str, code: int, says: str) -> None:
    without_gpu()
    done = drive(command, plain)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), f"{done.stdout}\n{done.stderr}"
    assert clean_end(done, (code,))


@pytest.mark.parametrize(("command", "code", "says"), [*COMMANDS, *IN_FILES])
def test_with_the_option_files_of_the_guide_too(whole: Path, command: str, code: int, says: str) -> None:
    without_gpu()
    done = drive(command, whole)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), f"{done.stdout}\n{done.stderr}"
    assert clean_end(done, (code,))


@pytest.mark.slow
def test_a_variant_is_made_and_used(whole: Path) -> None:
    for command in VARIANT:
        done = drive(command, whole)
        assert clean_end(done, (0,)), f"{command}\n{done.stdout}\n{done.stderr}"
    assert (whole / "datasets" / "openwebtext" / "subset-1k" / "metadata.yaml").is_file()


def test_the_runner_of_a_deep_session_becomes_the_command(plain: Path) -> None:
    argv = [sys.executable, "-m", deep_profile_runner.__name__, "--dry-run", "--json", "runtime.batch_size=3"]
    done = subprocess.run(argv, cwd=plain, capture_output=True, text=True, timeout=HANG_S, check=True)
    config = json.loads(done.stdout)["config"]
    assert (config["runtime"]["batch_size"], config["profiling"]["nsys"]["enable"]) == (3, True)


@pytest.mark.slow
def test_a_deep_session_leaves_everything_that_a_cpu_can_give(plain: Path) -> None:
    without_gpu()
    run = plain / "tmp" / "deep"
    peaks = "hardware.peak_tflops=1 hardware.bandwidth_gbs=20"  # those measured on a busy machine are not used
    drive(f"pixi run stage2-profile artifacts.stage2_dir={run} run.top_n_kernels=12 {peaks}", plain, PEAKS)
    manifest = json.loads((run / "run.json").read_text())
    done = {entry["name"] for entry in manifest["passes"] if entry["status"] == "complete"}
    assert done == {"nvml", "clean", "ceilings", "torch"}
    assert all(entry["why"] for entry in manifest["passes"] if entry["name"] not in done)
    assert yaml.safe_load((run / "config.yaml").read_text())["profiling"]["ncu"]["top"] == 12
    assert "aten::" in (run / "operators.md").read_text()
    assert re.search(r"\| prefill +\|.*%", (run / "report.md").read_text().split("## Roofline")[1])
    for name in ("kernels.md", "stakeholder_summary.md", "inputs.yaml", "env.json", "ops.csv", "nvml.csv"):
        assert (run / name).stat().st_size > 0, name


@pytest.mark.slow
def test_the_prompts_of_a_run_are_repeated(plain: Path) -> None:
    first, again = plain / "tmp" / "first", plain / "tmp" / "again"
    llm_perf(
        "run", "profiling=none", "dataset=sample_prompts", "runtime.batch_size=2", *SHORT[:4], f"hydra.run.dir={first}", cwd=plain
    )
    done = profile_runner(f"+inputs.manifest={first / 'inputs.yaml'}", f"hydra.run.dir={again}", cwd=plain)
    assert done.returncode == 0, done.stderr
    recorded, repeated = (yaml.safe_load((run / "inputs.yaml").read_text()) for run in (first, again))
    assert repeated["ids"] == recorded["ids"]
    assert repeated["sha256"] == recorded["sha256"]
    assert repeated["new_tokens"] == recorded["new_tokens"]
    assert len(json.loads((again / "stages.json").read_text())["steps_ns"]) == recorded["new_tokens"] - 1


def test_the_runner_alone_says_what_it_will_not_do(plain: Path) -> None:
    several = profile_runner("-m", "run.mode=deep,light", cwd=plain)
    assert several.returncode == 2
    assert "llm-perf run -m" in several.stderr
    (plain / "taken").mkdir(exist_ok=True)
    (plain / "taken" / "run.json").write_text("{}")
    taken = profile_runner("+hydra.run.dir=taken", cwd=plain)
    assert taken.returncode == 2
    assert "Traceback" not in several.stderr + taken.stderr


def test_the_timeline_of_the_guide_is_recorded(real_nsys: Path, plain: Path) -> None:
    """The gate `range@LLM` is the literal name of a range: the runner opens it when it is started alone."""
    from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, nsys_log_problems
    from llm_perf_opt.profiling.vendor.tool_pass import export_nsys
    from llm_perf_opt.traces.nsys_sqlite import read_nsys

    profile_runner(*SHORT[:4], "hydra.run.dir=tmp/for-nsys", cwd=plain)
    inputs = plain / "tmp" / "for-nsys" / "inputs.yaml"
    (plain / "tmp" / "stage2" / "nsys").mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(real_nsys.parent), os.environ["PATH"]])
    for _start in range(3):  # nsys itself fails in about 1 of 80 starts on a busy machine; `llm-perf run` restarts it
        done = subprocess.run(
            ["bash", "-c", NSYS.replace("/abs/path/inputs.yaml", str(inputs))],
            cwd=plain, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        if AGENT_LOST not in {problem.id for problem in nsys_log_problems(said)}:
            break
    assert done.returncode == 0, said
    report = plain / "tmp" / "stage2" / "nsys" / "run.nsys-rep"
    assert report.stat().st_size > 0, said
    sqlite = report.with_suffix(".sqlite")
    export_nsys(real_nsys, report, sqlite, log=plain / "log.txt")
    trace = read_nsys(sqlite)
    names = {trace.name_of(int(name)) for name in trace.ranges.name}
    assert {"prefill", "decode", "decode_step"} <= names


@pytest.mark.parametrize("script", ["make_symlinks.sh", "sanity.sh"])
def test_a_script_is_executable_and_valid(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.slow
def test_weights_are_linked_into_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text("{}")
    (tmp_path / "weights" / "other").mkdir()
    for _ in range(2):
        argv = ["bash", str(ROOT / "scripts" / "make_symlinks.sh"), "weights"]
        subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, check=True, timeout=HANG_S)
    assert {path.name: path.resolve() for path in (tmp_path / "models").iterdir()} == {
        name: (tmp_path / "weights" / name).resolve() for name in ("a", "b")
    }


def test_every_command_is_on_the_page() -> None:
    """The page names what each command of the guides is here."""
    for written in [*(case.values[0] for case in [*COMMANDS, *IN_FILES]), *VARIANT]:
        command = str(written).split(" hydra.run.dir")[0].split(f" {FOR_A_GPU}")[0]
        assert command in PAGE, command


def test_a_command_around_which_the_user_starts_nsys_says_what_to_do_instead(plain: Path) -> None:
    done = llm_perf("run", "--dry-run", cwd=plain, env={"NSYS_PROFILING_SESSION_ID": "1"})
    assert "profiling=nsys" in done.stderr
