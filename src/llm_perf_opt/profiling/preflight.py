"""Reject a request before a process is started: missing data, model, device, compiler or package, unknown engine arguments,
CPUs that this process may not use, images that the model cannot take, too many positions or too little memory.

Only what would certainly fail is rejected; what needs torch is left to the measured process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.analysis.cost_model.cost import Formats, kv_cache_bytes, weight_bytes
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.sharding import Plan, device_stages
from llm_perf_opt.config.parallel import ranks_of, ranks_on_device
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import HardwareConfig, ModelConfig, RunConfig, RuntimeConfig
from llm_perf_opt.core.compiler import INSTALL, compiler_problem
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.host import cpu_has_native_bf16, cpu_name, total_memory_bytes
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.runners.cpus import check_cpus
from llm_perf_opt.runners.measure.device import TorchBuild, check_available, most_cuda_devices, torch_build
from llm_perf_opt.runners.measure.gpu import gpu_size
from llm_perf_opt.runners.models import check_position_count, device_request, gib
from llm_perf_opt.runners.tensor_parallel import check_heads
from llm_perf_opt.runners.vision_families import check_image_request, check_random_images
from llm_perf_opt.traces.prometheus import read_prometheus
from llm_perf_opt.workspace.data.images import check_images
from llm_perf_opt.workspace.data.model_tree import model_folder
from llm_perf_opt.workspace.data.prompts import check_first_text
from llm_perf_opt.workspace.data.recorded import recorded_prompts

_N_POSITIONS = ("gpt2", "gptj", "codegen", "gpt_bigcode", "ctrl")
"""Model types whose field for positions is `n_positions`."""
_BF16_CAPABILITY = (8, 0)


def refuse_early(configs: Iterable[RunConfig]) -> None:
    """Raise for the first request that cannot work. What several requests share is checked once."""
    requests = list(configs)
    for path in dict.fromkeys(config.model.path for config in requests if config.model.source == "pretrained"):
        model_folder(path or "")
    for dataset in dict.fromkeys(config.dataset for config in requests if config.dataset.kind not in ("synthetic", "recorded")):
        (check_images if dataset.kind == "image_folder" else check_first_text)(dataset)
    for config in requests:
        if config.dataset.kind == "recorded":
            recorded_prompts(config)
    for name in dict.fromkeys(config.runtime.type for config in requests if config.runtime.engine):
        arguments = traits_of(name).arguments
        known = arguments.known() if arguments else None
        for config in requests:
            if arguments and config.runtime.type == name:
                arguments.refuse(config.runtime.engine, known)
    for cpus in dict.fromkeys(config.hardware.cpus for config in requests if config.hardware.cpus):
        check_cpus(cpus)
    for file in dict.fromkeys(config.profiling.nvml.prometheus for config in requests if config.profiling.nvml.prometheus):
        check_exporter_file(file)
    for run in dict.fromkeys(config.profiling.logits_reference for config in requests if config.profiling.logits_reference):
        _check_logits_reference(run)
    machine = _Machine()
    for config in requests:
        fields = _architecture(config.model)
        _check_positions(config, fields)
        _check_images(config, fields)
        machine.check_available(config.hardware)
        if not traits_of(config.runtime.type).engine:  # an engine manages its memory itself and may use several devices
            _check_attention(config.runtime)
            if ranks_of(config) > 1:
                _check_heads(fields, ranks_of(config))
            machine.check_size(config, fields)
            machine.check_compiler(config)


def refuse_anywhere(configs: Iterable[RunConfig]) -> None:
    """Raise for the first request that no machine can run. What depends on files, packages or devices is left to the node."""
    for config in configs:
        if config.model.source == "random":
            _check_positions(config, config.model.architecture)
            _check_images(config, config.model.architecture)


def check_exporter_file(name: str) -> None:
    """Raise a ConfigError for a file that is not in the Prometheus text format."""
    try:
        read_prometheus(Path(name))
    except ParseError as error:
        raise ConfigError(f"profiling.nvml.prometheus: {error.fact}", error.remedy) from error


def _check_logits_reference(run: str) -> None:
    """Raise a ConfigError for a run that was not asked to record logits."""
    file = RunFolder(Path(run)).clean_logits_file
    if not file.is_file():
        raise ConfigError(
            f"profiling.logits_reference={run}: there is no {file}.", "Give a run that was made with profiling.logits=true."
        )


@dataclass(frozen=True)
class _Device:
    """The device that will hold the model."""

    name: str
    memory_bytes: int
    """Total memory, free or not."""
    native_bf16: bool


class _Machine:
    """What is known of this machine's devices without torch."""

    @cached_property
    def _build(self) -> TorchBuild | None:
        return torch_build()

    @cached_property
    def _cuda_devices(self) -> int | None:
        return most_cuda_devices(self._build)

    def check_available(self, hardware: HardwareConfig) -> None:
        """Raise if the GPU that is requested by name or index does not exist, or there are fewer than requested."""
        count = self._cuda_devices
        if count and hardware.devices is not None and hardware.device_index + hardware.devices > count:
            raise ResourceError(
                f"hardware.devices={hardware.devices} needs GPUs {hardware.device_index} to "
                f"{hardware.device_index + hardware.devices - 1}, but there {'is one' if count == 1 else f'are {count}'}.",
                "To place several ranks on one GPU, which is no test of speed, use hardware=single_gpu.",
            )
        if count is not None and (
            hardware.device == "cuda" or (hardware.device == "auto" and 0 < count <= hardware.device_index)
        ):
            with_cuda = self._build is None or self._build.cuda is not None
            check_available(device_request(hardware), count, with_cuda=with_cuda)

    def check_size(self, config: RunConfig, fields: Mapping[str, Any]) -> None:
        """Raise if weights and KV cache exceed the total memory of the device."""
        device = self._device(config.hardware)
        if device is None:
            return
        wanted = config.model.dtype
        dtype = ("bf16" if device.native_bf16 else "fp32") if wanted == "auto" else wanted
        sizes = _sizes(config, fields, dtype)
        if sizes is None or sum(sizes) <= device.memory_bytes:
            return
        weights, cache = sizes
        what = f"its weights alone are {gib(weights)}"
        remedy = "Use a smaller model or dtype, or a device with more memory."
        if weights <= device.memory_bytes:
            what = f"its weights are {gib(weights)} and its KV cache {gib(cache)}"
            remedy = "Use a smaller batch or fewer tokens, a smaller model or dtype, or a device with more memory."
        raise ResourceError(
            f"{config.model.name} does not fit on {device.name}: {what} in {dtype}, "
            f"but the device has {gib(device.memory_bytes)} of memory.",
            remedy,
        )

    def check_compiler(self, config: RunConfig) -> None:
        """Raise if torch.compile on the CPU is requested and there is no working C++ compiler."""
        wanted, hardware = config.runtime.compile, config.hardware
        if wanted == "none" or not (hardware.device == "cpu" or self._cuda_devices == 0):
            return
        if self._compiler_problem:
            raise ConfigError(
                f"runtime.compile={wanted} on a CPU needs a C++ compiler: {self._compiler_problem}.",
                f"{INSTALL} Or use runtime.compile=none.",
            )

    @cached_property
    def _compiler_problem(self) -> str:
        return compiler_problem()

    def _device(self, hardware: HardwareConfig) -> _Device | None:
        """Return the device that will be chosen; None if that is uncertain."""
        gpus = 0 if hardware.device == "cpu" else self._cuda_devices
        if gpus == 0:
            return _Device(cpu_name(), total_memory_bytes(), cpu_has_native_bf16())
        size = gpu_size(hardware.device_index)
        cuda = self._build.cuda if self._build else None
        if gpus is None or cuda is None or isinstance(size, Missing):
            return None
        if hardware.device == "auto" and size.driver_cuda < int(cuda.partition(".")[0]):
            return None  # the driver is too old: torch would use the CPU
        return _Device(size.name, size.memory_bytes, size.capability >= _BF16_CAPABILITY)


def _architecture(model: ModelConfig) -> Mapping[str, Any]:
    """Return the fields of the model's Hugging Face configuration; empty if they cannot be read reliably."""
    if model.source == "random":
        return model.architecture
    try:
        fields = msgspec.json.decode((model_folder(model.path or "") / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}  # the loader reports the error
    return {} if model.trust_remote_code and "auto_map" in fields else fields  # its own code may interpret them differently


def _check_positions(config: RunConfig, fields: Mapping[str, Any]) -> None:
    """Raise if the request needs more positions than the model has."""
    inner = fields.get("text_config")
    text = inner if isinstance(inner, Mapping) else fields
    name = "n_positions" if text.get("model_type") in _N_POSITIONS else "max_position_embeddings"
    check_position_count(text.get(name), _least_prompt(config), config.runtime.num_new_tokens)


def _check_heads(fields: Mapping[str, Any], ranks: int) -> None:
    """Raise if the attention heads cannot be divided among the ranks."""
    inner = fields.get("text_config")
    check_heads(inner if isinstance(inner, Mapping) else fields, ranks)


def _check_images(config: RunConfig, fields: Mapping[str, Any]) -> None:
    """Raise if the model or the runtime cannot take the requested images."""
    if "model_type" in fields:
        check_image_request(config, str(fields["model_type"]))
        check_random_images(config, fields)


def _least_prompt(config: RunConfig) -> int:
    """Return the minimum prompt length: exact for synthetic prompts, 1 for texts."""
    return config.runtime.prompt_tokens if config.dataset.kind == "synthetic" else 1


def _check_attention(runtime: RuntimeConfig) -> None:
    """Raise if the package of the requested attention is missing; transformers accepts `kernels` for flash_attn."""
    if runtime.attn_implementation == "flash_attention_2" and not any(map(find_spec, ("flash_attn", "kernels"))):
        raise ResourceError(
            "runtime.attn_implementation=flash_attention_2 needs the package flash_attn, which is not installed.",
            "Install flash-attn, or use runtime.attn_implementation=sdpa or eager.",
        )


def _sizes(config: RunConfig, fields: Mapping[str, Any], dtype: str) -> tuple[int, int] | None:
    """Return the bytes of the weights and of the cache of one request on a device, counted by the cost model.

    None for a model type that it does not know, and for quantized weights. `runtime.quantization` does not lower them: the model
    is loaded in its dtype first.
    """
    if config.model.source == "pretrained" and fields.get("quantization_config"):
        return None
    formats, ranks, together = Formats(weights=dtype, kv=dtype), ranks_of(config), ranks_on_device(config)
    cached = _least_prompt(config) + config.runtime.num_new_tokens - 1  # the last token is not fed back
    try:
        architecture = architecture_of(fields)
        if ranks > 1:  # what the ranks of one device hold
            part = device_stages(architecture, Plan(tp=ranks))[0]
            held = part.kv_cache_bytes(config.runtime.batch_size, cached, formats)
            return together * part.weight_bytes(formats), together * held
        return weight_bytes(architecture, formats), kv_cache_bytes(architecture, config.runtime.batch_size, cached, formats)
    except ConfigError:
        return None
