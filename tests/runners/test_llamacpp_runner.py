"""llama.cpp on its real engine, in its own environment (`make engine-venvs`); what needs no engine runs anywhere."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from docs_commands import commands
from engine_runs import LLAMA3_ROPE, QUIET, SHAPE, SHORT, request, requests, run, save_model, timings
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import CaptureError, ConfigError
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.conversion import ConvertedModel
from llm_perf_opt.runners.llamacpp_runner import LlamaCppRunner, OpenedModel, model_files, read_streams, request_body
from llm_perf_opt.runners.measure.annotations import unmarked
from llm_perf_opt.runners.measure.engine_meter import EngineMeter
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

NAME = "llamacpp"
USERS_FILES = """
import sys
from contextlib import ExitStack
from pathlib import Path
import gguf
from transformers import AutoConfig
from llm_perf_opt.runners import gguf_files as files

source, *targets = map(Path, sys.argv[1:])
config = AutoConfig.from_pretrained(source)
for target in targets:
    if target.name == "pieces":  # tokens whose text is the first byte of a character
        files.placeholder = lambda token: f"<{token}>" + "\\\\xe2" * (token % 2)
    target.mkdir()
    writer = gguf.GGUFWriter(target / "users.gguf", "qwen2")
    files._write_fields(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    with ExitStack() as opened:
        tensors = files._Tensors(source, config, opened)
        for name, shape in tensors.shapes():
            kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
            values = gguf.quants.quantize(tensors.read(name).numpy(), kind)
            writer.add_tensor(files._gguf_name(names, name), values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    (target / "config.json").write_text((source / "config.json").read_text())
"""


@pytest.fixture(scope="module")
def python(engine_python: Callable[[str], Path]) -> Path:
    return engine_python(NAME)


@pytest.fixture(scope="module")
def folders(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stored models of each family, and two GGUF files of a user: quantized, the second with broken pieces of text."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        "qwen2": save_model(folder / "qwen2", eos_token_id=list(range(256))),
        "qwen3": save_model(folder / "qwen3", model_type="qwen3", head_dim=64),
        "mistral": save_model(folder / "mistral", model_type="mistral", sliding_window=None),
        "llama": save_model(folder / "llama", model_type="llama", tie_word_embeddings=False, attention_bias=True),
        "llama3": save_model(folder / "llama3", model_type="llama", rope_parameters=LLAMA3_ROPE),
    }
    users = {name: folder / name for name in ("whole", "pieces")}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    argv = [str(python), "-c", USERS_FILES, str(found["qwen2"]), *map(str, users.values())]
    subprocess.run(argv, env=environment, check=True, capture_output=True)
    return found | users


@pytest.fixture(scope="module")
def cases(folders: dict[str, Path]) -> dict[str, list[str]]:
    stored = {name: ["model=hf", f"model.path={folder}", *SHAPE, "runtime.prompt_tokens=40"] for name, folder in folders.items()}
    return stored | {
        "batch": [*stored["qwen2"], "runtime.batch_size=3"],
        "uneven": [*stored["qwen2"], "runtime.batch_size=2", "runtime.prompt_tokens=128", "dataset=sample_prompts"],
        "fp16": [*stored["llama"], "model.dtype=fp16"],
        "bf16": [*stored["llama"], "model.dtype=bf16"],
        "mixed": [*stored["qwen2"], "runtime.batch_size=3", "runtime.engine.n_batch=32"],
        "cache": [*stored["qwen2"], "runtime.engine.cache_type_k=q8_0", "runtime.engine.flash_attn_type=enabled"],
        "short": [*stored["qwen2"], "runtime.prompt_tokens=400", "runtime.engine.n_ctx=256"],
        "gpt2": ["model=gpt2", *SHAPE],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: the page's own command."""
    return tmp_path_factory.mktemp("engine") / "run"


@pytest.fixture(scope="module")
def found(python: Path, cases: dict[str, list[str]], whole: Path) -> dict[str, dict[str, Any]]:
    """Of the cases, and of the run: in one process."""
    (shown,) = [words[1:] for words in commands("runtimes.md") if f"runtime={NAME}" in words]
    line = ["run", "--json", "-q", *shown, *SHAPE, *SHORT, *QUIET, f"hydra.run.dir={whole}"]
    opened = [[f"runtime={NAME}", *words] for words in cases.values()]
    return dict(zip([*cases, "run"], requests(python, *opened, {"command": line, "cwd": str(whole.parent)}), strict=True))


@pytest.mark.engines
@pytest.mark.slow
class TestEngine:
    @pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "llama", "llama3", "batch", "uneven"])
    def test_the_tokens_are_those_of_pytorch(
        self, found: dict[str, dict[str, Any]], cases: dict[str, list[str]], name: str
    ) -> None:
        theirs, ours = found[name], request(cases[name])
        assert theirs["tokens"] == ours["tokens"]
        for key in ("parameters", "weight_bytes", "dtype", "model_type", "model_class", "device_name"):
            assert theirs["model"][key] == ours["model"][key], key
        assert ("different length" in theirs["runtime"]["uncosted"]) == (name == "uneven")

    def test_the_test_models_choose_different_tokens(self, found: dict[str, dict[str, Any]]) -> None:
        assert len({token for name in ("qwen2", "llama", "llama3") for token in found[name]["tokens"][0]}) > 5

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_other_dtypes_choose_the_same_tokens(self, found: dict[str, dict[str, Any]], dtype: str) -> None:
        """The weights of these models are far enough apart for 16 bits."""
        assert found[dtype]["tokens"] == found["llama"]["tokens"]
        assert (found[dtype]["model"]["dtype"], found[dtype]["runtime"]["uncosted"]) == (dtype, "")
        assert "cache_type_k" not in found[dtype]["runtime"]["engine"], "the engine's own default"

    def test_stages_are_the_whole_request(self, found: dict[str, dict[str, Any]]) -> None:
        for name in ("qwen2", "batch", "uneven"):
            assert (found[name]["inseparable"], found[name]["unstepped"]) == ("", "")
            for iteration in found[name]["iterations"]:
                assert len(iteration["steps_ns"]) == 5
                assert min(iteration["prefill_ns"], *iteration["steps_ns"]) > 0
                assert iteration["prefill_ns"] + sum(iteration["steps_ns"]) <= iteration["wall_ns"]

    def test_prompts_larger_than_a_batch_are_computed_while_others_decode(self, found: dict[str, dict[str, Any]]) -> None:
        assert "decoded while others were still in prefill" in found["mixed"]["inseparable"]

    def test_the_engines_own_times_are_held_against_ours(self, found: dict[str, dict[str, Any]]) -> None:
        assert "by the engine's own times" in found["qwen2"]["runtime"]["notes"][-1]

    def test_a_users_file_runs_as_it_is_stored(self, found: dict[str, dict[str, Any]]) -> None:
        for name in ("whole", "pieces"):
            weights = found[name]["model"]["weights"]
            assert (list(weights["stored_bytes"]), weights["conversion"]) == (["Q8_0"], None)
            assert found[name]["runtime"]["uncosted"].endswith("(Q8_0)")

    def test_tokens_that_the_server_holds_back_have_no_steps(self, found: dict[str, dict[str, Any]]) -> None:
        assert found["pieces"]["tokens"] == found["whole"]["tokens"]
        assert any(token % 2 for token in found["pieces"]["tokens"][0]), "a piece is held back"
        assert any("holds back" in note for note in found["pieces"]["runtime"]["notes"])
        assert (bool(found["pieces"]["unstepped"]), found["whole"]["unstepped"]) == (True, "")

    def test_settings_and_what_has_no_cost(self, found: dict[str, dict[str, Any]]) -> None:
        runtime = found["cache"]["runtime"]
        assert (runtime["engine"]["cache_type_k"], runtime["engine"]["cache_type_v"]) == ("q8_0", "f32")
        assert "cache_type_k=q8_0" in runtime["uncosted"]
        assert "cache_type_k" not in {setting["name"] for setting in runtime["settings"]}, "the user set it"

    def test_what_the_engine_does_not_take_is_an_error(self, found: dict[str, dict[str, Any]]) -> None:
        assert "exceeds the available context size" in found["short"]["error"]
        assert "cannot write models of type gpt2" in found["gpt2"]["error"]

    def test_a_run_in_a_process_of_its_own_is_not_disturbed_by_what_the_engine_prints(
        self, python: Path, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        words = [f"runtime={NAME}", "model=hf", f"model.path={folders['qwen2']}", *SHAPE, "profiling=none"]
        assert len(timings(run(python, tmp_path / "run", *words))["iterations"]) == 6

    def test_a_run_has_times_and_says_what_the_torch_pass_cannot_see(self, found: dict[str, dict[str, Any]], whole: Path) -> None:
        done = found["run"]
        assert json.loads(done["stdout"])["status"] == "partial", done["stderr"]
        assert "offers no profile of its operators" in (whole / "report.md").read_text()
        ran = timings(whole)
        assert (ran["threads"], ran["runtime"]["uncosted"], ran["runtime"]["inseparable"]) == (1, "", "")
        assert ran["model"]["weights"]["conversion"]["by"] == "gguf"


def test_arguments_are_checked_without_the_engine() -> None:
    arguments = traits_of(NAME).arguments
    assert arguments is not None
    arguments.refuse({"n_batch": 512, "flash_attn_type": "disabled", "kv_unified": True}, arguments.known())
    for name, value, said in (
        ("cpuparams", {"n_threads": 2}, r"set by hardware\.threads"),
        ("n_parallel", 2, r"set by runtime\.batch_size"),
        ("n_gpu_layers", 9, "only on the CPU"),
        ("fit_params", True, "set by llm-perf"),
        ("cache_ram_mib", 1, "set by llm-perf"),
        ("cache_idle_slots", True, "set by llm-perf"),
        ("cache_type", "f16", r"Did you mean .*cache_type_k"),
        ("server_tools", ["all"], "no such setting"),
        ("n_ctx", "large", "invalid"),
        ("n_ctx", True, "invalid"),
        ("kv_unified", 1, "invalid"),
        ("cache_type_v", "q9", "invalid"),
    ):
        with pytest.raises(ConfigError, match=said):
            arguments.refuse({name: value}, arguments.known())


def message(index: int, count: int, *tokens: int, **more: Any) -> bytes:
    return json.dumps({"__verbose": {"index": index, "tokens_predicted": count, "tokens": tokens, **more}}).encode()


ENDED = {"timings": {"prompt_n": 4, "prompt_ms": 1.5, "predicted_n": 3, "predicted_ms": 2.5, "cache_n": 0}}


def test_messages_are_tokens_of_their_sequence() -> None:
    sent = [(5, b"null"), (10, message(1, 1, 7)), (11, message(0, 1, 8)), (20, message(0, 2, 9)), (21, message(1, 2, 6))]
    found = read_streams([*sent, (22, message(1, 2, **ENDED)), (23, message(0, 2, **ENDED))], 2)
    assert (found.arrivals, found.tokens, found.complete) == (((11, 20), (10, 21)), ((8, 9), (7, 6)), True)
    assert [timing.prompt_n for timing in found.timings] == [4, 4]


def test_held_back_tokens_arrive_with_the_next() -> None:
    found = read_streams([(10, message(0, 1, 7)), (30, message(0, 3, 9)), (40, message(0, 4, **ENDED))], 1)
    assert (found.arrivals, found.complete) == (((10, 30, 30, 40),), False)


@pytest.mark.parametrize(
    ("sent", "said"), [(b'{"error": {"code": 400, "message": "too long"}}', "too long"), (b"[1]", "cannot be read")]
)
def test_a_refusal_and_an_unknown_message_are_errors(sent: bytes, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        read_streams([(1, sent)], 1)


def test_a_request_computes_its_prompts_and_is_greedy() -> None:
    found = json.loads(request_body(((1, 2), (3,)), 4, stream=True))
    assert (found["prompt"], found["max_tokens"], found["cache_prompt"], found["top_k"]) == ([[1, 2], [3]], 4, False, 1)


class Server:
    """Sends two tokens of every sequence, as xllamacpp does."""

    def __init__(self, skipped: int = 0) -> None:
        self.skipped = skipped
        """Tokens of a prompt that are taken from a cache."""

    def handle_completions(self, wanted: bytes, receive: Callable[[bytes], bool]) -> None:
        prompts = json.loads(wanted)["prompt"]
        for count in (1, 2):
            for index, ids in enumerate(prompts):
                receive(message(index, count, ids[0] + count))
        for index, ids in enumerate(prompts):
            receive(message(index, 2, timings={**ENDED["timings"], "prompt_n": len(ids) - self.skipped}))


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> RunnerRequest:
    engine = SimpleNamespace(__version__="1.2", get_system_info=lambda: "CPU : NEON = 1 | SVE = 0 | OPENMP = 1 | ")
    monkeypatch.setitem(sys.modules, "xllamacpp", engine)
    config = compose([f"runtime={NAME}", "model=tiny", "hardware=cpu", "runtime.batch_size=2"]).config
    prompts = synthetic_prompts(2, 4, 64, 0)
    return RunnerRequest(config, models.load_config(config.model), prompts, torch.device("cpu"), torch.float32, None)


def opened(dtype: torch.dtype = torch.float32, stored: str = "fp32", **values: Any) -> OpenedModel:
    return OpenedModel(ConvertedModel(Path("model"), None), dtype, {stored: 1}, values, (), 1)


def test_what_the_runner_returns_is_what_the_meter_takes(wanted: RunnerRequest) -> None:
    runner = LlamaCppRunner(Server(), opened(cache_type_k="f32", cache_type_v="f32"), wanted)
    meter = EngineMeter(runner, wanted.prompts, 2, 2)
    iteration = meter.iterate()
    assert meter.tokens() == [[ids[0] + 1, ids[0] + 2] for ids in wanted.prompts.ids]
    assert len(iteration.steps_ns) == 1
    assert (runner.runtime.version, runner.runtime.uncosted) == ("xllamacpp 1.2", "")
    assert "compiled with: NEON, OPENMP." in " ".join(runner.runtime.notes)
    assert "1.500 ms by the engine's own times" in runner.runtime.notes[-1]


class BrokenPieces(Server):
    """Holds back the first token of every sequence if it streams, and takes long if it does not."""

    def handle_completions(self, wanted: bytes, receive: Callable[[bytes], bool]) -> None:
        body = json.loads(wanted)
        if not body["stream"]:
            time.sleep(0.05)
            super().handle_completions(wanted, receive)
            return
        for index, ids in enumerate(body["prompt"]):
            receive(message(index, 2, ids[0] + 2))
            receive(message(index, 2, timings={**ENDED["timings"], "prompt_n": len(ids)}))


def test_the_second_request_for_held_back_tokens_is_not_timed(wanted: RunnerRequest) -> None:
    runner = LlamaCppRunner(BrokenPieces(), opened(), wanted)
    meter = EngineMeter(runner, wanted.prompts, 2, 2)
    began = time.monotonic_ns()
    iteration = meter.iterate()
    assert time.monotonic_ns() - began - iteration.wall_ns > 50_000_000
    assert meter.tokens() == [[ids[0] + 1, ids[0] + 2] for ids in wanted.prompts.ids]
    assert any("second request" in note for note in runner.runtime.notes)


def test_a_prompt_that_was_not_computed_is_an_error(wanted: RunnerRequest) -> None:
    runner = LlamaCppRunner(Server(skipped=3), opened(), wanted)
    with pytest.raises(CaptureError, match=r"computed \[1, 1\] tokens of prompts that have \[4, 4\]"):
        runner.generate(wanted.prompts, 2, unmarked)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (opened(torch.float16, "fp16"), ""),
        (opened(torch.bfloat16, "bf16"), ""),
        (opened(torch.float16, "fp16", cache_type_v="q8_0"), "cache_type_v=q8_0"),
        (opened(torch.float32, "fp16"), "stored, in fp16"),
        (opened(torch.float16, "Q4_K"), "(Q4_K)"),
    ],
)
def test_why_the_cost_is_unknown(wanted: RunnerRequest, found: OpenedModel, why: str) -> None:
    assert why in found.uncosted(wanted)
    assert bool(why) == bool(found.uncosted(wanted))


def test_a_folder_has_one_model(tmp_path: Path) -> None:
    (tmp_path / "a-00002-of-00002.gguf").touch()
    (tmp_path / "a-00001-of-00002.gguf").touch()
    assert [path.name for path in model_files(tmp_path)] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match="several models"):
        model_files(tmp_path)
