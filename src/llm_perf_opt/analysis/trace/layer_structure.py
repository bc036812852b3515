"""Assign the kernels of one step to the components of the model, by the structure of a decoder.

CUDA graphs and compiled code carry no labels, but every layer of a decoder runs in the same order: norm, query/key/value
products, attention, output product, norm, MLP products or router and experts. A norm and the LM head follow the last layer.
Products, attention and norms are recognized by the names of their kernels. Attention divides a step into layers, and norms divide
the products of a layer. A step is assigned only if all its layers have the same structure; otherwise the result is the reason.

The components are those that labels of modules give in an eager run: `attention_core` is what runs between the query/key/value
products and the output product, with positions and cache writes; `mlp` includes its activation. A fused kernel counts for the
component of its class. Copies, residual additions, sampling and collectives are `other`.
"""

import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llm_perf_opt.analysis.cost_model.work import ComponentName
from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.traces.health import MOST_NAMES

OTHER = "other"
"""Kernels outside the layers' components."""
UNKNOWN = "unknown"
"""Kernels inside a layer that belong to a component which their names and order do not show."""
LEAST_LAYERS = 2
"""With fewer, nothing repeats that could confirm the structure."""
MLP_PRODUCTS = (2, 3)
"""Up (packed with gate, or without one) and down; or gate, up and down."""
MOST_OUTPUT_PRODUCTS = 2
"""The output product, and for absorbed latent attention the expansion of the values before it."""
_CONTINUES = re.compile(r"splitk_?reduce|reduce_?splitk|postgsu|finalize_matmul|reduce_1block", re.IGNORECASE)
"""The second kernel of a product that was divided."""
_DOT = re.compile(r"\bdot_kernel|reduce_1Block")
"""cuBLAS computes the product of a single row as dot products and their sum."""
_SQUARE, _ROOT, _CAST = (re.compile(word) for word in ("pow_tensor_scalar", "rsqrt", "copy_kernel|copy_device"))
_NORM_AFTER = 6
"""Kernels of an uncompiled RMS norm from its mean on: mean, epsilon, root, product, cast, product with the weights."""
_OF_EXPERTS = re.compile(r"moe|expert|grouped|groupproblem|_ogs|^bmm_", re.IGNORECASE)
"""Products of all experts at once; `bmm_` are batched products."""


class Role(Enum):
    """What the name of a kernel says about its place in a layer."""

    PRODUCT = 1
    CONTINUATION = 2
    """A part of the product before it."""
    ATTENTION = 3
    NORM = 4
    REDUCTION = 5
    """In compiled code, a norm whose name does not say so."""
    ROUTING = 6
    COLLECTIVE = 7
    ANY = 8


PRODUCT, CONTINUATION, ATTENTION, NORM, REDUCTION, ROUTING, COLLECTIVE, ANY = Role  # looking a member up in its class is slow


@dataclass(frozen=True)
class StepStructure:
    """The components of a step's kernels."""

    components: tuple[str, ...]
    """Per kernel: a component of the cost model, `other` or `unknown`."""
    layers: int
    evidence: str


@dataclass(frozen=True)
class _Layer:
    """The products of one layer, as places in the step."""

    projections: tuple[int, ...]
    output: tuple[int, ...]
    feed_forward: tuple[int, ...]
    follows: int
    """The first product after the layer, or the end of the step."""


def structure_of(names: Sequence[str]) -> Maybe[StepStructure]:
    """Return the components of the kernels of one step on one device, in the order in which they ran."""
    roles = _roles(names)
    groups = _attention_groups(roles)
    if len(groups) < LEAST_LAYERS:
        return Missing(f"{len(groups) or 'no'} layers with attention between products were recognized; {LEAST_LAYERS} are needed")
    products = [place for place, role in enumerate(roles) if role is PRODUCT]
    layers = _layers(names, roles, products, groups)
    if isinstance(layers, Missing):
        return layers
    found = [OTHER] * len(roles)
    for layer in layers:
        why = _assign(layer, names, roles, found)
        if why:
            return Missing(why)
    _assign_ends(layers, roles, found)
    for place, role in enumerate(roles):
        if role is CONTINUATION:
            found[place] = found[products[max(bisect_left(products, place) - 1, 0)]]
        elif role is ATTENTION:
            found[place] = _name("attention_core")
        elif role is COLLECTIVE:
            found[place] = OTHER
    return StepStructure(tuple(found), len(layers), _evidence(layers, found))


def _roles(names: Sequence[str]) -> list[Role]:
    """Return the role of each kernel. The kernels of an uncompiled RMS norm are elementwise, except for its mean."""
    roles = [role_of(name) for name in names]
    for place in range(1, len(roles) - 3):
        if roles[place] is not REDUCTION or not _SQUARE.search(names[place - 1]):
            continue
        if not any(_ROOT.search(name) for name in names[place + 1 : place + 3]):
            continue
        first = place - 1 - bool(place > 1 and _CAST.search(names[place - 2]))
        for norm in range(first, min(place + _NORM_AFTER, len(roles))):
            if roles[norm] in (PRODUCT, ATTENTION):
                break
            roles[norm] = NORM
    return roles


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def role_of(name: str) -> Role:
    """Return the role of a kernel, from its class."""
    kind = classify(name)
    if kind in (KernelClass.GEMM, KernelClass.GEMV) or _DOT.search(name):
        return CONTINUATION if _CONTINUES.search(name) else PRODUCT
    return {
        KernelClass.ATTENTION: ATTENTION,
        KernelClass.NORM: NORM,
        KernelClass.REDUCTION: REDUCTION,
        KernelClass.MOE_ROUTING: ROUTING,
        KernelClass.SAMPLING: ROUTING,  # top-k of the experts; the sampling of tokens is outside the layers
        KernelClass.COLLECTIVE: COLLECTIVE,
    }.get(kind, ANY)


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def _is_of_experts(name: str) -> bool:
    return _OF_EXPERTS.search(name) is not None


def _name(component: ComponentName) -> str:
    return component


def _attention_groups(roles: Sequence[Role]) -> list[tuple[int, int]]:
    """Return the first and last attention kernel of each layer; what runs before the first product prepares attention."""
    groups: list[tuple[int, int]] = []
    since = False
    for place, role in enumerate(roles):
        if role is PRODUCT:
            since = True
        elif role is ATTENTION and since:
            groups.append((place, place))
            since = False
        elif role is ATTENTION and groups:
            groups[-1] = (groups[-1][0], place)
    return groups


def _layers(
    names: Sequence[str], roles: Sequence[Role], products: list[int], groups: list[tuple[int, int]]
) -> Maybe[list[_Layer]]:
    """Divide the products into layers; Missing if the layers differ or the division is not unique."""
    head = products[: bisect_left(products, groups[0][0])]
    between = [
        products[bisect_right(products, before[1]) : bisect_left(products, after[0])]
        for before, after in itertools.pairwise(groups)
    ]
    tail = products[bisect_right(products, groups[-1][1]) :]
    repeated = {names[place] for inside in between for place in inside}
    head = [place for place in head if names[place] in repeated] or head  # without others, such as that of the positions
    cut = _cut(roles, len(head), between)
    if isinstance(cut, Missing):
        return cut
    output, projections = cut
    inner = len(between[-1]) - output - projections
    if len(tail) < output + inner:
        return Missing(f"the step ends inside its last layer, after {len(tail)} of {output + inner} products")
    if len(tail) > output + inner + 1:
        return Missing(f"{len(tail) - output - inner} products follow the last layer; the LM head is one")
    if len(tail) > output + inner and not _norm_before(roles, tail) and any(_norm_before(roles, rest) for rest in between):
        return Missing("no norm precedes the product after the last layer, which may not be the LM head")
    found = []
    for number, after in enumerate([*between, tail]):
        before = head[-projections:] if number == 0 else between[number - 1][-projections:]
        inside = after[output : output + inner] if number == len(between) else after[output:-projections]
        place = output + len(inside)
        follows = after[place] if place < len(after) else len(roles)
        found.append(_Layer(tuple(before), tuple(after[:output]), tuple(inside), follows))
    return found


def _cut(roles: Sequence[Role], head: int, between: list[list[int]]) -> Maybe[tuple[int, int]]:
    """Return how many products follow attention as its output and how many precede it; the MLP is in between."""
    runs = [_runs(roles, products) for products in between]
    if all(len(found) == 1 for found in runs):
        counts = {len(products) for products in between}
        if len(counts) == 1 and counts.pop() - 1 - head in MLP_PRODUCTS and head:
            return 1, head
        return Missing("no norm was recognized between the products of a layer, and their number does not show the MLP's")
    output = {found[0] for found in runs}
    if len(output) > 1 or max(output) > MOST_OUTPUT_PRODUCTS:
        return Missing(f"the products between attention and the next norm differ or are too many: {_listed(output)} per layer")
    if head and all(head in itertools.accumulate(reversed(found[2:])) for found in runs):
        return output.pop(), head
    last = {found[-1] for found in runs if len(found) == 3}
    if len(last) == 1 and all(len(found) == 3 for found in runs) and head >= max(last):
        return output.pop(), last.pop()
    return Missing("the norms of a layer do not separate its MLP from the projections of the next layer")


def _runs(roles: Sequence[Role], products: Sequence[int]) -> list[int]:
    """Return the numbers of products between norms."""
    found = [min(len(products), 1)]
    for before, after in itertools.pairwise(products):
        if any(role in (NORM, REDUCTION) for role in roles[before + 1 : after]):
            found.append(0)
        found[-1] += 1
    return found


def _norm_before(roles: Sequence[Role], products: Sequence[int]) -> bool:
    """Return whether a norm is between the last two products."""
    return len(products) > 1 and _runs(roles, products[-2:]) == [1, 1]


def _assign(layer: _Layer, names: Sequence[str], roles: Sequence[Role], found: list[str]) -> str:
    """Assign the kernels of one layer; return why that is not possible, or an empty string."""
    for place in range(layer.projections[0], layer.output[-1]):
        found[place] = _name("norms") if roles[place] is NORM else _name("attention_core")
    for place in (*layer.projections, *layer.output):
        found[place] = _name("attention_projections")
    inside = layer.feed_forward
    if not inside:
        return "a layer has no products between its output product and the next projections"
    _norms(found, roles, layer.output[-1] + 1, inside[0])
    routing = [place for place in range(layer.output[-1] + 1, layer.follows) if roles[place] is ROUTING]
    routing = [place for place in routing if place < inside[-1]]
    if routing:
        _assign_experts(layer, routing, names, roles, found)
    elif len(inside) in MLP_PRODUCTS:
        for place in range(inside[0], inside[-1] + 1):
            found[place] = _name("mlp")
    else:
        return f"{len(inside)} products between two norms are neither an MLP (2 or 3) nor experts (no routing kernel)"
    _norms(found, roles, inside[-1] + 1, layer.follows)
    return ""


def _assign_experts(layer: _Layer, routing: list[int], names: Sequence[str], roles: Sequence[Role], found: list[str]) -> None:
    """Assign router, experts and, if as many products of single matrices as an MLP has follow the routing, shared experts."""
    before = [place for place in layer.feed_forward if place < routing[0]]
    experts = [place for place in layer.feed_forward if _is_of_experts(names[place])]
    first, last = layer.feed_forward[0], layer.feed_forward[-1]
    router = before[0] if len(before) == 1 else None
    begin = experts[0] if experts else routing[-1] + 1
    end = next((place for place in range(last + 1, layer.follows) if roles[place] is NORM), last + 1)
    for place in range(first, begin):
        of_router = place == router or roles[place] is ROUTING
        found[place] = _name("router") if of_router else _name("experts") if experts else UNKNOWN
    for place in range(begin, end):
        found[place] = _name("experts") if experts else UNKNOWN
    plain = [place for place in layer.feed_forward if place not in experts and place != router]
    shared = experts and len(before) < 2 and len(plain) in MLP_PRODUCTS
    for place in range(plain[0], plain[-1] + 1) if shared else plain:
        if place not in experts:
            found[place] = _name("shared_experts") if shared else UNKNOWN


def _assign_ends(layers: list[_Layer], roles: Sequence[Role], found: list[str]) -> None:
    """Assign the norm before the first layer and the LM head."""
    first = layers[0].projections[0]
    norms = [place for place in range(first) if roles[place] in (NORM, REDUCTION)]
    exact = [place for place in norms if roles[place] is NORM]
    for place in exact or norms[-1:]:
        found[place] = _name("norms")
    if layers[-1].follows < len(roles):
        found[layers[-1].follows] = _name("lm_head")


def _norms(found: list[str], roles: Sequence[Role], start: int, stop: int) -> None:
    for place in range(start, stop):
        exact = roles[place] is NORM  # at the end of a step, a reduction belongs to the sampling
        if exact or (roles[place] is REDUCTION and found[place] == OTHER and stop < len(roles)):
            found[place] = _name("norms")


def _evidence(layers: list[_Layer], found: list[str]) -> str:
    dense = [layer for layer in layers if found[layer.feed_forward[-1]] == "mlp"]
    each = f"{len(layers)} layers, each with {len(layers[0].projections)} query/key/value"
    output = f"{len(layers[0].output)} output"
    if not dense:
        return f"{each} and {output} products, and experts"
    instead = f"; {len(layers) - len(dense)} of them have experts instead" if len(dense) < len(layers) else ""
    counted = "" if "norms" in found[: layers[-1].follows] else "; no norm was recognized: divided by number"
    return f"{each}, {output} and {_listed({len(layer.feed_forward) for layer in dense})} MLP products{instead}{counted}"


def _listed(numbers: "set[int] | list[int]") -> str:
    return " or ".join(map(str, sorted(numbers)))
