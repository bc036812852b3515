"""Logits of a real model: what rounds differently passes, what computes something else does not; nothing else runs by default."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from builders import with_value
from llm_perf_opt.analysis.tuning.logits import LogitCheck, check_logits, unlike_measured
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners import logits as recording
from llm_perf_opt.runners.compilation import Compilation
from llm_perf_opt.runners.llm_profile_runner import clean_pass
from llm_perf_opt.runners.logit_tap import LogitTap, in_two_steps
from llm_perf_opt.runners.logits import record_logits
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.runners.session import Session, open_session
from llm_perf_opt.traces.logit_file import read_logits, write_logits
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

NEW_TOKENS = 16
LENGTHS = (8, 5, 8, 3)
"""Shorter prompts are padded on the left."""
SMALL = [
    "hardware=cpu", "hardware.threads=1", "profiling=none", "model.dtype=bf16", f"runtime.num_new_tokens={NEW_TOKENS}",
    "runtime.prompt_tokens=8", "runtime.batch_size=4", "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=64", "model.architecture.intermediate_size=128", "model.architecture.vocab_size=1500",
    "model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=2",
    "model.architecture.initializer_range=0.2",
]  # fmt: skip


@cache
def composed() -> RunConfig:
    return compose(SMALL).config


def opened(**changes: Any) -> Session:
    """A session with some settings replaced; `__` stands for a dot."""
    config = composed()
    for key, value in changes.items():
        config = with_value(config, key.replace("__", "."), value)
    session = open_session(config)
    runner: Any = session.runner
    ids = tuple(ids[:length] for ids, length in zip(session.prompts.ids, LENGTHS, strict=True))
    prompts = replace(session.prompts, ids=ids)
    return replace(session, prompts=prompts, batch=runner.place(prompts))


def generated(session: Session) -> list[list[int]]:
    runner: Any = session.runner
    runner.begin()
    tokens = [runner.prefill(session.batch)]
    for _ in range(NEW_TOKENS - 1):
        tokens.append(runner.decode_step(tokens[-1]))
    rows: list[list[int]] = runner.to_lists(tokens)
    return rows


def recorded(run: Path, *, spoil: float = 1.0, **changes: Any) -> tuple[Logits | Missing, list[list[int]]]:
    """Record a run. `spoil`: scale the attention of the first layer by this."""
    session = opened(profiling__logits=True, **changes)
    if spoil != 1.0:
        session.model.model.layers[0].self_attn.scaling *= spoil
    with torch.inference_mode():
        tokens = generated(session)
        record_logits(session, tokens, run / "raw/clean")
    return read_logits(run / "raw/clean/logits.json"), tokens


Base = tuple[Path, Logits, list[list[int]]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = tmp_path_factory.mktemp("logits") / "base"
    found, tokens = recorded(path)
    assert isinstance(found, Logits)
    return path, found, tokens


def tried(base: Base, run: Path, **changes: Any) -> tuple[LogitCheck, str]:
    found, tokens = recorded(run, profiling__logits_reference=str(base[0]), **changes)
    assert isinstance(found, Logits)
    check = check_logits(base[1], base[1], found)
    assert isinstance(check, LogitCheck)
    return check, unlike_measured(base[1], found, tokens, base[2])


def test_the_reference_in_fp32_is_the_model_with_the_same_weights(base: Base) -> None:
    """Computed here from transformers alone: one forward over prompt and tokens."""
    _, found, tokens = base
    assert found.fed.tolist() == tokens == found.chosen.tolist()
    assert len({token for row in tokens for token in row}) > 10, "a constant answer would prove nothing"
    assert (found.top.shape, found.common.shape) == ((4, NEW_TOKENS, 32), (992,))
    assert not isinstance(found.fp32, Missing)
    session = opened()
    model: Any = session.model.float()
    ids = torch.tensor([[*session.prompts.ids[1], *tokens[1][:-1]]])
    with torch.no_grad():
        every = model(ids, use_cache=False).logits[0, -NEW_TOKENS:].numpy()
    picked = np.concatenate([found.top[1], np.tile(found.common, (NEW_TOKENS, 1))], axis=1)
    assert found.fp32[1] == pytest.approx(np.take_along_axis(every, picked, 1), abs=2e-3)
    assert found.values.max(2) == pytest.approx(found.values[:, :, 0]), "the first recorded id is the chosen one"
    error = np.abs(found.values - found.fp32)
    for row in error:
        assert 1e-3 < np.sqrt((row**2).mean()) < 0.1 * found.fp32.std()


def test_another_cache_rounds_differently_and_a_wrong_scale_computes_something_else(base: Base, tmp_path: Path) -> None:
    check, unlike = tried(base, tmp_path / "static", runtime__cache="static")
    assert (check.flaw, unlike) == ("", "")
    assert check.equal > check.compared // 2
    wrong, _ = tried(base, tmp_path / "wrong", spoil=1.5)
    assert wrong.flaw
    assert wrong.error is not None
    assert wrong.error_before is not None
    assert wrong.error.rms > 1.25 * wrong.error_before.rms


def test_of_a_large_batch_the_first_sequences_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again, the same configuration has the same logits."""
    monkeypatch.setattr(recording, "MOST_POSITIONS", 2 * NEW_TOKENS)
    monkeypatch.setattr(recording, "MOST_VALUES", 2 * NEW_TOKENS * 40)
    found, tokens = recorded(tmp_path / "base")
    assert isinstance(found, Logits)
    assert (found.facts.sequences, found.facts.batch_size, found.common.size) == (2, 4, 8)
    assert found.fed.tolist() == tokens[:2]
    check, unlike = tried((tmp_path / "base", found, tokens), tmp_path / "run")
    assert (check.max_difference, check.equal, unlike) == (0.0, 2 * NEW_TOKENS, "")


def test_what_is_missing_has_a_reason(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(profiling__logits=True)

    def why(run: Path, **changes: Any) -> str:
        profiling = replace(session.config.profiling, logits_reference=str(run))
        now = replace(session, config=replace(session.config, profiling=profiling), **changes)
        record_logits(now, base[2], tmp_path / "clean")
        found = read_logits(tmp_path / "clean/logits.json")
        assert isinstance(found, Missing)
        return found.why

    assert why(base[0], prompts=synthetic_prompts(4, 8, 1500, seed=9)) == "the reference has other prompts"
    assert "another batch" in why(base[0], workload=replace(session.workload, new_tokens=3))
    assert "logits.json is missing" in why(tmp_path)
    other = replace(base[1], facts=replace(base[1].facts, vocabulary=9))
    write_logits(tmp_path / "other/raw/clean", other)
    with torch.inference_mode():
        assert why(tmp_path / "other") == "the reference has another vocabulary"
    engine: Any = SimpleNamespace(runtime=SimpleNamespace(type="mine"))
    assert why(base[0], runner=engine) == "the runtime mine does not return logits"
    ranks: Any = SimpleNamespace(size=2)
    assert "split over 2 ranks" in why(base[0], ranks=ranks)
    forced: Any = SimpleNamespace(vocabulary=1500, sequences=4)
    monkeypatch.setattr(recording, "available_memory_bytes", lambda: 1000)
    large = recording._in_fp32(session, forced)
    assert isinstance(large, Missing)
    assert "more memory, but only 1.0 kB are free" in large.why
    quantized = replace(session, config=with_value(session.config, "runtime.quantization", "int8"))
    assert "the weights are quantized" in str(recording._in_fp32(quantized, forced))


def test_by_default_nothing_is_recorded_and_the_same_functions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions return logits, too, only if they are recorded; eager ones are not wrapped while they are measured."""
    compiled: list[Any] = []

    def compile_it(function: Any, mode: Any = None) -> Any:
        compiled.append(function.__name__)
        return lambda *given: function(*given)

    monkeypatch.setattr(torch, "compile", compile_it)
    model = opened().model
    for prefill, names in ((False, ["_with_logits"]), (True, ["_with_logits", "_with_logits"])):
        runner = PyTorchRunner(model, "small", NEW_TOKENS, "static", Compilation("default", prefill))
        assert {*compiled} == {"_forward"}
        assert not isinstance(runner._decode, LogitTap)
        with pytest.raises(RuntimeError, match="do not return logits"), runner.tapped():
            pass
        compiled.clear()
        runner.return_logits()
        assert compiled == names
        compiled.clear()
    eager = PyTorchRunner(model, "small", NEW_TOKENS)
    eager.return_logits()
    assert (eager._decode, eager._first, compiled) == (eager._forward, eager._forward, [])
    with eager.tapped():
        assert isinstance(eager._decode, LogitTap)
    assert eager._decode == eager._forward


def test_the_unprofiled_pass_records_after_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and memory are written before; without the setting nothing is recorded."""
    seen: list[bool] = []

    def record(session: Session, tokens: list[list[int]], out: Path) -> None:
        seen.append((out / "timings.json").is_file())
        assert [len(row) for row in tokens] == [NEW_TOKENS] * 4

    monkeypatch.setattr(recording, "record_logits", record)
    few = {"runtime__max_warmup": 1, "runtime__min_repeats": 1, "runtime__max_repeats": 1}
    for wanted in (False, True):
        with torch.inference_mode():
            assert clean_pass(opened(profiling__logits=wanted, **few), tmp_path / str(wanted))
    assert seen == [True]


@pytest.mark.slow
def test_a_compiled_model_records_the_functions_that_were_measured(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, without generated code: that takes half a minute of the processor."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    check, unlike = tried(base, tmp_path / "run", runtime__compile="default", runtime__cache="static")
    assert (check.flaw, unlike) == ("", "")
    assert "that were measured" in json.loads((tmp_path / "run/raw/clean/logits.json").read_text())["method"]


@pytest.mark.parametrize("vocabulary", [1, 7, 63, 64, 1009, 50257, 128256, 151936])
def test_the_first_of_the_most_likely_tokens_is_found_in_two_steps(vocabulary: int) -> None:
    """Rounded to bf16, many logits are equal; also if all are."""
    torch.manual_seed(vocabulary)
    equal = torch.zeros(2, 1, vocabulary)
    for logits in (torch.randn(3, 1, vocabulary).bfloat16(), equal, equal - torch.inf):
        first = [row.tolist().index(max(row.tolist())) for row in logits.float().flatten(0, 1)]
        assert in_two_steps(logits).flatten().tolist() == first


def test_two_steps_are_one_graph() -> None:
    logits = torch.randn(1, 1, 1920)
    compiled = torch.compile(in_two_steps, backend="eager", fullgraph=True)
    assert compiled(logits).tolist() == logits.argmax(-1).tolist()
