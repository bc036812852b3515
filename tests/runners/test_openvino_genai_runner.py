"""OpenVINO GenAI on its real engine, in its own environment (`make engine-venvs`); what needs no engine runs anywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs_commands import commands
from engine_runs import QUIET, SHAPE, SHORT, request, requests, save_model, timings
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.openvino_genai_runner import stored_bytes

NAME = "openvino_genai"


@pytest.fixture(scope="module")
def python(engine_python: Callable[[str], Path]) -> Path:
    return engine_python(NAME)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """One sequence, two, two of different length: of a stored model of which every token ends a sequence."""
    folder = save_model(tmp_path_factory.mktemp("model") / "small", eos_token_id=list(range(256)))
    saved = ["model=hf", f"model.path={folder}", *SHAPE]
    uneven = ["runtime.batch_size=2", "runtime.prompt_tokens=128", "dataset=sample_prompts"]
    return [saved, [*saved, "runtime.batch_size=2"], [*saved, *uneven]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: the page's own command."""
    return tmp_path_factory.mktemp("engine") / "run"


@pytest.fixture(scope="module")
def found(python: Path, cases: list[list[str]], whole: Path) -> list[dict[str, Any]]:
    """Of the cases, of two settings, and of the run: in one process, which imports the converter once."""
    others = [[*cases[0], "runtime.engine.NO_SUCH=1"], [*cases[0], "runtime.engine.KV_CACHE_PRECISION=u8"]]
    (shown,) = [words[1:] for words in commands("runtimes.md") if f"runtime={NAME}" in words]
    run = ["run", "--json", "-q", *shown, *SHAPE, *SHORT, *QUIET, f"hydra.run.dir={whole}"]
    opened = [[f"runtime={NAME}", *words] for words in (*cases, *others)]
    return requests(python, *opened, {"command": run, "cwd": str(whole.parent)})


@pytest.mark.engines
@pytest.mark.slow
class TestEngine:
    def test_the_tokens_are_those_of_pytorch(self, found: list[dict[str, Any]], cases: list[list[str]]) -> None:
        for theirs, words in zip(found, cases, strict=False):
            ours = request(words)
            assert theirs["tokens"] == ours["tokens"]
            assert (theirs["prompts"], theirs["model"]["dtype"]) == (list(ours["prompts"]), "fp32")
            assert theirs["runtime"]["uncosted"] == ""
        assert len({token for row in found[1]["tokens"] for token in row}) > 2, "tokens that differ"
        assert len(set(found[2]["prompts"])) == 2

    def test_stages_are_the_whole_request(self, found: list[dict[str, Any]]) -> None:
        for one in found[:3]:
            for iteration in one["iterations"]:
                assert len(iteration["steps_ns"]) == 5
                assert min(iteration["prefill_ns"], *iteration["steps_ns"]) > 0
                assert iteration["prefill_ns"] + sum(iteration["steps_ns"]) <= iteration["wall_ns"]

    def test_the_engines_own_times_are_held_against_ours(self, found: list[dict[str, Any]]) -> None:
        streamed, batch = found[0]["runtime"], found[1]["runtime"]
        assert "streamer" in streamed["method"]
        assert "by the engine's own times" in streamed["notes"][-1]
        assert "timestamps of the engine" in batch["method"]
        assert "own times of its tokens" not in " ".join(batch["notes"])

    def test_what_the_engine_does_not_take_and_what_has_no_cost(self, found: list[dict[str, Any]]) -> None:
        assert "Unsupported property NO_SUCH" in found[3]["error"]
        assert "KV_CACHE_PRECISION=u8" in found[4]["runtime"]["uncosted"]
        own, users = ({setting["name"] for setting in one["runtime"]["settings"]} for one in (found[0], found[4]))
        assert own >= {"INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "ATTENTION_BACKEND", "ignore_eos", "do_sample"}
        assert own - users == {"KV_CACHE_PRECISION"}, "what the user sets is not stated"

    def test_a_run_has_times_and_says_what_the_torch_pass_cannot_see(self, found: list[dict[str, Any]], whole: Path) -> None:
        done = found[5]
        assert json.loads(done["stdout"])["status"] == "partial", done["stderr"]
        assert "offer no profile of its operators" in (whole / "report.md").read_text()
        ran = timings(whole)
        assert (ran["threads"], ran["runtime"]["uncosted"], ran["runtime"]["inseparable"]) == (1, "", "")
        assert ran["model"]["weights"]["conversion"]["by"] == "optimum-cli export openvino"


def test_arguments_that_llm_perf_sets_are_refused() -> None:
    arguments = traits_of(NAME).arguments
    assert arguments is not None
    arguments.refuse({"KV_CACHE_PRECISION": "u8"}, arguments.known())
    with pytest.raises(ConfigError, match=r"set by hardware\.threads"):
        arguments.refuse({"INFERENCE_NUM_THREADS": 2}, arguments.known())


def test_constants_are_counted_by_type(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text(
        '<data element_type="i64" shape="2" offset="0" size="16" /><data element_type="u4" shape="64" offset="16" size="32" />'
        '<data element_type="f32" shape="1" offset="48" size="4" /><data element_type="u4" shape="32" offset="52" size="16" />'
    )
    assert stored_bytes(tmp_path / "model.xml") == {"u4": 48, "i64": 16, "fp32": 4}
