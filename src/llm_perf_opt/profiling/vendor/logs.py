"""Find failures in the logs of the Nsight tools, which often exit with code 0 or an unspecific one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.profiling.vendor.compatibility import REMEDY, permission_error
from llm_perf_opt.profiling.vendor.gates import BOTH_SYNTAXES


@dataclass(frozen=True)
class LogProblem:
    """A problem that a tool reported."""

    id: str
    what: str
    remedy: str
    fatal: bool
    """Whether the report is unusable."""
    line: str
    """The line of the log."""


@dataclass(frozen=True)
class _Rule:
    id: str
    pattern: str
    what: str
    remedy: str
    fatal: bool = True


_OLD_TOOL = "Use an Nsight Systems at least as new as the program's CUDA; see `llm-perf doctor`."
_PERMISSION = _Rule(
    "no_permission",
    r"ERR_NVGPUCTRPERM",
    "This user has no permission to read the GPU's hardware counters.",
    REMEDY,
)

AGENT_LOST = "agent_lost"
"""The id of a problem that a restart of nsys may solve."""
_AGENT_LOST = re.compile(r"Connection to Agent lost\b.*|End of file|.*Local Endpoint is not available\.?")

_PROGRESS = re.compile(
    r"==PROF==|Generating '.*\.qdstrm'$|\[\d+/\d+\] \[|Generated$|(Collecting data|Processing events|Capture range)\b"
    r"|The target application|Saving (temporary|report)"
)
"""Start of lines of nsys (2022 to 2025) and ncu that are not about the program."""
_REPORT = re.compile(r"\S.*\.(nsys-rep|qdstrm|sqlite|ncu-rep)")
"""A line after nsys's `Generated:`."""

_NSYS = (
    _PERMISSION,
    _Rule(
        "importer_missing",
        r"[Ii]mporter binary .*not found|QdstrmImporter.*not found",
        "nsys could not create a report; it left only a .qdstrm.",
        "Install the host components of Nsight Systems, which include QdstrmImporter.",
    ),
    _Rule(
        "stream_incomplete",
        r"Qdstrm file is incomplete or invalid",
        "nsys was stopped before it had written its recording, so no report can be created.",
        "Raise profiling.pass_timeout_s, or record less.",
    ),
    _Rule(
        "tool_older_than_cuda",
        r"Unknown \w+ API function index",
        "nsys stopped at a CUDA call that is newer than itself: the report is incomplete.",
        _OLD_TOOL,
    ),
    _Rule(
        "events_not_processed",
        r"Errors occurred while processing the raw events",
        "nsys could not process all of its recording: the report is incomplete.",
        _OLD_TOOL,
    ),
    _Rule(
        "no_report",
        r"No reports were generated",
        "nsys recorded nothing: the range that starts the capture never occurred, or the program ended before it.",
        f"{BOTH_SYNTAXES} nsys up to 2023.4 does not see ranges of the nvtx package from 0.2.12 on.",
    ),
    _Rule(
        "gpu_metrics_unsupported",
        r"Illegal --gpu-metrics-devices? argument",
        "GPU metrics cannot be sampled on this machine.",
        "Leave GPU metrics out; `nsys profile --gpu-metrics-devices=help` (older: --gpu-metrics-device=help) shows why.",
    ),
    _Rule(
        "unknown_option",
        r"^unrecogni[sz]ed option|^Illegal (?!--gpu-metrics)--\S+ argument",
        "nsys rejected an option.",
        "Use a newer Nsight Systems; `llm-perf doctor` shows the installed version.",
    ),
)

_NCU = (
    _PERMISSION,
    _Rule(
        "unknown_metric",
        r"Failed to find metric",
        "A requested metric does not exist on this chip, so ncu stopped the program.",
        "Check the names with `llm-perf metrics check NAME --chip CHIP`.",
    ),
    _Rule(
        "unknown_section",
        r"did not match any section|No metrics to collect found in sections",
        "A requested section or set does not exist in this ncu.",
        "Names must match exactly, patterns need the prefix `regex:`; `ncu --list-sections` and `--list-sets` list the names.",
    ),
    _Rule(
        "no_driver",
        r"failed to connect to the CUDA driver",
        "ncu found no CUDA driver.",
        "Run on a machine with an NVIDIA GPU and its driver.",
    ),
    _Rule(
        "counters_in_use",
        r"Driver resource was unavailable",
        "Another tool is using the GPU's counters.",
        "Stop the other profiler; `dcgmi profiling --pause` makes a DCGM service release them.",
    ),
    _Rule(
        "unknown_option",
        r"unrecogni[sz]ed option|argument .*for option .* is invalid|Invalid regex|requires --nvtx",
        "ncu rejected an option.",
        "Use a newer Nsight Compute; `llm-perf doctor` shows the installed version.",
    ),
    _Rule(
        "no_kernels",
        r"No kernels were profiled|No ranges were profiled",
        "ncu profiled nothing: no launch passed its filters, or the program launched none.",
        BOTH_SYNTAXES,
    ),
    _Rule(
        "program_failed",
        r"The application returned an error code",
        "The program that ncu ran failed.",
        "See its output in the log; run it without ncu to see whether it succeeds.",
    ),
    _Rule(
        "cut_short",
        r"Trying to shutdown target application",
        "ncu was stopped before it was done: the report contains what was profiled until then.",
        "Raise profiling.pass_timeout_s, or count fewer launches and metrics.",
        fatal=False,
    ),
    _Rule(
        "profiling_error",
        r"An error occurred while trying to profile",
        "ncu could not profile a kernel.",
        "The log names the kernel; fewer metrics at a time, or another replay mode, may help.",
    ),
)


def nsys_log_problems(text: str) -> tuple[LogProblem, ...]:
    """Return the problems in a log of nsys, the most severe first."""
    lines = _lines(text)
    found = _problems(lines, _NSYS)
    if lines and lines[-1] == "Generated:":  # nsys 2023 recorded nothing
        rule = next(rule for rule in _NSYS if rule.id == "no_report")
        found.append(LogProblem(rule.id, rule.what, rule.remedy, rule.fatal, "Generated: (nothing)"))
    line = next(filter(_AGENT_LOST.fullmatch, lines), None)
    if line is not None:  # last, because all others are more specific
        what = "nsys lost the connection to its own agent."
        remedy = "Run it again; if it happens each time, stop other profilers or use another Nsight Systems."
        found.append(LogProblem(AGENT_LOST, what, remedy, True, line))
    return tuple(found)


def ncu_log_problems(text: str) -> tuple[LogProblem, ...]:
    """Return the problems in a log of ncu, the most severe first. Only ncu's own lines begin with ==."""
    found = _problems([line for line in _lines(text) if line.startswith("==")], _NCU)
    if any(problem.id == "cut_short" for problem in found):  # the failed kernel is the one that was interrupted
        found = [replace(problem, fatal=False) if problem.id == "profiling_error" else problem for problem in found]
    return tuple(found)


def program_output(text: str) -> list[str]:
    """Return the lines of a log without a tool's progress and report paths; the tool's errors stay."""
    found = []
    after_generated = False
    for line in _lines(text):
        report = after_generated and _REPORT.fullmatch(line)
        after_generated = bool(report) or line == "Generated:"
        if not (after_generated or _PROGRESS.match(line)):
            found.append(line)
    return found


def log_error(problems: Sequence[LogProblem]) -> LlmPerfError | None:
    """Return the first fatal problem as an error, or None."""
    worst = next((problem for problem in problems if problem.fatal), None)
    if worst is None:
        return None
    if worst.id == _PERMISSION.id:
        return permission_error(worst.line)
    return CaptureError(f"{worst.what} ({worst.line})", worst.remedy)


FOLLOWS_A_FAILURE = ("no_report", "no_kernels", "program_failed")
"""Problems that are also reported if the program failed before its work."""


def _lines(text: str) -> list[str]:
    """Return the non-empty lines; progress bars end in carriage returns."""
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _problems(lines: Sequence[str], rules: Sequence[_Rule]) -> list[LogProblem]:
    found = []
    for rule in rules:
        match = next(filter(None, (re.search(rule.pattern, line) for line in lines)), None)
        if match is not None:
            found.append(LogProblem(rule.id, rule.what, rule.remedy, rule.fatal, _excerpt(match)))
    return found


def _excerpt(match: re.Match[str], most: int = 300) -> str:
    """Return the matched line; of a long one, which begins with a location in the tool, the text from the match on."""
    return match.string[:most] if match.end() <= most else f"… {match.string[match.start() :][:most]}"


# --- engines ----------------------------------------------------------------------------------------------------------

_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w+(?:Error|Exception): .+)$")
"""The last line of a traceback, in the log of a process that may put its name before every line."""
_POINTS_ABOVE = "root cause"
"""In errors of engines whose cause was raised, and logged, in another process."""


def with_cause(error: LlmPerfError, log: str) -> LlmPerfError:
    """Return the error with its cause if that is only in the log: an engine's own process raised it."""
    if _POINTS_ABOVE not in error.fact:
        return error
    causes = [found[1] for line in log.splitlines() if _POINTS_ABOVE not in line and (found := _CAUSE.search(line))]
    return type(error)(f"{error.fact.rstrip('.')}: {causes[-1].strip()[:300]}", error.remedy) if causes else error
