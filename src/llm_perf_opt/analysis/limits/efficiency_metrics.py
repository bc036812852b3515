"""Definitions of the figures of `efficiency`, each with its formula."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EfficiencyMetric:
    """The definition of one figure."""

    key: str
    label: str
    unit: str
    formula: str
    definition: str


EFFICIENCY_METRICS = (
    EfficiencyMetric(
        "flops", "Model FLOPs", "FLOP", "Σ components (matrix products, a multiply-add counts 2)",
        "What the model requires: causal attention, logits for the last token in prefill. Kernels may execute more.",
    ),
    EfficiencyMetric(
        "bytes", "Minimum bytes", "byte", "weights used once + cache read + cache written + gathered embedding rows + logits",
        "What must cross the memory interface. For a mixture of experts, the expected number of distinct experts.",
    ),
    EfficiencyMetric(
        "mfu", "MFU (causal)", "%", "model FLOPs / (unprofiled time × peak FLOP/s of the run's dtype)",
        "Model FLOPs utilization with causal attention: a token attends only to earlier tokens.",
    ),
    EfficiencyMetric(
        "mfu_full_attention", "MFU (whole attention)", "%",
        "model FLOPs with the full attention matrix / (unprofiled time × peak FLOP/s)",
        "The same with the full attention matrix, as half the literature counts it. Only for comparison with published figures.",
    ),
    EfficiencyMetric(
        "hfu", "HFU", "%", "executed FLOPs / (unprofiled time × peak FLOP/s)",
        "Hardware FLOPs utilization from counters: FLOPs of the tensor cores, plus single and double precision outside them. "
        "Packed half precision is excluded, because its instructions also move constants. n/a without counters.",
    ),
    EfficiencyMetric(
        "mbu", "MBU", "%", "minimum bytes / (unprofiled time × memory bandwidth)",
        "Memory bandwidth utilization. n/a for a model that fits in the last-level cache.",
    ),
    EfficiencyMetric(
        "intensity", "Arithmetic intensity", "FLOP/byte", "model FLOPs / minimum bytes",
        "Below the ridge, memory bounds a stage; above it, compute does.",
    ),
    EfficiencyMetric(
        "ridge", "Ridge", "FLOP/byte", "peak FLOP/s / memory bandwidth",
        "The intensity at which compute and memory take equally long.",
    ),
    EfficiencyMetric(
        "floor", "Roofline time", "ms", "Σ components max(FLOPs / peak, bytes / bandwidth)",
        "The least time the stage can take at these peaks. Components run one after the other, so their times add up.",
    ),
    EfficiencyMetric(
        "times_floor", "× roofline", "×", "unprofiled time / roofline time",
        "How much faster the stage could be at most.",
    ),
    EfficiencyMetric(
        "busy", "Kernels' share of the time", "%", "Σ kernel durations (torch pass) / unprofiled time of as many steps",
        "How long the device is busy during the stage. Below 50 %, a GPU stage is launch-bound.",
    ),
)  # fmt: skip
