"""GGUF, the model format of llama.cpp: writes one from a Hugging Face folder, and reads the types of its tensors.

The file has a placeholder instead of the model's tokenizer, because prompts are passed as token ids.
"""

import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import ConfigError, ParseError

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`model_type` of Hugging Face → the architecture in GGUF."""
PLACEHOLDER = "rwkv"
"""A kind of tokenizer to which llama.cpp adds no token that ends a sequence."""
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Our names of dtypes → those of GGUF."""
_VERSIONS = (2, 3)
"""Those with lengths of 64 bits."""
_TEXT, _LIST = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Types of the fields in a header, and the bytes of those of fixed size (GGUF's specification)."""
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_HEAD = "lm_head.weight"
_COMPUTED = ".rotary_emb.inv_freq"
"""Older checkpoints store the frequencies of the rotary embedding, which llama.cpp computes."""
_NORMAL_TYPE = 1
"""An ordinary token in GGUF's list of token types."""


def write_gguf(source: Path, target: Path, dtype: "torch.dtype") -> None:
    """Write a folder with the source's weights as GGUF. Matrices get the dtype; vectors are fp32, as llama.cpp requires."""
    import gguf
    import numpy as np
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, local_files_only=True)
    target.mkdir()
    kind = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(target / MODEL_FILE, kind)
    _write_fields(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    with ExitStack() as opened:
        tensors = _Tensors(source, config, opened)
        for name, shape in tensors.shapes():
            stored = dtype if len(shape) > 1 else torch.float32
            size = torch.Size(shape).numel() * stored.itemsize
            raw = gguf.GGMLQuantizationType[_type_name(stored)]
            writer.add_tensor_info(_gguf_name(names, name), shape, np.dtype(np.float32), size, raw)  # `raw` decides
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in tensors.shapes():
            stored = dtype if len(shape) > 1 else torch.float32
            writer.write_tensor_data(tensors.read(name).to(stored).contiguous().view(torch.uint8).numpy())
    writer.close()


def stored_types(files: Iterable[Path]) -> dict[str, int]:
    """Return the bytes of the matrices in GGUF files by type (`fp16`, `Q4_K`), largest first."""
    import gguf

    ours = {theirs: name for name, theirs in TYPES.items()}
    found: dict[str, int] = {}
    for file in files:
        for dimensions, number in tensor_types(file):
            if len(dimensions) > 1:
                try:
                    kind = gguf.GGMLQuantizationType(number)
                    block, size = gguf.GGML_QUANT_SIZES[kind]
                except (ValueError, KeyError) as error:
                    fact = f"{file} has tensors of type {number}, which the installed gguf does not know."
                    raise ParseError(fact, "Install a newer gguf, or convert the model to another type.") from error
                name = ours.get(kind.name, kind.name)
                found[name] = found.get(name, 0) + prod(dimensions) // block * size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def tensor_types(file: Path) -> list[tuple[tuple[int, ...], int]]:
    """Return dimensions and type of each tensor, from the file's header.

    The reader of the gguf package does too, but takes seconds for a vocabulary of usual size.
    """
    if not file.stat().st_size:
        raise ParseError(f"{file} is empty.", "Copy or convert the file again.")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        try:
            magic, version, tensors, fields = header.numbers("<4sIQQ")
            if magic != b"GGUF" or version not in _VERSIONS:
                raise ParseError(f"{file} is not a GGUF file of version 2 or 3.", "Convert the model again.")
            for _ in range(fields):
                header.text()
                header.skip_value(*header.numbers("<I"))
            return [header.tensor() for _ in range(tensors)]
        except (struct.error, KeyError, OverflowError, RecursionError) as error:
            raise ParseError(f"The header of {file} cannot be read: {error!r}.", "Copy or convert the file again.") from error


class _Header:
    """Reads the fields of a header one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def text(self) -> None:
        (length,) = self.numbers("<Q")
        self._at += length

    def skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self.text()
        elif kind == _LIST:
            of, count = self.numbers("<IQ")
            if of in _SIZES:
                self._at += count * _SIZES[of]
            else:
                for _ in range(count):
                    self.skip_value(of)
        else:
            self._at += _SIZES[kind]

    def tensor(self) -> tuple[tuple[int, ...], int]:
        self.text()
        (count,) = self.numbers("<I")
        dimensions = self.numbers(f"<{count}Q")
        kind, _ = self.numbers("<IQ")
        return dimensions, kind


def _type_name(dtype: "torch.dtype") -> str:
    from llm_perf_opt.runners.engines import short_dtype

    return TYPES[short_dtype(dtype)]


def refuse_model(config: Any) -> None:
    """Raise a ConfigError for a model whose computation would differ, or that llm-perf cannot write."""
    remedy = "Convert it with llama.cpp's convert_hf_to_gguf.py, and give the folder with model=hf model.path=DIR."
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(f"llm-perf cannot write models of type {kind} as GGUF; it can: {', '.join(ARCHITECTURES)}.", remedy)
    if getattr(config, "quantization_config", None):
        raise ConfigError("llm-perf cannot write quantized checkpoints of Hugging Face as GGUF.", remedy)
    window = kind == "mistral" and config.sliding_window
    if window or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError("llm-perf cannot write models with sliding windows as GGUF.", remedy)
    rope = config.rope_parameters.get("rope_type", "default")
    if rope != "default" and (ARCHITECTURES[kind], rope) != ("llama", "llama3"):
        raise ConfigError(f"llm-perf cannot write {kind} with rotary embeddings of type {rope} as GGUF.", remedy)
    if config.hidden_act != "silu":
        raise ConfigError(f"llm-perf cannot write {kind} with hidden_act={config.hidden_act} as GGUF.", remedy)


def _write_fields(writer: Any, config: Any) -> None:
    heads = _head_size(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(heads)
    writer.add_value_length(heads)
    writer.add_rope_dimension_count(heads)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model(PLACEHOLDER)
    writer.add_token_list([placeholder(number) for number in range(config.vocab_size)])
    writer.add_token_types([_NORMAL_TYPE] * config.vocab_size)


def placeholder(token: int) -> str:
    """Return the text of a token."""
    return f"<{token}>"


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _gguf_name(names: Any, name: str) -> str:
    if name == _Tensors.ROPE:
        return name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ConfigError(f"GGUF has no name for the tensor {name}.", "Choose a model without it.")
    return str(found)


class _Tensors:
    """The tensors of a Hugging Face folder as llama.cpp takes them, read one by one."""

    ROPE = "rope_freqs.weight"

    def __init__(self, source: Path, config: Any, opened: ExitStack) -> None:
        from safetensors import safe_open

        self._config = config
        self._files: dict[str, Any] = {}
        for path in _weight_files(source):
            file = opened.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)
        self._files = {name: file for name, file in self._files.items() if not name.endswith(_COMPUTED)}
        if config.tie_word_embeddings:
            self._files.pop(_HEAD, None)
        self._factors = _rope_factors(config)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, in the order in which they are written."""
        if self._factors is not None:
            yield self.ROPE, tuple(self._factors.shape)
        for name, file in self._files.items():
            yield name, tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> "torch.Tensor":
        """Return a tensor."""
        if name == self.ROPE and self._factors is not None:
            return self._factors
        found: torch.Tensor = self._files[name].get_tensor(name)
        heads = {"q_proj": self._config.num_attention_heads, "k_proj": self._config.num_key_value_heads}.get(name.split(".")[-2])
        return interleaved(found, heads) if heads and ARCHITECTURES[self._config.model_type] == "llama" else found


def interleaved(tensor: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Return the rows of each head in the order of llama.cpp's Llama, which rotates neighbors; Hugging Face rotates halves."""
    rows: torch.Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return rows.reshape(tensor.shape)


def _rope_factors(config: Any) -> "torch.Tensor | None":
    """Return by how much Llama 3.1 and later slow each rotation; None for other models."""
    if config.rope_parameters.get("rope_type", "default") == "default":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = _head_size(config)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    factors: torch.Tensor = (plain / slowed.double()).float()
    return factors


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).exists():
        names = json.loads((source / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [source / Path(name).name for name in sorted(set(names))]
    if (source / _WEIGHTS).exists():
        return [source / _WEIGHTS]
    raise ConfigError(f"{source} has neither {_WEIGHTS} nor {_INDEX}.", "Save the model's weights in that format.")
