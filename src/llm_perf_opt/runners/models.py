"""Build the model of a run on its device and in its dtype; reject it first if it does not fit."""

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.config.schema import HardwareConfig, ModelConfig, RuntimeConfig, canonical_dtype
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.host import available_memory_bytes, cpu_has_native_bf16, cpu_name
from llm_perf_opt.core.weight_records import WeightFacts
from llm_perf_opt.runners.pytorch_levers import pytorch_levers
from llm_perf_opt.workspace.data.model_tree import check_model, model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from llm_perf_opt.runners.measure.device import DeviceRequest
    from llm_perf_opt.workspace.data.prompts import Tokenize

RUNTIME = Runtime(
    "pytorch",
    "llm_perf_opt.runners.pytorch_runner:open_pytorch",
    engine=False,
    steppable=True,
    images=True,
    packages=("torch", "transformers", "accelerate", "safetensors", "triton", "flash-attn", "pillow"),
    marks_stages=lambda _: True,
    ranks=True,
    levers=pytorch_levers,
)
"""The PyTorch runtime. It is declared here because importing its runner loads torch."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_IF_TRUSTED = "Read it; if you trust it, pass model.trust_remote_code=true."
_NAMED = 3
"""How many missing tensors a message names; the rest are counted."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a run needs on its device, computed before anything is allocated."""

    parameters: int
    weight_bytes: int
    cache_bytes: int
    logits_bytes: int
    image_bytes: int = 0
    """The pixels of the images in the prompts."""

    @property
    def total_bytes(self) -> int:
        """Minimum of free memory; activations are extra."""
        return self.weight_bytes + self.cache_bytes + self.logits_bytes + self.image_bytes


def device_request(hardware: HardwareConfig) -> "DeviceRequest":
    """Return the requested device, with the configuration keys that messages refer to."""
    from llm_perf_opt.runners.measure.device import DeviceRequest

    index = f"hardware.device_index={hardware.device_index}"
    return DeviceRequest(hardware.device, hardware.device_index, f"hardware.device={hardware.device}", index, "hardware=cpu")


def choose_device(hardware: HardwareConfig) -> "torch.device":
    """Return the requested device, or raise a ResourceError that lists those available."""
    from llm_perf_opt.runners.measure.device import pick_device

    return pick_device(device_request(hardware))


def choose_dtype(wanted: str, device: "torch.device") -> "torch.dtype":
    """Return the torch dtype; for `auto`, bf16 if the device supports it natively, else fp32."""
    import torch

    if wanted == "auto":
        native = torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else cpu_has_native_bf16()
        wanted = "bf16" if native else "fp32"
    dtype: torch.dtype = getattr(torch, _DTYPES[wanted])
    return dtype


def device_name(device: "torch.device") -> str:
    """Return the vendor's name of the device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def load_config(model: ModelConfig) -> "PretrainedConfig":
    """Return the Hugging Face configuration, from the preset's fields or from the folder."""
    from transformers import AutoConfig

    if model.source == "random":
        fields = dict(model.architecture)
        model_type = str(fields.pop("model_type"))
        for name in {"dtype", "torch_dtype"} & fields.keys():  # transformers only knows torch's names
            fields[name] = _DTYPES.get(canonical_dtype(str(fields[name])), fields[name])
        try:
            made: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
            _check_fields(made, fields)
            return made
        except ValueError as error:
            known = _known_model_types()
            if model_type not in known:
                raise ConfigError(
                    f"model.architecture.model_type={model_type} is unknown to transformers.{nearest(model_type, known)}",
                    f"The installed version has {len(known)} model types.",
                ) from error
            raise ConfigError(f"model.architecture: {_one_line(error)}") from error
        except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise ConfigError(f"model.architecture: {_one_line(error)}") from error
    folder = model_folder(model.path or "")
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise _load_error(model, error) from error
    named = str(getattr(found, "_attn_implementation", None))
    if re.search(r"[/:\\]", named) and not model.trust_remote_code:  # transformers would load it
        raise ConfigError(f"{model.path}/config.json names kernels that are code: {named}.", _IF_TRUSTED)
    return found


def _check_fields(made: "PretrainedConfig", fields: dict[str, Any]) -> None:
    """Raise for a misspelled field: transformers stores unknown fields without effect or warning."""
    known = {*type(made)().to_dict(), *getattr(made, "attribute_map", {})}
    for name in fields:
        similar = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and similar:
            raise ConfigError(
                f"model.architecture.{name}: {made.model_type} has no such field. Did you mean '{similar[0]}'?",
                "See the model's Hugging Face configuration for its fields.",
            )


def memory_need(
    config: "PretrainedConfig", model: ModelConfig, dtype: "torch.dtype", batch_size: int, tokens: int, ranks: int = 1
) -> MemoryNeed:
    """Return the memory for the weights and the cache of `batch_size` sequences of `tokens`; with `ranks`, that of each.

    Counted on the meta device; the shape of the cache comes from a one-token forward in bf16: there, experts support no other.
    """
    import torch
    from transformers import DynamicCache

    try:
        with torch.device("meta"):
            empty = _from_config(config, model, dtype, "eager")
    except (RuntimeError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            f"A model of this architecture cannot be built: {_one_line(error)}", "Check model.architecture."
        ) from error
    # Counted before the cast below, which separates tied weights.
    parameters = sum(tensor.numel() for tensor in empty.parameters())
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*empty.parameters(), *empty.buffers()))
    if ranks > 1:
        from llm_perf_opt.runners.tensor_parallel import split_bytes

        weight_bytes = split_bytes(empty, ranks)
    cache = DynamicCache(config=config)
    try:
        with torch.inference_mode():
            empty.bfloat16()(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True
            )
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"{type(empty).__name__} cannot be stepped: {_one_line(error)}", "Check model.architecture.") from error
    per_token = 0
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor):
                per_token += tensor.numel() * (dtype.itemsize if tensor.dtype is torch.bfloat16 else tensor.element_size())
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    return MemoryNeed(
        parameters=parameters,
        weight_bytes=weight_bytes,
        cache_bytes=per_token * batch_size * tokens // ranks,
        logits_bytes=batch_size * vocabulary * dtype.itemsize,
    )


def check_fits(need: MemoryNeed, device: "torch.device", ranks: int = 1) -> None:
    """Raise a ResourceError if the device does not have this much free memory for each of its ranks."""
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
    if need.total_bytes * ranks > free:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ResourceError(
            f"The model does not fit on {device} ({device_name(device)}): it needs {gib(need.total_bytes)}{each} "
            f"(weights {gib(need.weight_bytes)}, cache {gib(need.cache_bytes)}), but only {gib(free)} are free.",
            "Use a smaller model, batch, prompt or dtype, or a device with more memory.",
        )


def check_positions(config: "PretrainedConfig", longest_prompt: int, new_tokens: int) -> None:
    """Raise a ConfigError if a request needs more positions than the model has."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    check_position_count(positions, longest_prompt, new_tokens)


def check_position_count(positions: object, longest_prompt: int, new_tokens: int) -> None:
    """Raise a ConfigError if a request needs more than `positions`; a value that is not an integer sets no limit."""
    fed = longest_prompt + new_tokens - 1  # the last token is not fed back
    if isinstance(positions, int) and fed > positions:
        raise ConfigError(
            f"{longest_prompt} prompt tokens and {new_tokens} new tokens need {fed} positions; "
            f"the model has {positions} positions.",
            f"Lower runtime.prompt_tokens or runtime.num_new_tokens to at most {positions + 1} together.",
        )


def build_model(
    config: "PretrainedConfig",
    model: ModelConfig,
    runtime: RuntimeConfig,
    device: "torch.device",
    dtype: "torch.dtype",
    ranks: int = 1,
) -> "PreTrainedModel":
    """Return the model on `device` in `dtype`, built there without an intermediate copy.

    With `ranks`, only this rank's part of stored weights is read.
    """
    import torch
    from safetensors import SafetensorError

    attention = runtime.attn_implementation
    if model.source == "random":
        torch.manual_seed(model.seed)
        with torch.device(device):
            built: PreTrainedModel = _from_config(config, model, dtype, attention).eval()
            return built
    try:
        loaded, report = _auto_class(config).from_pretrained(
            str(model_folder(model.path or "")),
            config=config,
            dtype=dtype,
            attn_implementation=None if attention == "auto" else attention,
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # the alternative is pickle, which runs code
            device_map={"": device} if device.type == "cuda" and ranks == 1 else None,
            output_loading_info=True,
            **({"distributed_config": _split_over(ranks)} if ranks > 1 else {}),
        )
    except SafetensorError as error:
        raise _damaged_weights(model, error) from error
    except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _load_error(model, error) from error
    _check_complete(model, loaded, report)
    evaluated: PreTrainedModel = loaded.eval()
    return evaluated


def _split_over(ranks: int) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_size=ranks, tp_plan="auto")


def _check_complete(model: ModelConfig, loaded: "PreTrainedModel", report: Mapping[str, Iterable[Any]]) -> None:
    """Raise if the folder does not store all weights: transformers fills missing ones with random numbers and only warns."""
    missing = {str(name) for name in report.get("missing_keys", ())}
    if missing:
        tensors = [*loaded.named_parameters(remove_duplicate=False), *loaded.named_buffers(remove_duplicate=False)]
        stored = {id(tensor) for name, tensor in tensors if name not in missing}
        missing -= {name for name, tensor in tensors if id(tensor) in stored}  # tied to a stored tensor
    mismatched = {str(entry[0] if isinstance(entry, (tuple, list)) else entry) for entry in report.get("mismatched_keys", ())}
    where = model.path or model.name
    for names, what in ((missing, "are missing"), (mismatched, "have another shape")):
        if names:
            first = ", ".join(sorted(names)[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ResourceError(
                f"{where} is incomplete: {len(names)} tensors that config.json requires {what}: {first}{more}.",
                "Download the weights again, or the config.json that belongs to them.",
            )


def weight_facts(model: ModelConfig) -> WeightFacts:
    """Return where the weights come from and in which dtypes they are stored."""
    if model.source == "random":
        return WeightFacts("random")
    stored: dict[str, int] = {}
    folder = model_folder(model.path or "")
    for name, size in check_model(folder).dtypes.items():
        stored[canonical_dtype(name)] = stored.get(canonical_dtype(name), 0) + size
    return WeightFacts("stored", stored, folder=str(folder.resolve()))


def load_tokenizer(model: ModelConfig) -> "Tokenize | None":
    """Return the folder's tokenizer; None for random weights or a folder without one."""
    if model.source == "random":
        return None
    from transformers import AutoTokenizer

    folder = model_folder(model.path or "")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise _load_error(model, error) from error
    return lambda text: [int(token) for token in tokenizer(text)["input_ids"]]


def _from_config(config: "PretrainedConfig", model: ModelConfig, dtype: "torch.dtype", attention: str) -> "PreTrainedModel":
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = _auto_class(config).from_config(
                config,
                dtype=dtype,
                attn_implementation=None if attention == "auto" else attention,
                trust_remote_code=model.trust_remote_code,
            )
    except (ValueError, ImportError) as error:
        raise _load_error(model, error) from error
    built: PreTrainedModel = made
    return built


def _auto_class(config: "PretrainedConfig") -> Any:
    """Return the transformers class that builds the model: image-text-to-text for a vision-language model, else causal."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    from llm_perf_opt.runners.vision_families import family_of

    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    seeing = config.model_type in images and (family_of(config) is not None or config.model_type not in causal)
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def class_name(config: "PretrainedConfig") -> str:
    """Return the name of the class with which transformers builds a causal model of this configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = names.get(config.model_type)
    if found is None:
        raise ConfigError(f"transformers has no causal language model of type {config.model_type}.", "Choose another model.")
    return str(found[0] if isinstance(found, (list, tuple)) else found)


def _damaged_weights(model: ModelConfig, error: Exception) -> ResourceError:
    """Return an error that names the damaged file: safetensors does not, but the headers of the files show it."""
    found = check_model(model_folder(model.path or "")).problems
    return ResourceError(
        f"{model.path} has damaged weights: {'; '.join(found[:_NAMED]) or _one_line(error)}",
        "Download the file again. `llm-perf model check` checks the files of a linked model without running it.",
    )


def _load_error(model: ModelConfig, error: Exception) -> LlmPerfError:
    text = _one_line(error)
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"{model.path} contains its own Python code.",
            _IF_TRUSTED,
        )
    if "attn_implementation" in text or "FlashAttention" in text or "flash_attn" in text:
        return ConfigError(f"runtime.attn_implementation was rejected: {text}", "Use runtime.attn_implementation=sdpa or eager.")
    where = model.path or model.name
    if "safetensors" in text:
        return ResourceError(
            f"{where} has no complete *.safetensors: {text}", "Convert the weights; pickled weights (.bin) are not read."
        )
    return ResourceError(f"{where} cannot be loaded: {text}", "`--debug` shows the full error.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _known_model_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys: Any = CONFIG_MAPPING.keys()
    return [str(key) for key in keys]


def gib(count: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{count / 2**30:.2f} GiB"
