"""What the kernels of a compiled decode reach: a measure for those that are far from their roofline time."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.decode_cost import Decode, decode_of
from llm_perf_opt.analysis.findings.finding import unit_time
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.analysis.trace.stage_launches import KernelTotal
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import percentage

ASSUMED_SHARE = 0.9
"""Share of the bandwidth that the products are assumed to reach if no component of the run shows one."""
PRODUCT_KERNELS = (KernelClass.GEMM, KernelClass.GEMV)
LINEAR = ("attention_projections", "mlp", "shared_experts", "lm_head")
"""Components of the cost model whose time is that of plain linear layers."""
EXPERTS = re.compile(r"group(ed|problem)|moe|expert", re.IGNORECASE)
_LABELS = {"mlp": "MLP", "lm_head": "LM head"}
_GENERATED = re.compile(r"^triton_(poi|red|per|for|spl)_")
_CONTINUES = re.compile(r"splitk_?reduce|reduce_?splitk", re.IGNORECASE)


def seconds_of(time: RooflineTime, names: Iterable[str]) -> list[float]:
    """Return the roofline times of these components."""
    return [part.seconds for part in time.components if part.name in names]


def compiled_decode(evidence: Evidence) -> Decode | None:
    """Return decode on a GPU if this run compiled it and its cost is known."""
    return decode_of(evidence) if evidence.facts.compiled and evidence.stage(DECODE) is not None else None


@dataclass(frozen=True)
class Part:
    """The matrix products of one component, over all units."""

    name: str
    kernels: float
    spent_ns: float
    roofline_ns: float

    @property
    def label(self) -> str:
        """Its name as text."""
        return _LABELS.get(self.name, self.name.replace("_", " "))


@dataclass(frozen=True)
class Reach:
    """What kernels of this run reach, as a measure for the others."""

    roofline: RooflineTime
    peaks: str
    products: tuple[Part, ...]
    """Empty if none is recognized. Without the experts, whose products of all experts at once are kernels of their own."""
    fixed_ns: float
    """What a generated reduction takes in the median: most are norms, which read a row. With quantized weights, products are
    generated reductions, too: then what the shortest takes."""
    shortest_ns: float
    share: float
    """The best share of the bandwidth that a component of the run reaches."""
    source: str

    def roofline_ns(self, name: str) -> float:
        """Return the roofline time of a component, over all units."""
        return 1e9 * sum(seconds_of(self.roofline, (name,)))

    def possible_ns(self, part: Part) -> float:
        """Return the time of a component's products at the best rate of the run, plus a fixed time for each kernel."""
        return part.roofline_ns / self.share + part.kernels * self.fixed_ns

    def least_ns(self, part: Part) -> float:
        """Return the time at the full bandwidth, plus the shortest time of a generated kernel for each."""
        return part.roofline_ns + part.kernels * self.shortest_ns

    def row(self, part: Part, stage: StageEvidence) -> str:
        """Return a component as text."""
        count = stage.per_unit(part.kernels)
        return (
            f"{part.label}: {count:,.0f} kernel{'' if count == 1 else 's'}, {unit_time(stage, part.spent_ns)} per {stage.unit}, "
            f"{percentage(min(part.roofline_ns / part.spent_ns, 1.0))} of the {self.peaks} bandwidth"
        )


def reach_of(decode: Decode) -> Reach | None:
    """Return what the kernels of a compiled decode reach; None if the compiler generated none, or the peaks are unknown."""
    stage = decode.stage
    roofline = decode.roofline(decode.steps, decode.formats)
    generated = [row for row in stage.kernels if _GENERATED.search(row.name)]
    reductions = [row for row in generated if row.kind in (KernelClass.NORM, KernelClass.REDUCTION)]
    if roofline is None or not reductions:
        return None
    parts = _components(decode, roofline) or _all_products(stage, roofline)
    best = max(parts, key=lambda part: part.roofline_ns / part.spent_ns) if len(parts) > 1 else None
    share = min(best.roofline_ns / best.spent_ns, 1.0) if best else ASSUMED_SHARE
    source = (
        f"best rate of this run: {best.label}, {percentage(share)} of the bandwidth"
        if best
        else f"components are unknown; a rate of {percentage(ASSUMED_SHARE)} of the bandwidth is assumed to be possible"
    )
    return Reach(
        roofline,
        decode.peaks,
        parts,
        min(row.mean_ns for row in reductions) if decode.formats.quantized else _median(reductions),
        min(row.mean_ns for row in generated),
        share,
        source,
    )


def _components(decode: Decode, roofline: RooflineTime) -> tuple[Part, ...]:
    """Return the products by component; empty if the order of the kernels does not show the components."""
    torch = decode.evidence.facts.torch
    if isinstance(torch, Missing) or isinstance(torch.parts, Missing) or not torch.decode_steps:
        return ()
    scale = decode.stage.units / torch.decode_steps
    found = []
    for part in torch.parts:
        least = 1e9 * sum(seconds_of(roofline, (part.part,)))
        if part.stage == DECODE and part.part in LINEAR and least and part.time_ns:
            found.append(Part(part.part, part.pieces * scale, part.time_ns * scale, least))
    return tuple(found)


def _all_products(stage: StageEvidence, roofline: RooflineTime) -> tuple[Part, ...]:
    """Return all products as one component."""
    rows = [row for row in stage.kernels if row.kind in PRODUCT_KERNELS and not EXPERTS.search(row.name)]
    spent, least = sum(row.total_ns for row in rows), 1e9 * sum(seconds_of(roofline, (*LINEAR, "router")))
    count = sum(row.calls for row in rows if not _CONTINUES.search(row.name))
    return (Part("products", count, spent, least),) if spent and least else ()


def _median(rows: Sequence[KernelTotal]) -> float:
    """Return the median of the mean times, weighted by calls."""
    half, seen = sum(row.calls for row in rows) / 2, 0
    ordered = sorted(rows, key=lambda row: row.mean_ns)
    for row in ordered:
        seen += row.calls
        if seen >= half:
            return row.mean_ns
    return ordered[-1].mean_ns
