"""Measure the peaks of this machine."""

import sys
from typing import Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json


def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    device_index: Annotated[int, typer.Option(min=0, help="Which GPU, in the driver's order.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch decides.")] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=0.05, max=600, help="How many seconds to measure; by default 9 on a GPU, 3 on a CPU.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again even if a cached result exists.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine's peak FLOP/s, bandwidth and launch rate.

    This takes seconds. The result is cached per device, driver and torch version and, on a CPU, also per thread count, set of
    usable CPUs and wait policy.
    """
    note_debug(debug)
    from datetime import datetime, timezone

    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.profiling.ceilings import find_ceilings
    from llm_perf_opt.report.ceilings import ceilings_document, ceilings_json
    from llm_perf_opt.report.terminal import render_text

    with progress_for(False) as progress:
        found = find_ceilings(device, device_index, progress, refresh=refresh, threads=threads, budget_s=budget_s)
    now = datetime.now(timezone.utc)
    if as_json:
        print_json(ceilings_json(found, now))
    else:
        sys.stdout.write(render_text(ceilings_document(found, now)))
