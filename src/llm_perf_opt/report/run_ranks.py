"""The section of a run's report on its ranks."""

from llm_perf_opt.analysis.rank_run import RankCost, RankRun
from llm_perf_opt.analysis.ranks.document import RanksAnalysis
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.rank_records import RankFacts, rank_count, sharing
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.report.document import Block, Column, Paragraph, Section, Table, bullets, cell, count_cell, numbers, when_known
from llm_perf_opt.report.ranks_document import rank_blocks
from llm_perf_opt.report.text import duration, flops, mean_count, memory_size

_TOP = 10
_CLEAN = (
    "Unprofiled pass. Request is the median of the rank's own times; the time of a repeat in this report is that of the slowest "
    "rank. Weights is what the rank holds of them. Memory is the peak of its tensors on a GPU, and of its process on a CPU."
)
_SHARES = "Of one rank, by the cost model. The decode step is the last one; the cache is that at the end of a request."
_COLLECTIVES = (
    "Expected by the cost model and counted in the traces, in prefill and in each decode step. Sent is what a rank sends, if the "
    "ranks form a ring."
)


def split_words(timings: CleanTimings) -> str:
    """Return how many ranks and devices share the model; empty for one process on one device, or if it is not known."""
    ranks, runtime = timings.ranks, timings.runtime
    if not ranks:
        return f", {runtime.devices} devices" if runtime is not None and runtime.devices > 1 else ""
    number, devices, together = rank_count(ranks), {entry.device for entry in ranks}, sum(sharing(ranks).values())
    if number < 2:  # an interrupted run of an older version
        return ""
    if "cpu" in devices:
        where = f"{number} ranks share the CPU"
    elif len(ranks) < number:  # an interrupted run has the facts of one rank
        where = f"{number} ranks"
    elif together:
        where = f"{number} ranks share {'one GPU' if len(devices) == 1 else f'{len(devices)} GPUs'}"
    else:
        where = f"{len(devices)} GPUs"
    return f", tensor parallel {number} ({where})"


def rank_sections(found: RankRun | None) -> list[Section]:
    """Return the section, or nothing if the run has one rank."""
    if found is None:
        return []
    blocks: list[Block] = [Paragraph(found.shared)] if found.shared else []
    if found.ranks:
        blocks += [_clean(found), *when_known("Share of a rank:", found.cost, _cost)]
    blocks += when_known("Traces of the ranks:", found.traces, _traced)
    return [Section("ranks", "Ranks", blocks)]


def _traced(traces: RanksAnalysis) -> list[Block]:
    problems = [problem.what for problem in traces.problems]
    return [*rank_blocks(traces, _TOP), *([bullets(problems, "foot")] if problems else [])]


def _clean(found: RankRun) -> Table:
    names = ("threads", "loaded in", "request", "slowest in", "weights", "memory")
    columns = [Column("rank"), Column("device"), Column("collectives"), *numbers(*names)]
    table = Table("rank-times", "Ranks in the unprofiled pass", columns, tools=True, foot=_CLEAN)
    for entry, last in zip(found.ranks, found.slowest, strict=True):
        table.add(
            str(entry.rank),
            entry.device,
            entry.backend,
            count_cell(entry.threads),
            cell(entry.load_s * 1e9, duration),
            cell(_median(entry), duration),
            f"{last} of {len(entry.request_ns)}",
            cell(entry.weight_bytes, memory_size),
            cell(_memory(entry), memory_size),
        )
    return table


def _median(entry: RankFacts) -> Maybe[float]:
    return percentile(entry.request_ns, 0.5) if entry.request_ns else Missing("no repeat was measured")


def _memory(entry: RankFacts) -> Maybe[int]:
    return entry.process_rss_bytes if entry.device == "cpu" else entry.allocated_bytes


def _cost(cost: RankCost) -> list[Block]:
    shares = Table("rank-share", "Share of one rank", [Column("of"), *numbers("FLOPs", "bytes")], foot=_SHARES)
    nothing = Missing("not computed from FLOPs")
    shares.add("weights", nothing, cell(cost.weight_bytes, memory_size))
    shares.add("KV cache", nothing, cell(cost.kv_cache_bytes, memory_size))
    shares.add("prefill", cell(cost.prefill_flops, flops), cell(cost.prefill_bytes, memory_size))
    if cost.step_bytes:
        shares.add("decode step", cell(cost.step_flops, flops), cell(cost.step_bytes, memory_size))
    columns = [Column("stage"), Column("collective"), *numbers("expected", "counted", "sent")]
    counts = Table("rank-collectives", "Collectives per step", columns, foot=_COLLECTIVES)
    for line in cost.collectives:
        counts.add(
            line.stage,
            line.kind,
            count_cell(line.expected),
            cell(line.counted, mean_count),
            cell(line.sent_bytes, memory_size),
        )
    return [shares, counts]
