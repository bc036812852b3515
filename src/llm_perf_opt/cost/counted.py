"""A model as the operators that a forward dispatches: what each computes and moves, as a function of a step's sequences."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.cost.forms import NOTHING, Form

Kind = Literal["product", "experts", "attention", "rows", "read", "cache", "state", "other"]
"""A product with a weight; one with the weights of the experts that a token chooses; scores and weighted values; a table of which
rows are read; parameters that are read whole; keys and values; a state of constant size; any other product or convolution."""


@dataclass(frozen=True)
class Operator:
    """Equal operators of a layer, or of the model outside its layers. Zero where a field does not apply to the kind."""

    kind: Kind
    module: str
    """The path of its module in its layer or model, with `*` for numbers of repeated modules."""
    component: str
    count: int = 1
    """How many operators there are in one layer, or outside the layers."""
    rows: Form = NOTHING
    """Rows that each weight multiplies, or that are read from a table. Experts: the choices of all tokens."""
    inputs: int = 0
    outputs: int = 0
    """Sizes of a weight matrix, or the number of rows of a table and their width."""
    params: int = 0
    """Parameters that the operator reads, with the bias. Experts: those of one expert."""
    experts: int = 0
    active: int = 0
    """Experts of the layer, and how many a token uses."""
    flops: Form = NOTHING
    """Of the kind `other`."""
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    """How many tokens a query sees, including itself; None: all."""
    causal: bool = False
    elements: int = 0
    """Cached per token, or states of one sequence."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        found: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                found[entry.name] = value.to_json() if isinstance(value, Form) else value
        return found

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Operator":
        """Return the operator that `to_json` described; raise a ValueError or TypeError for anything else."""
        given: Any = {name: Form.from_json(value) if isinstance(value, dict) else value for name, value in values.items()}
        found = Operator(**given)
        if found.kind not in get_args(Kind) or not isinstance(found.module, str) or not isinstance(found.component, str):
            raise ValueError("an operator of no known kind")
        numbers = [getattr(found, entry.name) for entry in fields(found) if entry.type is int or entry.name == "window"]
        if any(type(number) is not int or number < 0 for number in numbers if number is not None):
            raise ValueError("a size that is not a whole number")
        if not isinstance(found.rows, Form) or not isinstance(found.flops, Form) or not isinstance(found.causal, bool):
            raise ValueError("an operator without a form")
        return found


@dataclass(frozen=True)
class CountedModel:
    """All that the cost of a model depends on."""

    model_type: str
    kinds: tuple[tuple[Operator, ...], ...]
    """The operators of each distinct layer."""
    layers: tuple[int, ...]
    """The kind of each layer, in order."""
    outside: tuple[Operator, ...]
    """Operators outside the layers."""
    params: int
    """All parameters; a tied one counts once."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operators that may multiply and have no formula: name and calls. Their FLOPs are missing in every figure."""
    guessed: tuple[str, ...] = ()
    """Operators whose result depends on data, which a model without data cannot have: as many as if it were balanced."""

    def parts(self) -> Iterator[tuple[tuple[Operator, ...], int]]:
        """Yield the operators of each distinct layer, and of what is outside, with how often they are there."""
        times = Counter(self.layers)
        yield from ((kind, times[number]) for number, kind in enumerate(self.kinds))
        yield self.outside, 1

    def operators(self) -> Iterator[tuple[Operator, int]]:
        """Yield every distinct operator and how often it is there."""
        return ((operator, times * operator.count) for part, times in self.parts() for operator in part)

    def caveats(self) -> Iterator[str]:
        """Yield what the figures leave out or assume, one sentence each."""
        if self.unknown:
            yield f"FLOPs of these operators are not included, as they have no formula: {', '.join(sorted(self.unknown))}."
        if self.guessed:
            names = ", ".join(self.guessed)
            yield f"The result of these operators depends on data; they are counted as if routing were balanced: {names}."
        attention = [operator for operator, _ in self.operators() if operator.component == "attention_core"]
        if any(operator.kind == "other" or not operator.causal for operator in attention):
            yield "The model does not say whether its attention is causal, so it is counted in full."

    @property
    def active_params(self) -> int:
        """All parameters except those of experts that a token does not use."""
        idle = sum(
            times * (operator.experts - operator.active) * operator.params
            for operator, times in self.operators()
            if operator.kind == "experts"
        )
        return self.params - idle

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "model_type": self.model_type,
            "params": self.params,
            "kinds": [[operator.to_json() for operator in kind] for kind in self.kinds],
            "layers": list(self.layers),
            "outside": [operator.to_json() for operator in self.outside],
            "unknown": dict(self.unknown),
            "guessed": list(self.guessed),
        }

    @staticmethod
    def from_json(values: Any) -> "CountedModel":
        """Return the model that `to_json` described; raise a ConfigError for anything else."""
        try:
            kinds = tuple(tuple(map(Operator.from_json, kind)) for kind in values["kinds"])
            layers = tuple(values["layers"])
            if any(type(number) is not int or not 0 <= number < len(kinds) for number in layers):
                raise ValueError("a layer of no known kind")
            unknown = {str(name): int(calls) for name, calls in values["unknown"].items()}
            outside = tuple(map(Operator.from_json, values["outside"]))
            params, guessed = int(values["params"]), tuple(map(str, values["guessed"]))
            return CountedModel(str(values["model_type"]), kinds, layers, outside, params, unknown, guessed)
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"The counted operators of the model cannot be read: {error}.", "The file was edited.") from error
