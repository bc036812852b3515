"""The report of a server under load, and its summary for stakeholders."""

from collections.abc import Sequence

from llm_perf_opt.analysis.serving.breakdown import ModelSteps, RequestParts
from llm_perf_opt.analysis.serving.knee import Knee
from llm_perf_opt.analysis.serving.outcome import Verdict
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.requests import LATENCIES
from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis
from llm_perf_opt.analysis.stats import PERCENTILE_METHOD
from llm_perf_opt.core.records import Maybe
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.core.serving_records import ServerFacts
from llm_perf_opt.report.charts import BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY
from llm_perf_opt.report.document import (
    Block,
    Card,
    Cards,
    Cell,
    Chart,
    Code,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Share,
    StackedBar,
    Table,
    Unavailable,
    bullets,
    cell,
    count_cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.serving_charts import curve_chart, server_chart
from llm_perf_opt.report.serving_tables import (
    agreement_table,
    checks_table,
    errors_table,
    latency_table,
    parts_table,
    server_table,
    throughput_table,
)
from llm_perf_opt.report.serving_text import (
    at_knee,
    broken_words,
    cause_sentence,
    definition_words,
    headline,
    knee_sentence,
    load_words,
    missing_knee,
    point_words,
    summary_sentences,
    why_items,
)
from llm_perf_opt.report.text import duration, known, percent, significant, then, words

_INTERVALS = (
    f"Percentiles: {PERCENTILE_METHOD}. Intervals: 95 %, by bootstrap over requests. Neighboring requests, as many as were "
    "in flight at a time, are drawn together, because they share steps of the server. A percentile is n/a if fewer "
    "than five requests are expected beyond it."
)
_PROFILED = (
    "A profiled load is slower than a normal one. It has no latencies of its own: it shows where time goes, in proportion."
)


def serving_document(found: ServingAnalysis) -> Document:
    """Return the report of a run of kind `serving`."""
    manifest = found.manifest
    notice = "" if manifest.status == "complete" else f"This run is {manifest.status}: {manifest.why} {manifest.remedy}".strip()
    sections = [
        Section("overview", "", _overview(found)),
        Section("curve", "Throughput and latency over the load", _curve(found)),
        Section("knee", "The knee", _knee_blocks(found)),
        Section("server", "The server during the loads", _server_blocks(found)),
        Section("parts", "Where the time of a request goes", _parts_blocks(found)),
        Section("generator", "Checks of the load generator", _generator_blocks(found)),
        Section("failures", "Failed requests", _failure_blocks(found)),
        Section("setup", "What ran", _setup(found)),
    ]
    return Document(_title(found), _subtitle(found), notice, sections)


def _title(found: ServingAnalysis) -> str:
    return f"{known(then(found.server, lambda server: server.model), found.run)} under load"


def _subtitle(found: ServingAnalysis) -> str:
    generators = ", ".join(dict.fromkeys(point.generator for point in found.points if point.generator))
    count = len(found.points)
    engine = known(then(found.server, _engine), "")
    parts = [engine, f"{count} load{'' if count == 1 else 's'}", f"by {generators}" if generators else ""]
    return " · ".join(part for part in parts if part)


def _engine(server: ServerFacts) -> str:
    return " ".join(part for part in (known(server.engine, ""), known(server.version, "")) if part)


def _overview(found: ServingAnalysis) -> list[Block]:
    blocks: list[Block] = [_headline(found)]
    best = at_knee(found)
    if best is None:
        return blocks
    about = f"at {point_words(best)}"
    cards = [Card("Carried load", known(then(found.knee, _carried), "n/a"), _carried_detail(found))]
    cards.append(Card("Output tokens/s", words(best.output_rate, significant), about))
    for key in ("ttft", "tpot"):
        latency = known(best.latencies[key], None)
        if latency is not None:
            p90 = then(latency.p90, lambda estimate: f"p90 {duration(estimate.value)}")
            shown = known(then(latency.p50, lambda estimate: duration(estimate.value)), "n/a")
            cards.append(Card(f"{key.upper()}, median", shown, f"{known(p90, 'p90 n/a')}, n = {latency.n:,}"))
    good = known(best.goodput, None)
    if good is not None:
        cards.append(
            Card("Meet the objective", percent(good.share), f"95 %: {percent(good.share_low)} – {percent(good.share_high)}")
        )
    return [Cards(cards), *blocks]


def _headline(found: ServingAnalysis) -> Items:
    """Return the result: where the knee is, why, and the figures there."""
    sentences = [Item("", sentence) for sentence in headline(found)]
    lost = [Item("Knee:", f"n/a: {missing_knee(found)}.")] if missing_knee(found) else []
    return Items([*sentences[:1], *why_items(found), *sentences[1:], *lost])


def _carried(knee: Knee) -> str:
    shown = known(then(knee.carried, lambda load: load_words(load, knee.kind)), "none of the loads")
    if knee.status == "unclear":
        shown = known(then(knee.carried, lambda load: load_words(load, knee.kind)), "n/a")
    return f"≥ {shown}" if knee.status == "above" else shown


def _carried_detail(found: ServingAnalysis) -> str:
    def words_of(knee: Knee) -> str:
        beyond = known(then(knee.not_carried, lambda load: f"at {load_words(load, knee.kind)}, "), "")
        if not beyond:
            return "no knee was reached" if knee.status == "above" else "larger loads cannot be judged"
        return f"{beyond}{broken_words(knee.broken)}"

    return known(then(found.knee, words_of), missing_knee(found))


def _curve(found: ServingAnalysis) -> list[Block]:
    caption = "Throughput, TTFT and TPOT over the load; bars: 95 % intervals; dotted line: the knee"
    blocks: list[Block] = []
    blocks += when_known("Curve:", curve_chart(found), lambda chart: [Chart("curve-chart", caption, chart)])
    blocks += [throughput_table(found.measured, found.slo), *[latency_table(found.measured, entry) for entry in LATENCIES]]
    return [*blocks, Paragraph(_INTERVALS)]


def _knee_blocks(found: ServingAnalysis) -> list[Block]:
    def build(knee: Knee) -> Sequence[Block]:
        table = Table("verdicts", "Each load", [Column("load"), Column("carried"), Column("why not")])
        for verdict in knee.verdicts:
            table.add(load_words(verdict.load, knee.kind), _carried_cell(verdict), broken_words(verdict.broken))
        reasons = [cause_sentence(cause) for cause in knee.causes]
        why: list[Block] = []
        if reasons:
            beyond = known(then(knee.not_carried, lambda load: load_words(load, knee.kind)), "")
            why = [Paragraph(f"Why, at {beyond}", "heading"), bullets(reasons)]
        elif knee.broken:
            why = [Paragraph("Nothing that was recorded shows why. Sample the server's metrics to find out.")]
        definition = definition_words(knee.kind, not _is_missing_slo(found))
        return [Paragraph(knee_sentence(knee)), *why, table, Paragraph(definition)]

    return when_known("Knee:", found.knee, build)


def _is_missing_slo(found: ServingAnalysis) -> bool:
    return known(found.slo, None) is None


def _carried_cell(verdict: Verdict) -> Maybe[str]:
    return then(verdict.carried, lambda carried: "yes" if carried else "no")


def _server_blocks(found: ServingAnalysis) -> list[Block]:
    caption = "Metrics of the server, sampled during the loads (shaded; above: the load)"
    blocks: list[Block] = []
    blocks += when_known("Server:", server_chart(found.points), lambda chart: [Chart("server-chart", caption, chart)])
    return [*blocks, server_table(found.points)] if any(point.states for point in found.points) else blocks


_PARTS = (
    ("network", "network_ns", GRAY),
    ("server front end", "frontend_ns", SKY),
    ("queue", "queue_ns", PURPLE),
    ("prefill", "prefill_ns", ORANGE),
    ("decode: model steps", "steps_ns", BLUE),
    ("decode: between steps", "between_ns", GREEN),
    ("decode", "decode_ns", BLUE),
)


def _parts_blocks(found: ServingAnalysis) -> list[Block]:
    blocks: list[Block] = [parts_table(found.measured)] if any(_has_parts(point) for point in found.measured) else []
    for point in found.points:
        parts = known(point.parts, None)
        if parts is not None and point.point.profiled:
            blocks += [_parts_bar(point, parts), *_parts_notes(parts)]
        steps = known(point.steps, None)
        if steps is not None:
            blocks.append(_steps_table(point, steps))
    if not blocks:
        reason = next((str(point.parts) for point in reversed(found.points)), "no load was measured")
        return [Unavailable("Parts of a request:", reason.removeprefix("n/a: "))]
    return [*blocks, *([Paragraph(_PROFILED)] if any(point.point.profiled for point in found.points) else [])]


def _has_parts(point: PointAnalysis) -> bool:
    return known(point.parts, None) is not None


def _parts_bar(point: PointAnalysis, parts: RequestParts) -> StackedBar:
    split = known(parts.steps_ns, None) is not None
    shares = []
    for name, field, color in _PARTS:
        if field == "decode_ns" and split:
            continue
        value = known(getattr(parts, field), None)
        if value is not None and value > 0:
            share = value / parts.e2e_ns
            shares.append(Share(name, duration(value), percent(share), min(share, 1.0), color))
    detail = f"mean of {parts.requests:,} requests, end to end {duration(parts.e2e_ns)}"
    return StackedBar(f"parts-{point.point.number}", f"A request at {point_words(point)}", detail, shares)


def _parts_notes(parts: RequestParts) -> list[Block]:
    notes = []
    if parts.without_span:
        notes.append(f"{parts.without_span:,} requests have no span and are left out.")
    lost = [(name, getattr(parts, field)) for name, field, _ in _PARTS]
    notes += [f"{name}: {words(value)}." for name, value in lost if known(value, None) is None]
    if known(then(parts.network_ns, lambda value: value < 0), False):
        notes.append("The server reports a longer time than the client saw: network is left out.")
    return [bullets(notes)] if notes else []


def _steps_table(point: PointAnalysis, steps: ModelSteps) -> Table:
    table = Table(
        f"steps-{point.point.number}",
        f"Steps of the model at {point_words(point)}, by the requests that were decoding",
        numbers("requests", "steps", "median step"),
    )
    for row in steps.by_batch:
        sizes = str(row.least) if row.least == row.most else f"{row.least} – {row.most}"
        table.add(Cell(sizes, row.least), count_cell(row.steps), cell(row.median_ns, duration))
    table.foot = (
        f"{steps.steps:,} steps, median {duration(steps.median_ns)}; median gap between two steps {duration(steps.between_ns)}. "
        "Times are under the profiler."
    )
    return table


def _generator_blocks(found: ServingAnalysis) -> list[Block]:
    notes = list(dict.fromkeys(f"{point.generator}: {note}." for point in found.points for note in point.notes))
    blocks: list[Block] = [checks_table(found.points)]
    blocks += [bullets(notes)] if notes else []
    return [*blocks, *agreement_table(found.points)]


def _failure_blocks(found: ServingAnalysis) -> list[Block]:
    failed = sum(point.failed for point in found.points)
    total, cut = sum(point.requests for point in found.points), sum(point.cut for point in found.points)
    note = f"{cut:,} of {total:,} requests had not ended when the measurement ended: they are neither successes nor failures."
    blocks: list[Block] = [Paragraph(note)] if cut else []
    if not failed:
        return [Paragraph(f"None of {total:,} requests failed."), *blocks]
    return [errors_table(found.points), *blocks]


def _setup(found: ServingAnalysis) -> list[Block]:
    items = []
    server = known(found.server, None)
    if server is not None:
        items.append(Item("Server:", f"{_engine(server) or 'unknown engine'} at {server.url or 'an unknown address'}."))
        items += [Item("Note:", f"{note.rstrip('.')}.") for note in server.notes]
    items += [Item("Problem:", f"{problem.rstrip('.')}.") for problem in found.problems]
    items += [
        Item(f"Problem at {point_words(point)}:", f"{problem.rstrip('.')}.")
        for point in found.points
        for problem in point.problems
    ]
    items += [Item("Objective:", words(found.slo, lambda slo: f"{slo.words}."))]
    for point in found.points:
        if point.point.status != "complete" or point.unusable is not None:
            why = point.point.why or (point.unusable.why if point.unusable else "")
            items.append(Item(f"{point_words(point)}:", f"{point.point.status}: {why}"))
    definitions = [Item(f"{entry.label}:", f"{entry.definition}.") for entry in LATENCIES]
    blocks: list[Block] = [Items(items)]
    if server is not None and server.argv:
        blocks.append(Code(shown_command(server.argv)))
    return [*blocks, Paragraph("Definitions", "heading"), Items(definitions)]


def overview_document(found: ServingAnalysis) -> Document:
    """Return what fits on one screen: the result, throughput and the main latencies of each load."""
    latencies = [entry for entry in LATENCIES if entry.key in ("ttft", "tpot")]
    tables = [throughput_table(found.measured, found.slo), *[latency_table(found.measured, entry) for entry in latencies]]
    return Document(_title(found), _subtitle(found), "", [Section("overview", "", [_headline(found), *tables])])


def serving_summary(found: ServingAnalysis) -> Document:
    """Return stakeholder_summary.md."""
    closing = Paragraph("Figures with their intervals, and how the load was checked, are in report.md.")
    return Document(
        f"{_title(found)}: summary", _subtitle(found), "", [Section("summary", "", [bullets(summary_sentences(found)), closing])]
    )
