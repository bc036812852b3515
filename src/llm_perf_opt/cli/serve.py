"""Put load on an engine's server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt.cli.completing import complete_override
from llm_perf_opt.cli.outcome import print_serving
from llm_perf_opt.cli.shared import SLO_HELP, Debug, Json, Quiet, command_line, note_debug, raise_if
from llm_perf_opt.core.errors import Interrupted, unreported

if TYPE_CHECKING:
    from llm_perf_opt.config.composition import Composed
    from llm_perf_opt.profiling.serving.request import ServingRequest


def _option(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, **limits)


_OVERRIDES = typer.Argument(
    metavar="KEY=VALUE",
    help="Settings as for `llm-perf run`: model=… runtime=… runtime.engine.NAME=VALUE runtime.prompt_tokens=512 "
    "runtime.num_new_tokens=128.",
    autocompletion=complete_override,
)
_RATES = "Requests per second, separated by commas. Without --rates and --concurrency, bisection finds the knee."
_KNEE = "They also define the knee: the highest rate at which 90 % of the requests are good and none pile up."
_LEAST_S = "Minimum seconds per load; more requests are sent if needed. With 0, each load has exactly --requests."
_GENERATOR = "The load generator: aiperf, or one that comes with an engine."
_PROFILE = "The load of the short profiled point at the end; by default the knee."


def serve(
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    url: Annotated[str | None, _option("Attach to this OpenAI-compatible server instead of starting one.")] = None,
    served_model: Annotated[str | None, _option("The model of an attached server, if it serves several.")] = None,
    tokenizer: Annotated[str | None, _option("A local folder with the tokenizer of an attached server's model.")] = None,
    port: Annotated[int | None, _option("The server's port on 127.0.0.1; by default a free one.", min=1, max=65535)] = None,
    generator: Annotated[str, _option(_GENERATOR)] = "aiperf",
    generator_python: Annotated[Path | None, _option("The interpreter of the environment that has the generator.")] = None,
    rates: Annotated[str | None, _option(_RATES)] = None,
    concurrency: Annotated[str | None, _option("Requests at a time instead of rates, separated by commas.")] = None,
    slo: Annotated[str, _option(f"{SLO_HELP} {_KNEE}", metavar="LIMITS")] = "",
    requests: Annotated[int, _option("Requests per load, at least.", min=2)] = 100,
    least_s: Annotated[float, _option(_LEAST_S, min=0)] = 10.0,
    warmup: Annotated[int, _option("Requests before each load that are not recorded.", min=1)] = 5,
    points: Annotated[int, _option("Maximum number of rates that the bisection tries.", min=2, max=50)] = 8,
    profile: Annotated[float | None, _option(_PROFILE, min=0.001)] = None,
    no_profile: Annotated[bool, _option("Do not profile.", "--no-profile")] = False,
    profile_s: Annotated[float, _option("About how many seconds of load to profile.", min=0.1)] = 5.0,
    no_spans: Annotated[bool, _option("Do not collect the server's OpenTelemetry spans.", "--no-spans")] = False,
    seed: Annotated[int, _option("Seed of prompts and arrivals; load N uses seed + N.", min=0)] = 0,
    request_s: Annotated[float, _option("Give up a request after this many seconds.", min=0.1)] = 120.0,
    point_s: Annotated[float, _option("Maximum seconds per load.", min=1)] = 600.0,
    startup_s: Annotated[float, _option("Maximum seconds until the server is ready.", min=1)] = 900.0,
    timeout_s: Annotated[float, _option("Maximum seconds of the whole run.", min=1)] = 3600.0,
    config_dir: Annotated[Path | None, _option("A folder with your own options: model/mine.yaml, runtime/mine.yaml …")] = None,
    out: Annotated[Path | None, _option("Run folder; by default as for `llm-perf run`.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure an engine's server under increasing load, up to overload, and write a run folder.

    Starts the server from the same settings as `llm-perf run`, on 127.0.0.1, or attaches to one with --url. A load generator in
    an environment of its own sends the requests.
    """
    options = dict(locals())
    note_debug(debug)
    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.config.composition import compose
    from llm_perf_opt.workflows.run_reader import RunReader
    from llm_perf_opt.workflows.serve import check_serving, place_of
    from llm_perf_opt.workflows.serve import serve as run_serving
    from llm_perf_opt.workflows.serving import report_serving

    composed = compose(overrides or [], config_dir)
    prepared = check_serving(_request(options, composed))
    with progress_for(quiet) as progress:
        result = run_serving(prepared, place_of(prepared, composed, out), command_line(), progress)
    try:
        print_serving(result.folder, report_serving(RunReader(result.folder)), as_json)
    except (KeyboardInterrupt, Interrupted) as stopped:
        raise unreported(stopped, result.folder.path, result.error) from stopped
    raise_if(result.error)


def _request(given: dict[str, Any], composed: "Composed") -> "ServingRequest":
    """Return the options, by parameter name, as a request."""
    from llm_perf_opt.config.serving import parse_loads
    from llm_perf_opt.profiling.serving.request import ServingRequest

    same = (
        *("url", "served_model", "tokenizer", "port", "generator", "generator_python", "requests", "least_s", "warmup", "points"),
        *("slo", "profile", "profile_s", "seed", "request_s", "point_s", "startup_s", "timeout_s"),
    )
    loads = [parse_loads(given[name], f"--{name}") if given[name] is not None else () for name in ("rates", "concurrency")]
    return ServingRequest(
        config=composed.config,
        code=tuple(map(str, composed.code)),
        rates=loads[0],
        concurrency=loads[1],
        profiled=not given["no_profile"],
        spans=not given["no_spans"],
        **{name: given[name] for name in same},
    )
