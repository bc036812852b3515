"""Count the operators of a model by running its forward without memory: on meta tensors, whose operators compute nothing.

A few steps are run (`_SESSIONS`); every figure of an operator becomes a function of the tokens that fits them all exactly.
Attention is counted where transformers hands it to an implementation, as only there causality and windows are known. Layers
that are equal in all modules, sizes and settings run twice, the first and the last; the others return tensors of the same shapes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch

from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.cost.forms import Sequences
from llm_perf_opt.cost.recorder import Counted, Recorder, Where

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Caches = Literal["own", "empty"]
"""The model makes its own cache, or gets an empty one."""
NAME = "llm_perf_opt_counted"
"""Under this name the counted attention is registered with transformers."""
_SESSIONS = ((1, 24, 3), (2, 40, 75), (3, 17, 2), (1, 150, 270), (2, 330, 4), (5, 33, 6))
"""Sequences, tokens of a prefill, and of a chunk after a decode step. They tell all terms of a form apart, and leave some to
check; a prompt and a chunk have more tokens than scans have in a block."""
_INDEX = re.compile(r"idx|index|layer_(id|num|number)$|depth")
"""Names of numbers that differ between equal layers: which layer it is."""
_LEAST_REPEATED = 3
"""With fewer equal layers, all are run."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What models raise that cannot run a step."""
_active: list[Recorder] = []


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **settings: Any) -> tuple[Any, None]:
    if _active:
        window = settings.get("sliding_window")
        if window is None and attention_mask is not None:
            window = _active[-1].windows.get(attention_mask.untyped_storage()._cdata)
        causal = settings.get("is_causal")
        causal = bool(getattr(module, "is_causal", False)) if causal is None else bool(causal)
        _active[-1].attention(query, key, value, window=window, causal=causal, settings=settings)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask(batch_size: int, q_length: int, kv_length: int, *_: Any, **settings: Any) -> torch.Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    if _active and settings.get("local_size"):
        _active[-1].windowed(mask, settings["local_size"])
    return mask


class Program:
    """A model on meta tensors, whose forwards are counted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.caches: Caches = "own"
        self.trusts = True
        """Whether layers that look equal are taken to be equal."""
        self.follow()

    def follow(self) -> None:
        """Take stock of the model's modules."""
        model = self.model
        self.dtypes: dict[Any, torch.dtype] = {}
        """Of the results of operators that work value by value, by the operator and the types of its arguments."""
        self.parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self.parameters.setdefault(parameter.untyped_storage()._cdata, name)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.params = sum(parameter.numel() for parameter in model.parameters())
        self.layers = [(name, module) for name, module in _stacked(model)]
        self._numbers = {id(module): number for number, (_, module) in enumerate(self.layers)}
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._stack: list[Where] = [(-1, "")]
        self.calls: Counter[Where] = Counter()
        self._layer_of: Callable[[torch.Tensor], int | None] = lambda value: None
        self._written: dict[int, int] = {}
        """The layer that wrote a cached tensor, by storage."""
        groups = _equal([module for _, module in self.layers]) if self.trusts else []
        self.same_as = {number: members[0] for members in groups for number in members[1:-1]}
        """Layers that need not run, and the equal one that does."""
        self.ends = [(members[0], members[-1]) for members in groups]
        """The first and the last of equal layers, which both run: they must have the same operators."""

    @property
    def where(self) -> Where:
        """The layer and module that run now."""
        return self._stack[-1]

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        number = self._numbers.get(id(module), self.where[0])
        path = self._paths.get(id(module), "")
        if number >= 0:
            path = path.removeprefix(self.layers[number][0]).removeprefix(".")
        self._stack.append((number, path))

    def _running(self) -> list[Any]:
        """Return the modules outside layers that need not run."""
        idle = {id(module) for number in self.same_as for module in self.layers[number][1].modules()}
        shared = {
            id(module)
            for number, (_, layer) in enumerate(self.layers)
            if number not in self.same_as
            for module in layer.modules()
        }
        return [module for module in self.model.modules() if id(module) not in idle - shared]

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Keep track of the module that runs, and return equal tensors in place of running equal layers."""
        self.calls.clear()
        outputs: dict[int, Any] = {}
        with ExitStack() as hooks:
            for module in self._running():
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(lambda *_: self._stack.pop() and None, always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            for number in set(self.same_as.values()):
                keep = self.layers[number][1].register_forward_hook(_keeper(outputs, number))
                hooks.callback(keep.remove)
            for number, other in self.same_as.items():
                module = self.layers[number][1]
                module.forward = _stand_in(outputs, other, module.forward)
                hooks.callback(module.__dict__.pop, "forward", None)
            yield

    def forward(self, sequences: int, new: int, cached: int, state: Mapping[str, Any]) -> tuple[Counted, dict[str, Any]]:
        """Count one step; return it and the caches for the next."""
        accepted = signature(self.model.forward).parameters
        options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, "return_dict": True}
        given = {name: value for name, value in options.items() if name in accepted} | dict(state)
        if self.caches == "empty" and not cached and "past_key_values" in accepted:
            from transformers import DynamicCache

            given["past_key_values"] = DynamicCache()
        step, output = self._counted(
            ((new, cached),) * sequences, sequences * new, lambda ids: self.model(input_ids=ids, **given)
        )
        kept = {name: value for name, value in output.items() if name in accepted and value is not None}
        self._hold(step, kept)
        return step, kept

    def _counted(self, sequences: Sequences, tokens: int, run: Callable[[torch.Tensor], Any]) -> tuple[Counted, Any]:
        step = Counted(sequences)
        recorder = Recorder(self, step)
        _active.append(recorder)
        try:
            with torch.device("meta"), torch.no_grad(), self._followed(), recorder:
                ids = torch.zeros(len(sequences), tokens // len(sequences), dtype=torch.long)
                recorder.start(ids)
                output = run(ids)
        finally:
            _active.pop()
            del self._stack[1:]
        self._layer_of = recorder.layer_of
        return step, output

    def _hold(self, step: Counted, state: Mapping[str, Any]) -> None:
        """Note what the caches hold, at the layer that wrote it."""
        written: dict[int, int] = {}
        sizes: dict[str, Counter[int]] = defaultdict(Counter)
        for name, value in _tensors("", state, set()):
            address = value.untyped_storage()._cdata
            layer = self._layer_of(value)
            written[address] = self._written.get(address, -1) if layer is None else layer
            sizes[name][written[address]] += value.numel()
        for name, by_layer in sizes.items():
            if -1 in by_layer:  # not every layer's share is known
                by_layer = Counter({-1: sum(by_layer.values())})
            step.held |= {((layer, ""), name): size for layer, size in by_layer.items()}
        self._written = written

    def changed(self) -> bool:
        """Return whether the model has made itself other modules while it ran."""
        return {id(module) for module in self.model.modules()} != set(self._paths)


def _stacked(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the outermost lists of modules."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            yield from ((f"{name}.{number}", entry) for number, entry in module.named_children())


def _settings(module: Any) -> list[Any]:
    """Return everything that decides what a layer does: its modules, sizes, and plain attributes."""
    found: list[Any] = []
    for name, inner in module.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(inner).items()
            if isinstance(value, (bool, int, float, str, type(None))) and not key.startswith("__") and not _INDEX.search(key)
        )
        sizes = [(key, tuple(value.shape)) for key, value in inner.named_parameters(recurse=False)]
        found.append((name, type(inner), [(key, repr(value)) for key, value in plain], sizes))
    return found


def _equal(layers: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of layers that look equal, where they are several."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        groups[repr(_settings(layer))].append(number)
    return [members for members in groups.values() if len(members) >= _LEAST_REPEATED]


def _keeper(outputs: dict[int, Any], number: int) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        outputs[number] = output

    return keep


def _stand_in(outputs: dict[int, Any], other: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def same(*args: Any, **kwargs: Any) -> Any:
        return outputs[other] if other in outputs else forward(*args, **kwargs)

    return same


def _tensors(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in the caches with its name, without numbers."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.ndim > 1:
            yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(f"{name}.{key}" if isinstance(key, str) else name, entry, seen)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(name, entry, seen)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("transformers") and not hasattr(value, "to_diff_dict"):
        for key, entry in vars(value).items():
            yield from _tensors(f"{name}.{key}", entry, seen)


def meta_model(config: "PretrainedConfig") -> Any:
    """Return a model without memory, with the attention that is counted."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    config._experts_implementation = "batched_mm"
    return _built(AutoModelForCausalLM.from_config, config)


def _built(make: Callable[..., Any], config: "PretrainedConfig") -> Any:
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        try:
            model = make(config, attn_implementation=NAME)
        except (ValueError, KeyError, ImportError, NotImplementedError):  # it brings its own attention
            model = make(config, attn_implementation="eager")
    if not all(parameter.is_meta for parameter in model.parameters()):
        model = model.to("meta")
    model.tie_weights()
    return model.eval()


def count_steps(program: Program) -> list[Counted]:
    """Return the counted steps of all sessions; if the model cannot run with its own cache, with an empty one."""
    try:
        return _all_steps(program)
    except _REFUSALS as error:
        program.caches = "empty"
        try:
            return _all_steps(program)
        except _REFUSALS:
            raise error from None


def _all_steps(program: Program) -> list[Counted]:
    found = []
    for sequences, prompt, chunk in _SESSIONS:
        cached = 0
        state: dict[str, Any] = {}
        for new in (prompt, 1, chunk):
            step, state = program.forward(sequences, new, cached, state)
            if program.changed():
                program.follow()
                return _all_steps(program)
            if not state:
                raise LlmPerfError("Its forward returns no cache, so that its decode steps cannot be counted.")
            found.append(step)
            cached += new
    return found
