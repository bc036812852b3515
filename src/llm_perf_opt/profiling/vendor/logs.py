"""What the Nsight tools say of a failure in their log while they end with exit code 0, or with one that says nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.profiling.vendor.compatibility import REMEDY, permission_error
from llm_perf_opt.profiling.vendor.gates import BOTH_SYNTAXES


@dataclass(frozen=True)
class LogProblem:
    """One thing a tool complained of."""

    id: str
    what: str
    remedy: str
    fatal: bool
    """Whether its figures may not be used."""
    line: str
    """The line that says so."""


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
    "The GPU's hardware counters may not be read by this user.",
    REMEDY,
)

AGENT_LOST = "agent_lost"
"""The id of what may pass when nsys is started again."""
_AGENT_LOST = re.compile(r"Connection to Agent lost\b.*|End of file|.*Local Endpoint is not available\.?")

_PROGRESS = re.compile(
    r"==PROF==|Generating '.*\.qdstrm'$|\[\d+/\d+\] \[|Generated$|(Collecting data|Processing events|Capture range)\b"
    r"|The target application|Saving (temporary|report)"
)
"""How lines of nsys (2022 to 2025) and ncu begin that say nothing of the program."""
_REPORT = re.compile(r"\S.*\.(nsys-rep|qdstrm|sqlite|ncu-rep)")
"""A line below nsys's `Generated:`."""

_NSYS = (
    _PERMISSION,
    _Rule(
        "importer_missing",
        r"[Ii]mporter binary .*not found|QdstrmImporter.*not found",
        "nsys could not make a report of what it recorded; only a .qdstrm was left.",
        "Install the host part of Nsight Systems, which holds QdstrmImporter.",
    ),
    _Rule(
        "stream_incomplete",
        r"Qdstrm file is incomplete or invalid",
        "nsys was ended before it had written what it recorded: no report can be made of it.",
        "Raise profiling.pass_timeout_s, or record less.",
    ),
    _Rule(
        "tool_older_than_cuda",
        r"Unknown \w+ API function index",
        "nsys met a CUDA call newer than itself and gave up: the report is incomplete.",
        _OLD_TOOL,
    ),
    _Rule(
        "events_not_processed",
        r"Errors occurred while processing the raw events",
        "nsys could not read all of what it had recorded: the report is incomplete.",
        _OLD_TOOL,
    ),
    _Rule(
        "no_report",
        r"No reports were generated",
        "nsys recorded nothing: the range it waited for never came, or the program ended before it.",
        f"{BOTH_SYNTAXES} Up to 2023.4 it does not see ranges of the nvtx package from 0.2.12 on.",
    ),
    _Rule(
        "gpu_metrics_unsupported",
        r"Illegal --gpu-metrics-devices? argument",
        "GPU metrics cannot be sampled here.",
        "Leave GPU metrics out; `nsys profile --gpu-metrics-devices=help` (older: --gpu-metrics-device=help) says why.",
    ),
    _Rule(
        "unknown_option",
        r"^unrecogni[sz]ed option|^Illegal (?!--gpu-metrics)--\S+ argument",
        "nsys does not take an option it was given.",
        "Use a newer Nsight Systems; `llm-perf doctor` says what this one is.",
    ),
)

_NCU = (
    _PERMISSION,
    _Rule(
        "unknown_metric",
        r"Failed to find metric",
        "ncu does not know a metric on this chip, and ended the program for it.",
        "Check the names with `llm-perf metrics check NAME --chip CHIP`.",
    ),
    _Rule(
        "unknown_section",
        r"did not match any section|No metrics to collect found in sections",
        "ncu does not know a section or set by that name.",
        "A name is matched exactly, a pattern only behind `regex:`; `ncu --list-sections` and `--list-sets` name them.",
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
        "Another tool holds the GPU's counters.",
        "End the other profiler; a DCGM service lets go of them with `dcgmi profiling --pause`.",
    ),
    _Rule(
        "unknown_option",
        r"unrecogni[sz]ed option|argument .*for option .* is invalid|Invalid regex|requires --nvtx",
        "ncu does not take an option it was given.",
        "Use a newer Nsight Compute; `llm-perf doctor` says what this one is.",
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
        "The program that ncu ran ended with an error of its own.",
        "The log has what it said; run it without ncu to see whether it ends well.",
    ),
    _Rule(
        "cut_short",
        r"Trying to shutdown target application",
        "ncu was ended before it was done: the report holds what was profiled until then.",
        "Raise profiling.pass_timeout_s, or count fewer launches and metrics.",
        fatal=False,
    ),
    _Rule(
        "profiling_error",
        r"An error occurred while trying to profile",
        "ncu could not profile a kernel.",
        "The log has the kernel; fewer metrics at a time, or another replay mode, may help.",
    ),
)


def nsys_log_problems(text: str) -> tuple[LogProblem, ...]:
    """What nsys complained of, the gravest first."""
    lines = _lines(text)
    found = _problems(lines, _NSYS)
    if lines and lines[-1] == "Generated:":  # how 2023 says that it recorded nothing
        rule = next(rule for rule in _NSYS if rule.id == "no_report")
        found.append(LogProblem(rule.id, rule.what, rule.remedy, rule.fatal, "Generated: (nothing)"))
    said = next(filter(_AGENT_LOST.fullmatch, lines), None)
    if said is not None:  # behind all others, which say more
        what = "nsys lost the connection to its own agent."
        remedy = "Run it again; where it happens each time, end other profilers or use another Nsight Systems."
        found.append(LogProblem(AGENT_LOST, what, remedy, True, said))
    return tuple(found)


def ncu_log_problems(text: str) -> tuple[LogProblem, ...]:
    """What ncu complained of, the gravest first. Its own lines begin with ==, so that the program's are told apart."""
    found = _problems([line for line in _lines(text) if line.startswith("==")], _NCU)
    if any(problem.id == "cut_short" for problem in found):  # then the failed kernel is the one at which it was interrupted
        found = [replace(problem, fatal=False) if problem.id == "profiling_error" else problem for problem in found]
    return tuple(found)


def words_of_the_program(text: str) -> list[str]:
    """The lines of a log without a tool's own about its progress and where it wrote its report; its errors stay."""
    said = []
    after_generated = False
    for line in _lines(text):
        report = after_generated and _REPORT.fullmatch(line)
        after_generated = bool(report) or line == "Generated:"
        if not (after_generated or _PROGRESS.match(line)):
            said.append(line)
    return said


def log_error(problems: Sequence[LogProblem]) -> LlmPerfError | None:
    """The first problem that spoils the pass, as an error."""
    worst = next((problem for problem in problems if problem.fatal), None)
    if worst is None:
        return None
    if worst.id == _PERMISSION.id:
        return permission_error(worst.line)
    return CaptureError(f"{worst.what} ({worst.line})", worst.remedy)


FOLLOWS_A_FAILURE = ("no_report", "no_kernels", "program_failed")
"""What is said, too, of a program that failed before it came to its work."""


def _lines(text: str) -> list[str]:
    """Lines that say something; progress bars end in carriage returns."""
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _problems(lines: Sequence[str], rules: Sequence[_Rule]) -> list[LogProblem]:
    found = []
    for rule in rules:
        said = next((match for line in lines if (match := re.search(rule.pattern, line))), None)
        if said is not None:
            found.append(LogProblem(rule.id, rule.what, rule.remedy, rule.fatal, _around(said)))
    return found


def _around(said: re.Match[str], most: int = 300) -> str:
    """The line that was found; of a long one, which begins with where in the tool it was thrown, the part that says it."""
    return said.string[:most] if said.end() <= most else f"… {said.string[said.start() :][:most]}"
