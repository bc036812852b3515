"""Whether two passes of one run launched the same: a timeline that lost kernels unseen differs from the other one."""

from collections.abc import Mapping

NOTABLE = 0.1
"""Share of the larger count. Passes of one program agree to the kernel; a compiler or a library may choose a few differently."""
_UNIT = {"decode": "decode step"}


def disagreements(per_instance: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """What is to be said of stages that hold another number of kernels in one pass than in another.

    `per_instance`: timeline → stage → kernels in a prefill, or in a decode step.
    """
    found = []
    (first, counts), *others = per_instance.items() if per_instance else (("", {}),)
    for other, theirs in others:
        for stage in (stage for stage in counts if stage in theirs):
            mine, yours = counts[stage], theirs[stage]
            if abs(mine - yours) > NOTABLE * max(mine, yours):
                found.append(
                    f"{first} holds {mine:,.1f} kernels per {_UNIT.get(stage, stage)}, {other} {yours:,.1f}: the passes did not "
                    "launch the same, or one of them lost kernels. Each table of kernels says which pass it is of."
                )
    return tuple(found)
