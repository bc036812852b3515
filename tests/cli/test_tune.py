"""`llm-perf tune` as a user runs it: a runtime of another package, real runs, its own clock."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import command
import llm_perf_opt.runners.session as sessions
from builders import default_config
from llm_perf_opt.analysis.tuning.tokens import RULES
from llm_perf_opt.cli.completing import complete_goal, complete_objective, complete_token_rule, complete_tuned
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import Machine
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.measure.engine_meter import EngineMeter
from llm_perf_opt.runners.pytorch_levers import pytorch_levers
from plugins import bring, llm_perf

RUNNER = '''
"""Each token takes as long as its settings say, on a clock of its own."""

from llm_perf_opt.config.runtimes import Lever, Runtime
from llm_perf_opt.core.records import Missing, RuntimeFacts
from llm_perf_opt.runners.base import Generated, RunnerRequest
from llm_perf_opt.runners.engines import EngineWords, engine_model_facts

NOW = [10**12]


class Clocked:
    def __init__(self, request: RunnerRequest) -> None:
        given = request.config.runtime.engine
        words = EngineWords(attention="none", cache="none", compile="none", logits="last token")
        self.facts = engine_model_facts(request.config.model, request.architecture, request.device, request.dtype, words)
        self.runtime = RuntimeFacts("clocked", "1.0", "by its own clock", uncosted="it computes nothing", engine=given)
        self.profiler = Missing("it computes nothing")
        self._step = int(given.get("step_us", 1000)) * 1000
        self._token = int(given.get("token", 7))
        NOW[0] += 10**9

    def generate(self, prompts, new_tokens, marker):
        started = NOW[0]
        arrivals = []
        for number in range(new_tokens):
            NOW[0] += self._step + (NOW[0] // 977 + number) % 11 * self._step // 2000
            arrivals.append(NOW[0])
        sequences = len(prompts.ids)
        return Generated(started, (tuple(arrivals),) * sequences, ((self._token,) * new_tokens,) * sequences)


def open_clocked(request: RunnerRequest) -> Clocked:
    return Clocked(request)


LEVERS = (
    Lever("token", (("runtime.engine.token=8", "runtime.engine.step_us=100"),)),
    Lever("step", (("runtime.engine.step_us=600",),)),
)
RUNTIME = Runtime("clocked", "clocked_runner:open_clocked", steppable=False, levers=lambda machine: LEVERS)
'''
SHORT = [
    "runtime=clocked", "hardware=cpu", "profiling=none", "runtime.num_new_tokens=5", "runtime.prompt_tokens=4",
    "runtime.min_repeats=6", "runtime.max_repeats=6", "runtime.max_warmup=3", "model.architecture.num_hidden_layers=1",
]  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime, installed; its meter reads its clock."""

    def meter(engine: Any, prompts: Any, sequences: int, tokens: int, marker: Any) -> EngineMeter:
        return EngineMeter(engine, prompts, sequences, tokens, marker, lambda: sys.modules["clocked_runner"].NOW[0])

    monkeypatch.setattr(sessions, "EngineMeter", meter)
    return bring(tmp_path / "site", "clocked", "clocked_runner:RUNTIME", RUNNER)


@pytest.mark.slow
def test_a_search_from_settings_to_its_page(tmp_path: Path, site: Path) -> None:
    done = llm_perf("tune", *SHORT, "--budget", "1h", "--json", "-q", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [*found][:4] == ["base", "best", "objective", "steps"]
    assert [(step["change"], step["kept"]) for step in found["steps"]] == [
        ("runtime.engine.token=8 runtime.engine.step_us=100", False),
        ("runtime.engine.step_us=600", True),
    ]
    assert "the tokens differ from those of the base: 0 of 5 tokens" in found["steps"][0]["why"]
    assert found["steps"][1]["measured_ns"] == pytest.approx(600_000, rel=0.01)
    assert found["confirmed"] is True
    base, best = Path(found["base"]), Path(found["best"])
    assert best.parent == base.with_name(f"{base.name}-tune")
    assert base.parent.parent.name == "baseline", "an ordinary run, not a trial"
    timings = json.loads((best / "raw/clean/timings.json").read_text())
    assert timings["runtime"]["engine"] == {"step_us": 600}
    assert found["command"][:3] == ["llm-perf", "run", "runtime.engine.step_us=600"]
    assert "runtime.engine.step_us=600" in (best.parent / "tune.md").read_text()
    again = llm_perf("tune", str(base), "--resume", "--json", "-q", cwd=tmp_path, site=site)
    assert json.loads(again.stdout)["steps"] == found["steps"], "nothing is measured again"
    listed = json.loads(llm_perf("runs", "--json", "--limit", "0", cwd=tmp_path, site=site).stdout)
    assert len(listed) == 1 + len(list(best.parent.glob("*/run.json")))


KILLED = """
import os, signal, sys
from pathlib import Path
from unittest.mock import patch
sys.path.insert(0, sys.argv[3])
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.workflows.tune import begin, tune
from llm_perf_opt.workflows.tune_folder import TuneOptions
from tuning_builders import FakeRuns, fake_base, fake_runtime, fake_settings

with fake_runtime(Path(sys.argv[2])):
    values = fake_settings()
    base = Path(sys.argv[1])
    fake_base(base, values)
    folder = begin(base, TuneOptions(), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values)
    plain = runs.measure

    def measure(*given, **more):
        if len(runs.made) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given, **more)

    runs.measure = measure
    tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
"""


@pytest.mark.slow
def test_after_kill_9_the_search_goes_on_with_its_runs(tmp_path: Path) -> None:
    from llm_perf_opt.cli.progress import QuietProgress
    from llm_perf_opt.workflows.tune import resume, tune
    from tuning_builders import FakeClock, FakeRuns, fake_runtime, fake_settings

    tests = str(Path(__file__).parents[1])
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(tmp_path / "site"), tests]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=command.HANG_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = resume(tmp_path / "run", None)
    before = len(folder.read().runs)
    assert before == 6
    with fake_runtime(tmp_path / "again"):
        runs = FakeRuns(folder.path, fake_settings(), clock=FakeClock(2000.0))
        found, error = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert error is None
    assert {*found.overrides} == {"runtime.engine.fast=2", "runtime.engine.helper=1", "runtime.engine.memory=1"}
    assert len(folder.read().runs) == before + len(runs.made)
    assert found.confirmed is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "--resume", "model=tiny"], "--resume needs the run that was tuned"),
        (["tune", "model=tiny", "--budget", "soon"], "is not a time"),
        (["tune", "model=tiny", "--constraint", "ttft<50"], "ttft needs a unit"),
        (["tune", "model=tiny", "--tokens", "some"], "Known: same, exact, any"),
        (["tune", "model=tiny", "--max-logit-diff", "-1"], "is not a limit"),
        (["tune", "model=tiny", "--objective", "tpt"], "Did you mean 'tpot'?"),
        (["tune", ".", "--resume", "--top", "2"], "--resume uses the options of the search"),
        (["tune", ".", "--resume"], "has no search to resume"),
        (["tune", ".", "model=tiny"], ". is a run; its settings cannot be changed here"),
        (["tune", "model=tiny", "."], ". is a run; its settings cannot be changed here"),
        (["tune", ".", ".."], "`tune` takes one run, but 2 were given: ., .."),
        (["tune", "--model", "tiny"], "settings are written KEY=VALUE"),
        (["tune", "."], "is not a run"),
        (["tune", "model=tiny", "--lever", "runtime.batch_size"], "--lever needs KEY=VALUE,VALUE"),
        (["tune", "model=tiny", "--lever", "runtime.batchsize=1,2"], "Did you mean 'batch_size'?"),
        (["tune", "model=tiny", "hardware=cpu", "--objective", "energy"], "energy comes from the GPU's counter"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_measured(tmp_path: Path, words: list[str], said: str) -> None:
    done = command.llm_perf(*words, cwd=tmp_path)
    assert done.returncode in (2, 5), done.stderr
    assert said in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_completion() -> None:
    assert complete_objective("t") == ["tpot", "ttft", "throughput"]
    assert complete_goal("th") == ["throughput>"]
    assert complete_token_rule("e") == ["exact"]
    assert complete_token_rule("") == [*RULES]
    assert "model=tiny" in complete_tuned("model=ti")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_lever_is_a_valid_setting(device: str) -> None:
    """Alone and for the device it is meant for; a GPU's settings are composed without one."""
    from dataclasses import asdict

    from llm_perf_opt.config.composition import with_overrides

    values = asdict(default_config())
    for lever in pytorch_levers(Machine(device, 4)):
        for choice in lever.choices:
            with_overrides(values, choice)
    assert not any("compile" in lever.name for lever in pytorch_levers(Machine("cpu", 4, compiler=False)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runtime.compile_prefill=true"], "has no effect: runtime.compile=none"),
        (
            ["runtime.attention_backend=math", "runtime.attn_implementation=eager"],
            "has no effect on runtime.attn_implementation=eager",
        ),
        (["runtime=vllm", "runtime.attention_backend=math"], "has no effect on runtime.type=vllm"),
    ],
)
def test_settings_without_effect_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert said in caught.value.fact
