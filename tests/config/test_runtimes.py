"""The registry of runtimes, and a runtime of another package."""

import json
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from docs_commands import commands
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.config import runtimes
from llm_perf_opt.config.choices import group_options
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import all_traits, known_runtimes, runtime_named, traits_of
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.runners import ENTRY_POINTS
from llm_perf_opt.traces import trace_mark
from plugins import bring, installed, llm_perf, llm_perf_process, the_minimal_runner
from trace_builders import Builder


@pytest.fixture
def brought(tmp_path: Path) -> Iterator[Path]:
    """A site folder on the path of this process."""
    with installed(tmp_path / "site"):
        yield tmp_path / "site"


def test_the_packages_runtimes_come_first() -> None:
    assert [runtime.name for runtime in known_runtimes() if not runtime.provided_by] == [*ENTRY_POINTS]
    assert [*ENTRY_POINTS][:2] == ["pytorch", "vllm"]


def test_an_unknown_one_is_answered_with_what_is_there() -> None:
    with pytest.raises(ConfigError) as caught:
        runtime_named("vlm")
    assert "runtime.type=vlm is not known. Did you mean 'vllm'?" in caught.value.fact
    assert "Known: pytorch, vllm" in caught.value.remedy
    assert runtimes.GROUP in caught.value.remedy


def test_one_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda _: None)
    with pytest.raises(ResourceError) as caught:
        runtime_named("vllm")
    assert "needs the package vllm" in caught.value.fact
    assert "pip install 'llm-perf-opt[vllm]'" in caught.value.remedy


def test_an_entry_point_is_an_option_of_the_group(brought: Path) -> None:
    bring(brought, "echo", "echo_runner:open_echo")
    assert "echo" in group_options()["runtime"]
    config = compose(["runtime=echo", "runtime.batch_size=3", "runtime.engine.speed=2"]).config
    assert (config.runtime.type, config.runtime.batch_size, config.runtime.engine) == ("echo", 3, {"speed": 2})
    assert runtime_named("echo").provided_by == "echo-runner"


def test_a_name_cannot_be_taken_twice(brought: Path) -> None:
    bring(brought, "vllm", "theirs:open")
    with pytest.raises(ConfigError, match="'vllm' is provided by echo-runner and by llm-perf-opt"):
        known_runtimes()


def test_one_that_cannot_be_loaded_disturbs_nothing_else(brought: Path) -> None:
    bring(brought, "broken", "broken_runner:RUNTIME", "raise RuntimeError('no such library')")
    with pytest.raises(ConfigError, match="is not known"):
        runtime_named("vlm")
    assert compose(["runtime=pytorch"]).config.runtime.type == "pytorch"
    assert traits_of("broken").provided_by == "echo-runner", "a run of it can be read"
    with pytest.raises(ResourceError, match="no such library"):
        runtime_named("broken")


def test_a_runtime_that_is_installed_later_is_asked_how_stages_are_labeled(brought: Path) -> None:
    before = trace_mark.made_by.__wrapped__()
    bring(brought, "echo", "echo_runner:open_echo")
    assert trace_mark.made_by.__wrapped__() != before, "tables of traces that were made without it are not reused"


RECORD = """
from llm_perf_opt.config.runtimes import Runtime, StageLabels, by_requests


class Arguments:
    def known(self):
        return frozenset({"step_ms"})

    def refuse(self, given, known):
        from llm_perf_opt.core.errors import ConfigError

        for name in given:
            if name not in known:
                raise ConfigError(f"echo takes no {name}.")


RUNTIME = Runtime(
    "echo",
    "echo_runner:open_echo",
    steppable=False,
    packages=("echo-runner",),
    variables=("ECHO_",),
    arguments=Arguments(),
    labels=(StageLabels("echo", by_requests(r"echo (\\d+) new (\\d+) running")),),
    marks_stages=lambda engine: True,
    separate="Echo less at a time.",
)
"""
"""What a runtime can declare of itself, behind its runner in the same file."""


def test_a_runtime_declares_its_traits_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bring(tmp_path / "site", "echo", "echo_runner:RUNTIME", the_minimal_runner() + RECORD)
    monkeypatch.setenv("ECHO_LEVEL", "3")
    run = tmp_path / "run"
    words = ["run", "-q", "runtime=echo", "profiling=none", *SHORT, f"hydra.run.dir={run}"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    env = json.loads((run / "env.json").read_text())
    assert env["packages"]["echo-runner"] == "1.0"
    assert env["variables"]["ECHO_LEVEL"] == "3"
    assert "run by echo 1.0" in (run / "report.md").read_text()
    refused = llm_perf(*words[:-1], "runtime.engine.loud=1", cwd=tmp_path, site=site)
    assert (refused.returncode, "echo takes no loud" in refused.stderr) == (2, True)
    with installed(site):
        assert traits_of("echo").marks_stages({})
        with pytest.raises(ConfigError, match=r"model\.substages needs"):
            compose(["runtime=echo", "model.substages.first=model.layers.0"])
        built = Builder()
        built.range(0, 100, "echo 1 new 0 running", None)
        built.launch(10, 20, 30)
        assert find_stages(built.trace()).method == "echo"
    assert traits_of("echo").separate == "", "where it is not installed, nothing is known of it"


def test_what_it_runs_together_it_says_how_to_keep_apart(tmp_path: Path) -> None:
    together = 'uncosted="it computes nothing", inseparable="it echoes at once"'
    module = the_minimal_runner().replace('uncosted="it computes nothing"', together) + RECORD
    site = bring(tmp_path / "site", "echo", "echo_runner:RUNTIME", module)
    run = tmp_path / "run"
    words = ["run", "-q", "runtime=echo", "profiling=none", *SHORT, f"hydra.run.dir={run}"]
    assert llm_perf(*words, cwd=tmp_path, site=site).returncode == 0
    report = (run / "report.md").read_text()
    assert "Echo less at a time." in report
    assert "| Time per output token (TPOT) | n/a (" in report
    assert "): it echoes at once\n" in report
    assert "| Time to first token (TTFT) | n/a" not in report
    assert "| &nbsp;&nbsp;prefill |" not in report


def test_the_packages_runtimes_are_declared_without_loading_torch() -> None:
    code = (
        "import sys; from llm_perf_opt.config.runtimes import all_traits\n"
        "print([one.name for one in all_traits()], sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert ask([sys.executable, "-c", code]) == f"{[*ENTRY_POINTS]} []"
    assert {name for one in all_traits() for name in one.packages} >= {"torch", "vllm", "tensorrt-llm"}


def test_a_runner_of_ones_own_is_measured(tmp_path: Path) -> None:
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", the_minimal_runner())
    run = tmp_path / "run"
    words = [
        "run",
        "--json",
        "-q",
        "runtime=echo",
        "runtime.engine.step_ms=2",
        "runtime.batch_size=2",
        "runtime.num_new_tokens=6",
    ]
    done = llm_perf(*words, "hardware=cpu", "profiling=none", f"hydra.run.dir={run}", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    timings: dict[str, Any] = json.loads((run / "raw/clean/timings.json").read_text())
    assert timings["runtime"]["type"] == "echo"
    assert timings["runtime"]["engine"] == {"step_ms": 2}
    assert all(len(one["steps_ns"]) == 5 and min(one["steps_ns"]) >= 2_000_000 for one in timings["iterations"])
    report = (run / "report.md").read_text()
    assert timings["model"]["weights"]["counted_on"] == "configuration"
    assert "parameters by its configuration" in report
    assert "run by echo 1.0" in report
    assert timings["runtime"]["method"] in report


def test_the_torch_pass_of_a_runner_without_a_profiler_says_why(tmp_path: Path) -> None:
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", the_minimal_runner())
    words = ["run", "-q", "runtime=echo", "hardware=cpu", "profiling=minimal", "profiling.clean=false"]
    done = llm_perf(*words, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path, site=site)
    assert done.returncode == 3
    assert "torch.profiler cannot see echo: it computes nothing." in done.stderr


def changed_runner(body: str) -> str:
    """The page's runner with something else made of what it gives back, `made`."""
    return (
        the_minimal_runner()
        + f"""
from dataclasses import replace
_plain = EchoRunner.generate

def _changed(self, *given):
    made = _plain(self, *given)
    {body}

EchoRunner.generate = _changed
"""
    )


SHORT = ["runtime.num_new_tokens=7", "runtime.max_repeats=6", "runtime.min_repeats=6", "runtime.max_warmup=4", "hardware=cpu"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param("import os; os._exit(0)", "timings.json is missing", marks=pytest.mark.slow),
        (
            "return replace(made, started_ns=made.started_ns + 0.5, "
            "arrivals_ns=tuple(tuple(at + 0.5 for at in row) for row in made.arrivals_ns))",
            "Expected `int`, got `float`",
        ),
        ("return replace(made, arrivals_ns=tuple((row[-1],) * len(row) for row in made.arrivals_ns))", "take no time"),
    ],
    ids=["no result", "times that are no whole numbers", "all tokens at one moment"],
)
def test_a_pass_that_leaves_no_sound_result_has_failed(tmp_path: Path, body: str, why: str) -> None:
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", changed_runner(body))
    run = tmp_path / "run"
    words = ["run", "-q", "runtime=echo", "profiling=none", *SHORT, f"hydra.run.dir={run}"]
    start = llm_perf_process if "_exit" in body else llm_perf
    done = start(*words, cwd=tmp_path, site=site)
    assert done.returncode == 4, done.stderr
    assert "left no usable result" in done.stderr
    assert why in done.stderr
    manifest = json.loads((run / "run.json").read_text())
    (clean,) = [entry for entry in manifest["passes"] if entry["name"] == "clean"]
    assert manifest["status"] != "complete"
    assert clean["status"] == "failed"
    assert why in clean["why"]
    assert "damaged" not in (run / "report.md").read_text(), "it failed, and for the reason that run.json gives"
    (row,) = json.loads(llm_perf("runs", "--json", str(tmp_path), cwd=tmp_path, site=site).stdout)
    assert row["status"] == manifest["status"]


@pytest.mark.parametrize("early_s", [5, 1000])
def test_an_engine_that_says_it_began_before_it_was_asked_is_refused(tmp_path: Path, early_s: int) -> None:
    body = f"return replace(made, started_ns=made.started_ns - {early_s} * 10**9)"
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", changed_runner(body))
    done = llm_perf("run", "-q", "runtime=echo", "profiling=none", *SHORT, cwd=tmp_path, site=site)
    assert (done.returncode, "ms before `generate` was called" in done.stderr) == (4, True), done.stderr


@pytest.mark.slow
def test_tokens_handed_over_in_pairs_have_no_steps_of_their_own(tmp_path: Path) -> None:
    pairs = (
        "return replace(made, arrivals_ns=tuple((row[0], *(row[i + i % 2] for i in range(1, 7))) for row in made.arrivals_ns))"
    )
    pairs = pairs.replace("row[i + i % 2]", "row[i + i % 2 if i + i % 2 < 7 else 6]")
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", changed_runner(pairs))
    run = tmp_path / "run"
    words = ["run", "-q", "runtime=echo", "profiling=none", *SHORT, f"hydra.run.dir={run}"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    report = (run / "report.md").read_text()
    why = "the engine returned several tokens of a sequence at once"
    assert "Single decode steps have no times" in report
    for label in ("median gap", "p90 gap", "p99 gap"):
        (line,) = [line for line in report.splitlines() if line.startswith(f"| Inter-token latency, {label} |")]
        mark = line.split(" | ")[1]
        assert any(text.startswith(f"- {mark}: ") and why in text for text in report.splitlines())
    for label in ("Time to first token (TTFT)", "Time per output token (TPOT)", "End to end"):
        assert f"| {label} | n/a" not in report
    assert "decode |" in report
    assert "decode_step |" not in report.replace("\\_", "_")
    done = llm_perf(*words[:-1], f"hydra.run.dir={tmp_path / 'other'}", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    again = llm_perf("compare", str(run), str(tmp_path / "other"), cwd=tmp_path, site=site)
    assert why in again.stdout + again.stderr
    times = [line for line in report.splitlines() if not line.startswith("| Warm-up beyond")]  # which may be none
    assert not re.search(r"(?<![\d.,])0(\.0+)? (ms|µs|ns|s)\b", "\n".join(times))


ENGINES = {"runtime=vllm", "runtime=onnxruntime_genai", "runtime=openvino_genai", "runtime=llamacpp"}
SHOWN = [words for words in commands("runtimes.md") if not ENGINES & {*words}]
"""Commands of the page; those of engines in their own environments are run by the tests of the engines."""


@pytest.mark.slow
@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_the_pages_commands_run(tmp_path: Path, words: list[str]) -> None:
    site = bring(tmp_path / "site", "echo", "echo_runner:open_echo", the_minimal_runner())
    short = ["-q", "runtime.num_new_tokens=3", "runtime.max_repeats=6", "runtime.min_repeats=6", "runtime.max_warmup=4"]
    start = llm_perf_process if "runtime=tensorrtllm" in words else llm_perf  # its stand-in may be loaded here
    done = start(*words, *short, "hardware=cpu", "profiling=none", cwd=tmp_path, site=site)
    if "runtime=tensorrtllm" in words and PathFinder.find_spec("tensorrt_llm") is None:
        assert (done.returncode, "needs the package tensorrt_llm" in done.stderr) == (3, True)
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "module", "code", "said"),
    [
        ("gone:open", "", 3, "cannot be loaded from gone:open"),
        (
            "half:open",
            "def open(request): return object()",
            2,
            "invalid engine runner: it has no generate, profiler, facts, runtime",
        ),
        (
            "steps:open",
            "class R:\n    decode_step = 1\ndef open(request): return R()",
            2,
            "invalid steppable runner: it has no begin",
        ),
    ],
)
def test_a_runner_that_is_none_is_refused(tmp_path: Path, target: str, module: str, code: int, said: str) -> None:
    site = bring(tmp_path / "site", "echo", target, module)
    done = llm_perf("run", "-q", "runtime=echo", "hardware=cpu", "profiling=none", cwd=tmp_path, site=site)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runtime.engine.block_size=16"], "has no effect on runtime=pytorch"),
        (["runtime=vllm", "runtime.cache=static"], "runtime.cache=static has no effect on runtime.type=vllm"),
        (["runtime=vllm", "runtime.compile=default"], "runtime.compile=default has no effect"),
        (["runtime=vllm", "runtime.attn_implementation=sdpa"], "runtime.attn_implementation=sdpa has no effect"),
        (["runtime=vllm", "model.substages.first=model.layers.0"], "model.substages needs a runtime that llm-perf steps"),
    ],
)
def test_a_setting_without_effect_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert said in caught.value.fact


def test_engine_arguments_keep_their_types() -> None:
    words = ["runtime=vllm", "runtime.engine.enforce_eager=true", "runtime.engine.block_size=16", "runtime.engine.x={a: [1, 2]}"]
    assert compose(words).config.runtime.engine == {"enforce_eager": True, "block_size": 16, "x": {"a": [1, 2]}}


@pytest.mark.parametrize("words", [["model=tiny_vlm"], ["model=tiny_vlm", "dataset=image_folder", "dataset.path=pages"]])
@pytest.mark.parametrize("entry", ["echo_runner:open_echo", "echo_runner:RUNTIME"])
def test_images_that_a_runner_does_not_take_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], entry: str
) -> None:
    (tmp_path / "pages").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pages" / "a.png")
    site = bring(tmp_path / "site", "echo", entry, the_minimal_runner() + RECORD)
    done = llm_perf("run", "-q", "runtime=echo", "profiling=none", *SHORT, *words, cwd=tmp_path, site=site)
    assert done.returncode == 2
    assert "runtime=echo accepts token ids only" in done.stderr
    assert "dataset.images=0" in done.stderr
    assert "images=True" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_parameters_are_those_of_the_module_that_ran(tmp_path: Path) -> None:
    module = (
        the_minimal_runner()
        + """
import torch


class OwnModule(EchoRunner):
    def __init__(self, request):
        super().__init__(request)
        self.model = torch.nn.Linear(10, 7)


def open_own(request):
    return OwnModule(request)
"""
    )
    site = bring(tmp_path / "site", "echo", "echo_runner:open_own", module)
    words = ["run", "-q", "--json", "runtime=echo", "profiling=none", "hardware=cpu", *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]
    done = llm_perf(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    model = json.loads((tmp_path / "run/raw/clean/timings.json").read_text())["model"]
    assert (model["parameters"], model["weight_bytes"], model["weights"]["counted_on"]) == (77, 308, "module")
    assert model["weights"]["stated_parameters"] > 4_000_000
    found = json.loads(done.stdout)
    assert any(f"{model['weights']['stated_parameters']:,}" in text for text in found["warnings"])
    assert "77 parameters" in (tmp_path / "run/report.md").read_text()
