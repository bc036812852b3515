"""A sweep on disk: the plan, which is written once, and a folder of runs for each point.

`sweep.json` lists the points, `plan.json` has the resolved configuration of each. Nothing records the status of a point: it
follows from run.json in the folders of its runs (`NNN`, `NNN-2` …). Processes on several machines therefore need no lock: each
writes only into a folder that it created.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, file_error
from llm_perf_opt.core.inside import check_links
from llm_perf_opt.core.records import SCHEMA, Manifest, Maybe, Missing
from llm_perf_opt.core.run_folder import OwnFolder, RunFolder, encoded, read_record, there
from llm_perf_opt.core.run_status import status_of
from llm_perf_opt.core.user_files import check_folder
from llm_perf_opt.workflows.run_reader import RunReader

PointStatus = Literal["pending", "complete", "partial", "failed", "damaged", "not readable"]
_RUN_NAME = re.compile(r"(\d{3,6})(?:-(\d{1,3}))?")
"""The folder of a point's run: its number, and a second number for each run after the first."""


@dataclass(frozen=True)
class PlannedPoint:
    """One configuration of a sweep."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    """The overrides that differ between the points."""


@dataclass(frozen=True)
class Sweep:
    """The contents of sweep.json."""

    schema: int
    tool_version: str
    created: str
    command: tuple[str, ...]
    config_dir: str | None
    points: tuple[PlannedPoint, ...]
    project: str | None = None
    """The folder that the command was started in, which relative paths start from. None in a sweep of an older version, whose
    points are composed from their overrides; those of all others are in plan.json."""


@dataclass(frozen=True)
class SweepPoint:
    """A point in its current state."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    folder: str = ""
    """Name of its run in the folder of the sweep; empty until it has started."""
    status: PointStatus = "pending"
    why: str = ""


class SweepFolder(OwnFolder):
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held: RunFolder | None = None

    @classmethod
    def create(cls, wanted: Path) -> "SweepFolder":
        """Create a new folder."""
        made = cls(RunFolder.create(wanted).path)
        made.hold()
        return made

    @classmethod
    def open(cls, path: Path) -> "SweepFolder":
        """Open a sweep. Raise ParseError if the folder is not a sweep."""
        remedy = "Give the folder that `llm-perf run -m` printed."
        check_folder(path)
        check_links(path)
        if not is_sweep(there(path, remedy)):
            raise ParseError(f"{path} is not a sweep: it has no sweep.json.", remedy)
        return cls(path.resolve())

    def hold(self) -> None:
        """Mark the sweep as in use, as long as this object lives."""
        self._held = RunFolder(self.path)
        self._held.hold()

    @property
    def sweep_file(self) -> Path:
        """The plan."""
        return self.path / "sweep.json"

    @property
    def page_file(self) -> Path:
        """The HTML report."""
        return self.path / "sweep.html"

    @property
    def report_file(self) -> Path:
        """The Markdown report."""
        return self.path / "sweep.md"

    @property
    def jobs_folder(self) -> Path:
        """What was submitted to a cluster, with the logs of the jobs."""
        return self.path / "jobs"

    def point_folder(self, number: int) -> Path:
        """Return the folder of the first run of a point."""
        return self.path / f"{number:03d}"

    # --- the plan -------------------------------------------------------------------------------------------------

    def read(self) -> Sweep:
        """Read sweep.json. Raise ParseError if it is damaged."""
        sweep = read_record(self.sweep_file, Sweep)
        if sweep.schema > SCHEMA:
            raise ParseError(f"{self.sweep_file} was written by a newer version.", "Upgrade llm-perf-opt.")
        return sweep

    def write_plan(self, sweep: Sweep, configs: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the plan, with the configuration of each point. sweep.json is the last file: it makes the folder a sweep."""
        if configs:
            self.write(self.plan_file, encoded(configs))
        self.write_record(self.sweep_file, sweep)

    def settings(self) -> list[dict[str, Any]]:
        """Return the planned configuration of each point. Raise ParseError if they are missing or damaged."""
        try:
            return read_record(self.plan_file, list[dict[str, Any]])
        except ParseError as error:
            raise ParseError(error.fact, "The plan cannot be used: start a new sweep.") from error

    @property
    def plan_file(self) -> Path:
        """The configuration of each point."""
        return self.path / "plan.json"

    # --- what has become of it ------------------------------------------------------------------------------------

    def points(self, sweep: Sweep | None = None) -> tuple[SweepPoint, ...]:
        """Return every point in the state that its runs show."""
        runs = self._runs()
        planned = (sweep or self.read()).points
        return tuple(self._point(point, runs.get(number, ())) for number, point in enumerate(planned))

    def point(self, number: int, sweep: Sweep) -> SweepPoint:
        """Return one point in the state that its runs show."""
        return self._point(sweep.points[number], self._runs().get(number, ()))

    def goes_on(self, number: int) -> bool:
        """Return whether the last run of a point has not ended: it is running, or was killed."""
        runs = self._runs().get(number, ())
        manifest = _manifest(RunFolder(self.path / runs[-1])) if runs else Missing("not run")
        return not isinstance(manifest, Missing) and any(entry.status in ("pending", "started") for entry in manifest.passes)

    def _runs(self) -> Mapping[int, Sequence[str]]:
        """Return the names of the run folders of each point, oldest first. Links are not followed."""
        found: dict[int, list[tuple[int, str]]] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _RUN_NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    found.setdefault(int(match[1]), []).append((int(match[2] or 1), entry.name))
        return {number: [name for _, name in sorted(names)] for number, names in found.items()}

    def _point(self, planned: PlannedPoint, runs: Sequence[str]) -> SweepPoint:
        """Return the state of a point: that of its last complete run, otherwise of its last run."""
        states = [self._state(planned, name) for name in runs]
        complete = [state for state in states if state.status == "complete"]
        return (complete or states or [SweepPoint(planned.overrides, planned.swept)])[-1]

    def _state(self, planned: PlannedPoint, name: str) -> SweepPoint:
        try:
            manifest = RunFolder(self.path / name).manifest()
        except ParseError as error:
            return SweepPoint(planned.overrides, planned.swept, name, status_of(error), error.fact)
        why = " ".join(filter(None, (manifest.why, manifest.remedy)))
        return SweepPoint(planned.overrides, planned.swept, name, manifest.status, why)

    def run(self, point: SweepPoint) -> Maybe[RunReader]:
        """Return the run of a point, or why there is none."""
        if not point.folder:
            return Missing(point.why or "the point was not run")
        try:
            return RunReader.open(self.path / point.folder)
        except (ConfigError, ParseError, ResourceError) as error:  # gone, damaged or not readable
            return Missing(error.fact)
        except OSError as error:
            return Missing(file_error(error).fact)


def _manifest(run: RunFolder) -> Maybe[Manifest]:
    try:
        return run.manifest()
    except ParseError as error:
        return Missing(error.fact)


def damage_of(point: SweepPoint, run: Maybe[RunReader]) -> Missing | None:
    """Return why the run of a complete point can no longer be used: its times are gone or damaged."""
    if point.status != "complete":
        return None
    if isinstance(run, Missing):
        return run
    damage = run.damage if run.manifest.pass_named("clean") is not None else None
    return None if damage is None else Missing(damage.fact)


def is_sweep(path: Path) -> bool:
    """Return whether the folder is a sweep."""
    return (path / "sweep.json").is_file()


def resume_command(folder: SweepFolder) -> str:
    """Return the command that resumes a sweep, as it can be pasted."""
    return f"llm-perf run --resume {shlex.quote(str(folder.path))}"


def resume_hint(folder: SweepFolder) -> str:
    """Return the remedy after an interrupt."""
    return f"`{resume_command(folder)}` runs the points that are not complete and writes missing reports."
