"""The measured process: builds the model, runs one pass and writes its files.

`llm-perf run` starts it with the run's config.yaml. You can also run it alone, under a profiler of your choice:

    nsys profile --capture-range=nvtx --nvtx-capture=profile@LLM … python -m llm_perf_opt.runners.llm_profile_runner model=tiny

Alone, it also writes config.yaml and inputs.yaml, and opens the ranges that the gates of the profiling guides name.

Passes: clean (unprofiled timing), torch (torch.profiler), plain (warm up, then one iteration inside the NVTX range `profile`).
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.overhead import without_profiler_events
from llm_perf_opt.config.code_settings import Stored, code_settings
from llm_perf_opt.config.composition import config_from_mapping
from llm_perf_opt.config.parallel import ranks_of
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.engine_records import ChangedEngine
from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, ParseError, ResourceError, nearest
from llm_perf_opt.core.inside import make_folder
from llm_perf_opt.core.records import Iteration, Missing, TorchPass, WrappedPass
from llm_perf_opt.core.run_folder import encoded, write_record, write_whole
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.user_files import read_text
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml
from llm_perf_opt.runners.alone import outlive_nsys, requested, shown_errors, write_manifests
from llm_perf_opt.runners.child import die_with_parent, enable_interrupts, framework_error, report_errors, send, send_workers
from llm_perf_opt.runners.clean_records import inputs_record, timings_record
from llm_perf_opt.runners.measure.annotations import StageMarker, around_forward, marked, marked_for_guides, unmarked
from llm_perf_opt.runners.measure.host_load import HostWatch
from llm_perf_opt.runners.measure.meter import Effort, Meter, Progress, RequestMeter
from llm_perf_opt.runners.measure.rank_meter import RankMeter
from llm_perf_opt.runners.measure.torch_profiler import Profiled, profile_engine
from llm_perf_opt.runners.rank_group import RankGroup
from llm_perf_opt.runners.rank_results import is_first, of_all_ranks, trace_name
from llm_perf_opt.runners.rank_supervisor import supervise
from llm_perf_opt.runners.session import Session, open_session

PASSES = ("clean", "torch", "plain")
_PLAIN_WARMUP = 3
_CHANGED_REPEATS = 6
"""Requests that show what the changes of a profiled pass to an engine cost: as few as give the median a 95 % interval."""


# --- passes -----------------------------------------------------------------------------------------------------------


def clean_pass(session: Session, out: Path) -> bool:
    """Time the model unprofiled. Return False if interrupted; what was measured until then is kept.

    Of several ranks, the first writes the files.
    """
    runtime = session.config.runtime
    meter = session.meter(runtime.num_new_tokens, unmarked)
    effort = Effort(runtime.max_warmup, runtime.min_repeats, runtime.max_repeats, runtime.ci_target, runtime.time_limit_s)
    watch = HostWatch(session.before)
    with _substages(session, meter):
        measured = meter.measure(effort, _report_progress, watch.watching)
    timings = replace(timings_record(session, measured, meter), host=watch.load)
    if session.ranks is not None and isinstance(meter, RankMeter):
        timings = of_all_ranks(session, meter, timings, interrupted=measured.interrupted)
    if is_first(session):
        write_record(out, out / "inputs.json", inputs_record(session))
        write_whole(out, out / "tokens.json", encoded(measured.tokens))
        write_record(out, out / "timings.json", timings)
        if session.config.profiling.logits and not measured.interrupted:
            _record_logits(session, measured.tokens, out)
    return not measured.interrupted


def _record_logits(session: Session, tokens: list[list[int]], out: Path) -> None:
    from llm_perf_opt.runners.logits import record_logits

    send("phase", text="recording logits")
    record_logits(session, tokens, out)


def torch_pass(session: Session, out: Path) -> None:
    """Run one iteration under torch.profiler, after an unprofiled warm-up."""
    wanted = session.config.profiling.torch
    new_tokens = session.config.runtime.num_new_tokens
    if wanted.decode_steps is not None:
        new_tokens = min(new_tokens, wanted.decode_steps + 1)
    profiler = getattr(session.runner, "profiler", None)
    if isinstance(profiler, Missing):
        raise ResourceError(
            f"torch.profiler cannot see {session.runner.runtime.type}: {profiler.why}.",
            "Choose profiling=none or profiling=nsys.",
        )
    engine = _changed_engine(session, _warm_up(session.meter(new_tokens, unmarked)))
    meter = session.meter(new_tokens, marked)
    trace = out / trace_name(session)
    send("phase", text="profiling one iteration")
    if profiler is None:
        profiled = _profile_here(session, meter, trace)
    else:
        profiled = profile_engine(profiler, meter.iterate, session.cuda, trace)
    if not profiled.operators:
        raise CaptureError(
            "torch.profiler recorded no operators.", "See the pass's log.txt; another profiler may be using the device."
        )
    record = TorchPass(
        preset=wanted.preset,
        stage_wall_ns=_stage_walls(profiled.iteration),
        decode_steps=len(profiled.iteration.steps_ns),
        activity=profiled.activity,
        parts=profiled.parts,
        operators=tuple(profiled.operators),
        overhead=profiled.overhead,
        trace_file=trace.name,
        trace_bytes=trace.stat().st_size,
        cost=profiled.cost,
        stage_cpu_ns=_stage_cpu(profiled.iteration),
        engine=engine,
    )
    _check_tokens(session, meter)
    if is_first(session):
        write_record(out, out / "operators.json", without_profiler_events(record))


def _profile_here(session: Session, meter: RequestMeter, trace: Path) -> Profiled:
    """Profile in this process; the model's components are labeled unless it is compiled."""
    from llm_perf_opt.runners.measure.components import labeled_parts
    from llm_perf_opt.runners.measure.torch_profiler import profile_iteration

    eager = session.model is not None and session.config.runtime.compile == "none"
    parts = labeled_parts(session.model) if eager else nullcontext()
    with _substages(session, meter), parts:
        preset, several = session.config.profiling.torch.preset, session.ranks is not None
        return profile_iteration(meter.iterate, preset, session.cuda, trace, shapes=several)


def plain_pass(session: Session, out: Path, decode_steps: int | None, marker: StageMarker = marked) -> None:
    """Warm up without ranges, then run one iteration in ranges, for an external profiler to capture."""
    new_tokens = session.config.runtime.num_new_tokens
    if decode_steps is not None:
        new_tokens = min(new_tokens, decode_steps + 1)
    engine = _changed_engine(session, _warm_up(session.meter(new_tokens, unmarked)))
    meter = session.meter(new_tokens, marker)
    with _substages(session, meter), _profiler_api(session):
        iteration = meter.iterate()
    _check_tokens(session, meter)
    walls = _stage_walls(iteration)
    if is_first(session):
        write_record(out, out / "stages.json", WrappedPass(walls, iteration.steps_ns, engine))
    send("stages", **walls)


def _check_tokens(session: Session, meter: RequestMeter) -> None:
    """Raise if ranks have different tokens."""
    if session.ranks is not None:
        meter.tokens()


@contextmanager
def _profiler_api(session: Session) -> Iterator[None]:
    """Call cudaProfilerStart and Stop around the iteration if the capture is gated on them."""
    if not (session.cuda and session.config.profiling.nsys.capture == "cudaProfilerApi"):
        yield
        return
    import torch

    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _warm_up(meter: RequestMeter) -> RequestMeter:
    for number in range(_PLAIN_WARMUP):
        iteration = meter.iterate()
        _report_progress(Progress("warm-up", number + 1, _PLAIN_WARMUP, iteration.total_ns))
    return meter


def _changed_engine(session: Session, meter: RequestMeter) -> ChangedEngine | None:
    """Time what the pass changed in the engine, before anything is recorded; None if it changed nothing."""
    from llm_perf_opt.analysis.stats import percentile

    changes = session.runner.runtime.changes
    if not changes:
        return None
    done = []
    for number in range(_CHANGED_REPEATS):
        done.append(meter.iterate())
        _report_progress(Progress("unprofiled", number + 1, _CHANGED_REPEATS, done[-1].total_ns))
    walls = {Stage.PREFILL: [each.prefill_ns for each in done], Stage.DECODE: [each.decode_ns for each in done]}
    medians = {stage.value: round(percentile(times, 0.5)) for stage, times in walls.items()}
    samples = {stage.value: tuple(times) for stage, times in walls.items()}
    return ChangedEngine(changes, medians, len(done[0].steps_ns), len(done), samples)


def _stage_cpu(iteration: Iteration) -> dict[str, int]:
    if iteration.prefill_cpu_ns is None:
        return {}
    return {Stage.PREFILL.value: iteration.prefill_cpu_ns, Stage.DECODE.value: sum(iteration.steps_cpu_ns)}


def _stage_walls(iteration: Iteration) -> dict[str, int]:
    from llm_perf_opt.analysis.stats import percentile

    walls = {
        Stage.PROFILE.value: iteration.total_ns,
        Stage.PREFILL.value: iteration.prefill_ns,
    }
    if iteration.steps_ns:
        walls[Stage.DECODE.value] = iteration.decode_ns
        if min(iteration.steps_ns):  # tokens that an engine returns together have no steps between them
            walls[Stage.DECODE_STEP.value] = round(percentile(iteration.steps_ns, 0.5))
    return walls


@contextmanager
def _substages(session: Session, meter: RequestMeter) -> Iterator[None]:
    """Time the forward of each configured submodule while the context is open."""
    if not isinstance(meter, Meter) or session.model is None:
        yield
        return
    with ExitStack() as stack:
        for name, path in session.config.model.substages.items():
            stack.enter_context(_timed(session.model, meter, name, path))
        meter.around_prefill = partial(_vision_substages, session, meter)
        yield


@contextmanager
def _vision_substages(session: Session, meter: Meter) -> Iterator[None]:
    """Time the sub-stages of the model's family while the context is open."""
    with ExitStack() as stack:
        for name, path in session.vision_substages.items():
            stack.enter_context(_timed(session.model, meter, name, path))
        yield


@contextmanager
def _timed(model: Any, meter: Meter, name: str, path: str) -> Iterator[None]:
    """Time the forward of a submodule, or of each of its children if the path ends with `.*`."""
    module = _submodule(model, name, path.removesuffix(".*"))
    with ExitStack() as stack:
        for one in module.children() if path.endswith(".*") else (module,):
            stack.enter_context(around_forward(one, partial(meter.substage, name)))
        yield


def _submodule(model: Any, name: str, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        known = [known for known, _ in model.named_modules() if known]
        parent = path
        while parent and parent not in known:
            parent = parent.rpartition(".")[0]
        depth = parent.count(".") + 1 if parent else 0
        children = [known_path for known_path in known if known_path.startswith(parent) and known_path.count(".") == depth]
        raise ConfigError(
            f"model.substages.{name}={path}: the model has no such submodule.{nearest(path, known)}",
            f"{'Submodules of ' + parent if parent else 'Top level'}: {', '.join(children[:12]) or 'none'}.",
        ) from error


def _report_progress(progress: Progress) -> None:
    send("progress", **asdict(progress))


# --- command line -----------------------------------------------------------------------------------------------------


def run_pass(
    config: RunConfig,
    which: str,
    out: Path,
    decode_steps: int | None = None,
    *,
    alone: bool = False,
    ranks: RankGroup | None = None,
) -> bool:
    """Run one pass and write its files to `out`. Return False if it was interrupted but kept its results.

    `alone`: no other process has written the configuration, and the profiler around this one may be gated as in the guides.
    `ranks`: this process is one of several that run the pass together.
    """
    make_folder(out, out)
    clean = which == "clean"
    trace_dir = out if which == "torch" else None
    session = open_session(config, trace_dir, compare_tokens=clean, profiled=not clean, ranks=ranks)
    send("position", text="the model is loaded")
    send_workers()
    if alone:
        write_manifests(config, inputs_record(session), out)
        outlive_nsys()
    import torch

    with torch.inference_mode():
        if clean:
            return clean_pass(session, out)
        if which == "torch":
            torch_pass(session, out)
        else:
            plain_pass(session, out, decode_steps, marked_for_guides if alone else marked)
    return True


def read_config(path: Path, code: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a run's config.yaml. `code`: its settings that can run code, as typed."""
    try:
        values = load_yaml(read_text(path))
    except invalid_yaml() as error:
        raise ParseError(f"{path} cannot be read as YAML: {error}") from error
    config = config_from_mapping(values if isinstance(values, dict) else {})
    stored = Stored(path, f"python -m llm_perf_opt.runners.llm_profile_runner --config {shlex.quote(str(path))}", tuple(code))
    stored.allowed(code_settings(asdict(config)))
    return config


def translate(error: Exception) -> LlmPerfError:
    """Return an error of the framework with a remedy for the user."""
    return framework_error(
        error,
        memory="Lower runtime.batch_size, runtime.prompt_tokens or runtime.num_new_tokens, or use a smaller model or dtype.",
        disk="Free some space, or choose another disk with hydra.run.dir=DIR.",
        otherwise="The full error is in the pass's log.txt.",
    )


def main() -> None:
    """Command line of the measured process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides, as for `llm-perf run`; with --config, only its settings that run code"
    )
    parser.add_argument("--config", type=Path, help="a resolved config.yaml")
    parser.add_argument("--pass", dest="which", choices=PASSES, default="plain")
    parser.add_argument("--out", type=Path, help="folder for the pass's files; default: hydra.run.dir, or runs/alone")
    parser.add_argument("--decode-steps", type=int, help="maximum number of decode steps (pass plain)")
    parser.add_argument("-m", "--multirun", action="store_true", help="accept values as in a sweep, as long as they are one run")
    arguments = parser.parse_intermixed_args()
    if arguments.config is None:
        _main_alone(arguments)
        return
    with report_errors(translate):
        die_with_parent()
        enable_interrupts()
        out, config = arguments.out or Path("runs") / "alone", read_config(arguments.config, arguments.overrides)
        if ranks_of(config) > 1:
            words = [*arguments.overrides, "--config", str(arguments.config), "--pass", arguments.which, "--out", str(out)]
            words += ["--decode-steps", str(arguments.decode_steps)] if arguments.decode_steps is not None else []
            sys.exit(supervise(config, words, out))
        finished = run_pass(config, arguments.which, out, arguments.decode_steps)
        sys.exit(0 if finished else 130)


def _main_alone(arguments: argparse.Namespace) -> None:
    with shown_errors(translate):
        asked = requested(arguments.overrides, arguments.out, multirun=arguments.multirun)
        if ranks_of(asked.config) > 1:
            raise ConfigError(
                "This process runs one rank; it does not start those of runtime.tensor_parallel.",
                "Use `llm-perf run`, with profiling=nsys for a timeline.",
            )
        finished = run_pass(asked.config, arguments.which, asked.out, arguments.decode_steps, alone=True)
        print(f"files: {asked.out}")
        sys.exit(0 if finished else 130)


if __name__ == "__main__":
    main()
