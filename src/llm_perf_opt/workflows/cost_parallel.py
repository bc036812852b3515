"""The part of `llm-perf cost` about several devices: the plan, and its rooflines, communication and memory for given sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.communication import EXPERT_EXCHANGES, ExpertExchange
from llm_perf_opt.analysis.cost_model.cost import Formats
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture
from llm_perf_opt.analysis.cost_model.families import known_model_types
from llm_perf_opt.analysis.cost_model.sharding import Plan, check_plan, divides_tokens
from llm_perf_opt.analysis.limits.hardware import MEMORY_SHARE, Hardware
from llm_perf_opt.analysis.limits.links import Link, fabric_of
from llm_perf_opt.analysis.limits.parallel import (
    Communication,
    Deployment,
    ParallelRow,
    ParallelStep,
    StageTime,
    parallel_row,
)
from llm_perf_opt.analysis.limits.roofline import WhatIf
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import Missing


@dataclass(frozen=True)
class ParallelRequest:
    """The options about several devices; None: not given."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    link: str | None = None
    network: str | None = None
    node_gpus: int | None = None
    expert_exchange: str | None = None
    collective_us: float | None = None
    memory_share: float | None = None

    @property
    def share(self) -> float:
        """The share of the memory for weights and cache. Raise ConfigError if it is none."""
        found = MEMORY_SHARE if self.memory_share is None else self.memory_share
        if not 0 < found <= 1:
            raise ConfigError(f"--memory-share {found:g} is not a share of the memory.", "Give one above 0 and up to 1.")
        return found

    @property
    def given(self) -> str | None:
        """The first option that was given."""
        return self._first(*vars(self))

    @property
    def between(self) -> str | None:
        """The first option that was given about communication between devices."""
        return self._first("link", "network", "collective_us")

    def _first(self, *names: str) -> str | None:
        return next((f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None), None)

    @property
    def plan(self) -> Plan:
        """The plan that the options ask for."""
        return Plan(*(1 if size is None else size for size in (self.tp, self.pp, self.ep)))


def parallel_rows(
    request: ParallelRequest,
    architecture: Architecture,
    hardware: Hardware,
    rows: Sequence[WhatIf],
    measured: Link | None = None,
) -> list[ParallelRow]:
    """Return a row per combination of sizes; none for a model with images, or of counted operators, on one device."""
    counted = isinstance(architecture, CountedArchitecture)
    if architecture.vision_params or counted:
        given = replace(request, memory_share=None).given  # the first table uses the share
        if given and counted:
            raise ConfigError(
                f"{given} does not work for {architecture.model_type}: how its counted operators are divided is not modeled.",
                f"Models that it works for: {', '.join(known_model_types())}.",
            )
        if given:
            raise ConfigError(
                f"{given} works on text models only: how image encoders are split is not modeled.",
                "Add --decoder-only to count the text decoder alone.",
            )
        return []
    plan = request.plan
    check_plan(architecture, plan)
    if request.between is not None and plan.devices == 1:
        raise ConfigError(f"{request.between} has no effect on one device.", "Give --tp, --pp or --ep, or omit it.")
    exchange = _exchange(request, architecture, plan)
    fabric = fabric_of(hardware, request.link, request.network, request.node_gpus, request.collective_us or 0.0, measured)
    found: dict[Formats, Deployment] = {}
    for row in rows:
        if row.formats not in found:
            found[row.formats] = Deployment(architecture, row.formats, hardware, fabric, plan, exchange, request.share)
    return [parallel_row(found[row.formats], row.batch, row.prompt, row.context) for row in rows]


def _exchange(request: ParallelRequest, architecture: Architecture, plan: Plan) -> ExpertExchange:
    if request.expert_exchange is None:
        return EXPERT_EXCHANGES[0]
    word = request.expert_exchange.strip().lower().replace("-", "_")
    known = next((one for one in EXPERT_EXCHANGES if one == word), None)
    if known is None:
        raise ConfigError(
            f"--expert-exchange {request.expert_exchange} is not known.{nearest(word, EXPERT_EXCHANGES)}",
            f"Known: {', '.join(EXPERT_EXCHANGES)}.",
        )
    if plan.replicas == 1:
        raise ConfigError(
            "--expert-exchange has no effect: all devices of a stage have the same tokens.", "Give an --ep above --tp."
        )
    if known == "all_to_all" and plan.tp > 1 and not divides_tokens(architecture, plan):
        raise ConfigError(
            f"--expert-exchange all_to_all with --tp {plan.tp} is not modeled for {architecture.model_type}: at its "
            "experts, all devices of a tensor-parallel group have the same tokens.",
            "Omit --tp, or use all_gather.",
        )
    return known


# --- JSON ------------------------------------------------------------------------------------------------------------


def row_json(row: ParallelRow) -> dict[str, Any]:
    """Return one row as plain values."""
    deployment, memory = row.deployment, row.memory
    return {
        "dtype": deployment.formats.weights,
        "kv_dtype": deployment.formats.kv,
        **({"mla": str(deployment.formats.mla)} if deployment.architecture.has_latent_attention else {}),
        "batch": row.batch,
        "prompt": row.prompt,
        "context": row.context,
        **_plan_json(deployment.plan),
        "node_gpus": deployment.fabric.node_gpus,
        "memory": {
            "device_bytes": plain(deployment.hardware.memory_bytes),
            "share": deployment.memory_share,
            "usable_bytes": plain(memory.usable_bytes),
            "weight_bytes": memory.weight_bytes,
            "kv_cache_bytes": memory.kv_cache_bytes,
            "fits": plain(memory.fits),
        },
        "stages": [_stage_json(row, index) for index in range(deployment.plan.pp)],
        "prefill": _step_json(row.prefill),
        "decode": _step_json(row.decode),
        "decode_tokens_per_s": plain(row.decode_tokens_per_s),
        "largest_batch": plain(row.largest_batch),
        "largest_context": plain(row.largest_context),
        "smallest": plain(row.smallest) if isinstance(row.smallest, Missing) else _plan_json(row.smallest),
    }


def _plan_json(plan: Plan) -> dict[str, int]:
    return {"devices": plan.devices, "tp": plan.tp, "pp": plan.pp, "ep": plan.ep, "replicas": plan.replicas}


def _stage_json(row: ParallelRow, index: int) -> dict[str, Any]:
    stage, formats = row.deployment.stages[index], row.deployment.formats
    return {
        "layers": len(stage.layers),
        "params": stage.params,
        "weight_bytes": stage.weight_bytes(formats),
        "kv_cache_bytes": stage.kv_cache_bytes(row.batch, row.tokens, formats),
        "prefill": _stage_time_json(row.prefill.stages[index]),
        "decode": _stage_time_json(row.decode.stages[index]),
    }


def _stage_time_json(stage: StageTime) -> dict[str, Any]:
    """Return what the most loaded device of a pipeline stage does in one step."""
    return {
        **stage.cost.to_json(),
        "roofline_s": stage.roofline.seconds if not isinstance(stage.roofline, Missing) else plain(stage.roofline),
        "communication_s": stage.communication_s,
        "seconds": plain(stage.seconds),
    }


def _step_json(step: ParallelStep) -> dict[str, Any]:
    most = step.most_loaded.cost
    return {
        "flops_per_device": most.flops,
        "bytes_per_device": most.bytes,
        "model_flops": step.model_flops,
        "roofline_s": plain(step.roofline_s),
        "communication_s": step.communication_s,
        "seconds": plain(step.seconds),
        "interval_s": plain(step.interval_s),
        "bound": plain(step.bound),
        "mfu": plain(step.mfu(step.seconds)),
        "mfu_full_pipeline": plain(step.mfu(step.interval_s)),
        "sent_bytes_per_device": step.sent_bytes,
        "collectives": [_communication_json(one) for one in step.by_collective()],
    }


def _communication_json(one: Communication) -> dict[str, Any]:
    call = one.collective
    return {
        "kind": call.kind,
        "group": call.group,
        "purpose": call.purpose,
        "ranks": call.ranks,
        "nodes": one.nodes,
        "count": call.count,
        "bytes": call.bytes,
        "sent_bytes": call.sent_bytes,
        "link": one.link.name,
        "link_bytes_per_s": one.link.bytes_per_s,
        "link_source": one.link.source,
        "seconds": one.seconds,
    }


def plain(value: Any) -> Any:
    """Return a value for JSON: a missing one as its reason."""
    return {"n/a": value.why} if isinstance(value, Missing) else value
