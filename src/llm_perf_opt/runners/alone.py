"""The measured process on its own, under a profiler that the user starts: its settings, its folder, its errors."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llm_perf_opt.config.composition import compose, config_to_yaml, expand_sweep, without_plus
from llm_perf_opt.config.guide_keys import RUN_DIR
from llm_perf_opt.config.guide_overrides import from_guides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.processes import under_nsys
from llm_perf_opt.core.run_folder import RunFolder

_FOLDER = Path("runs") / "alone"
_WRITTEN = ("stages.json", "timings.json", "operators.json")
"""What the passes write: a folder with one of them is of this process."""


@dataclass(frozen=True)
class Alone:
    """What to run, and where its files go."""

    config: RunConfig
    out: Path


def requested(overrides: Sequence[str], out: Path | None, *, multirun: bool = False) -> Alone:
    """Return the request of a command line, whose overrides may be those of the profiling guides."""
    translated = from_guides(overrides)
    for note in translated.notes:
        print("note:", note, file=sys.stderr)
    if any(without_plus(text).startswith("profiling=") for text in translated.overrides):
        print("note: this process runs one pass (--pass); profiling selects those of `llm-perf run`.", file=sys.stderr)
    points = expand_sweep(translated.overrides) if multirun else [translated.overrides]
    if len(points) > 1:
        raise ConfigError(
            f"-m with {len(points)} points: a profiler around this process would record only the first.",
            "`llm-perf run -m … profiling=nsys` starts one process and writes one report per point.",
        )
    composed = compose(points[0])
    for note in composed.config.project.notes:
        print("note:", note, file=sys.stderr)
    folder = out or (composed.run_dir if composed.run_dir_given else _FOLDER)
    if composed.run_dir_file and out is None:
        print(f"note: {RUN_DIR} in the project's files is for `llm-perf run`: the files are in {folder}.", file=sys.stderr)
    _check_folder(folder)
    return Alone(composed.config, folder)


def _check_folder(folder: Path) -> None:
    """Raise if a folder is that of a run, or has a config.yaml or inputs.yaml that this process did not write."""
    remedy = f"Choose another one with {RUN_DIR}=DIR or --out DIR."
    place = RunFolder(folder)
    if place.manifest_file.exists():
        raise ConfigError(f"{folder} is the folder of a run.", remedy)
    if folder == _FOLDER or any((folder / name).exists() for name in _WRITTEN):
        return
    for file in (place.config_file, place.inputs_file):
        if os.path.lexists(file):
            raise ConfigError(f"{file} would be overwritten, and there is no finished pass in {folder}.", remedy)


def write_manifests(config: RunConfig, inputs: dict[str, Any], out: Path) -> None:
    """Write config.yaml and inputs.yaml next to what the profiler writes."""
    folder = RunFolder(out)
    folder.write(folder.config_file, config_to_yaml(config).encode())
    folder.write(folder.inputs_file, yaml.safe_dump(inputs, sort_keys=False, default_flow_style=None).encode())


@contextmanager
def shown_errors(translate: Callable[[Exception], LlmPerfError]) -> Iterator[None]:
    """Wrap `main`: print an error as one message and exit with its code."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as raised:  # noqa: BLE001 - the frameworks raise anything
        error = raised if isinstance(raised, LlmPerfError) else translate(raised)
        print(f"error: {error.fact}", *([f"  → {error.remedy}"] if error.remedy else []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


def outlive_nsys() -> None:
    """Let this process finish if nsys ends it with the range that it records (SIGTERM), as it does unless told otherwise.

    Its files would be missing, and nsys would return 143. Only what is left of the pass, a few iterations, ignores the signal.
    """
    if under_nsys():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
