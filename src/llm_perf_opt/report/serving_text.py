"""Sentences about a server under load: the knee, its causes, the checks of the generator."""

from collections.abc import Callable

from llm_perf_opt.analysis.serving.generator import CheckId
from llm_perf_opt.analysis.serving.knee import Cause, CauseId, Knee
from llm_perf_opt.analysis.serving.outcome import GAIN, GOOD_SHARE, KEEPS_UP, MOST_FAILED, RESOLVED, Criterion
from llm_perf_opt.analysis.serving.pace import STEADY_TIMES
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis
from llm_perf_opt.core.serving_records import LoadKind
from llm_perf_opt.report.document import Item
from llm_perf_opt.report.text import duration, known, mean_count, missing, percent, significant, then, words


def load_words(load: float, kind: LoadKind) -> str:
    """Return a load: `8 requests/s`, or `16 requests at a time`."""
    number = f"{load:,.4g}"
    return f"{number} request{'s' if load != 1 else ''}/s" if kind == "rate" else f"{number} at a time"


def point_words(point: PointAnalysis) -> str:
    """Return the load of a point, and whether it was profiled."""
    return f"{load_words(point.point.asked, point.point.kind)}{', profiled' if point.point.profiled else ''}"


def definition_words(kind: LoadKind, with_slo: bool) -> str:
    """Return when a load counts as carried."""
    if kind == "rate":
        first = (
            f"requests end as fast as they are sent: the 95 % interval of the ratio lies above {percent(1 / RESOLVED, 0)}, and "
            f"not below 100 % with the ratio below {percent(KEEPS_UP, 0)} (then they pile up in the server)"
        )
    else:
        first = (
            f"the output throughput while all requests run still grows with the requests at a time: by at least {GAIN:g} of "
            "their growth, both as logarithms"
        )
    rules = [first, f"at most {percent(MOST_FAILED, 0)} of the requests fail"]
    if with_slo:
        rules.append(f"at least {percent(GOOD_SHARE, 0)} of the requests meet the objective")
    return (
        f"A load is carried if {'; '.join(rules)}. A load that ended early, was too short or has too few requests to decide is "
        "n/a. The knee is the largest load that is carried, below every one that is not."
    )


_BROKEN = {
    Criterion.THROUGHPUT: "the throughput no longer follows the load",
    Criterion.OBJECTIVE: "too few requests meet the objective",
    Criterion.FAILURES: "too many requests fail",
}


def broken_words(broken: tuple[Criterion, ...]) -> str:
    """Return which criteria a load does not fulfill."""
    return ", ".join(_BROKEN[criterion] for criterion in broken)


def knee_sentence(knee: Knee) -> str:
    """Return where the knee is."""
    kind = knee.kind
    carried, beyond = (known(then(load, lambda value: load_words(value, kind)), "") for load in (knee.carried, knee.not_carried))
    unclear = unclear_words(knee)
    if knee.status == "above":
        every = "every load, up to" if not unclear else "the largest load,"
        return f"The server carries {every} {carried}: no knee was reached.{unclear}"
    if knee.status == "below":
        return f"The server does not carry even the smallest load, {beyond}: {broken_words(knee.broken)}."
    first = f"The server carries {carried}." if carried else ""
    second = f"At {beyond}, {broken_words(knee.broken)}." if beyond else ""
    return " ".join(part for part in (first, second) if part) + unclear


def unclear_words(knee: Knee) -> str:
    """Return which loads below the knee cannot be judged, with the reason of the first, as a further sentence."""
    if not knee.unclear:
        return ""
    loads = ", ".join(f"{found.load:,.4g}" for found in knee.unclear[:-1])
    last = load_words(knee.unclear[-1].load, knee.kind)
    reason = str(knee.unclear[0].carried).removeprefix("n/a: ")
    return f" Whether it carries {f'{loads} and ' if loads else ''}{last} cannot be told: {reason.rstrip('.')}."


def cause_sentence(cause: Cause) -> str:
    """Return one reason, with the figures that show it."""
    return f"{_CAUSES[cause.id](cause.figures)}."


def _queue(seen: dict[str, float]) -> str:
    mean, most = mean_count(seen["waiting_mean"]), mean_count(seen["waiting_max"])
    growth = ""
    if seen.get("waiting_last", 0) > 2 * seen.get("waiting_first", 0) and "waiting_last" in seen:
        growth = f", growing from {mean_count(seen['waiting_first'])} to {mean_count(seen['waiting_last'])}"
    return f"Requests wait in the queue: {mean} on average, {most} at most{growth}"


def _batch(seen: dict[str, float]) -> str:
    if "slots" in seen:
        running, allowed = mean_count(seen["running_max"]), mean_count(seen["slots"])
        return f"The batch is full: {running} requests run, and the server allows {allowed}"
    least, most = mean_count(seen["running_min_waiting"]), mean_count(seen["running_max"])
    return f"The batch is full: while requests wait, {least} to {most} run, and the KV cache has room"


_PARTS = {"frontend": "the server's front end (HTTP, tokenizing, detokenizing)", "network": "the network and the client"}


def _part(seen: dict[str, float]) -> str:
    name = next(key for key in seen if key.endswith("_ns") and not key.endswith("_lowest_ns")).removesuffix("_ns")
    now, before = duration(seen[f"{name}_ns"]), duration(seen[f"{name}_lowest_ns"])
    where = f"{percent(seen['share'], 0)} of the added time is in {_PARTS.get(name, name)}"
    return f"{where}: {now} per request, {before} at the lowest load"


def _steps(seen: dict[str, float]) -> str:
    key = "itl" if "itl_ns" in seen else "tpot"
    now, before = duration(seen[f"{key}_ns"]), duration(seen[f"{key}_lowest_ns"])
    text = f"Each step takes longer: median {key.upper()} {now}, {before} at the lowest load"
    if "running" in seen and "running_lowest" in seen:
        text += f", with {mean_count(seen['running'])} instead of {mean_count(seen['running_lowest'])} requests running"
    return text


_CAUSES: dict[CauseId, Callable[[dict[str, float]], str]] = {
    CauseId.QUEUE: _queue,
    CauseId.BATCH_LIMIT: _batch,
    CauseId.KV_CACHE: lambda seen: f"The KV cache is full: up to {percent(seen['kv_usage_max'], 0)} in use",
    CauseId.PREEMPTIONS: lambda seen: f"Requests lose their place in the KV cache: {mean_count(seen['preemptions'])} preemptions",
    CauseId.LONGER_PART: _part,
    CauseId.LONGER_STEPS: _steps,
    CauseId.LONGER_TTFT: lambda seen: (
        f"The first token takes longer: median TTFT {duration(seen['ttft_ns'])}, {duration(seen['ttft_lowest_ns'])} at the "
        "lowest load"
    ),
    CauseId.REFUSED: lambda seen: f"Requests fail: {mean_count(seen['failed'])} of {mean_count(seen['requests'])}",
    CauseId.GENERATOR: lambda seen: f"The load generator is off ({', '.join(seen)}), so the load is not the one that was asked",
}


def check_figure(check: CheckId, value: float) -> str:
    """Return a figure of this check."""
    shown: dict[CheckId, Callable[[float], str]] = {
        CheckId.RATE: lambda rate: f"{significant(rate, 3)} requests/s",
        CheckId.SPREAD: lambda spread: significant(spread, 3),
        CheckId.DELAY: lambda time: duration(time, 3),
        CheckId.IN_FLIGHT: lambda count: significant(count, 3),
    }
    return shown[check](value)


CHECK_WORDS = {
    CheckId.RATE: "issued",
    CheckId.SPREAD: "spread of gaps (deviation ÷ mean)",
    CheckId.DELAY: "median send delay",
    CheckId.IN_FLIGHT: "mean in flight",
}


def headline(found: ServingAnalysis) -> list[str]:
    """Return the result in a few sentences."""
    sentences = [known(then(found.knee, knee_sentence), "")]
    best = at_knee(found)
    if best is not None:
        ttft, tpot = (words(best.typical(key), duration) for key in ("ttft", "tpot"))
        rate = words(best.output_rate, lambda value: f"{significant(value)} output tokens/s")
        sentences.append(f"At {point_words(best)}: {rate}, median TTFT {ttft}, median TPOT {tpot}.")
    off = [point for point in found.curve if any(check.outcome == "off" for check in point.checks)]
    if off:
        names = ", ".join(point_words(point) for point in off[:5])
        sentences.append(f"The load generator was off at {names}: see the checks.")
    short = [point for point in found.curve if point.short]
    if short:
        names = ", ".join(f"{point.point.asked:,.4g}" for point in short)
        sentences.append(
            f"Loads that are too short for a steady state: {names}. Requests were sent for less than {STEADY_TIMES:g} times the "
            "median end-to-end time; send more."
        )
    return [sentence for sentence in sentences if sentence]


def why_items(found: ServingAnalysis) -> list[Item]:
    """Return why the load beyond the knee is not carried; empty without a knee or a cause."""

    def items(knee: Knee) -> list[Item]:
        beyond = words(knee.not_carried, lambda load: load_words(load, knee.kind))
        reasons = " ".join(cause_sentence(cause) for cause in knee.causes)
        return [Item(f"Why, at {beyond}:", reasons)] if reasons else []

    return known(then(found.knee, items), [])


def at_knee(found: ServingAnalysis) -> PointAnalysis | None:
    """Return the point at the knee. If no load is carried, the smallest one; without a knee, the largest one."""
    load = known(then(found.knee, lambda knee: knee.carried), None)
    matching = [point for point in found.curve if point.point.asked == load]
    place = 0 if known(then(found.knee, lambda knee: bool(knee.broken)), False) else -1
    return matching[0] if matching else found.curve[place] if found.curve else None


def summary_sentences(found: ServingAnalysis) -> list[str]:
    """Return the result for readers who do not know the terms."""
    best = at_knee(found)
    if best is None:
        return ["No load has results."]
    kind = best.point.kind
    each = "requests per second" if kind == "rate" else "requests at a time"
    sentences = []
    knee = known(found.knee, None)
    if knee is not None and knee.status == "found":
        carried = f"{known(knee.carried, 0.0):,.4g}"
        sentences.append(
            f"The server handles up to {carried} {each}. At {known(knee.not_carried, 0.0):,.4g}, {broken_words(knee.broken)}."
        )
        sentences += [f"{_PLAIN[cause.id](cause.figures)}." for cause in knee.causes[:3]]
        sentences += [unclear_words(knee).strip()]
    elif knee is not None:
        sentences.append(knee_sentence(knee))
    else:
        sentences.append(
            f"{len(found.curve)} load{'s were' if len(found.curve) != 1 else ' was'} measured, up to "
            f"{best.point.asked:,.4g} {each}."
        )
    sentences.append(
        f"At {best.point.asked:,.4g} {each}, half of the requests get their first token within "
        f"{words(best.typical('ttft'), duration)}, and then a token every {words(best.typical('tpot'), duration)}."
    )
    slo = known(found.slo, None)
    good = known(best.goodput, None)
    if slo is not None and good is not None:
        sentences.append(f"{percent(good.share, 0)} of the requests meet the objective ({slo.words}).")
    return [sentence for sentence in sentences if sentence]


def _plain_steps(seen: dict[str, float]) -> str:
    key = "itl" if "itl_ns" in seen else "tpot"
    now, before = duration(seen[f"{key}_ns"], 3), duration(seen[f"{key}_lowest_ns"], 3)
    return f"A token takes longer because more requests share the server: {now} instead of {before}"


_PLAIN: dict[CauseId, Callable[[dict[str, float]], str]] = {
    CauseId.QUEUE: lambda seen: f"Requests have to wait: up to {mean_count(seen['waiting_max'])} at a time",
    CauseId.BATCH_LIMIT: lambda seen: f"The server works on at most {mean_count(seen['running_max'])} requests at the same time",
    CauseId.KV_CACHE: lambda _: "The memory for requests that run (the KV cache) is full",
    CauseId.PREEMPTIONS: lambda seen: f"Memory runs out, and requests start again: {mean_count(seen['preemptions'])} times",
    CauseId.LONGER_STEPS: _plain_steps,
    CauseId.LONGER_TTFT: lambda seen: (
        f"The first token takes {duration(seen['ttft_ns'], 3)}; at the lowest load, {duration(seen['ttft_lowest_ns'], 3)}"
    ),
    CauseId.LONGER_PART: _part,
    CauseId.REFUSED: lambda seen: f"{mean_count(seen['failed'])} of {mean_count(seen['requests'])} requests fail",
    CauseId.GENERATOR: lambda _: "The load was not exactly the one that was asked, because the load generator was off",
}
"""Each cause for readers who do not know the terms."""


def missing_knee(found: ServingAnalysis) -> str:
    """Return why there is no knee; empty if there is one."""
    return "".join(why for _, why in missing([("knee", found.knee)]))
