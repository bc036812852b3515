"""Analyze a run of kind `serving` and write its pages and tables. Reads only the run folder."""

from dataclasses import replace
from typing import Any

from llm_perf_opt.analysis.serving.points import MeasuredLoad, with_unix_times
from llm_perf_opt.analysis.serving.requests import e2e, tpot, ttft
from llm_perf_opt.analysis.serving.server import state_of
from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis, analyze_loads
from llm_perf_opt.analysis.serving.slo import NO_SLO, Slo, meets, parse_slo, recorded_slo
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.inside import disk_error
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.serving_document import serving_document, serving_summary
from llm_perf_opt.report.text import then
from llm_perf_opt.traces.trace_tables import write_rows
from llm_perf_opt.workflows.queries import SERVING_TYPES
from llm_perf_opt.workflows.run_reader import RunReader

Row = dict[str, Any]


def analyze_serving(run: RunReader, slo: str | None = None) -> ServingAnalysis:
    """Return the analysis of a serving run. `slo`: another objective than the recorded one."""
    return analyze_loads(run.folder.path.name, run.manifest, run.server, run.loads, _objective(run, slo), run.env)


def _objective(run: RunReader, given: str | None) -> Maybe[Slo]:
    """Return the objective that was given, or else the one that the run recorded."""
    if given is not None:
        return parse_slo(given)
    return NO_SLO if isinstance(run.server, Missing) else recorded_slo(run.server.slo_ns)


def report_serving(run: RunReader, slo: str | None = None) -> ServingAnalysis:
    """Analyze a serving run and write report.html, report.md, stakeholder_summary.md and the tables."""
    found = analyze_serving(run, slo)
    unwritten = write_serving_tables(run, found)
    found = replace(found, problems=(unwritten.why,)) if unwritten else found
    document, folder = serving_document(found), run.folder
    folder.write(folder.report_file, render_markdown(document).encode())
    folder.write(folder.summary_file, render_markdown(serving_summary(found)).encode())
    folder.write(folder.page_file, render_html(document).encode())
    return found


# --- tables ---------------------------------------------------------------------------------------------------------------


def write_serving_tables(run: RunReader, found: ServingAnalysis) -> Missing | None:
    """Write requests, load_points and server_samples as Parquet; return why there are none, for example without DuckDB."""
    tables = {"requests": _requests(run.loads, found), "load_points": _points(found), "server_samples": _samples(run.loads)}
    place = run.folder.derived_tables
    try:
        for name, rows in tables.items():
            write_rows(run.folder.path, place / f"{name}.parquet", SERVING_TYPES[name], rows)
    except (ParseError, ResourceError) as error:
        return Missing(f"tables/ was not written: {error.fact} {error.remedy}")
    except OSError as error:
        raise disk_error(error, place) from error
    return None


def _requests(loads: list[MeasuredLoad], found: ServingAnalysis) -> list[Row]:
    rows: list[Row] = []
    for load in loads:
        if isinstance(load.records, Missing):
            continue
        for request in with_unix_times(load.records, load.point).requests:
            rows.append({
                "load": load.point.number, "id": request.id, "sent_ns": request.sent_ns, "end_ns": request.end_ns,
                "scheduled_ns": _plain(request.scheduled_ns), "prompt_tokens": _plain(request.prompt_tokens),
                "output_tokens": _plain(request.output_tokens), "chunks": len(request.token_ns),
                **{f"{name}_ns": _single(value(request)) for name, value in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e))},
                "good": None if isinstance(found.slo, Missing) else _plain(meets(request, found.slo)),
                "error": request.error or None,
            })  # fmt: skip
    return rows


def _single(values: Maybe[tuple[float, ...]]) -> float | None:
    return None if isinstance(values, Missing) or not values else values[0]


def _points(found: ServingAnalysis) -> list[Row]:
    rows = []
    for point in found.points:
        figures = {
            f"{key}_{name}_ns": _percentile(latency, name)
            for key, latency in point.latencies.items()
            for name in ("p50", "p90", "p99")
        }
        about, good = point.point, point.goodput
        rows.append({
            "load": about.number, "kind": about.kind, "asked": about.asked, "arrival": about.arrival,
            "generator": about.generator, "status": about.status, "profiled": about.profiled,
            "requests": point.requests, "failed": point.failed,
            "issued_rate": _plain(point.issued_rate), "request_rate": _plain(point.request_rate),
            "output_rate": _plain(point.output_rate), "kept_up": _plain(then(point.kept_up, lambda found: found.value)),
            "goodput": None if isinstance(good, Missing) else _plain(good.rate),
            "good_share": None if isinstance(good, Missing) else good.share, **figures,
        })  # fmt: skip
    return rows


def _percentile(latency: Any, name: str) -> float | None:
    found = latency if isinstance(latency, Missing) else getattr(latency, name)
    return None if isinstance(found, Missing) else found.value


def _samples(loads: list[MeasuredLoad]) -> list[Row]:
    rows = []
    for load in loads:
        for state in () if isinstance(load.samples, Missing) else map(state_of, load.samples):
            values = {
                name: _plain(getattr(state, name)) for name in ("running", "waiting", "kv_usage", "preemptions", "generated")
            }
            rows.append({"load": load.point.number, "at_ns": state.at_ns, **values})
    return rows


def _plain(value: Any) -> Any:
    return None if isinstance(value, Missing) else value
