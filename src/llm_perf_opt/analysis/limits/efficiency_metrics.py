"""What the figures of `efficiency` are, in words: each with its formula and its denominator."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EfficiencyMetric:
    """One figure's definition."""

    key: str
    label: str
    unit: str
    formula: str
    definition: str


EFFICIENCY_METRICS = (
    EfficiencyMetric(
        "flops", "Model FLOPs", "FLOP", "Σ parts (matrix products, a multiply-add counts 2)",
        "What the model's equations need, attention causal, logits for the last token in prefill. Not what kernels execute.",
    ),
    EfficiencyMetric(
        "bytes", "Least bytes", "byte", "weights used once + cache read + cache written + gathered embedding rows + logits",
        "What must cross the memory interface at least. Experts of a mixture: the expected number of different ones.",
    ),
    EfficiencyMetric(
        "mfu", "MFU (causal)", "%", "model FLOPs / (unprofiled time × peak FLOP/s of the run's dtype)",
        "Model FLOPs utilization, attention counted causal: a token meets only those before it.",
    ),
    EfficiencyMetric(
        "mfu_full_attention", "MFU (whole attention)", "%", "model FLOPs with whole attention / (unprofiled time × peak FLOP/s)",
        "The same with attention counted whole, as half the field does. For comparison with published figures only.",
    ),
    EfficiencyMetric(
        "hfu", "HFU", "%", "executed FLOPs / (unprofiled time × peak FLOP/s)",
        "Hardware FLOPs utilization, from counters: FLOPs of the tensor cores, and of single and double precision beside them. "
        "Packed half precision beside them is left out, for its instructions also move constants. n/a where none were read.",
    ),
    EfficiencyMetric(
        "mbu", "MBU", "%", "least bytes / (unprofiled time × memory bandwidth)",
        "Memory bandwidth utilization. n/a for a model that fits in the last-level cache.",
    ),
    EfficiencyMetric(
        "intensity", "Arithmetic intensity", "FLOP/byte", "model FLOPs / least bytes",
        "Below the ridge a stage is bound by memory, above it by computing.",
    ),
    EfficiencyMetric(
        "ridge", "Ridge", "FLOP/byte", "peak FLOP/s / memory bandwidth",
        "The intensity at which computing and moving take equally long.",
    ),
    EfficiencyMetric(
        "floor", "Floor", "ms", "Σ parts max(FLOPs / peak, bytes / bandwidth)",
        "The least time the stage can take on these limits. Parts run one after the other, so it is no less than the larger sum.",
    ),
    EfficiencyMetric(
        "times_floor", "Times off the floor", "×", "unprofiled time / floor",
        "How much faster the stage could be at most.",
    ),
    EfficiencyMetric(
        "busy", "Kernels' share of the time", "%", "Σ kernel durations (torch pass) / unprofiled time of as many steps",
        "How long the device works while the stage lasts. Under 50 % a GPU stage is called launch-bound.",
    ),
)  # fmt: skip
