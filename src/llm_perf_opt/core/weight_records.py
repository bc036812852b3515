"""The records of a model's weights: where they came from, what was quantized, and what that changed."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class QuantizedWeights:
    """Linear layers that llm-perf quantized after loading."""

    format: str
    """int8, fp8: one byte per weight and one scale per output channel. int4: half a byte, and a scale and a zero per group."""
    kernel: str
    """The operators that multiply with them, and in how many layers."""
    layers: int
    weights: int
    """Number of quantized weights."""
    weight_bytes: int
    scale_bytes: int
    components: tuple[str, ...]
    """Components of the cost model whose matrices are quantized."""
    kernel_rows: int | None = None
    """Instead of `aten::_weight_int8pack_mm`, inputs with more rows use dequantized weights, which is faster; None: none do."""
    quantized_inputs: bool = False
    """Whether a kernel also rounds its inputs to int8, with one scale for all of them, at each call."""
    group: int | None = None
    """Inputs of an output channel that share a scale; None: all of them."""
    kept_layers: int = 0
    """Linear layers that were not quantized, because the format does not fit their shape."""
    component_bits: dict[str, float] = field(default_factory=dict)
    """Component → average bits of the parameters of its linear layers: weights, scales, biases and kept layers."""

    @property
    def bits_per_weight(self) -> float:
        """Average size of a quantized weight, including its share of the scales."""
        return (self.weight_bytes + self.scale_bytes) * 8 / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class ModelConversion:
    """How a model was converted into the format of its engine, before anything was measured."""

    by: str
    version: str
    seconds: float
    """What it took when it was made."""
    source: str = ""
    """The folder that was converted; empty for random weights."""
    reused: bool = False
    """Whether it was taken from the cache."""


@dataclass(frozen=True)
class WeightFacts:
    """Where the weights came from."""

    source: Literal["random", "stored"]
    stored_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes per format in the files; empty for random weights, or if the file headers do not contain it."""
    quantized: QuantizedWeights | None = None
    """Weights that were quantized after loading; None: none."""
    folder: str = ""
    """The real path of the folder with the files; empty for random weights, and in older runs."""
    conversion: ModelConversion | None = None
    """None: they ran as they are stored, or the user converted them."""
    counted_on: Literal["", "module", "configuration"] = ""
    """What the number of parameters was counted on: the module that ran, or the model's configuration if the runner shows no
    module. Empty in older runs."""
    stated_parameters: int | None = None
    """What the runner states, if the module that ran has another number of parameters."""

    @property
    def parameters_words(self) -> str:
        """The word after the number of parameters, with what it was counted on if not on the module that ran."""
        return "parameters by its configuration" if self.counted_on == "configuration" else "parameters"

    @property
    def kind(self) -> str:
        """`random` or `real`."""
        return "random" if self.source == "random" else "real"

    @property
    def words(self) -> str:
        """The kind as part of a sentence."""
        return f"{self.kind} weights"


@dataclass(frozen=True)
class TokenAgreement:
    """The tokens of the quantized model compared with those of the same model before it was quantized."""

    compared: int
    """Tokens of the first request, over all sequences."""
    equal: int
    first_difference: int | None
    """Position of the first differing token in its sequence, from 0; None if all are equal."""
