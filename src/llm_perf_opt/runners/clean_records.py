"""The records of the unprofiled pass: the prompts, and the times with what ran."""

import copy
import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from llm_perf_opt.analysis.cost_model.models import has_formulas
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, ModelFacts
from llm_perf_opt.core.weight_records import TokenAgreement
from llm_perf_opt.cost.models import count_config
from llm_perf_opt.runners.cpus import compute_threads
from llm_perf_opt.runners.measure.engine_meter import EngineMeter
from llm_perf_opt.runners.measure.memory import memory_peaks
from llm_perf_opt.runners.measure.meter import Measured, RequestMeter
from llm_perf_opt.runners.models import weight_facts
from llm_perf_opt.runners.session import Session


def inputs_record(session: Session) -> dict[str, Any]:
    """Return the prompts of the run."""
    images = session.prompts.images
    vision = {"images": {**asdict(images.record), "token_id": images.token_id}} if images else {}
    return {
        **vision,
        "source": session.prompts.source,
        "sha256": session.prompts.sha256(),
        "lengths": session.prompts.lengths,
        "new_tokens": session.workload.new_tokens,
        "ids": session.prompts.ids,
    }


def timings_record(session: Session, measured: Measured, meter: RequestMeter) -> CleanTimings:
    """Return the times of the pass, with the model, the workload and the machine as they were."""
    runtime = session.runner.runtime
    if isinstance(meter, EngineMeter):
        runtime = replace(
            runtime,
            inseparable=meter.inseparable or runtime.inseparable,
            unstepped=meter.unstepped or runtime.unstepped,
            held_back=meter.held_back,
        )
    memory = memory_peaks(session.device, elsewhere=runtime.elsewhere)  # before operators are counted, which takes memory
    facts = replace(_with_operators(session), substages={**session.config.model.substages, **session.vision_substages})
    return CleanTimings(
        model=facts,
        workload=session.workload,
        clock=session.clock,
        load_s=session.load_s,
        warmup=measured.warmup,
        iterations=measured.iterations,
        stopped=measured.stopped,
        stable=measured.stable,
        settled=measured.settled,
        memory=memory,
        tokens_sha256=hashlib.sha256(json.dumps(measured.tokens).encode()).hexdigest(),
        tokens_repeat=measured.tokens_repeat,
        threads=getattr(session.runner, "threads", 0) or compute_threads(elsewhere=runtime.elsewhere and not session.cuda),
        framework=_framework(session),
        device_untouched_until_ns=session.untouched_until_ns,
        runtime=runtime,
        agreement=_agreement(getattr(session.runner, "reference_tokens", None), measured.tokens),
    )


def _with_operators(session: Session) -> ModelFacts:
    """Return the facts of the model, with its operators if it has no formulas: they are counted on a copy without memory."""
    facts, model = _counted(session), session.model
    whole: Any = getattr(model, "config", None)  # a runner's module may be no model of transformers
    if not hasattr(whole, "get_text_config") or session.ranks is not None or session.workload.vision is not None:
        return facts
    config = whole.get_text_config(decoder=True)
    if has_formulas(facts.architecture) or has_formulas(config.to_dict()):
        return facts
    try:
        counted = count_config(copy.deepcopy(config))
    except ConfigError as error:
        return replace(facts, counted=error.fact)
    if config is whole and counted.params != facts.parameters:
        counts = f"{counted.params:,} parameters, not {facts.parameters:,}"
        return replace(facts, counted=f"the model that transformers builds from this configuration has {counts}")
    return replace(facts, counted=counted.to_json())


def _counted(session: Session) -> ModelFacts:
    """Return the facts of the model with the parameters of the module that ran, whatever the runner states.

    Quantized layers and the parts of several ranks have other tensors than the model: their runner counts before.
    """
    facts, model = session.runner.facts, session.model
    weights = facts.weights or weight_facts(session.config.model)
    if model is None:
        return replace(facts, weights=replace(weights, counted_on="configuration"))
    if session.ranks is not None or weights.quantized is not None:
        return replace(facts, weights=replace(weights, counted_on="module"))
    tensors = list(model.parameters())
    count, size = sum(tensor.numel() for tensor in tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    stated = None if count == facts.parameters else facts.parameters
    weights = replace(weights, counted_on="module", stated_parameters=stated)
    return replace(facts, parameters=count, weight_bytes=size, weights=weights)


def _agreement(reference: list[list[int]] | None, tokens: list[list[int]]) -> TokenAgreement | None:
    """Return how the tokens agree with those of the model before it was quantized; None if there are none."""
    if reference is None:
        return None
    pairs = [
        (position, expected == found)
        for before, after in zip(reference, tokens, strict=True)
        for position, (expected, found) in enumerate(zip(before, after, strict=True))
    ]
    differing = [position for position, same in pairs if not same]
    return TokenAgreement(len(pairs), len(pairs) - len(differing), min(differing, default=None))


def _framework(session: Session) -> dict[str, str]:
    import torch
    import transformers

    versions = {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}
    if session.runner.runtime.type != PYTORCH:
        versions[session.runner.runtime.type] = session.runner.runtime.version
    if torch.version.cuda:
        versions["cuda_runtime"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    else:
        versions["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return versions
