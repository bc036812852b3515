"""GGUF files: which models can be written, and the header of a file. What is written runs in test_llamacpp_runner.py."""

import enum
import json
import struct
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_runs import LLAMA3_ROPE, MODEL
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.runners.gguf_files import (
    _rope_factors,
    _Tensors,
    _weight_files,
    interleaved,
    refuse_model,
    stored_types,
    tensor_types,
)

LLAMA3 = {"rope_parameters": LLAMA3_ROPE}


def config(kind: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**MODEL, **fields})


def test_supported_models_pass() -> None:
    mistral = config("mistral", sliding_window=None)
    for found in (config("llama", **LLAMA3), mistral, config("qwen2"), config("qwen3")):
        refuse_model(found)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("gpt2", {}, "type gpt2"),
        ("mistral", {"sliding_window": 32}, "sliding windows"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "sliding windows"),
        ("qwen2", LLAMA3, "rotary embeddings of type llama3"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "of type linear"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints"),
    ],
)
def test_models_that_would_compute_something_else_are_refused(kind: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_model(config(kind, **fields))


def test_rows_of_a_head_are_interleaved() -> None:
    rows = torch.arange(8)
    assert interleaved(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved(rows[:, None], 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rotations_are_slowed_as_the_model_says() -> None:
    assert _rope_factors(config("llama")) is None
    factors = _rope_factors(config("llama", **LLAMA3))
    assert factors is not None
    assert factors[[0, -1]].tolist() == pytest.approx([1.0, LLAMA3_ROPE["factor"]])


def test_weights_are_found_inside_their_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither"):
        _weight_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert _weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    names = {"a": "b-1.safetensors", "c": "../../b-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert _weight_files(tmp_path) == [tmp_path / "b-2.safetensors", tmp_path / "b-1.safetensors"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HEADER = (
    struct.pack("<4sIQQ", b"GGUF", 3, 2, 3)
    + (text("general.architecture") + struct.pack("<I", 8) + text("llama"))
    + (text("llama.block_count") + struct.pack("<II", 4, 2))
    + (text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"))
    + (text("token_embd.weight") + struct.pack("<I2QIQ", 2, 64, 4, 12, 0))
    + (text("output_norm.weight") + struct.pack("<IQIQ", 1, 64, 0, 256))
)


def test_the_tensors_of_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(HEADER)
    assert tensor_types(tmp_path / "a.gguf") == [((64, 4), 12), ((64,), 0)]


NESTED = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000


BEGINNING = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)
LONG_TEXT = BEGINNING + struct.pack("<Q", 2**63)
LONG_LIST = BEGINNING + text("many") + struct.pack("<IIQ", 9, 12, 2**62)


@pytest.mark.parametrize(
    "content",
    [
        *[HEADER[:length] for length in range(0, len(HEADER), 7)],
        *(b"GGML" + HEADER[4:], NESTED, LONG_TEXT, LONG_LIST),
    ],
)
def test_a_damaged_header_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ParseError, match=r"a\.gguf"):
        tensor_types(tmp_path / "a.gguf")


class Known(enum.IntEnum):
    Q4_K = 12


def test_a_type_that_the_package_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {Known.Q4_K: (256, 144)}
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGMLQuantizationType=Known, GGML_QUANT_SIZES=sizes))
    (tmp_path / "a.gguf").write_bytes(HEADER)
    assert stored_types([tmp_path / "a.gguf"]) == {"Q4_K": 144}
    unknown = HEADER.replace(struct.pack("<I2QI", 2, 64, 4, 12), struct.pack("<I2QI", 2, 64, 4, 999))
    (tmp_path / "a.gguf").write_bytes(unknown)
    with pytest.raises(ParseError, match=r"a\.gguf has tensors of type 999"):
        stored_types([tmp_path / "a.gguf"])


def test_stored_frequencies_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = {"model.norm.weight": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(stored, tmp_path / "model.safetensors")
    with ExitStack() as opened:
        tensors = _Tensors(tmp_path, config("llama"), opened)
        assert [name for name, _ in tensors.shapes()] == ["model.norm.weight"]
