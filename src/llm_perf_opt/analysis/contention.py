"""Whether the threads of the measured process competed for processors while they were measured."""

from llm_perf_opt.core.host_records import HostLoad
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.units import percentage
from llm_perf_opt.core.warnings import RunWarning, WarningId

LEAST_DELAY = 0.05
"""Share of the time that the main thread, or the mean of the compute threads, waits for a processor: more causes a warning."""


def contention(timings: CleanTimings) -> RunWarning | None:
    """Return a warning if threads of the measured process waited for processors during the repeats, otherwise None."""
    host = timings.host
    if host is None:
        return None
    main, mean = host.main_delay_share, host.delay_share(max(timings.threads, 1))
    if max((share for share in (main, mean) if not isinstance(share, Missing)), default=0.0) <= LEAST_DELAY:
        return None
    words = (
        f"{_waited(main, mean)}{_preempted(host)}. The run used {_count(timings.threads, 'thread')} on "
        f"{_count(host.processors, 'processor')}{_others(host)}. The times are inflated. Stop other programs, or use fewer "
        "threads (hardware.threads)"
    )
    advice = "." if host.wait_policy == "passive" else " or threads that sleep while they wait (hardware.wait_policy=passive)."
    return RunWarning(WarningId.CONTENDED_PROCESSORS, words + advice)


def _waited(main: Maybe[float], mean: Maybe[float]) -> str:
    shares = {"the main thread for {} of the time": main, "its compute threads for {} on average": mean}
    known = [words.format(percentage(share, 0)) for words, share in shares.items() if not isinstance(share, Missing)]
    return f"Threads of the measured process waited for processors during the repeats: {', '.join(known)}"


def _preempted(host: HostLoad) -> str:
    switches = host.involuntary_switches
    if isinstance(switches, Missing):
        return ""
    return f"; threads were preempted {_count(round(switches / (host.wall_ns / 1e9)), 'time')} per second"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _others(host: HostLoad) -> str:
    if isinstance(host.others_before, Missing):
        return ""
    return f"; other processes used {host.others_before:.2f} processors while the model was loaded"
