"""Count the operators of a model by running its forward without memory: on meta tensors, whose operators compute nothing.

A few steps are run (`_SESSIONS`); every figure of an operator becomes a function of the tokens that fits them all exactly.
Attention is counted where transformers hands it to an implementation, as only there causality and windows are known. Layers
that are equal in all modules, sizes and settings run twice, the first and the last; the others return tensors of the same shapes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.cost.forms import Form, Sequences, fitted
from llm_perf_opt.cost.operators import attention_flops, flops_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "llm_perf_opt_counted"
"""Under this name the counted attention is registered with transformers."""
_SESSIONS = ((1, 24, 3), (2, 40, 5), (3, 17, 2), (1, 56, 7), (2, 129, 4), (5, 33, 6))
"""Sequences, tokens of a prefill, and of a chunk after a decode step. They tell all terms of a form apart, and leave some to check."""
_INDEX = re.compile(r"idx|index|layer_(id|num|number)$|depth")
"""Names of numbers that differ between equal layers: which layer it is."""
_LEAST_REPEATED = 3
"""With fewer equal layers, all are run."""
_CHOICES = 2
"""Values that stand for data: `item()` and the like."""
_SAME_VALUES = frozenset(("aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach", "aten::alias", "aten::lift_fresh"))
"""Operators whose result is a copy of a parameter, which a product then uses in its place."""

Where = tuple[int, str]
"""The layer, -1 outside layers, and the module's path in it."""


@dataclass
class Site:
    """What one module did with one parameter, or without any, in one forward."""

    kind: str
    flops: int = 0
    calls: int = 0
    rows: int = 0
    read: int = 0
    shape: tuple[int, ...] = ()
    """Of the parameter as it was used; of attention: heads, key/value heads, their widths."""
    biases: dict[str, int] = field(default_factory=dict)
    """One-dimensional parameters that the product adds, by name."""
    window: int | None = None
    causal: bool = False
    convolution: bool = False
    order: int = 0


@dataclass
class Counted:
    """One forward: the sites, and what its caches hold afterwards."""

    sequences: Sequences
    sites: dict[tuple[Where, str], Site] = field(default_factory=dict)
    held: dict[tuple[Where, str], int] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    guessed: set[str] = field(default_factory=set)
    softmax: set[Where] = field(default_factory=set)
    """Modules that compute attention themselves."""
    received_cache: set[Where] = field(default_factory=set)
    tokens: int = 0


class _Recorder(TorchDispatchMode):
    """Record every operator of a forward at its module."""

    def __init__(self, model: "Program", counted: Counted) -> None:
        super().__init__()
        self._model, self.counted = model, counted
        self._gathered: dict[int, tuple[str, int]] = {}
        """Storages of weights that were gathered for each choice of an expert: the parameter, and how many rows of it."""
        self._copies: dict[int, str] = {}
        self.windows: dict[int, int] = {}
        """Windows of masks, by storage."""
        self._dtypes: dict[Any, torch.dtype] = model.dtypes
        self._from_ids: set[int] = set()
        """Storages that depend on the tokens. Rows that are taken by others are the same for all sequences: positions."""
        self._kept: list[torch.Tensor] = []  # a storage that is freed gives its address to another one

    def site(self, kind: str, key: str) -> Site:
        """Return the record of this kind at the module that runs now."""
        sites = self.counted.sites
        found = sites.setdefault((self._model.where, f"{kind} {key}"), Site(kind, order=len(sites)))
        found.calls += 1
        return found

    def _parameter(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        address = value.untyped_storage()._cdata
        return self._copies.get(address) or self._model.parameters.get(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        namespace, _, short = name.partition("::")
        guess = _GUESSES.get(short)
        if guess is not None:
            self.counted.guessed.add(short)
            return guess(*args, **kwargs)
        tensors = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        output = self._pointwise(func, args, kwargs, tensors)
        if not func.is_view and any(value.untyped_storage()._cdata in self._from_ids for value in tensors):
            self._follow(output)
        if name in _SAME_VALUES and tensors:
            source = self._parameter(tensors[0])
            if source is not None:
                self._keep(output)
                self._copies[output.untyped_storage()._cdata] = source
                return output
            gathered = self._gathered.get(tensors[0].untyped_storage()._cdata)
            if gathered is not None:
                self._keep(output)
                self._gathered[output.untyped_storage()._cdata] = gathered
                return output
        if func.is_view:
            return output
        if short in ("_softmax", "_safe_softmax"):
            self.counted.softmax.add(self._model.where)
        if self._gather(short, args, output):
            return output
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in args]
        flops = flops_of(short, shapes, tuple(output.shape) if isinstance(output, torch.Tensor) else ()) if namespace == "aten" else 0
        if flops is None or (namespace != "aten" and "attn" in short):
            self.counted.unknown[name] += 1
            flops = 0
        named = {parameter: value for value in tensors if (parameter := self._parameter(value)) is not None}
        if flops:
            self._product(short, flops, tensors, named)
        else:
            for parameter, value in named.items():
                site = self.site("read", parameter)
                site.read = max(site.read, value.numel())
        return output

    def _pointwise(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Run an operator; of one that works value by value on meta tensors, whose Python is slow, only make the result."""
        plain = not kwargs and torch.Tag.pointwise in func.tags and not func._schema.is_mutable
        if not plain or not all(value.is_meta and value.is_contiguous() for value in tensors):
            return func(*args, **kwargs)
        kinds = (func, *((value.dtype, value.ndim > 0) if isinstance(value, torch.Tensor) else type(value) for value in args))
        dtype = self._dtypes.get(kinds)
        if dtype is None or not tensors:
            output = func(*args)
            if isinstance(output, torch.Tensor):
                self._dtypes[kinds] = output.dtype
            return output
        return tensors[0].new_empty(torch.broadcast_shapes(*(value.shape for value in tensors)), dtype=dtype)

    def _follow(self, output: Any) -> None:
        for value in _flat(output):
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
                self._keep(value)
                self._from_ids.add(value.untyped_storage()._cdata)

    def windowed(self, mask: torch.Tensor, window: int) -> None:
        """Note the window that a mask stands for."""
        self._keep(mask)
        self.windows[mask.untyped_storage()._cdata] = window

    def start(self, ids: torch.Tensor) -> None:
        """Note which tensor holds the tokens."""
        self._keep(ids)
        self._from_ids.add(ids.untyped_storage()._cdata)

    def _keep(self, value: torch.Tensor) -> None:
        self._kept.append(value)

    def _gather(self, short: str, args: Any, output: Any) -> bool:
        """Record rows taken from a parameter; return whether there were any."""
        if short not in ("embedding", "index", "index_select"):
            return False
        table = self._parameter(args[0])
        if table is None or args[0].ndim < _CHOICES:
            return False
        shape = tuple(args[0].shape)
        rows = output.numel() // prod(shape[1:])
        if len(shape) > _CHOICES:
            self._keep(output)
            self._gathered[output.untyped_storage()._cdata] = table, rows
            return True
        indices = [value for value in _flat(args[1:]) if isinstance(value, torch.Tensor)]
        if indices and not any(value.untyped_storage()._cdata in self._from_ids for value in indices):
            rows = indices[0].shape[-1]
        site = self.site("rows", table)
        site.rows, site.shape = site.rows + rows, shape
        return True

    def _product(self, short: str, flops: int, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
        weights = {name: value for name, value in named.items() if value.ndim > 1}
        for value in tensors:
            gathered = self._gathered.get(value.untyped_storage()._cdata)
            if gathered is not None and value.ndim > _CHOICES:
                site = self.site("experts", gathered[0])
                site.flops, site.rows, site.shape = site.flops + flops, site.rows + gathered[1], tuple(value.shape[-2:])
                return
        if not weights:
            site = self.site("other", short)
            site.flops += flops
            for name, value in named.items():
                self.site("read", name).read = value.numel()
            return
        name, weight = max(weights.items(), key=lambda item: item[1].numel())
        site = self.site("product", name)
        site.flops += flops
        site.read = max(site.read, weight.numel())
        site.biases |= {name: value.numel() for name, value in named.items() if value.ndim == 1}
        site.convolution = "conv" in short
        if site.convolution:
            site.shape = (prod(weight.shape[1:]), weight.shape[0])
        elif tensors[-1] is weight or weight.ndim > _CHOICES:
            site.shape = tuple(weight.shape[-2:])
        else:
            site.shape = (weight.shape[-1], weight.shape[-2])

    def attention(self, query: Any, key: Any, value: Any, *, window: int | None, causal: bool, settings: Any) -> None:
        """Record scores and weighted values of one call of transformers' attention, and the parameters it gets, such as sinks."""
        for setting in settings.values():
            if (name := self._parameter(setting)) is not None:
                self.site("read", name).read = setting.numel()
        site = self.site("attention", str(self._model.calls[self._model.where]))
        self._model.calls[self._model.where] += 1
        site.flops += attention_flops(query.shape, key.shape, value.shape)
        site.rows = key.shape[2]
        site.shape = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        site.window, site.causal = window, causal


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _flat(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def _nonzero(source: torch.Tensor) -> torch.Tensor:
    """Return as many indices as if half of the values were set; at least one."""
    number = max(1, source.shape[0] if source.ndim == 1 else source.numel() // _CHOICES)
    return source.new_empty((number, source.ndim), dtype=torch.long)


_GUESSES: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": lambda source: 1 if not source.dtype.is_floating_point else 1.0,
    "nonzero": _nonzero,
    "is_nonzero": lambda source: True,
    "equal": lambda left, right: True,
}
"""Operators that need data."""

_active: list[_Recorder] = []


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
        self.same_as = _repeated([module for _, module in self.layers])
        """Layers that need not run, and the equal one that does."""

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
        shared = {id(module) for number, (_, layer) in enumerate(self.layers) if number not in self.same_as for module in layer.modules()}
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
        given = {name: value for name, value in options.items() if name in accepted}
        counted = Counted(((new, cached),) * sequences, tokens=sequences * new)
        recorder = _Recorder(self, counted)
        _active.append(recorder)
        try:
            with torch.device("meta"), torch.no_grad(), self._followed(), recorder:
                ids = torch.zeros(sequences, new, dtype=torch.long)
                recorder.start(ids)
                output = self.model(input_ids=ids, **given, **state)
        finally:
            _active.pop()
            del self._stack[1:]
        kept = {
            name: value
            for name, value in output.items()
            if name in accepted and value is not None
        }
        for where, name, size in _held(kept):
            counted.held[where, name] = size
        return counted, kept


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


def _repeated(layers: Sequence[Any]) -> dict[int, int]:
    """Return the layers that are equal to an earlier one, except the last of each kind, which is a check."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        groups[repr(_settings(layer))].append(number)
    return {
        number: members[0] for members in groups.values() if len(members) >= _LEAST_REPEATED for number in members[1:-1]
    }


def _keeper(outputs: dict[int, Any], number: int) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        outputs[number] = output

    return keep


def _stand_in(outputs: dict[int, Any], other: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def same(*args: Any, **kwargs: Any) -> Any:
        if other not in outputs:
            return forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda value: value, outputs[other])

    return same


def _held(state: Mapping[str, Any]) -> Iterator[tuple[Where, str, int]]:
    """Yield the size of every tensor in the caches, with the layer if the cache has layers."""
    for name, value in state.items():
        yield from _tensors((-1, ""), name, value, set())


def _tensors(where: Where, name: str, value: Any, seen: set[int]) -> Iterator[tuple[Where, str, int]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.ndim > 1:
            yield where, name, value.numel()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(where, f"{name}.{key}", entry, seen)
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            inner = (number, "") if name.endswith(".layers") else where
            yield from _tensors(inner, name if inner != where else f"{name}.{number}", entry, seen)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("transformers") and not hasattr(value, "to_diff_dict"):
        for key, entry in vars(value).items():
            yield from _tensors(where, f"{name}.{key}", entry, seen)


def meta_model(config: "PretrainedConfig", auto: Any = None) -> Any:
    """Return a model without memory, with the attention that is counted."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part._experts_implementation = "batched_mm"
    make = (auto or AutoModelForCausalLM).from_config
    with torch.device("meta"), no_init_weights():
        try:
            model = make(config, attn_implementation=NAME)
        except (ValueError, KeyError, ImportError, NotImplementedError):  # it brings its own attention
            model = make(config, attn_implementation="eager")
    model.tie_weights()
    return model.eval()


def count_steps(program: Program) -> list[Counted]:
    """Return the counted steps of all sessions."""
    found = []
    for sequences, prompt, chunk in _SESSIONS:
        cached, state = 0, {}
        for new in (prompt, 1, chunk):
            step, state = program.forward(sequences, new, cached, state)
            found.append(step)
            if not state:
                break
            cached += new
    return found
