"""Record what every operator of a forward computes and reads, at the module that runs it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm_perf_opt.cost.balance import COPIES, NEED_DATA, Balance
from llm_perf_opt.cost.forms import Sequences
from llm_perf_opt.cost.operators import attention_flops, flops_of

_CHOICES = 2
"""Dimensions of a table or matrix; a stack of experts has more."""

Where = tuple[int, str]
"""The layer, -1 outside layers, and the module's path in it."""


@dataclass
class Site:
    """What one module did with one parameter, or without any, in one forward."""

    kind: str
    flops: int = 0
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
    """Operators whose result depends on data, and was taken to be balanced."""
    softmax: set[Where] = field(default_factory=set)
    """Modules that compute attention themselves."""


class Followed(Protocol):
    """A model whose running module is known."""

    parameters: dict[int, str]
    """Names of parameters by storage."""
    shapes: dict[str, tuple[int, ...]]
    calls: Counter[Where]
    dtypes: dict[Any, torch.dtype]
    """Of the results of operators that work value by value, by the operator and the types of its arguments."""

    @property
    def where(self) -> Where:
        """The layer and module that run now."""


class Recorder(TorchDispatchMode):
    """Record every operator of a forward at its module."""

    def __init__(self, model: Followed, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self.counted = model, counted
        self._gathered: dict[int, tuple[str, int]] = {}
        """Storages of weights that were gathered for each choice of an expert: the parameter, and how many rows of it."""
        self._copies: dict[int, str] = {}
        self.windows: dict[int, int] = {}
        """Windows of masks, by storage."""
        self._dtypes: dict[Any, torch.dtype] = model.dtypes
        self._writers: dict[int, set[int]] = {}
        self._balance = Balance()
        counted.guessed = self._balance.guessed
        self._from_ids: set[int] = set()
        """Storages that depend on the tokens. Rows that are taken by others are the same for all sequences: positions."""
        self._kept: list[torch.Tensor] = []  # a storage that is freed gives its address to another one

    def site(self, kind: str, key: str) -> Site:
        """Return the record of this kind at the module that runs now."""
        sites = self.counted.sites
        return sites.setdefault((self._model.where, f"{kind} {key}"), Site(kind, order=len(sites)))

    def _parameter(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        address = value.untyped_storage()._cdata
        return self._copies.get(address) or self._model.parameters.get(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        namespace, _, short = name.partition("::")
        tensors = [value for value in flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        blind = any(value.is_meta for value in tensors)
        if (
            blind
            and namespace == "aten"
            and short in NEED_DATA
            and not (short == "repeat_interleave" and kwargs.get("output_size"))
        ):
            return self._balance.answer(self._model.where, short, args, kwargs)
        if short == "_to_copy" and blind and _leaves(kwargs.get("device")):
            return self._balance.on_cpu(tensors[0], kwargs.get("dtype"))
        output = self._pointwise(func, args, kwargs, tensors)
        self._balance.follow(short, args, output)
        self._created(func, tensors, output)
        if not func.is_view and any(value.untyped_storage()._cdata in self._from_ids for value in tensors):
            self._follow(output)
        if short in COPIES and tensors:
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
        flops = (
            flops_of(short, shapes, tuple(output.shape) if isinstance(output, torch.Tensor) else ()) if namespace == "aten" else 0
        )
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
        return tensors[0].new_empty(_broadcast([tuple(value.shape) for value in tensors]), dtype=dtype)

    def _created(self, func: Any, tensors: Sequence[torch.Tensor], output: Any) -> None:
        """Note which layers wrote a storage."""
        layer = self._model.where[0]
        if func._schema.is_mutable:
            if tensors:
                self._writers.setdefault(tensors[0].untyped_storage()._cdata, set()).add(layer)
        elif not func.is_view:
            for value in flat(output):
                if isinstance(value, torch.Tensor):
                    self._writers[value.untyped_storage()._cdata] = {layer}

    def layer_of(self, value: torch.Tensor) -> int | None:
        """Return the layer that alone wrote a tensor; -1 if several did, None if none did in this forward."""
        writers = self._writers.get(value.untyped_storage()._cdata)
        return None if writers is None else next(iter(writers)) if len(writers) == 1 else -1

    def _follow(self, output: Any) -> None:
        for value in flat(output):
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
        indices = [value for value in flat(args[1:]) if isinstance(value, torch.Tensor)]
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
        whole = self._model.shapes[name]
        if len(whole) > weight.ndim == _CHOICES and weight.numel() == prod(whole[1:]):  # one of a stack of experts, in a loop
            site = self.site("experts", name)
            site.flops += flops
            site.shape = tuple(weight.shape) if tensors[-1] is weight else (weight.shape[1], weight.shape[0])
            return
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


def flat(value: Any) -> Iterator[Any]:
    """Yield what is in nested lists and mappings."""
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from flat(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from flat(entry)
    else:
        yield value


def _leaves(device: Any) -> bool:
    """Return whether a tensor is copied to a device with memory."""
    return device is not None and torch.device(device).type != "meta"


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that tensors have together."""
    if len(set(shapes)) == 1:
        return shapes[0]
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    found = []
    for sizes in columns:
        others = {size for size in sizes if size != 1}
        if len(others) > 1:
            raise RuntimeError(f"The shapes {shapes} do not fit together.")
        found.append(others.pop() if others else 1)
    return tuple(found)
