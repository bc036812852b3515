"""Whether the threads of the measured process competed for processors while they were measured."""

from llm_perf_opt.core.host_records import HostLoad
from llm_perf_opt.core.rank_records import rank_count
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.units import counted, percentage
from llm_perf_opt.core.warnings import RunWarning, WarningId

LEAST_DELAY = 0.05
"""Share of the time that the main thread, or the mean of the compute threads, waits for a processor: more causes a warning."""
_NO_MEAN = Missing("threads that exchange results between the ranks waited too")


def contention(timings: CleanTimings) -> RunWarning | None:
    """Return a warning if threads of the measured process waited for processors during the repeats, otherwise None."""
    host = timings.host
    if host is None:
        return None
    mains = _main_shares(timings, host)
    mean = _NO_MEAN if timings.ranks else host.delay_share(timings.threads)
    if max([*mains, 0.0 if isinstance(mean, Missing) else mean]) <= LEAST_DELAY:
        return None
    words = (
        f"{_waited(timings, mains, mean)}{_preempted(timings, host)}. The run used {thread_words(timings)} on "
        f"{counted(host.processors, 'processor')}{_others(host)}. The times are inflated. {_advice(timings, host)}."
    )
    return RunWarning(WarningId.CONTENDED_PROCESSORS, words)


def _main_shares(timings: CleanTimings, host: HostLoad) -> list[float]:
    """Return the share of the time that the main thread of each process waited, as far as it is known."""
    delays = [entry.main_delay_ns for entry in timings.ranks] if timings.ranks else [host.main_delay_ns]
    known = [delay for delay in delays if not isinstance(delay, Missing)]
    # The repeats of a rank may last a little longer than those of the first, whose time is recorded.
    return [min(delay / host.wall_ns, 1.0) for delay in known if host.wall_ns]


def _waited(timings: CleanTimings, mains: list[float], mean: Maybe[float]) -> str:
    known = []
    if mains:
        low, high = percentage(min(mains), 0), percentage(max(mains), 0)
        of = "" if not timings.ranks else " of a rank" if len(mains) > 1 else " of rank 0"
        known.append(f"the main thread{of} for {high if low == high else f'{low} to {high}'} of the time")
    if not isinstance(mean, Missing):
        known.append(f"its compute threads for {percentage(mean, 0)} on average")
    whose = "the ranks" if timings.ranks else "the measured process"
    return f"Threads of {whose} waited for processors during the repeats: {', '.join(known)}"


def _preempted(timings: CleanTimings, host: HostLoad) -> str:
    switches = host.involuntary_switches
    if isinstance(switches, Missing):
        return ""
    whose = "threads of rank 0" if timings.ranks else "threads"
    return f"; {whose} were preempted {counted(round(switches / (host.wall_ns / 1e9)), 'time')} per second"


def thread_words(timings: CleanTimings) -> str:
    """Return the number of threads, of each rank if there are several."""
    ranks = rank_count(timings.ranks)
    return f"{counted(timings.threads, 'thread')}{f' in each of {ranks} ranks' if ranks > 1 else ''}"


def _advice(timings: CleanTimings, host: HostLoad) -> str:
    ways = ["Stop other programs"]
    if timings.threads > 1:
        ways.append("use fewer threads (hardware.threads)")
        if host.wait_policy != "passive":
            ways.append("use threads that sleep while they wait (hardware.wait_policy=passive)")
    elif rank_count(timings.ranks) > host.processors:
        ways.append("use fewer ranks (runtime.tensor_parallel)")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]


def _others(host: HostLoad) -> str:
    if isinstance(host.others_before, Missing):
        return ""
    return f"; other processes used {host.others_before:.2f} processors while the model was loaded"
