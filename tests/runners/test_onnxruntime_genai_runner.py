"""ONNX Runtime GenAI on its real engine, in its own environment (`make engine-venvs`); what needs no engine runs anywhere."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs_commands import commands
from engine_runs import QUIET, SHAPE, SHORT, llm_perf, request, requests, save_model, timings
from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import CaptureError, ConfigError, ParseError
from llm_perf_opt.runners.onnxruntime_genai_runner import CONFIG, trace_events, write_links

NAME = "onnxruntime_genai"
UNEVEN = ["model=tiny", "runtime.batch_size=2", *SHAPE, "runtime.prompt_tokens=128", "dataset=sample_prompts"]


@pytest.fixture(scope="module")
def python(engine_python: Callable[[str], Path]) -> Path:
    return engine_python(NAME)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A stored model of which every token ends a sequence."""
    folder = save_model(tmp_path_factory.mktemp("model") / "small", eos_token_id=list(range(256)))
    return ["model=hf", f"model.path={folder}", "runtime.batch_size=2", *SHAPE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the unprofiled pass and the torch pass: the page's own command."""
    return tmp_path_factory.mktemp("engine") / "run"


@pytest.fixture(scope="module")
def found(python: Path, saved: list[str], whole: Path) -> list[dict[str, Any]]:
    """Of two models, of two settings, and of the run: in one process."""
    bad = [["model.dtype=fp16"], ["runtime.engine.graph_optimization_level=none"]]
    (shown,) = [words[1:] for words in commands("runtimes.md") if f"runtime={NAME}" in words]
    run = ["run", "--json", "-q", *shown, *SHAPE, *SHORT, *QUIET, f"hydra.run.dir={whole}"]
    opened = [[f"runtime={NAME}", *words] for words in (saved, UNEVEN, *[[*saved, *one] for one in bad])]
    return requests(python, *opened, {"command": run, "cwd": str(whole.parent)})


@pytest.mark.engines
@pytest.mark.slow
class TestEngine:
    def test_the_tokens_are_those_of_pytorch(self, found: list[dict[str, Any]], saved: list[str]) -> None:
        ours, theirs = request(saved), found[0]
        assert theirs["tokens"] == ours["tokens"]
        assert len({token for row in theirs["tokens"] for token in row}) > 2, "tokens that differ"
        for key in ("parameters", "weight_bytes", "dtype", "model_type", "model_class", "device_name"):
            assert theirs["model"][key] == ours["model"][key], key
        assert theirs["runtime"]["uncosted"] == ""
        assert theirs["model"]["weights"]["conversion"]["source"] == saved[1].partition("=")[2]

    def test_prompts_of_different_length(self, found: list[dict[str, Any]]) -> None:
        assert len(set(found[1]["prompts"])) == 2
        assert found[1]["tokens"] == request(UNEVEN)["tokens"]
        assert "pads sequences" in found[1]["runtime"]["uncosted"]

    def test_what_the_engine_does_not_take_is_an_error(self, found: list[dict[str, Any]]) -> None:
        assert "does not run model.dtype=fp16" in found[2]["error"]
        assert "cannot open this model" in found[3]["error"]

    def test_what_ran_is_recorded(self, found: list[dict[str, Any]], whole: Path) -> None:
        assert json.loads(found[4]["stdout"])["status"] == "complete", found[4]["stderr"]
        ran = timings(whole)
        runtime, conversion = ran["runtime"], ran["model"]["weights"]["conversion"]
        assert (runtime["type"], runtime["uncosted"], runtime["engine"]) == (NAME, "", {"intra_op_num_threads": 1})
        settings = {setting["name"]: setting["value"] for setting in runtime["settings"]}
        assert (settings["intra_op_num_threads"], settings["do_sample"], settings["eos_token_id"]) == ("1", "False", "None")
        assert (ran["threads"], ran["model"]["logits"], ran["model"]["dtype"]) == (1, "whole prompt", "fp32")
        assert conversion["by"] == "onnxruntime_genai.models.builder"
        report = (whole / "report.md").read_text().replace("\\_", "_")
        assert f"from random weights by {conversion['by']}" in report
        for iteration in ran["iterations"]:
            assert len(iteration["steps_ns"]) == 5
            assert min(iteration["prefill_ns"], *iteration["steps_ns"]) > 0

    def test_the_torch_pass_has_the_nodes_of_the_engines_profiler(self, found: list[dict[str, Any]], whole: Path) -> None:
        assert found[4]["returncode"] == 0, found[4]["stderr"]
        with gzip.open(whole / "raw/torch/trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = [event["name"] for event in events if event["name"] in ("prefill", "decode_step")]
        assert steps == ["prefill", *["decode_step"] * 5]
        rows = json.loads((whole / "raw/torch/operators.json").read_text())["operators"]
        (attention,) = [row for row in rows if row["name"] == "onnx::GroupQueryAttention"]
        assert attention["calls"] == 6 * 4, "four layers, in prefill and in every step"
        products = [row for row in rows if row_of(row["name"], False) is HostRow.MATMUL]
        assert min(row["cpu_self_ns"] for row in products) > 0, "the report shows them as such"
        kept = {path.name for path in (whole / "raw/torch").iterdir()}
        assert {"trace.json.gz", "onnxruntime_profile.json"} <= kept
        assert not any(name.startswith("onnxruntime_profile_") for name in kept)

    def test_nsys_sees_the_stages(self, python: Path, saved: list[str], real_nsys: Path, tmp_path: Path) -> None:
        from llm_perf_opt.traces.nsys_sqlite import read_nsys

        words = [f"runtime={NAME}", *saved, "profiling=nsys", "profiling.clean=false", *SHORT, *QUIET]
        done = llm_perf(python, "run", "-q", *words, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path, NSYS=str(real_nsys))
        assert done.returncode == 0, done.stderr
        trace = read_nsys(tmp_path / "run/raw/nsys/run.sqlite")
        names = [trace.name_of(int(index)) for index in trace.ranges.name]
        assert (names.count("prefill"), names.count("decode_step")) == (1, 5)


def test_arguments_are_checked_without_the_engine() -> None:
    arguments = traits_of(NAME).arguments
    assert arguments is not None
    arguments.refuse({"intra_op_num_threads": 1, "session": {"intra_op": {"allow_spinning": "0"}}}, arguments.known())
    for name in ("custom_ops_library", "enable_profiling", "intra_op_num_thread"):
        with pytest.raises(ConfigError):
            arguments.refuse({name: "x"}, arguments.known())


def event(name: str, start: int, length: int, **more: str) -> dict[str, object]:
    kind = {"cat": "Node", "args": more} if more else {"cat": "Session", "args": {}}
    return {"name": name, "ts": start, "dur": length, "ph": "X", "pid": 1, "tid": 1, **kind}


def test_the_runs_of_a_profile_are_its_stages() -> None:
    profile = [
        event("session_initialization", 0, 50),
        event("/embed/Gather_kernel_time", 101, 2, op_name="Gather"),
        event("model_run", 100, 10),
        event("model_run", 120, 5),
        event("/lm_head/MatMul_kernel_time", 121, 3, op_name="MatMul"),
        event("model_run", 130, 6),
    ]
    found = [(row["name"], row["ts"], row["dur"]) for row in trace_events(profile)]
    assert found == [
        ("profile", 100, 36),
        ("prefill", 100, 10),
        ("decode_step", 120, 5),
        ("decode_step", 130, 6),
        ("decode", 120, 16),
        ("onnx::Gather", 101, 2),
        ("onnx::MatMul", 121, 3),
    ]
    with pytest.raises(CaptureError, match="no run of the model"):
        trace_events(profile[:2])


def test_a_configuration_loads_no_code_and_ends_no_sequence(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "links"
    model.mkdir()
    folder.mkdir()
    decoder = {"filename": "model.onnx", "session_options": {"custom_ops_library": "x.so", "provider_options": [{"cuda": {}}]}}
    (model / CONFIG).write_text(json.dumps({"model": {"eos_token_id": [3], "decoder": decoder}}))
    (model / "model.onnx").write_bytes(b"")
    write_links(model, folder, {"intra_op_num_threads": 2}, padding=7)
    found = json.loads((folder / CONFIG).read_text())["model"]
    assert found == {
        "pad_token_id": 7,
        "decoder": {"filename": "model.onnx", "session_options": {"intra_op_num_threads": 2, "provider_options": []}},
    }
    assert (folder / "model.onnx").resolve() == model / "model.onnx"
    (model / CONFIG).write_text("[]")
    with pytest.raises(ParseError, match="cannot be read"):
        write_links(model, folder, {}, padding=7)
