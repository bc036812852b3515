"""What the Tab key offers."""

import ast
import os
import pty
import select
import shutil
import subprocess
import sys
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from command import HANG_S
from llm_perf_opt.cli.app import app
from llm_perf_opt.cli.completing import complete_hardware, complete_override, complete_run, complete_side, complete_status
from llm_perf_opt.config.choices import all_keys, group_options
from llm_perf_opt.config.schema import NcuConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import RunStatus


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without options or runs, and a shell that hands over whole words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMP_WORDS", raising=False)
    monkeypatch.delenv("COMP_CWORD", raising=False)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("model=tiny_v", ["model=tiny_vlm"]),
        ("model=", [f"model={name}" for name in group_options()["model"]]),
        ("hardware=s", ["hardware=single_gpu"]),
        ("run", ["runtime.", "runtime="]),
        ("runtime.m", ["runtime.max_repeats=", "runtime.max_warmup=", "runtime.min_repeats="]),
        ("runtime.bat", ["runtime.batch_size=", "runtime.batch_size=1"]),
        ("runtime.compile=", [f"runtime.compile={mode}" for mode in ("none", "default", "reduce-overhead", "max-autotune")]),
        ("profiling.ncu.en", ["profiling.ncu.enable=true", "profiling.ncu.enable=false"]),
        ("profiling.ncu", [f"profiling.ncu.{field.name}=" for field in sorted(fields(NcuConfig), key=attrgetter("name"))]),
        ("model.path=", []),
        ("hydra", ["hydra.run.dir="]),
        ("nonsense", []),
        ("nonsense=", ["nonsense="]),
    ],
)
def test_overrides_are_offered_a_level_at_a_time(typed: str, offered: list[str]) -> None:
    assert complete_override(typed) == offered


def test_the_first_tab_shows_the_groups_and_not_every_key() -> None:
    offered = complete_override("")
    assert {"model=", "model.", "runtime=", "experiment="} <= set(offered)
    assert len(offered) < 20 < len(all_keys())


@pytest.mark.slow
def test_every_key_can_be_reached() -> None:
    for key in all_keys():
        assert all(offer.startswith(f"{key}=") for offer in complete_override(f"{key}="))
        assert any(offer.startswith(key) for offer in complete_override(key[:-1]))


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        (["llm-perf", "run", "model", "="], "", "tiny"),
        (["llm-perf", "run", "model", "=", "ti"], "ti", "tiny"),
        (["llm-perf", "run", "--quiet", "runtime.batch_size=4", "model", "=", "ti"], "ti", "tiny"),
        (["llm-perf", "run", "mo"], "mo", "model="),
    ],
)
def test_bash_takes_an_override_for_three_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str], incomplete: str, offered: str
) -> None:
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    found = complete_override(incomplete)
    assert offered in found
    assert all(word.startswith(incomplete) for word in found), "it replaces what stands behind the ="


def test_an_option_of_the_project_is_offered(tmp_path: Path) -> None:
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "mine.yaml").write_text("name: mine\n")
    assert complete_override("dataset=m") == ["dataset=mine"]


def test_runs_and_baselines_are_offered(tmp_path: Path) -> None:
    for place in (
        "main/tiny/1/run.json",
        "main/tiny/2/run.json",
        "exec/train/3/run.json",
        "main/sweeps/4/sweep.json",
        "main/x/5/no",
    ):
        file = tmp_path / "runs" / place
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    assert complete_run("") == ["runs/main/tiny/2", "runs/main/tiny/1", "runs/main/sweeps/4", "runs/exec/train/3"]
    assert complete_run("runs/e") == ["runs/exec/train/3"]
    assert complete_run("elsewhere/") == [], "then the shell offers files"
    (tmp_path / "runs" / "baselines.json").write_text('{"baselines": {"good": {"runs": ["main/tiny/1"], "set_at": "now"}}}')
    assert complete_side("g") == ["good"]
    assert complete_side("")[:2] == ["good", "runs/main/tiny/2"]
    (tmp_path / "runs" / "baselines.json").write_text("{")
    assert complete_side("runs/e") == ["runs/exec/train/3"], "a damaged file is for the verb to tell"


def test_what_would_act_in_a_terminal_is_not_offered(tmp_path: Path) -> None:
    for place in ("main/ti\x1b[31mny/1", "main/ti\nny/1", "main/tiny/1"):
        (tmp_path / "runs" / place).mkdir(parents=True)
        (tmp_path / "runs" / place / "run.json").write_text("{}")
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "m\x07.yaml").write_text("name: mine\n")
    assert complete_run("") == ["runs/main/tiny/1"]
    assert complete_override("dataset=m") == []


def test_every_status_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete_status("") == [*get_args(RunStatus), "damaged", "not readable", "planned"]
    assert complete_status("p") == ["partial", "planned"]
    monkeypatch.setenv("COMP_WORDS", "llm-perf\nruns\n--status\nno")
    assert complete_status("no") == ["not\\ readable"], "bash would split it"


def test_hardware_is_offered() -> None:
    assert {"h100_sxm", "h100_pcie"} <= set(complete_hardware("h100")) < set(complete_hardware(""))


@pytest.mark.parametrize(("shell", "sign"), [("zsh", "#compdef llm-perf"), ("fish", "complete --command llm-perf")])
def test_a_script_is_shown_for_the_shell_that_is_named(capsys: pytest.CaptureFixture[str], shell: str, sign: str) -> None:
    for words in (["--show-completion", shell], [f"--show-completion={shell}"]):
        with pytest.raises(SystemExit) as ended:
            get_command(app).main(words, prog_name="llm-perf")
        assert ended.value.code == 0
        assert sign in capsys.readouterr().out


def test_no_script_is_shown_that_would_not_work() -> None:
    group = get_command(app)
    with pytest.raises(ConfigError, match="Did you mean 'zsh'"):
        group.main(["--show-completion", "zhs"], prog_name="llm-perf")
    for option in ("--show-completion", "--install-completion"):
        with pytest.raises(ConfigError, match=r"--(show|install)-completion works only"):
            group.main([option, "zsh"], prog_name="python -m llm_perf_opt")


def completing(shell: str, **words: str) -> dict[str, str]:
    return {**os.environ, "_LLM_PERF_COMPLETE": f"complete_{shell}", **words}


def test_the_tab_key_loads_nothing_heavy() -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr))\n"
        "from llm_perf_opt.cli.app import app\napp(prog_name='llm-perf')"
    )
    environment = completing("bash", COMP_WORDS="llm-perf\nrun\nmodel\n=\ntiny_v", COMP_CWORD="4")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.stdout.split() == ["tiny_vlm"], done.stderr
    loaded = set(ast.literal_eval(done.stderr.splitlines()[-1]))
    assert not loaded & {"torch", "transformers", "duckdb", "plotly", "numpy", "hydra", "omegaconf", "pynvml", "psutil"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The command on PATH, and no files of the user."""
    command = tmp_path / "bin" / "llm-perf"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'llm-perf'\nfrom llm_perf_opt.cli.app import main\nmain()\n"
    )
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "xterm"}


def real(shell: str) -> str:
    found = shutil.which(shell)
    if found is None and os.environ.get("LLM_PERF_REQUIRE_SHELLS"):  # set where they were installed on purpose
        pytest.fail(f"there is no {shell} here")
    return found or pytest.skip(f"there is no {shell} here")


def completed(environment: dict[str, str], *argv: str) -> list[str]:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_real_bash_completes(environment: dict[str, str]) -> None:
    script = (
        'eval "$(_LLM_PERF_COMPLETE=source_bash llm-perf)"\n'
        "COMP_WORDS=(llm-perf run runtime.compile = max); COMP_CWORD=4\n"
        '_llm_perf_completion llm-perf; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    assert completed(environment, real("bash"), "--norc", "-c", script) == ["max-autotune"]


@pytest.mark.slow
def test_a_real_fish_completes(environment: dict[str, str]) -> None:
    script = 'llm-perf --show-completion fish | source; complete --do-complete "llm-perf run runtime.compile=max"'
    assert completed(environment, real("fish"), "--no-config", "-c", script) == ["runtime.compile=max-autotune"]


@pytest.mark.slow
def test_a_real_zsh_completes(environment: dict[str, str]) -> None:
    """Its completion needs a terminal."""
    zsh_program = real("zsh")
    mine, its = pty.openpty()
    with subprocess.Popen(
        [zsh_program, "-f", "-i"], stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True
    ) as zsh:
        try:
            os.close(its)
            os.write(
                mine, b"PS1=; autoload -U compinit; compinit -u -D; eval \"$(llm-perf --show-completion zsh)\"; print re''ady\n"
            )
            read_until(mine, b"ready\r")
            os.write(mine, b"llm-perf run runtime.compile=max\t")
            read_until(mine, b"runtime.compile=max-autotune")
        finally:
            zsh.kill()
            os.close(mine)


def read_until(terminal: int, text: bytes) -> None:
    """Read what a terminal shows until it has shown this text."""
    shown = b""
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], HANG_S)
        assert ready, shown
        shown += os.read(terminal, 65536)
