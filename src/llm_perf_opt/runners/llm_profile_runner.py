"""The measured process: builds the model, runs one pass, leaves its files.

`llm-perf run` starts it with the run's config.yaml. It also stands alone, for a profiler of your own to wrap:

    nsys profile --capture-range=nvtx --nvtx-capture=profile@LLM … python -m llm_perf_opt.runners.llm_profile_runner model=tiny

Passes: clean (unprofiled timing), torch (torch.profiler), plain (warm up, then one iteration inside the NVTX range `profile`).
"""

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llm_perf_opt.composition import compose, config_from_mapping
from llm_perf_opt.config import RunConfig
from llm_perf_opt.data.prompts import Prompts, synthetic_prompts, text_prompts
from llm_perf_opt.errors import CaptureError, ConfigError, LlmPerfError, ParseError, nearest
from llm_perf_opt.profiling.annotations import marked, unmarked
from llm_perf_opt.profiling.meter import Effort, Measured, Meter, Progress
from llm_perf_opt.profiling.vendor.child import framework_error, last_words
from llm_perf_opt.profiling.vendor.launch import die_with_parent, send
from llm_perf_opt.records import CleanTimings, Iteration, MemoryPeaks, Missing, TorchPass, Workload, WrappedPass
from llm_perf_opt.run_folder import write_record
from llm_perf_opt.stages import Stage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from llm_perf_opt.runners.pytorch_runner import PyTorchRunner

PASSES = ("clean", "torch", "plain")
_PLAIN_WARMUP = 3


@dataclass(frozen=True)
class Session:
    """Everything a pass needs, loaded once."""

    config: RunConfig
    model: "PreTrainedModel"
    runner: "PyTorchRunner"
    prompts: Prompts
    batch: Any
    workload: Workload
    device: "torch.device"
    load_s: float
    untouched_until_ns: int

    @property
    def cuda(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.type == "cuda"


def open_session(config: RunConfig) -> Session:
    """Check everything that can be checked cheaply, then load the model."""
    import torch
    import transformers

    from llm_perf_opt.runners import models
    from llm_perf_opt.runners.pytorch_runner import PyTorchRunner

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if config.hardware.cpu_threads:
        torch.set_num_threads(config.hardware.cpu_threads)
    untouched_until = time.monotonic_ns()
    device = models.choose_device(config.hardware)
    dtype = models.choose_dtype(config.model.dtype, device)
    architecture = models.load_config(config.model)
    vocabulary = int(architecture.get_text_config(decoder=True).vocab_size)

    def check_size(longest: int) -> None:
        new_tokens = config.runtime.num_new_tokens
        models.check_positions(architecture, longest, new_tokens)
        need = models.memory_need(architecture, config.model, dtype, config.runtime.batch_size, longest + new_tokens)
        models.check_fits(need, device)

    if config.dataset.kind == "synthetic":
        check_size(config.runtime.prompt_tokens)  # before the ids are drawn: there may be billions
        prompts = synthetic_prompts(config.runtime.batch_size, config.runtime.prompt_tokens, vocabulary, config.dataset.seed)
    else:
        tokenize = models.load_tokenizer(config.model)
        prompts = text_prompts(config.dataset, config.runtime.batch_size, config.runtime.prompt_tokens, vocabulary, tokenize)
        check_size(max(prompts.lengths))
    send("phase", text=f"loading {config.model.name} on {device} in {str(dtype).removeprefix('torch.')}")
    begun = time.monotonic()
    model = models.build_model(architecture, config.model, config.runtime, device, dtype)
    runner = PyTorchRunner(model, config.model.name, config.runtime.num_new_tokens, config.runtime.cache, config.runtime.compile)
    batch = runner.place(prompts)
    workload = Workload(
        batch_size=len(prompts.ids),
        prompt_tokens=prompts.lengths,
        padded_tokens=max(prompts.lengths),
        new_tokens=config.runtime.num_new_tokens,
        source=prompts.source,
    )
    return Session(config, model, runner, prompts, batch, workload, device, time.monotonic() - begun, untouched_until)


# --- passes -----------------------------------------------------------------------------------------------------------


def clean_pass(session: Session, out: Path) -> bool:
    """Unprofiled timing; returns whether it ran to its own end (False: interrupted, what was measured is kept)."""
    from llm_perf_opt.profiling.clock import clock_for

    runtime = session.config.runtime
    clock = clock_for(session.device)
    meter = Meter(session.runner, session.batch, runtime.num_new_tokens, clock, unmarked)
    effort = Effort(runtime.max_warmup, runtime.min_repeats, runtime.max_repeats, runtime.ci_target, runtime.time_limit_s)
    with _substages(session, meter):
        measured = meter.measure(effort, _report_progress)
    write_record(out / "inputs.json", _inputs(session))
    write_record(out / "timings.json", _timings(session, measured, clock.name))
    return not measured.interrupted


def torch_pass(session: Session, out: Path) -> None:
    """One iteration under torch.profiler, after warming up without it."""
    from llm_perf_opt.profiling.clock import clock_for
    from llm_perf_opt.profiling.parts import labelled_parts
    from llm_perf_opt.profiling.torch_profiler import profile_iteration

    clock = clock_for(session.device)
    wanted = session.config.profiling.torch
    new_tokens = session.config.runtime.num_new_tokens
    if wanted.decode_steps is not None:
        new_tokens = min(new_tokens, wanted.decode_steps + 1)
    _warm_up(Meter(session.runner, session.batch, new_tokens, clock, unmarked))
    meter = Meter(session.runner, session.batch, new_tokens, clock, marked)
    trace = out / "trace.json.gz"
    send("phase", text="profiling one iteration")
    parts = labelled_parts(session.model) if session.config.runtime.compile == "none" else nullcontext()
    with _substages(session, meter), parts:
        profiled = profile_iteration(meter.iterate, wanted.preset, session.cuda, trace)
    if not profiled.operators:
        raise CaptureError(
            "torch.profiler recorded no operator.", "See log.txt of the pass; another profiler may hold the device."
        )
    record = TorchPass(
        preset=wanted.preset,
        stage_wall_ns=_stage_walls(profiled.iteration),
        decode_steps=len(profiled.iteration.steps_ns),
        activity=profiled.activity,
        parts=profiled.parts,
        operators=tuple(profiled.operators),
        trace_file=trace.name,
        trace_bytes=trace.stat().st_size,
    )
    write_record(out / "operators.json", record)


def plain_pass(session: Session, out: Path, decode_steps: int | None) -> None:
    """Warm up without marks, then one marked iteration: what an outside profiler captures."""
    from llm_perf_opt.profiling.clock import clock_for

    clock = clock_for(session.device)
    new_tokens = session.config.runtime.num_new_tokens
    if decode_steps is not None:
        new_tokens = min(new_tokens, decode_steps + 1)
    _warm_up(Meter(session.runner, session.batch, new_tokens, clock, unmarked))
    meter = Meter(session.runner, session.batch, new_tokens, clock, marked)
    with _substages(session, meter), _profiler_api(session):
        iteration = meter.iterate()
    walls = _stage_walls(iteration)
    write_record(out / "stages.json", WrappedPass(walls, iteration.steps_ns))
    send("stages", **walls)


@contextmanager
def _profiler_api(session: Session) -> Iterator[None]:
    """cudaProfilerStart and Stop around the iteration, where the capture waits for them."""
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


def _warm_up(meter: Meter) -> None:
    for number in range(_PLAIN_WARMUP):
        iteration = meter.iterate()
        _report_progress(Progress("warm-up", number + 1, _PLAIN_WARMUP, iteration.total_ns))


def _stage_walls(iteration: Iteration) -> dict[str, int]:
    from llm_perf_opt.analysis.stats import percentile

    walls = {
        Stage.PROFILE.value: iteration.total_ns,
        Stage.PREFILL.value: iteration.prefill_ns,
    }
    if iteration.steps_ns:
        walls[Stage.DECODE.value] = iteration.decode_ns
        walls[Stage.DECODE_STEP.value] = round(percentile(iteration.steps_ns, 0.5))
    return walls


@contextmanager
def _substages(session: Session, meter: Meter) -> Iterator[None]:
    """Bracket the configured submodules' forwards for as long as the context lasts."""
    with ExitStack() as stack:
        for name, path in session.config.model.substages.items():
            module = _submodule(session.model, name, path)
            open_contexts: list[Any] = []

            def enter(_: Any, __: Any, name: str = name, contexts: list[Any] = open_contexts) -> None:
                context = meter.substage(name)
                context.__enter__()
                contexts.append(context)

            def leave(_: Any, __: Any, ___: Any, contexts: list[Any] = open_contexts) -> None:
                contexts.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _submodule(model: "PreTrainedModel", name: str, path: str) -> "torch.nn.Module":
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        known = [known for known, _ in model.named_modules() if known]
        parent = path
        while parent and parent not in known:
            parent = parent.rpartition(".")[0]
        depth = parent.count(".") + 1 if parent else 0
        below = [known_path for known_path in known if known_path.startswith(parent) and known_path.count(".") == depth]
        raise ConfigError(
            f"model.substages.{name}={path}: the model has no such submodule.{nearest(path, known)}",
            f"{'Below ' + parent if parent else 'At the top'}: {', '.join(below[:12]) or 'nothing'}.",
        ) from error


def _report_progress(progress: Progress) -> None:
    send("progress", **asdict(progress))


# --- records ----------------------------------------------------------------------------------------------------------


def _inputs(session: Session) -> dict[str, Any]:
    return {
        "source": session.prompts.source,
        "sha256": session.prompts.sha256(),
        "lengths": session.prompts.lengths,
        "new_tokens": session.workload.new_tokens,
        "ids": session.prompts.ids,
    }


def _timings(session: Session, measured: Measured, clock: Any) -> CleanTimings:
    import torch

    return CleanTimings(
        model=session.runner.facts,
        workload=session.workload,
        clock=clock,
        load_s=session.load_s,
        warmup=measured.warmup,
        iterations=measured.iterations,
        stopped=measured.stopped,
        stable=measured.stable,
        settled=measured.settled,
        memory=_memory(session),
        tokens_sha256=hashlib.sha256(json.dumps(measured.tokens).encode()).hexdigest(),
        tokens_repeat=measured.tokens_repeat,
        threads=torch.get_num_threads(),
        framework=_framework(),
        device_untouched_until_ns=session.untouched_until_ns,
    )


def _memory(session: Session) -> MemoryPeaks:
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if not session.cuda:
        none = Missing("the run is on the CPU")
        return MemoryPeaks(none, none, none, rss)
    free, total = torch.cuda.mem_get_info(session.device)
    return MemoryPeaks(
        allocated_bytes=torch.cuda.max_memory_allocated(session.device),
        reserved_bytes=torch.cuda.max_memory_reserved(session.device),
        device_used_bytes=total - free,
        process_rss_bytes=rss,
    )


def _framework() -> dict[str, str]:
    import torch
    import transformers

    versions = {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}
    if torch.version.cuda:
        versions["cuda_runtime"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    else:
        versions["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return versions


# --- command line -----------------------------------------------------------------------------------------------------


def run_pass(config: RunConfig, which: str, out: Path, decode_steps: int | None = None) -> bool:
    """Run one pass and leave its files in `out`; False when it was interrupted but kept what it had."""
    out.mkdir(parents=True, exist_ok=True)
    session = open_session(config)
    import torch

    with torch.inference_mode():
        if which == "clean":
            return clean_pass(session, out)
        if which == "torch":
            torch_pass(session, out)
        else:
            plain_pass(session, out, decode_steps)
    return True


def _read_config(path: Path) -> RunConfig:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParseError(f"{path} cannot be read as YAML: {error}") from error
    return config_from_mapping(values if isinstance(values, dict) else {})


def _translated(error: Exception) -> LlmPerfError:
    """Errors of the framework that a user can act on, as ours."""
    return framework_error(
        error,
        memory="Lower runtime.batch_size, runtime.prompt_tokens or runtime.num_new_tokens, or use a smaller model or dtype.",
        disk="Free some space, or use hydra.run.dir=DIR elsewhere.",
        otherwise="The whole error is in the pass's log.txt.",
    )


def main() -> None:
    """Command line of the measured process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for `llm-perf run`; not with --config")
    parser.add_argument("--config", type=Path, help="a resolved config.yaml")
    parser.add_argument("--pass", dest="which", choices=PASSES, default="plain")
    parser.add_argument("--out", type=Path, default=Path("runs") / "alone", help="folder for the pass's files")
    parser.add_argument("--decode-steps", type=int, help="at most so many decode steps (pass plain)")
    arguments = parser.parse_args()
    with last_words(_translated):
        if arguments.config and arguments.overrides:
            raise ConfigError("--config is a resolved configuration; overrides have no place beside it.")
        if arguments.config:
            die_with_parent()
        config = _read_config(arguments.config) if arguments.config else compose(arguments.overrides).config
        finished = run_pass(config, arguments.which, arguments.out, arguments.decode_steps)
        sys.exit(0 if finished else 130)


if __name__ == "__main__":
    main()
