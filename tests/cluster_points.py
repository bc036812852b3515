"""Points of a sweep for the tests of real clusters: small, and one of them can be held until it is killed."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import HANG_S
from llm_perf_opt.config import passes
from plugins import bring

_NAP = '''
"""A pass that waits while a file exists, in the point with the largest batch and without a measurement."""

import sys
from dataclasses import dataclass

from llm_perf_opt.config.passes import Pass, is_there
from llm_perf_opt.profiling.passes import run_alone

SCRIPT = """
import pathlib, sys, time
out, hold, held = sys.argv[1:]
pathlib.Path(out).write_text("up")
while held == "yes" and pathlib.Path(hold).exists():
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Settings:
    enable: bool = False
    hold: str = ""


def launch(capture):
    held = not capture.profiling.clean and capture.config.runtime.batch_size == 4
    out = capture.folder.raw("nap") / "up"
    argv = [sys.executable, "-S", "-c", SCRIPT, str(out), capture.settings("nap").hold, "yes" if held else "no"]
    run_alone(capture, "nap", argv, "nap 1.0")


PASS = Pass("nap", "waiting", 10, launch, settings=Settings, leaves={"up": is_there}, tool="Nap")
'''
SMALL = (
    "model=tiny", "hardware=cpu", "hardware.threads=1", "profiling=none", "runtime.prompt_tokens=4", "runtime.num_new_tokens=2",
    "runtime.min_repeats=1", "runtime.max_repeats=1", "runtime.max_warmup=1", "profiling.passes.nap.enable=true",
)  # fmt: skip


def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a cluster whose nodes have the pass."""
    site = bring(tmp_path / "site", "nap", "nap_pass:PASS", _NAP, "nap", passes.GROUP)
    here = Path(__file__).parents[1] / "src"
    paths = [str(here), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def four_points(hold: Path) -> list[str]:
    """The settings of four points without a measurement; the last is held while the file exists."""
    return [*SMALL, "runtime.batch_size=1,2,3,4", "profiling.clean=false", f"profiling.passes.nap.hold={hold}"]


def two_measured_points(hold: Path) -> list[str]:
    """The settings of four points, of which the first two are measured and the last is held while the file exists."""
    return [*SMALL, "profiling.clean=true,false", "runtime.batch_size=2,4", f"profiling.passes.nap.hold={hold}"]


def wait_for(what: Callable[[], Any], name: str) -> None:
    """Wait until something is there; the limit is reached by a hang only."""
    deadline = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < deadline, name
        time.sleep(0.2)


def points_of(output: str) -> list[tuple[str, str]]:
    """The status and the folder of each point, from `--json`."""
    return [(point["status"], point["folder"]) for point in json.loads(output)["points"]]


def llm_perf(python: Path | str | None = None) -> list[str]:
    """The command, with an interpreter."""
    return [str(python or sys.executable), "-m", "llm_perf_opt"]
