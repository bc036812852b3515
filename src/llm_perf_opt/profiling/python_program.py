"""The torch.profiler pass of `llm-perf exec`: a user's Python program in its own interpreter."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.host_records import ProgramProfile
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.profiling.passes import Capture, PassOutcome, run_pass
from llm_perf_opt.runners.measure import program_profiler
from llm_perf_opt.runners.measure.torch_profiler import PRESETS

LAUNCH_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch"),
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
)
"""Modules that run a program in other processes, with `python -m`."""
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
"""Scripts that do the same."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_HAS_TORCH = "import importlib.util; print('torch' if importlib.util.find_spec('torch') else '')"
_WHOLE = "torch.profiler recorded the whole program: it cannot be restricted to a range."


@dataclass(frozen=True)
class PythonProgram:
    """The command of a Python program."""

    interpreter: tuple[str, ...]
    """The interpreter and its options."""
    target: tuple[str, ...]
    """SCRIPT, `-m MODULE` or `-c CODE`, and the arguments of the program."""


def python_program(argv: Sequence[str]) -> Maybe[PythonProgram]:
    """Return the parts of the command, or why it is not a Python program that can be wrapped."""
    if not _PYTHON.fullmatch(Path(argv[0]).name):
        return Missing(f"{argv[0]} is not a Python interpreter")
    at = 1
    while at < len(argv):
        word = argv[at]
        if not word.startswith("-"):
            if Path(word).name in _LAUNCHERS:
                return Missing(f"{word} runs the program in other processes")
            return PythonProgram(tuple(argv[:at]), tuple(argv[at:]))
        letters = re.fullmatch(r"-([^-mcWX]*)([mcWX]?)(.*)", word, re.DOTALL)
        if word == "-" or word.startswith("--") or letters is None:
            break
        flags, option, value = letters.groups()
        if option in ("m", "c"):
            rest = [value, *argv[at + 1 :]] if value else list(argv[at + 1 :])
            if not rest:
                break
            if option == "m" and rest[0] in LAUNCH_MODULES:
                return Missing(f"{rest[0]} runs the program in other processes")
            before = (*argv[:at], f"-{flags}") if flags else tuple(argv[:at])
            return PythonProgram(before, (f"-{option}", *rest))
        at += 2 if option and not value else 1
    return Missing("it names no script, module or code")


def check_python(argv: Sequence[str]) -> None:
    """Raise if torch.profiler cannot record this program: it is not Python, or its interpreter has no torch."""
    found = python_program(argv)
    if isinstance(found, Missing):
        raise ConfigError(
            f"The torch pass records Python programs only: {found.why}.",
            "Write `-- python SCRIPT`, `-- python -m MODULE` or `-- python -c CODE`, or leave out torch in --passes.",
        )
    if (ask([*found.interpreter, "-c", _HAS_TORCH], timeout_s=60) or "").strip() != "torch":
        raise ResourceError(
            f"The torch pass needs torch, and {found.interpreter[0]} does not have it.",
            "Install torch for this interpreter, or leave out torch in --passes.",
        )


def profiled_argv(program: PythonProgram, folder: Path, preset: TorchPreset) -> list[str]:
    """Return the command that runs the program under torch.profiler and writes to `folder`."""
    settings = json.dumps(PRESETS[preset])
    return [*program.interpreter, program_profiler.__file__, str(folder.resolve()), preset, settings, *program.target]


def launch(capture: Capture) -> None:
    """Run the program of a capture under torch.profiler."""
    folder, program = capture.folder, capture.program
    capture.started("torch")
    found = python_program(program.argv) if program else Missing("no program is profiled")
    if isinstance(found, Missing):
        remedy = capture.without("torch")
        raise ConfigError(f"torch.profiler cannot record the program: {found.why}.", f"{remedy[0].upper()}{remedy[1:]}.")
    gated = bool(program and program.range) or capture.profiling.nsys.capture != "nvtx"
    argv = profiled_argv(found, folder.raw("torch"), capture.profiling.torch.preset)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        return PassOutcome(ended or _lost(folder))

    run_pass(folder, capture.plan("torch", argv, "torch.profiler", _WHOLE if gated else ""), capture.listener, check=check)


def _lost(folder: RunFolder) -> LlmPerfError | None:
    """Return an error if the pass left nothing to read."""
    if not (folder.torch_trace_file.exists() and folder.program_profile_file.exists()):
        remedy = f"The program may have ended with os._exit; see {folder.log_file('torch')}."
        return CaptureError("torch.profiler left no trace.", remedy)
    if read_record(folder.program_profile_file, ProgramProfile).worked:
        return None
    remedy = "Profile the Python program that calls torch, not one that starts it in another process."
    return CaptureError("torch.profiler recorded no operator: the process did no work with torch.", remedy)
