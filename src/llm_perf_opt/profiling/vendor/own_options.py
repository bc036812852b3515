"""Options of nsys and ncu that the user adds to a command, and the ones that llm-perf must set itself."""

import re
from collections.abc import Collection, Sequence

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.profiling.vendor.gates import Tool

_REPORT = "llm-perf names the report and reads it afterwards"
_GATE = "llm-perf decides when the recording starts and stops"
_LAUNCHES = "the launches to count are selected from a timeline; another filter would count others"
_MESSAGES = "the messages of the tool are read from its log"
_NO_PROFILE = "the tool would not profile the program"
_SESSION = "the tool must run until the program ends"
_LOADS = "it loads code, or more options, from a file"
_OURS = "llm-perf sets it"

_NSYS = {
    **dict.fromkeys(("--output", "--force-overwrite", "--export", "--stats"), _REPORT),
    **dict.fromkeys(
        ("--capture-range", "--nvtx-capture", "--capture-range-end", "--start-later", "--delay", "--duration"), _GATE
    ),
    **dict.fromkeys(("--capture-range-op", "--hotkey-capture", "--start-frame-index", "--duration-frames"), _GATE),
    **dict.fromkeys(("--session", "--session-new", "--stop-on-exit", "--stop-on-range-end", "--wait", "--kill"), _SESSION),
    **dict.fromkeys(("--help", "--version", "--run-as"), _NO_PROFILE),
    **dict.fromkeys(("--command-file", "--enable"), _LOADS),  # --enable starts a plugin of nsys
    **dict.fromkeys(("--trace", "--sample", "--cpuctxsw", "--gpu-metrics-device", "--gpu-metrics-devices"), _OURS),
    "--cuda-graph-trace": "kernels inside CUDA graphs must be recorded one by one",
    "--trace-fork-before-exec": "processes that the program forks are always followed",
    **dict.fromkeys(("--env-var", "--inherit-environment"), "the program gets the environment of llm-perf"),
    "--show-output": _MESSAGES,
}
_NCU = {
    **dict.fromkeys(("--export", "--force-overwrite", "--import", "--csv", "--page", "--details-all"), _REPORT),
    **dict.fromkeys(("--print-units", "--print-fp", "--print-summary", "--print-kernel-base", "--print-details"), _REPORT),
    **dict.fromkeys(("--print-metric-instances", "--print-metric-name", "--print-metric-attribution"), _REPORT),
    **dict.fromkeys(("--print-nvtx-rename", "--print-source", "--print-rule-details"), _REPORT),
    **dict.fromkeys(("--open-in-ui", "--mode", "--hostname", "--port", "--help", "--version"), _NO_PROFILE),
    **dict.fromkeys(("--query-metrics", "--query-metrics-mode", "--query-metrics-collection", "--chips"), _NO_PROFILE),
    **dict.fromkeys(("--list-sets", "--list-sections", "--list-metrics", "--list-rules", "--list-chips"), _NO_PROFILE),
    **dict.fromkeys(("--log-file", "--quiet", "--check-exit-code"), _MESSAGES),
    **dict.fromkeys(("--nvtx", "--nvtx-include", "--nvtx-exclude", "--range-filter", "--filter-mode", "--kernel-id"), _LAUNCHES),
    **dict.fromkeys(("--kernel-name-base", "--launch-skip-before-match", "--devices", "--graph-profiling"), _LAUNCHES),
    **dict.fromkeys(("--replay-mode", "--range-replay-options", "--app-replay-match"), _LAUNCHES),
    **dict.fromkeys(("--profile-from-start", "--disable-profiler-start-stop"), _GATE),
    **dict.fromkeys(("--target-processes", "--target-processes-filter"), "all processes of the program are profiled"),
    **dict.fromkeys(("--preload-library", "--injection-path-32", "--injection-path-64"), _LOADS),
    **dict.fromkeys(("--section-folder", "--section-folder-recursive", "--section-folder-restore"), _LOADS),
    **dict.fromkeys(("--config-file", "--config-file-path"), _LOADS),
    "--kill": _SESSION,
    **dict.fromkeys(("--metrics", "--section", "--set", "--kernel-name", "--launch-skip", "--launch-count"), _OURS),
    **dict.fromkeys(("--clock-control", "--cache-control"), _OURS),
}
RESERVED: dict[Tool, dict[str, str]] = {"nsys": _NSYS, "ncu": _NCU}
"""Options that are not accepted, and why."""
_INSTEAD = {
    "--trace": "Use profiling.nsys.trace.",
    "--sample": "Use profiling.nsys.sample.",
    "--cpuctxsw": "Use profiling.nsys.sample, which also sets this option.",
    "--gpu-metrics-device": "Use a metric set with gpu_metrics: true.",
    "--gpu-metrics-devices": "Use a metric set with gpu_metrics: true.",
    "--env-var": "Set the variable in the environment of llm-perf.",
    "--metrics": "Use profiling.metrics.add, which checks the name on this chip.",
    "--section": "Use profiling.ncu.sections.",
    "--set": "Use profiling.ncu.set.",
    "--kernel-name": "Use profiling.ncu.kernel_regex.",
    "--launch-skip": "Use profiling.ncu.launch_skip.",
    "--launch-count": "Use profiling.ncu.launch_count.",
    "--clock-control": "Use profiling.ncu.clock_control.",
    "--cache-control": "Use profiling.ncu.cache_control.",
}
"""Option → what to do instead."""

_LONG = re.compile(r"--[a-z0-9][a-z0-9-]*")


def own_options(tool: Tool, words: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """Return the user's words as options of the tool, each with its value attached; raise a ConfigError for any other.

    A value is joined with `=`, so no word can be taken for the program. `known` contains the options that the installed tool
    lists; empty: not checked.
    """
    found: list[str] = []
    for word in words:
        if not word.startswith("-"):
            if not found or "=" in found[-1]:
                raise _error(tool, word, "it is neither an option nor the value of one", "Write options as --NAME=VALUE.")
            found[-1] = f"{found[-1]}={word}"
            continue
        _check_option(tool, word.partition("=")[0], known)
        found.append(word)
    return found


def _check_option(tool: Tool, name: str, known: Collection[str]) -> None:
    if not _LONG.fullmatch(name):
        raise _error(tool, name, "short options are not accepted", "Write the long form, --NAME=VALUE.")
    if reason := RESERVED[tool].get(name):
        raise _error(tool, name, reason, _INSTEAD.get(name, "Remove it."))
    if known and name not in known:
        open_ones = [flag for flag in known if flag not in RESERVED[tool]]
        raise _error(tool, name, f"the installed {tool} has no such option.{nearest(name, open_ones)}", _help(tool))


def _help(tool: Tool) -> str:
    return f"`{'nsys profile' if tool == 'nsys' else tool} --help` lists the options."


def _error(tool: Tool, word: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"profiling.{tool}.args: {word!r} is not accepted: {why}.", remedy)
