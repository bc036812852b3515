"""The stages of an inference request, and their names in every tool.

`profile` is the measured iteration. It contains `prefill` and `decode`; `decode` contains one `decode_step` per token.
The time of a stage includes its children.
"""

from enum import Enum

DOMAIN = "LLM"
"""The NVTX domain of all ranges."""

PART_LABEL = "part:"
"""The prefix of the label of a model component in a trace (`part:mlp`)."""

PROFILER_OPERATORS = "profiler::"
"""The prefix of operators that torch runs to record a label (`profiler::_record_function_enter_new`)."""


class Stage(str, Enum):
    """A stage. Its value is its name in NVTX, in record_function and in every table."""

    PROFILE = "profile"
    PREFILL = "prefill"
    DECODE = "decode"
    DECODE_STEP = "decode_step"

    def __str__(self) -> str:
        return self.value


PARENT: dict[Stage, Stage | None] = {
    Stage.PROFILE: None,
    Stage.PREFILL: Stage.PROFILE,
    Stage.DECODE: Stage.PROFILE,
    Stage.DECODE_STEP: Stage.DECODE,
}

STAGE_NAMES = tuple(stage.value for stage in Stage)
MIXED_STEP = "mixed_step"
"""A step of a server that processes prompts and single tokens together."""
STEP = "step"
"""A step whose content the trace does not show."""
REQUEST = "request"
"""A whole request, in findings on its total time."""


def nsys_range(stage: Stage) -> str:
    """Return the argument of `nsys profile --nvtx-capture`: a literal name, then the domain."""
    return f"{stage.value}@{DOMAIN}"


def ncu_range(stage: Stage, substage: str | None = None) -> str:
    """Return the argument of `ncu --nvtx-include`: the domain, the path inside `profile`, a slash for push/pop ranges.

    A sub-stage of prefill is named alone, because it may lie inside another one; no decode step is run when prefill is counted.
    """
    if substage is not None:
        return f"{DOMAIN}@{substage}/" if stage is Stage.PREFILL else f"{DOMAIN}@{stage.value}/{substage}/"
    path = [stage.value]
    parent = PARENT[stage]
    while parent is not None and parent is not Stage.PROFILE:
        path.insert(0, parent.value)
        parent = PARENT[parent]
    return f"{DOMAIN}@{'/'.join(path)}/"
