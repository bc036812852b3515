"""From counted steps to a model's operators: what belongs to attention, experts, a recurrent state, decided by what modules do.

No name of a family or module decides anything: attention is where scores and values are multiplied, experts are where weights are
gathered for the choice of a token, a router is the product in their block with a column for each of them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.cost.counted import CountedModel, Operator
from llm_perf_opt.cost.forms import PER_TOKEN, Form, Sequences, fitted

if TYPE_CHECKING:
    from llm_perf_opt.cost.counting import Program
    from llm_perf_opt.cost.recorder import Counted, Site, Where

_OUTSIDE = -1


class UnequalLayersError(LlmPerfError):
    """The first and the last of layers that look equal do not do the same."""


@dataclass(frozen=True)
class _Entry:
    """One module with one parameter, over all counted steps."""

    where: "Where"
    key: str
    name: str
    """The parameter; without one, the operator or the number of the call."""
    points: tuple[tuple[Sequences, "Site | None"], ...]

    @property
    def site(self) -> "Site":
        """The first step that has it."""
        return next(site for _, site in self.points if site is not None)

    @property
    def path(self) -> str:
        return self.where[1]

    def figure(self, name: str) -> Form:
        """Return a figure of the sites as a function."""
        return fitted([(sequences, getattr(site, name) if site else 0) for sequences, site in self.points])


def model_of(model_type: str, program: "Program", steps: Sequence["Counted"]) -> CountedModel:
    """Return the operators of a model from its counted steps."""
    entries = _entries(steps)
    by_layer: dict[int, list[_Entry]] = defaultdict(list)
    for entry in entries:
        by_layer[entry.where[0]].append(entry)
    last_layer = [
        max((site.order for (where, _), site in step.sites.items() if where[0] != _OUTSIDE), default=0) for step in steps
    ]  # fmt: skip
    found: dict[int, tuple[Operator, ...]] = {}
    for number, inside in by_layer.items():
        part = _Part(program, number, inside, steps, last_layer)
        found[number] = _merged(part.operators())
    if any(found.get(first) != found.get(last) for first, last in program.ends):
        raise UnequalLayersError("Layers that look equal have different operators.")
    for number, other in program.same_as.items():
        found.setdefault(number, found.get(other, ()))
    kinds: dict[tuple[Operator, ...], int] = {}
    layers = [kinds.setdefault(found.get(number, ()), len(kinds)) for number in range(len(program.layers))]
    unknown = sum((step.unknown for step in steps), Counter[str]())
    guessed = sorted(set().union(*(step.guessed for step in steps)))
    return CountedModel(model_type, tuple(kinds), tuple(layers), found.get(_OUTSIDE, ()), program.params, unknown, tuple(guessed))


def _entries(steps: Sequence["Counted"]) -> list[_Entry]:
    keys = dict.fromkeys(key for step in steps for key in step.sites)
    return [
        _Entry(where, key, key.partition(" ")[2], tuple((step.sequences, step.sites.get((where, key))) for step in steps))
        for where, key in keys
    ]


def _merged(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Return distinct operators with their numbers; modules that differ in numbers of their path are the same."""
    counts: Counter[Operator] = Counter()
    for operator in operators:
        path = ".".join("*" if word.isdigit() else word for word in operator.module.split("."))
        counts[replace(operator, module=path)] += 1
    return tuple(replace(operator, count=count) for operator, count in counts.items())


def _inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


class _Part:
    """One layer, or what is outside all layers."""

    def __init__(
        self, program: "Program", number: int, entries: Sequence[_Entry], steps: Sequence["Counted"], last_layer: Sequence[int]
    ) -> None:
        self._program, self._number, self._entries, self._steps = program, number, entries, steps
        self._last_layer = last_layer
        own = {path for step in steps for layer, path in step.softmax if layer == number}
        multiplied = {entry.path for entry in entries if entry.site.kind == "other"}
        self._attention = {entry.path for entry in entries if entry.site.kind == "attention"} | (own & multiplied)
        self._recurrent = {
            entry.path.partition(".")[0]
            for entry in entries
            if (entry.site.kind == "other" or self._convolves(entry)) and not self._near_attention(entry.path)
        }
        self._experts: dict[str, int] = {}
        """Modules of experts, by the number of experts."""
        for entry in entries:
            if entry.site.kind == "experts":
                self._experts[entry.path] = program.shapes[entry.name][0]

    def _convolves(self, entry: _Entry) -> bool:
        return entry.site.kind == "product" and entry.site.convolution

    def _near_attention(self, path: str) -> bool:
        return any(_inside(path, module) or _inside(module, path) for module in self._attention)

    def operators(self) -> list[Operator]:
        """Return an operator for every module and parameter."""
        found = [operator for entry in self._entries if (operator := self._operator(entry)) is not None]
        return [*found, *self._caches()]

    def _operator(self, entry: _Entry) -> Operator | None:
        site, kind = entry.site, entry.site.kind
        component = self._component(entry)
        if kind == "attention":
            if any(step and step.rows not in (sum(one[0]), _seen(one[0], site.window)) for one, step in entry.points):
                raise LlmPerfError(f"{entry.path}: attends to other keys than those of the step and its cache.")
            heads, kv_heads, key_dim, value_dim = site.shape
            return Operator(
                "attention", entry.path, component, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim,
                window=site.window, causal=site.causal,
            )  # fmt: skip
        if kind == "product":
            inputs, outputs = site.shape
            biases = {name: size for _, step in entry.points if step for name, size in step.biases.items()}
            params = site.read + sum(biases.values())
            rows = entry.figure("flops").times(Fraction(1, 2 * inputs * outputs))
            return Operator("product", entry.path, component, rows=rows, inputs=inputs, outputs=outputs, params=params)
        if kind == "experts":
            return self._expert(entry, component)
        if kind == "rows":
            table, width = site.shape[0], prod(site.shape[1:])
            if self._experts.get(entry.path) == table:
                return None  # a bias of the experts
            return Operator("rows", entry.path, component, rows=entry.figure("rows"), inputs=table, outputs=width)
        if kind == "read":
            if self._read_elsewhere(entry) or not site.read:
                return None
            return Operator("read", entry.path, component, params=site.read)
        return Operator("other", entry.path, component, flops=entry.figure("flops"))

    def _read_elsewhere(self, entry: _Entry) -> bool:
        """Return whether an operator of another kind reads the same parameter: a product its weight, or its bias."""
        others = [other for other in self._entries if other.site.kind != "read"]
        return any(
            other.name == entry.name or any(entry.name in site.biases for _, site in other.points if site) for other in others
        )

    def _expert(self, entry: _Entry, component: str) -> Operator:
        inputs, outputs = entry.site.shape
        rows = entry.figure("flops").times(Fraction(1, 2 * inputs * outputs))
        active = rows.terms.get("new", Fraction(0))
        if rows != PER_TOKEN.times(active) or active.denominator != 1:
            raise LlmPerfError(f"{entry.path}: experts are not chosen once per token.")
        biases = [
            other.site.shape[1]
            for other in self._entries
            if other.site.kind == "rows" and other.path == entry.path and other.site.shape[0] == self._experts[entry.path]
            and other.site.shape[1] == outputs
        ]  # fmt: skip
        return Operator(
            "experts", entry.path, component, rows=rows, inputs=inputs, outputs=outputs,
            params=inputs * outputs + sum(biases[:1]), experts=self._experts[entry.path], active=int(active),
        )  # fmt: skip

    def _component(self, entry: _Entry) -> str:
        kind, path = entry.site.kind, entry.path
        if kind == "read":
            product = next((other for other in self._entries if other.path == path and other.site.kind == "product"), None)
            if product is not None:  # its bias
                return self._component(product)
        if self._number == _OUTSIDE:
            return self._outside(entry)
        for module, number in self._experts.items():
            block = module.rpartition(".")[0]
            if kind == "product" and _inside(path, block) and entry.site.shape[-1] == number:
                return "router"
            if _inside(path, module):
                return "experts"
            if block and _inside(path, block) and kind == "product":
                return "shared_experts"
        if any(_inside(path, module) for module in self._attention):
            if kind in ("attention", "other"):
                return "attention_core"
            return "attention_projections" if kind == "product" else "norms"
        if path.partition(".")[0] in self._recurrent:
            return "recurrent"
        if kind == "rows":
            return "embedding"
        return "norms" if kind == "read" else "mlp"

    def _outside(self, entry: _Entry) -> str:
        if entry.site.kind == "read":
            return "norms"
        if entry.site.kind == "rows":
            return "embedding"
        after = any(
            site is not None and site.order > last for (_, site), last in zip(entry.points, self._last_layer, strict=True)
        )
        return "lm_head" if after else "embedding"

    def _caches(self) -> Iterator[Operator]:
        """Yield what the caches of this part hold."""
        names = dict.fromkeys(key for step in self._steps for key in step.held if key[0][0] == self._number)
        window = next((entry.site.window for entry in self._entries if entry.site.kind == "attention"), None)
        for key in names:
            points = [(step.sequences, step.held[key]) for step in self._steps if key in step.held]
            name = key[1].rpartition(".")[2]
            kept = [(len(sequences) * kept_tokens(sum(sequences[0]), window), held) for sequences, held in points]
            per_token = {Fraction(held, tokens) for tokens, held in kept}
            per_sequence = {Fraction(held, len(sequences)) for sequences, held in points}
            if len(per_sequence) == 1:
                yield Operator("state", name, "state", elements=int(per_sequence.pop()))
            elif len(per_token) == 1:
                yield Operator("cache", name, "kv", elements=int(per_token.pop()), window=window)
            else:
                raise LlmPerfError(f"The cache {key[1]} grows neither with the tokens nor not at all.")


def _seen(sequence: tuple[int, int], window: int | None) -> int:
    """Return the keys that a cache with this window hands to attention: the new ones and those it kept."""
    return sequence[0] + kept_tokens(sequence[1], window)


def kept_tokens(tokens: int, window: int | None) -> int:
    """Return how many tokens a cache holds: the next token sees them and itself within the window."""
    return tokens if window is None else min(tokens, window - 1)
