"""The kinds of collectives: their names in any trace, and the traffic that each causes on a link."""

import re
from functools import lru_cache

_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("reduce_scatter", r"reduce_?scatter"),
        ("all_reduce", r"all_?reduce|cross_device_reduce|quick_?reduce"),
        ("all_gather", r"all_?gather"),
        ("all_to_all", r"all_?to_?all|a2a"),
        ("barrier", r"barrier"),
        ("broadcast", r"broad_?cast"),
        ("send_recv", r"send_?recv"),
        ("gather", r"gather"),
        ("scatter", r"scatter"),
        ("send", r"send"),
        ("recv", r"recv"),
        ("reduce", r"reduce"),
    )
)
"""The first match counts; names contain each other."""
OTHER = "other"
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds that no rank leaves before the last one has arrived."""
UNEVEN = frozenset({"all_to_all", "gather", "scatter", "send_recv", "send", "recv"})
"""Kinds in which ranks may move different amounts."""
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
"""Kinds between two ranks of a group, which the other ranks do not take part in. They are not matched. `send_recv` is a kernel
whose trace does not state the kind: the same kernel runs all_to_all."""


@lru_cache(maxsize=10_000)
def kind_of(name: str) -> str:
    """Return the kind of a collective by its name in a library, a label or a kernel."""
    lower = name.lower()
    return next((kind for kind, pattern in _RULES if pattern.search(lower)), OTHER)


def moved_bytes(kind: str, in_bytes: int, out_bytes: int, group_size: int) -> int:
    """Return the size of a collective as nccl-tests counts it: the larger of a rank's input and output; -1 if unknown."""
    if out_bytes < 0 and in_bytes >= 0 and kind == "all_gather":
        return in_bytes * group_size if group_size else -1
    return max(in_bytes, out_bytes)


def bus_factor(kind: str, group_size: int) -> float | None:
    """Return the bytes that cross the busiest link of a ring per byte of the collective; None if the kind has no such factor.

    These are the factors of nccl-tests (doc/PERFORMANCE.md): the result is comparable with the bandwidth of a link, whatever the
    number of ranks.
    """
    if group_size < 2:
        return None
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    return (group_size - 1) / group_size if kind in ("all_gather", "reduce_scatter", "all_to_all") else None
