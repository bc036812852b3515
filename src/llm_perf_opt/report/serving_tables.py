"""Tables of a server under load."""

from collections.abc import Sequence
from functools import partial

from llm_perf_opt.analysis.serving.agreement import AgreedFigure, Agreement
from llm_perf_opt.analysis.serving.breakdown import RequestParts
from llm_perf_opt.analysis.serving.generator import CheckId, GeneratorCheck
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.requests import Estimate, Latency, LatencyDefinition
from llm_perf_opt.analysis.serving.server import ServerLoad
from llm_perf_opt.analysis.serving.slo import Goodput, Slo
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import durations
from llm_perf_opt.report.document import Block, Cell, Column, Paragraph, Table, cell, count_cell, name_cell, numbers
from llm_perf_opt.report.serving_text import CHECK_WORDS, check_figure, point_words
from llm_perf_opt.report.text import duration, grouped, known, percent, signed_percent, significant, then

_LONGEST_ERROR = 120
MOST_ERRORS = 20


def load_cell(point: PointAnalysis) -> Cell:
    """Return the load of a point, sorted by it."""
    return Cell(point_words(point), point.point.asked)


def throughput_table(points: Sequence[PointAnalysis], slo: Maybe[Slo]) -> Table:
    """Return throughput, failures and goodput of each load."""
    columns = [Column("load"), *numbers("requests", "failed", "issued/s", "completed/s", "output tokens/s", "ended/s ÷ sent/s")]
    columns += numbers("met the objective", "goodput, requests/s")
    table = Table("throughput", "Throughput", columns, tools=len(points) > 8)
    for point in points:
        good = point.goodput
        table.add(
            load_cell(point), count_cell(point.requests), _failed(point), cell(point.issued_rate, _rate),
            cell(point.request_rate, _rate), cell(point.output_rate, significant), then(point.kept_up, _ratio),
            then(good, _share),
            cell(then(good, lambda found: found.rate), _rate),
        )  # fmt: skip
    objective = known(then(slo, lambda found: f" Objective: {found.words}."), "")
    table.foot = (
        "Completed/s: from the first start to the last end. Ended/s ÷ sent/s, with its 95 % interval: from how the end-to-end "
        f"time changes while requests are sent; below 1, requests pile up, above 1, a backlog shrinks.{objective}"
    )
    return table


def _share(found: Goodput) -> Cell:
    cut = f", {found.undecided:,} undecided" if found.undecided else ""
    return Cell(percent(found.share), found.share, below=f"({percent(found.share_low)} – {percent(found.share_high)}{cut})")


def _rate(value: float) -> str:
    return significant(value, 3)


def _ratio(found: Estimate) -> Cell:
    ends = then(found.low, lambda low: then(found.high, lambda high: f"({significant(low, 3)} – {significant(high, 3)})"))
    return Cell(significant(found.value, 3), found.value, below=known(ends, ""))


def _failed(point: PointAnalysis) -> Cell:
    share = f" ({percent(point.failed_share)})" if point.failed else ""
    return Cell(f"{point.failed:,}{share}", point.failed)


def latency_table(points: Sequence[PointAnalysis], definition: LatencyDefinition) -> Table:
    """Return the percentiles of one latency at each load, with their intervals."""
    columns = [Column("load"), *numbers("n", "mean", "p50", "p90", "p99")]
    table = Table(f"latency-{definition.key}", f"{definition.label}: {definition.definition}", columns)
    for point in points:
        latency = point.latencies[definition.key]
        table.add(
            load_cell(point),
            cell(then(latency, lambda found: found.n), lambda count: f"{count:,}"),
            cell(then(latency, lambda found: found.mean), duration),
            *[then(latency, partial(_percentile, name)) for name in ("p50", "p90", "p99")],
        )
    return table


def _percentile(name: str, latency: Latency) -> Cell | Missing:
    value: Maybe[Estimate] = getattr(latency, name)
    return then(value, lambda found: Cell(duration(found.value), found.value, below=_ends(found)))


def _ends(found: Estimate) -> str:
    ends = then(found.low, lambda low: then(found.high, lambda high: durations(low, high, around_ns=found.value)))
    return known(then(ends, lambda text: f"({text})"), "")


def server_table(points: Sequence[PointAnalysis]) -> Table:
    """Return what the server's metrics say about each load."""
    columns = [
        Column("load"),
        *numbers("samples", "running, mean", "running, most", "waiting, mean", "waiting, most", "KV cache, most", "preemptions"),
    ]
    table = Table("server-metrics", "Metrics of the server during each load", columns)
    for point in points:
        server = point.server
        table.add(
            load_cell(point),
            cell(then(server, lambda found: found.samples), lambda count: f"{count:,}"),
            *[
                cell(then(server, partial(_reading, name)), _rate)
                for name in ("running_mean", "running_max", "waiting_mean", "waiting_max")
            ],
            cell(then(server, lambda found: found.kv_usage_max), lambda share: percent(share)),
            cell(then(server, lambda found: found.preemptions), grouped),
        )
    return table


def _reading(name: str, server: ServerLoad) -> Maybe[float]:
    found: Maybe[float] = getattr(server, name)
    return found


def parts_table(points: Sequence[PointAnalysis]) -> Table:
    """Return the mean parts of a request at each load, from the server's spans."""
    columns = [Column("load"), *numbers("requests", "end-to-end", "network", "server front end", "queue", "prefill", "decode")]
    table = Table("request-parts", "Mean time of a request, by part", columns)
    for point in points:
        fields = ("e2e_ns", "network_ns", "frontend_ns", "queue_ns", "prefill_ns", "decode_ns")
        cells = [cell(then(point.parts, partial(_part, name)), duration) for name in fields]
        table.add(load_cell(point), cell(then(point.parts, lambda parts: parts.requests), lambda count: f"{count:,}"), *cells)
    table.foot = (
        "Queue, prefill and decode: as the server's spans record them, joined by request id. Server front end: its HTTP server, "
        "tokenizing and detokenizing. Network: the rest of the time that the client saw."
    )
    return table


def _part(name: str, parts: RequestParts) -> Maybe[float]:
    found: Maybe[float] = getattr(parts, name)
    return found


def checks_table(points: Sequence[PointAnalysis]) -> Table:
    """Return the checks of the generator, one row per load."""
    known_checks = [check for check in CheckId if any(each.id is check for point in points for each in point.checks)]
    columns = [Column("load"), Column("outcome"), *numbers("n", *(CHECK_WORDS[check] for check in known_checks))]
    table = Table("generator-checks", "Whether the generator did what was asked; in brackets: what is expected", columns)
    for point in points:
        found = {check.id: check for check in point.checks}
        cells = [_check_cell(found.get(check)) for check in known_checks]
        table.add(load_cell(point), _outcome(point.checks), cell(max((check.n for check in point.checks), default=0)), *cells)
    table.foot = (
        "Expected: for arrivals at random (Poisson), the interval that 99 of 100 correct generators stay in; for even ones, a "
        "tolerance. The send delay is the time from the planned to the real start of a request: TTFT does not contain it, so it "
        "should be below a tenth of the median TTFT."
    )
    return table


def _outcome(checks: Sequence[GeneratorCheck]) -> str:
    off = [check.id.value for check in checks if check.outcome == "off"]
    if off:
        return f"off: {', '.join(off)}"
    return "ok" if any(check.outcome == "ok" for check in checks) else "cannot tell"


def _check_cell(check: GeneratorCheck | None) -> Cell | Missing | str:
    if check is None:
        return ""
    expected = known(then(_expected(check), lambda text: f"({text})"), "")
    return then(check.found, lambda value: Cell(check_figure(check.id, value), value, below=expected))


def _expected(check: GeneratorCheck) -> Maybe[str]:
    def show(low: float, high: float) -> str:
        if not low:
            return f"at most {check_figure(check.id, high)}"
        return f"{significant(low, 3)} – {check_figure(check.id, high)}"

    return then(check.low, lambda low: then(check.high, lambda high: show(low, high)))


def agreement_table(points: Sequence[PointAnalysis]) -> list[Block]:
    """Return how the generator's own summary compares: a sentence if everything is the same, otherwise also a table."""
    figures = [(point, figure) for point in points for figure in point.agreement]
    if not figures:
        return [Paragraph("The generator left no summary to compare with.")]
    same = sum(figure.agreement is Agreement.SAME for _, figure in figures)
    sentence = Paragraph(f"{same} of {len(figures)} figures of the generator's own summary equal ours.")
    if same == len(figures):
        return [sentence]
    columns = [Column("figure"), Column("why it differs"), *numbers("loads", "ours", "its own", "difference")]
    table = Table(
        "agreement", "Figures of the generator's own summary that differ; of several loads, the largest difference", columns
    )
    groups: dict[tuple[str, str, str], list[AgreedFigure]] = {}
    for _, figure in figures:
        if figure.agreement is not Agreement.SAME:
            why = known(then(figure.agreement, lambda agreed: agreed.value), "")
            groups.setdefault((figure.key, figure.statistic, why), []).append(figure)
    for (key, statistic, why), members in groups.items():
        largest = max(members, key=lambda figure: abs(known(_apart(figure), 0.0)))
        table.add(f"{_FIGURES[key]}, {statistic}", why, count_cell(len(members)), *_compared(largest))
    return [sentence, table]


_FIGURES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end-to-end",
    "request_rate": "requests/s",
    "output_rate": "output tokens/s",
}


def _compared(figure: AgreedFigure) -> list[Cell | Missing]:
    show = significant if figure.key.endswith("rate") else duration
    return [cell(figure.ours, show), cell(figure.own, show), cell(_apart(figure), partial(signed_percent, digits=1))]


def _apart(figure: AgreedFigure) -> Maybe[float]:
    return then(figure.ours, lambda ours: figure.own / ours - 1 if ours else Missing("ours is zero"))


def errors_table(points: Sequence[PointAnalysis]) -> Table:
    """Return why requests failed."""
    table = Table("errors", "Failed requests by error", [Column("load"), *numbers("requests"), Column("error")])
    rows = [(point, error, count) for point in points for error, count in point.errors]
    for point, error, count in rows[:MOST_ERRORS]:
        table.add(
            load_cell(point),
            count_cell(count),
            name_cell(error, error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}…"),
        )
    if len(rows) > MOST_ERRORS:
        table.foot = f"{len(rows) - MOST_ERRORS:,} more are in the table `requests`: llm-perf sql RUN."
    return table
