"""The passes under NVIDIA's tools."""

from dataclasses import replace
from typing import TYPE_CHECKING

from llm_perf_opt.config.passes import EVERY_STAGE, Pass
from llm_perf_opt.core.stages import Stage

if TYPE_CHECKING:
    from llm_perf_opt.config.schema import RunConfig

NSYS_LABEL = "Nsight Systems"
NSYS_STAGES = {"nsys": EVERY_STAGE, "nsys_decode": (Stage.DECODE, Stage.DECODE_STEP)}
NSYS_SUBSTAGE = "nsys_substage"
NCU_LABEL = "Nsight Compute"
NCU_SELFTEST, NCU_PROGRAM = "ncu_selftest", "ncu"
NCU_STAGES = {"ncu_prefill": Stage.PREFILL, "ncu_decode": Stage.DECODE_STEP}
_READ_COUNTERS = "llm_perf_opt.profiling.ncu_counters:launch"


def _in_decode(config: "RunConfig") -> bool:
    """Return whether kernels of a decode step are counted; the sub-stages of vision-language models are in prefill only."""
    ncu = config.profiling.ncu
    return ncu.enable and config.runtime.num_new_tokens > 1 and (ncu.substage is None or ncu.substage in config.model.substages)


_TIMELINE = Pass(
    "nsys",
    NSYS_LABEL,
    40,
    "llm_perf_opt.profiling.nsys_timeline:launch",
    lambda config: config.profiling.nsys.enable and config.profiling.nsys.substage is None,
    trace="run.sqlite",
    checked=True,
    tool=f"{NSYS_LABEL} (nsys)",
    stages=NSYS_STAGES["nsys"],
    programs=True,
)
PASSES = (
    _TIMELINE,
    replace(
        _TIMELINE,
        name="nsys_decode",
        label=f"{NSYS_LABEL}, decode only",
        order=41,
        launch=None,
        wanted=lambda _: False,  # started by the pass nsys if the whole iteration cannot be recorded
        tool=f"{NSYS_LABEL} (nsys_decode)",
        stages=NSYS_STAGES["nsys_decode"],
        programs=False,
    ),
    Pass(
        NSYS_SUBSTAGE,
        f"{NSYS_LABEL}, one sub-stage",
        42,
        "llm_perf_opt.profiling.nsys_timeline:launch_substage",
        lambda config: config.profiling.nsys.enable and config.profiling.nsys.substage is not None,
        stages=EVERY_STAGE,
    ),
    Pass(NCU_SELFTEST, f"{NCU_LABEL}, counter self-test", 60, _READ_COUNTERS, lambda config: config.profiling.ncu.enable),
    Pass(
        "ncu_prefill",
        f"{NCU_LABEL}, prefill",
        61,
        wanted=lambda config: config.profiling.ncu.enable,
        stages=(Stage.PREFILL,),
    ),
    Pass(
        "ncu_decode",
        f"{NCU_LABEL}, a decode step",
        62,
        wanted=_in_decode,
        stages=(Stage.DECODE_STEP,),
    ),
    Pass(NCU_PROGRAM, NCU_LABEL, 60, _READ_COUNTERS, lambda _: False, programs=True),
)
