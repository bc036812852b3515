"""The stages of an inference request: defined once, spelled for every tool from here.

`profile` is the one measured iteration. It holds `prefill` and `decode`; `decode` holds one `decode_step` per token.
A parent's time includes its children's.
"""

from enum import Enum

DOMAIN = "LLM"
"""The NVTX domain all ranges are pushed in."""

PART_LABEL = "part:"
"""How the label of a part of the model (`part:mlp`) begins in a trace."""


class Stage(str, Enum):
    """A stage; its value is the range's name in NVTX, in record_function and in every table."""

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
"""A server's step that holds prompts and single tokens together."""
STEP = "step"
"""A step of which the trace does not say what it held."""


def nsys_range(stage: Stage) -> str:
    """The argument of `nsys profile --nvtx-capture`: a literal name, then the domain."""
    return f"{stage.value}@{DOMAIN}"


def ncu_range(stage: Stage) -> str:
    """The argument of `ncu --nvtx-include`: the domain first, the path below `profile`, a slash for push/pop ranges."""
    path = [stage.value]
    parent = PARENT[stage]
    while parent is not None and parent is not Stage.PROFILE:
        path.insert(0, parent.value)
        parent = PARENT[parent]
    return f"{DOMAIN}@{'/'.join(path)}/"
