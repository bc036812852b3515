"""Of how many devices the limits are. A model spread over several has all their FLOP/s and bytes/s, and each a share of the work.

Tensor parallel splits every product over the devices, so the least time of a step is that of the whole divided by their number:
no device can be given less than an equal share, and what they tell each other comes on top.
"""

from llm_perf_opt.records import CleanTimings, Maybe, Missing


def devices_of(timings: Maybe[CleanTimings]) -> int:
    """Devices that share the work of the run that was timed."""
    if isinstance(timings, Missing) or timings.runtime is None:
        return 1
    return max(timings.runtime.devices, 1)


def other_devices(seen: int, limits: int) -> Missing | None:
    """Why sums over the devices seen in a trace may not be held against the limits of `limits` devices; None where they may."""
    if seen == limits:
        return None
    of = "one" if limits == 1 else f"{limits} together"
    return Missing(f"the stage's kernels ran on {seen} {'device' if seen == 1 else 'devices'}, and the limits are those of {of}")


def more_devices(seen: int, limits: int) -> Missing | None:
    """The same for a floor: one device of several still has its share to do, so fewer may be seen than share the work."""
    return other_devices(seen, limits) if seen > limits else None


def shared_words(devices: int) -> str:
    """What is assumed where several devices share the work."""
    return (
        f"The model is spread over {devices} devices, taken for alike: limits are those of all {devices} together, and the "
        "floor is that of the whole divided among them, as tensor parallelism does at best, without what they tell each other."
    )
