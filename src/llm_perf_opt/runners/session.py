"""A loaded request: its prompts, its runner and the matching meter."""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llm_perf_opt.config.registry import Declared, load
from llm_perf_opt.config.runtimes import GROUP, Runtime, runtime_named, traits_of
from llm_perf_opt.config.schema import RunConfig, canonical_dtype
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.host import without_garbage_collection
from llm_perf_opt.core.records import Missing, Workload
from llm_perf_opt.runners.base import EngineRunner, Opener, Runner, RunnerRequest, SteppableRunner
from llm_perf_opt.runners.child import send
from llm_perf_opt.runners.cpus import prepare_threads, set_threads
from llm_perf_opt.runners.measure.annotations import StageMarker
from llm_perf_opt.runners.measure.clock import ClockName, HostClock, clock_for
from llm_perf_opt.runners.measure.engine_meter import EngineMeter
from llm_perf_opt.runners.measure.host_load import BusyBefore, OtherProcesses, sampled
from llm_perf_opt.runners.measure.meter import Meter, RequestMeter
from llm_perf_opt.runners.measure.rank_meter import RankMeter
from llm_perf_opt.runners.rank_group import RankGroup
from llm_perf_opt.runners.vision_families import default_substages
from llm_perf_opt.workspace.data.prompts import Prompts, repeated_prompt, synthetic_prompts, text_prompts
from llm_perf_opt.workspace.data.recorded import recorded_prompts

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


_IN_ENGINE = Missing("the engine may load the model in other processes")
_OTHER_RANKS = Missing("the other ranks load the model at the same time")


@dataclass(frozen=True)
class Session:
    """Everything that a pass needs."""

    config: RunConfig
    runner: Runner
    prompts: Prompts
    batch: Any
    """The prompts in the runner's form."""
    workload: Workload
    device: "torch.device"
    load_s: float
    untouched_until_ns: int
    before: BusyBefore
    """The load of other processes while the model was loaded."""
    ranks: RankGroup | None = None
    """The ranks that share the model; None: there is one."""

    @property
    def cuda(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.type == "cuda"

    @property
    def model(self) -> Any:
        """The torch module; None if the runner does not expose one."""
        return getattr(self.runner, "model", None)

    @property
    def clock(self) -> ClockName:
        """The clock that times are taken with; an engine's tokens arrive on the host."""
        return clock_for(self.device).name if is_steppable(self.runner) else HostClock.name

    @cached_property
    def vision_substages(self) -> dict[str, str]:
        """The sub-stages of the model's family, name → path of the submodule; they run in prefill. Empty without images.

        A runtime of another package may build the model from other modules; those that it does not have are left out.
        """
        if self.prompts.images is None or self.model is None:
            return {}
        paths = {path for path, _ in self.model.named_modules()}
        known = default_substages(self.runner.facts.model_type).items()
        own = self.config.model.substages
        return {name: path for name, path in known if name not in own and path.removesuffix(".*") in paths}

    def meter(self, new_tokens: int, marker: StageMarker) -> RequestMeter:
        """Return a meter for requests of this many new tokens."""
        if self.ranks is not None:
            runner, clock = cast("SteppableRunner", self.runner), clock_for(self.device)
            return RankMeter(runner, self.batch, new_tokens, clock, marker, ranks=self.ranks)
        if is_steppable(self.runner):
            return Meter(cast("SteppableRunner", self.runner), self.batch, new_tokens, clock_for(self.device), marker)
        return EngineMeter(cast("EngineRunner", self.runner), self.batch, len(self.prompts.ids), new_tokens, marker)


def is_steppable(runner: Runner) -> bool:
    """Return whether llm-perf calls the steps itself."""
    return hasattr(runner, "decode_step")


def open_session(
    config: RunConfig,
    trace_dir: Path | None = None,
    *,
    compare_tokens: bool = False,
    profiled: bool = False,
    ranks: RankGroup | None = None,
) -> Session:
    """Check what can be checked cheaply, then open the runtime with the model; see `RunnerRequest` for the other parameters."""
    runtime = runtime_named(config.runtime.type)
    hardware = config.hardware
    prepare_threads(hardware.cpus, hardware.threads)
    others = OtherProcesses()
    with without_garbage_collection():  # collecting garbage would add about 8 % of CPU time to the imports
        opener = _opener(runtime)
        import transformers

        from llm_perf_opt.runners import models

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        set_threads(hardware.cpus, hardware.threads)
        untouched_until = time.monotonic_ns()
        device = models.choose_device(hardware)
        dtype = models.choose_dtype(config.model.dtype, device)
        architecture = models.load_config(config.model)
        prompts = _prompts(config, architecture, device, dtype, ranks)
    send("phase", text=f"loading {config.model.name} on {device} in {canonical_dtype(str(dtype))}")
    begun = time.monotonic()
    runner = opener(RunnerRequest(config, architecture, prompts, device, dtype, trace_dir, compare_tokens, profiled, ranks))
    _check_runner(runner, runtime)
    batch = cast("SteppableRunner", runner).place(prompts) if is_steppable(runner) else prompts
    workload = Workload(
        batch_size=len(prompts.ids),
        prompt_tokens=prompts.lengths,
        padded_tokens=max(prompts.lengths),
        new_tokens=config.runtime.num_new_tokens,
        source=prompts.source,
        texts=prompts.texts,
        vision=prompts.images.record if prompts.images else None,
    )
    unseen = _IN_ENGINE if runtime.engine else _OTHER_RANKS if ranks else None
    before = BusyBefore(unseen, others.seconds) if unseen else sampled(others)
    load_s = time.monotonic() - begun - getattr(runner, "conversion_s", 0.0)
    session = Session(config, runner, prompts, batch, workload, device, load_s, untouched_until, before, ranks)
    _check_substages(session)
    return session


def _check_substages(session: Session) -> None:
    """Refuse to record a sub-stage that the model does not have."""
    profiling, known = session.config.profiling, [*session.config.model.substages, *session.vision_substages]
    for tool, name in (("nsys", profiling.nsys.substage), ("ncu", profiling.ncu.substage)):
        if name is not None and name not in known:
            raise ConfigError(
                f"profiling.{tool}.substage={name}: the model has no such sub-stage.{nearest(name, known)}",
                f"It has: {', '.join(known)}." if known else "Add one with model.substages.NAME=PATH.",
            )


def _prompts(
    config: RunConfig, architecture: "PretrainedConfig", device: "torch.device", dtype: "torch.dtype", ranks: RankGroup | None
) -> Prompts:
    """Return the sequences of the batch, or raise if the model or the device cannot take requests of that size."""
    from llm_perf_opt.runners import models
    from llm_perf_opt.runners.vision_inputs import request_images

    vocabulary = int(architecture.get_text_config(decoder=True).vocab_size)
    runtime = config.runtime

    def check_size(text_tokens: int) -> None:
        longest = images.longest_prompt(text_tokens) if images else text_tokens
        models.check_positions(architecture, longest, runtime.num_new_tokens)
        if not traits_of(runtime.type).engine:  # an engine manages its memory itself
            tokens, size = longest + runtime.num_new_tokens, ranks.size if ranks else 1
            need = models.memory_need(architecture, config.model, dtype, runtime.batch_size, tokens, size)
            if images is not None:
                need = replace(need, image_bytes=images.pixels * dtype.itemsize)
            models.check_fits(need, device, size if ranks and ranks.shared_device else 1)

    images = request_images(config, architecture)
    dataset = config.dataset
    if dataset.kind == "synthetic" or (dataset.kind == "image_folder" and dataset.prompt is None):
        check_size(runtime.prompt_tokens)  # before the ids are drawn: there may be billions
        prompts = synthetic_prompts(runtime.batch_size, runtime.prompt_tokens, vocabulary, dataset.seed)
    elif dataset.kind == "recorded":
        prompts = recorded_prompts(config, vocabulary)
        check_size(max(prompts.lengths))
    else:
        tokenize = models.load_tokenizer(config.model)
        make = repeated_prompt if dataset.kind == "image_folder" else text_prompts
        prompts = make(dataset, runtime.batch_size, runtime.prompt_tokens, vocabulary, tokenize)
        check_size(max(prompts.lengths))
    return images.placed(prompts) if images else prompts


def _opener(runtime: Runtime) -> Opener:
    remedy = f"The entry point of the group {GROUP} must name a function." if runtime.provided_by else runtime.install
    return cast("Opener", load(Declared(runtime.name, runtime.target, runtime.provided_by), "runtime", remedy))


def _check_runner(runner: Any, runtime: Runtime) -> None:
    """Raise if the runner does not have all attributes of its kind."""
    kinds = {"steppable": ("begin", "place", "prefill", "decode_step", "to_lists", "model"), "engine": ("generate", "profiler")}
    kind = "steppable" if is_steppable(runner) else "engine"
    missing = [name for name in (*kinds[kind], "facts", "runtime") if not hasattr(runner, name)]
    if missing:
        raise ConfigError(
            f"The runtime '{runtime.name}' returned an invalid {kind} runner: it has no {', '.join(missing)}.",
            "llm_perf_opt.runners.base and docs/runtimes.md define the interface.",
        )
