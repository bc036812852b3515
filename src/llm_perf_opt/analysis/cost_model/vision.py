"""The work of image encoders and projectors: linear layers, convolutions and transformer layers over patches.

Everything is counted as transformers runs it, including the padding of windows. Weights count once, however many views they
process. Pooling, interpolation and rotary positions have no matrix products.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.work import ComponentName, Work


@dataclass(frozen=True)
class Product:
    """Products of `rows` rows with each of `count` weight matrices."""

    inputs: int
    outputs: int
    rows: int
    count: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return 2 * self.rows * self.params

    @property
    def params(self) -> int:
        """Weights of all of them."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class ModuleWork:
    """What one submodule computes and moves for the images of a request, in one component."""

    module: str
    """Its path in the model of transformers."""
    component: ComponentName
    work: Work
    params: int
    products: tuple[Product, ...] = ()
    """Products with weights; a convolution is the product that computes it."""


@dataclass(frozen=True)
class Maps:
    """`count` feature maps, or images, of the same size."""

    count: int
    height: int
    width: int

    @property
    def positions(self) -> int:
        """Positions of all maps together."""
        return self.count * self.height * self.width


Views = tuple[Maps, ...]
"""Maps of several sizes that pass through the same weights, such as the whole image and its tiles."""


def positions(views: Iterable[Maps]) -> int:
    """Return the positions of all maps together."""
    return sum(maps.positions for maps in views)


def linear(
    module: str, component: ComponentName, rows: int, inputs: int, outputs: int, *, bias: bool = True, count: int = 1
) -> ModuleWork:
    """Return the work of `count` linear layers on `rows` rows each."""
    product = Product(inputs, outputs, rows, count)
    params = product.params + (count * outputs if bias else 0)
    return ModuleWork(module, component, Work(product.flops, weights=params), params, (product,))


def table(module: str, params: int, *, used: int | None = None, component: ComponentName = "vision_norms") -> ModuleWork:
    """Return parameters that are only read: norms, class tokens, positions. `used` are those that are read, by default all."""
    return ModuleWork(module, component, Work(weights=params if used is None else used), params)


def patch_embedding(module: str, pixels: Views, channels: int, outputs: int, patch: tuple[int, int], *, bias: bool) -> ModuleWork:
    """Return the convolution whose kernel and stride are a patch; it reads the pixels."""
    read = channels * positions(pixels)
    return embedded(module, positions(patches(pixels, patch)), channels * patch[0] * patch[1], outputs, bias=bias, pixels=read)


def embedded(module: str, rows: int, inputs: int, outputs: int, *, bias: bool, pixels: int) -> ModuleWork:
    """Return the embedding of `rows` patches of `inputs` values each."""
    found = linear(module, "vision_convolutions", rows, inputs, outputs, bias=bias)
    return replace(found, work=replace(found.work, activations=pixels))


def patches(pixels: Views, patch: tuple[int, int]) -> Views:
    """Return the images in patches; pixels beyond the last whole patch are not used."""
    return tuple(Maps(maps.count, maps.height // patch[0], maps.width // patch[1]) for maps in pixels)


def convolution(
    module: str, views: Views, inputs: int, outputs: int, kernel: int, *, stride: int = 1
) -> tuple[ModuleWork, Views]:
    """Return the work and the result of a convolution without bias, padded by half its kernel."""
    padding = kernel // 2

    def size(length: int) -> int:
        return (length + 2 * padding - kernel) // stride + 1

    result = tuple(Maps(maps.count, size(maps.height), size(maps.width)) for maps in views)
    work = linear(module, "vision_convolutions", positions(result), inputs * kernel * kernel, outputs, bias=False)
    return work, result


def attention_core(module: str, flops: int, *, unneeded: int = 0) -> ModuleWork:
    """Return scores and weighted values; `unneeded` FLOPs are of pairs that a mask removes."""
    return ModuleWork(module, "vision_attention_core", Work(flops, unneeded), 0)


@dataclass(frozen=True)
class Attended:
    """What the attention of one layer processes, over all images."""

    rows: int
    """Tokens in its projections."""
    pairs: int
    """Query-key pairs."""
    masked_pairs: int = 0
    """Pairs in addition, which a mask removes."""


def whole(views: Views, extra_tokens: int = 0) -> Attended:
    """Return attention of every token of a map to all others of that map, with `extra_tokens` such as a class token."""
    lengths = [(maps.count, maps.height * maps.width + extra_tokens) for maps in views]
    return Attended(sum(count * length for count, length in lengths), sum(count * length * length for count, length in lengths))


@dataclass(frozen=True)
class EncoderLayer:
    """One transformer layer of an image encoder."""

    hidden: int
    intermediate: int
    norm_params: int
    """Norms, scales and position tables of the layer."""
    key_values: int = 0
    """Width of keys and of values; 0 for the width of the queries."""
    gated: bool = False
    packed: bool = False
    """Whether one matrix computes queries, keys and values."""
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True

    def work(self, module: str, count: int, attended: Attended, mlp_rows: int | None = None) -> Iterator[ModuleWork]:
        """Yield the work of `count` such layers. The MLP has as many rows as the attention if `mlp_rows` is not given."""
        if not count:
            return
        yield from self._projections(module, count, attended.rows)
        per_pair = 4 * self.hidden * count
        yield attention_core(module, per_pair * attended.pairs, unneeded=per_pair * attended.masked_pairs)
        rows = attended.rows if mlp_rows is None else mlp_rows
        ups = count * (2 if self.gated else 1)
        yield linear(module, "vision_mlp", rows, self.hidden, self.intermediate, bias=self.mlp_bias, count=ups)
        yield linear(module, "vision_mlp", rows, self.intermediate, self.hidden, bias=self.mlp_bias, count=count)
        yield table(module, count * self.norm_params)

    def _projections(self, module: str, count: int, rows: int) -> Iterator[ModuleWork]:
        width, other = self.hidden, self.key_values or self.hidden
        outputs = [(width + 2 * other, 1)] if self.packed else [(width, 1), (other, 2)]
        for size, times in outputs:
            yield linear(module, "vision_attention_projections", rows, width, size, bias=self.qkv_bias, count=count * times)
        yield linear(module, "vision_attention_projections", rows, width, width, bias=self.out_bias, count=count)
