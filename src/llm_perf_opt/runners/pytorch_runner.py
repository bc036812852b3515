"""The PyTorch runtime: steps a transformers causal LM, greedy."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StaticCache

from llm_perf_opt.config.schema import AttentionBackend, CacheKind, RuntimeConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import ModelFacts, RuntimeFacts
from llm_perf_opt.runners import models
from llm_perf_opt.runners.attention_backends import explained_backend, use_attention_backend
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.compilation import NOT_COMPILED, Compilation
from llm_perf_opt.runners.engines import last_level_cache_of, plain_config, short_dtype
from llm_perf_opt.runners.fused_projections import fuse_projections, share_fused
from llm_perf_opt.runners.logit_tap import TappedRunner, next_token
from llm_perf_opt.runners.models import device_name
from llm_perf_opt.runners.quantized_layers import check_format
from llm_perf_opt.runners.quantized_model import quantize_linear_layers, quantized_bytes
from llm_perf_opt.runners.rank_group import RankGroup
from llm_perf_opt.runners.tensor_parallel import check_heads, held_bytes, loads_shards, split_model
from llm_perf_opt.runners.vision_inputs import forward_arguments
from llm_perf_opt.workspace.data.prompts import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "llm-perf calls prefill and every decode step"


@dataclass(frozen=True)
class Batch:
    """Prompts on the device. Mask and positions are set only if sequences differ in length."""

    input_ids: torch.Tensor
    mask: torch.Tensor | None
    """Covers prompt and new tokens; zero for padding, which is on the left."""
    positions: torch.Tensor | None
    images: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's forward for the images in the prompts: pixels in the model's dtype, grids, types of tokens."""


class PyTorchRunner(TappedRunner):
    """A model that is stepped one forward at a time; see `SteppableRunner`."""

    def __init__(
        self,
        model: "PreTrainedModel",
        name: str,
        new_tokens: int,
        cache: CacheKind = "dynamic",
        compile: Compilation = NOT_COMPILED,
        attention_backend: AttentionBackend = "auto",
    ) -> None:
        self.model = model
        self.reference_tokens: list[list[int]] | None = None
        """Tokens of the same request before the weights were quantized; None: not compared."""
        self.held_bytes: int | None = None
        """What this rank holds of the weights; None: there is one rank."""
        self._device = next(model.parameters()).device
        self._new_tokens = new_tokens
        self._cache_kind = cache
        self._cache: Any = None
        parameters = inspect.signature(model.forward).parameters
        if "past_key_values" not in parameters:
            raise ConfigError(
                f"{type(model).__name__} does not use a key-value cache: its forward takes no past_key_values.",
                "Choose a model with a key-value cache.",
            )
        self._keep_last = "logits_to_keep" in parameters
        self._own_positions = hasattr(model.base_model, "rope_deltas")
        """Whether positions after an image depend on its grid, so that the model computes them (Qwen's M-RoPE)."""
        self._mask: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._filled = 0
        self._cache_seen = False
        compile.check(self._device)
        self._compilation = compile
        self._graphs = compile.captures(self._device)
        self._decode = compile.compiled(self._forward)
        self._first = compile.compiled(self._forward) if compile.prefill else self._forward
        self._compiled_prefill = compile.prefill
        self._attention_backend = attention_backend
        use_attention_backend(attention_backend, str(getattr(model.config, "_attn_implementation", "unknown")), self._device)
        self.runtime = RuntimeFacts("pytorch", str(torch.__version__), METHOD)
        self.facts = _facts(model, name, self._device, cache, compile.words, self._keep_last)

    def place(self, prompts: Prompts) -> Batch:
        """Return the prompts on the device, left-padded to the longest sequence."""
        width = max(prompts.lengths)
        padding = 1 if prompts.images and prompts.images.token_id == 0 else 0
        rows = [[padding] * (width - len(ids)) + list(ids) for ids in prompts.ids]
        input_ids = torch.tensor(rows, dtype=torch.long, device=self._device)
        images = self._images(prompts, input_ids)
        if len(set(prompts.lengths)) == 1:
            return Batch(input_ids, None, None, images)
        mask = torch.ones((len(rows), width + self._new_tokens), dtype=torch.long, device=self._device)
        for row, length in enumerate(prompts.lengths):
            mask[row, : width - length] = 0
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        return Batch(input_ids, mask, positions, images)

    def _images(self, prompts: Prompts, input_ids: torch.Tensor) -> dict[str, Any]:
        if prompts.images is None:
            return {}
        if self._compiled_prefill:
            raise ConfigError(
                "runtime.compile_prefill=true does not support images: their grids are not of a fixed shape.",
                "Use runtime.compile_prefill=false.",
            )
        return forward_arguments(self.facts.model_type, prompts.images, input_ids, next(self.model.parameters()).dtype)

    @torch.inference_mode()
    def begin(self) -> None:
        """Empty the cache. A static cache keeps its memory, so that captured CUDA graphs stay valid."""
        if self._cache is not None and self._cache_kind == "static":
            self._cache.reset()
        else:
            self._cache = None
        self._mask = self._positions = None

    def prefill(self, prompts: Batch) -> torch.Tensor:
        """Run the whole prompt in one forward and return the first new token of each sequence, [batch, 1]."""
        with _inference(), self._supported():
            return self._prefill(prompts)

    def decode_step(self, token: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence and return the next, [batch, 1]."""
        with _inference(), self._supported():
            return self._decode_step(token)

    def _supported(self) -> AbstractContextManager[None]:
        """Return a context that explains why a chosen attention backend does not work; for `auto`, a no-op."""
        return _NOTHING if self._attention_backend == "auto" else explained_backend(self._attention_backend)

    def _prefill(self, prompts: Batch) -> torch.Tensor:
        width = prompts.input_ids.shape[1]
        if self._cache is None:
            self._cache = self._new_cache(width + self._new_tokens)
        self._filled = width
        self._mask = prompts.mask
        mask, positions = self._mask_now(), prompts.positions
        if prompts.images:
            mask = None if mask is None else mask[:, :width]  # grids of images are matched to the tokens of the prompt
            positions = None if self._own_positions else positions
        if self._compiled_prefill and self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        token = self._first(prompts.input_ids, mask, positions, prompts.images or None)
        if self._compiled_prefill and self._graphs:
            token = token.clone()  # the graph of the next request overwrites it
        if not self._cache_seen:
            self._check_cache()
        self._positions = self._last_positions(prompts)
        return token

    def _last_positions(self, prompts: Batch) -> torch.Tensor | None:
        """Return the position of the last token of each prompt; None if the model counts by itself."""
        last = None if prompts.positions is None else prompts.positions[:, -1:]
        if not (prompts.images and self._own_positions):
            return last
        batch, width = prompts.input_ids.shape
        if last is None:
            last = torch.full((batch, 1), width - 1, dtype=torch.long, device=self._device)
        base: Any = self.model.base_model
        moved: torch.Tensor = last + base.rope_deltas
        return moved

    def _check_cache(self) -> None:
        """Raise if the model ignores the cache: its decode steps would be timed although they see no prompt."""
        if int(self._cache.get_seq_length()) == 0:
            raise ConfigError(
                f"The key-value cache of {type(self.model).__name__} is empty after prefill: "
                "decode steps would not see the prompt.",
                "Check that the model is a decoder (is_decoder, use_cache), or choose another.",
            )
        self._cache_seen = True

    def _decode_step(self, token: torch.Tensor) -> torch.Tensor:
        self._filled += 1
        if self._positions is not None:
            self._positions = self._positions + 1
        if not self._graphs:
            return self._decode(token, self._mask_now(), self._positions)
        torch.compiler.cudagraph_mark_step_begin()
        return self._decode(token, self._mask_now(), self._positions).clone()  # the graph overwrites its output in the next step

    def to_lists(self, tokens: list[torch.Tensor]) -> list[list[int]]:
        """Return the tokens of each sequence, on the host."""
        rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
        return rows

    def _forward(self, *given: Any) -> torch.Tensor:
        return next_token(self._logits(*given))

    def _logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        images: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the logits of the last position, [batch, 1, vocabulary]."""
        extra: dict[str, Any] = {"logits_to_keep": 1} if self._keep_last else {}
        if images:
            extra |= images
        if mask is not None:
            extra["attention_mask"] = mask
        if positions is not None:
            extra["position_ids"] = positions
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, **extra).logits
        return logits[:, -1:]

    def _mask_now(self) -> torch.Tensor | None:
        """Return the mask of the cache: full width if static, else of the filled positions."""
        if self._mask is None or self._cache_kind == "static":
            return self._mask
        return self._mask[:, : self._filled]

    def _new_cache(self, longest: int) -> Any:
        config = self.model.config
        if self._cache_kind == "static":
            kind = _FlexCache if getattr(config, "_attn_implementation", "") == "flex_attention" else StaticCache
            return kind(config=config, max_cache_len=longest)
        return DynamicCache(config=config)


class _FlexCache(StaticCache):  # type: ignore[misc]
    """A static cache for flex attention.

    The mask of flex attention is a function of the length that the cache returns, and is called when the cache has already been
    updated in place (transformers 5.17 to 5.23): a query would see keys after it. A copy keeps the length.
    """

    def get_seq_length(self, *arguments: Any, **named: Any) -> Any:
        """Return the number of tokens in the cache."""
        length = super().get_seq_length(*arguments, **named)
        return length.clone() if isinstance(length, torch.Tensor) else length


_NOTHING: AbstractContextManager[None] = nullcontext()


def _inference() -> "AbstractContextManager[None] | torch.inference_mode":
    """Return inference mode, or a no-op if it is on already: entering it at every step would show in the times."""
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()


def _facts(model: "PreTrainedModel", name: str, device: torch.device, cache: str, compile: str, keep_last: bool) -> ModelFacts:
    parameters = list(model.parameters())
    config = model.config
    return ModelFacts(
        name=name,
        model_class=type(model).__name__,
        model_type=str(config.model_type),
        parameters=sum(tensor.numel() for tensor in parameters),
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        dtype=short_dtype(parameters[0].dtype),
        device=str(device),
        device_name=device_name(device),
        attention=str(getattr(config, "_attn_implementation", "unknown")),
        cache=cache,
        compile=compile,
        logits="last token" if keep_last else "whole prompt",
        architecture=plain_config(config.to_dict()),
        last_level_cache_bytes=last_level_cache_of(device),
    )


def open_pytorch(request: RunnerRequest) -> PyTorchRunner:
    """Return a runner of the request's model."""
    config, wanted = request.config, request.config.runtime
    if request.ranks is not None:
        return _split(request, request.ranks)
    if wanted.row_kernel:
        _check_row_kernel(request.device)
    model = models.build_model(request.architecture, config.model, wanted, request.device, request.dtype)
    notes = [fuse_projections(model)] if wanted.fuse_projections else []
    runner = _runner(model, request) if wanted.quantization == "none" else _quantized(model, request)
    if wanted.row_kernel:
        notes.append(_with_row_kernel(model, wanted.batch_size))
    runner.runtime = replace(runner.runtime, notes=(*runner.runtime.notes, *notes))
    return runner


def _check_row_kernel(device: torch.device) -> None:
    """Raise a ConfigError if the kernel for one row does not run on the device."""
    if device.type != "cuda" or torch.version.hip:
        raise ConfigError(f"runtime.row_kernel=true needs an NVIDIA GPU; this run is on {device_name(device)}.", "Leave it out.")


def _with_row_kernel(model: "PreTrainedModel", rows: int) -> str:
    """Let the layers that are not quantized use the kernel for one row, and return what changed."""
    if rows > 1:
        return f"runtime.row_kernel has no effect: steps of {rows} sequences have {rows} rows."
    from llm_perf_opt.runners.row_kernel import use_row_kernel

    return use_row_kernel(model)


def _split(request: RunnerRequest, group: RankGroup) -> PyTorchRunner:
    """Return the runner of this rank's part of the model."""
    config, wanted, device = request.config, request.config.runtime, request.device
    check_heads(request.architecture.get_text_config(decoder=True).to_dict(), group.size)
    arguments = (request.architecture, config.model, wanted)
    group.join(device)
    if config.model.source == "pretrained" and loads_shards(device, group.backend):
        model = models.build_model(*arguments, device, request.dtype, group.size)
    else:
        whole = models.memory_need(request.architecture, config.model, request.dtype, 1, 1).weight_bytes
        model = split_model(lambda place: models.build_model(*arguments, place, request.dtype), whole, device, group)
    runner = _runner(model, request)
    runner.held_bytes = held_bytes(model)
    on = "the CPU" if device.type == "cpu" else "one GPU"
    shared = f"{group.size} ranks share {on} and its peaks: a figure per device would be that of one rank with a part of it"
    if device.type == "cuda" and config.hardware.devices and config.hardware.devices > 1 and group.shared_device:
        shared = f"several ranks share each of {config.hardware.devices} GPUs and its peaks"
    runner.runtime = replace(
        runner.runtime,
        devices=1 if group.shared_device else group.size,
        uncosted=shared if group.shared_device else "",
        notes=(_RANK_NOTE.format(group.size, group.backend),),
    )
    return runner


_RANK_NOTE = (
    "{} ranks share every layer (tensor parallelism, transformers' plan of the family) and exchange results with {}. The time of "
    "a request is that of the slowest rank; ranks wait for each other before every request."
)


def _runner(model: "PreTrainedModel", request: RunnerRequest) -> PyTorchRunner:
    name, wanted = request.config.model.name, request.config.runtime
    runner = PyTorchRunner(model, name, wanted.num_new_tokens, wanted.cache, _compilation(wanted), wanted.attention_backend)
    if request.config.profiling.logits and not request.profiled:
        runner.return_logits()
    return runner


def _compilation(wanted: RuntimeConfig) -> Compilation:
    return Compilation(wanted.compile, wanted.compile_prefill, wanted.coordinate_descent_tuning)


def _quantized(model: "PreTrainedModel", request: RunnerRequest) -> PyTorchRunner:
    """Quantize the model and return its runner, with the tokens of the request before it was quantized if they are wanted."""
    config, wanted = request.config, request.config.runtime
    check_format(wanted.quantization, request.device, request.dtype)
    before = PyTorchRunner(model, config.model.name, wanted.num_new_tokens)
    parameters, reference = before.facts.parameters, _tokens(before, request) if request.compare_tokens else None
    before.release()  # its cache is not part of the peak
    compile = _compilation(wanted)
    quantized = quantize_linear_layers(
        model,
        wanted.batch_size,
        compiled=wanted.compile != "none",
        graphs=compile.captures(request.device),
        format=wanted.quantization,
    )
    share_fused(model)
    if request.device.type == "cuda":  # the peak of the request, not that of the weights before they were quantized
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(request.device)
    runner = _runner(model, request)
    runner.reference_tokens = reference
    runner.facts = replace(
        runner.facts,
        parameters=parameters,
        weight_bytes=runner.facts.weight_bytes + quantized_bytes(model),
        weights=replace(models.weight_facts(config.model), quantized=quantized),
    )
    return runner


def _tokens(runner: PyTorchRunner, request: RunnerRequest) -> list[list[int]]:
    """Return the tokens of the request."""
    runner.begin()
    tokens = [runner.prefill(runner.place(request.prompts))]
    for _ in range(request.config.runtime.num_new_tokens - 1):
        tokens.append(runner.decode_step(tokens[-1]))
    return runner.to_lists(tokens)
