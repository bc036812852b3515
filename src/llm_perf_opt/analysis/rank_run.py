"""The ranks of a run: what each did in the unprofiled pass, and what the cost model expects of one of them."""

from collections import Counter
from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.communication import stage_collectives
from llm_perf_opt.analysis.cost_model.models import architecture_that_ran
from llm_perf_opt.analysis.cost_model.sharding import Plan, check_plan, device_stages
from llm_perf_opt.analysis.cost_model.work import Logits, Step
from llm_perf_opt.analysis.limits.efficiency import formats_of
from llm_perf_opt.analysis.ranks.document import RanksAnalysis
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.rank_records import RankFacts, rank_count, sharing
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.stages import Stage

_NOT_TRACED = Missing("no trace of every rank was recorded")


@dataclass(frozen=True)
class StageCollectives:
    """The collectives of one kind in prefill, or in one decode step."""

    stage: str
    kind: str
    expected: int
    """By the cost model."""
    sent_bytes: float
    """What a rank sends in them, by the cost model."""
    counted: Maybe[float]
    """In the traces of the ranks, per prefill or decode step."""


@dataclass(frozen=True)
class RankCost:
    """The share of one rank, by the cost model."""

    weight_bytes: int
    kv_cache_bytes: int
    """At the end of a request."""
    prefill_flops: int
    prefill_bytes: int
    step_flops: int
    """Of the last decode step; 0 without decode steps."""
    step_bytes: int
    collectives: tuple[StageCollectives, ...]


@dataclass(frozen=True)
class RankRun:
    """All ranks of a run."""

    ranks: tuple[RankFacts, ...]
    slowest: tuple[int, ...]
    """By rank: the repeats in which it took longest."""
    cost: Maybe[RankCost]
    traces: Maybe[RanksAnalysis]

    @property
    def shared(self) -> str:
        """A sentence on devices that several ranks share; empty if each rank has its own."""
        found = sharing(self.ranks)
        if not found:
            return ""
        words = ", ".join(f"{count} ranks on {device}" for device, count in found.items())
        return (
            f"Ranks share a device ({words}) and take turns on it: this run shows how the ranks work together, not what one rank "
            "per device would reach. Utilization of a device (MFU, MBU, roofline) is n/a."
        )


def rank_run(timings: Maybe[CleanTimings], traces: Maybe[RanksAnalysis]) -> RankRun | None:
    """Return the ranks of a run; None if it has one process and no trace of several ranks."""
    ranks = () if isinstance(timings, Missing) else timings.ranks
    if not ranks and isinstance(traces, Missing):
        return None
    cost = timings if isinstance(timings, Missing) else _cost(timings, rank_count(ranks), traces)
    return RankRun(ranks, _slowest(ranks), cost, traces)


def _slowest(ranks: tuple[RankFacts, ...]) -> tuple[int, ...]:
    last: Counter[int] = Counter()
    for times in zip(*(entry.request_ns for entry in ranks), strict=False):
        last[times.index(max(times))] += 1
    return tuple(last[place] for place in range(len(ranks)))


def _cost(timings: CleanTimings, size: int, traces: Maybe[RanksAnalysis]) -> Maybe[RankCost]:
    work, formats, plan = timings.workload, formats_of(timings.model), Plan(tp=size)
    if size < 2:
        return Missing("the number of ranks is not known")
    try:
        architecture = architecture_that_ran(timings.model)
        check_plan(architecture, plan)
    except ConfigError as error:
        return Missing(f"no cost model: {error.fact}")
    stage = device_stages(architecture, plan)[0]
    logits: Logits = "last" if timings.model.logits == "last token" else "all"
    context = work.padded_tokens + work.decode_steps
    steps = {Stage.PREFILL: Step(work.batch_size, work.padded_tokens, 0, logits)}
    if work.decode_steps:
        steps[Stage.DECODE_STEP] = Step(work.batch_size, 1, context - 1)
    costs = {name: stage.cost(step, formats) for name, step in steps.items()}
    last = costs.get(Stage.DECODE_STEP)
    found = []
    for name, step in steps.items():
        sums: dict[str, tuple[int, float]] = {}
        for one in stage_collectives(stage, step, formats):
            count, sent = sums.get(one.kind, (0, 0.0))
            sums[one.kind] = (count + one.count, sent + one.sent_bytes)
        found += [
            StageCollectives(name.value, kind, count, sent, _counted(traces, name.value, kind))
            for kind, (count, sent) in sums.items()
        ]
    return RankCost(
        weight_bytes=stage.weight_bytes(formats),
        kv_cache_bytes=stage.kv_cache_bytes(work.batch_size, context, formats),
        prefill_flops=costs[Stage.PREFILL].flops,
        prefill_bytes=costs[Stage.PREFILL].bytes,
        step_flops=last.flops if last else 0,
        step_bytes=last.bytes if last else 0,
        collectives=tuple(found),
    )


def _counted(traces: Maybe[RanksAnalysis], stage: str, kind: str) -> Maybe[float]:
    """Return how many collectives of a kind the traces show per prefill or decode step."""
    if isinstance(traces, Missing):
        return _NOT_TRACED
    steps = {line.step for line in traces.steps if line.step.rpartition(" ")[0] == stage}
    if not steps:
        return Missing(f"the traces have no {stage}")
    return sum(line.kind == kind and line.step in steps for line in traces.collectives) / len(steps)
