"""A sweep on disk: a folder of run folders, and sweep.json with the configuration and status of each."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.records import SCHEMA, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_record, there, write_record
from llm_perf_opt.core.user_files import check_folder
from llm_perf_opt.workflows.run_reader import RunReader

PointStatus = Literal["pending", "complete", "partial", "failed"]


@dataclass(frozen=True)
class SweepPoint:
    """One configuration of a sweep."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    """The overrides that differ between the points."""
    folder: str = ""
    """Name of its run in the folder of the sweep; empty until it has started."""
    status: PointStatus = "pending"
    why: str = ""


@dataclass(frozen=True)
class Sweep:
    """The contents of sweep.json."""

    schema: int
    tool_version: str
    created: str
    command: tuple[str, ...]
    config_dir: str | None
    points: tuple[SweepPoint, ...]


class SweepFolder:
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        if not is_sweep(there(path, remedy)):
            raise ParseError(f"{path} is not a sweep: it has no sweep.json.", remedy)
        return cls(path.resolve())

    def hold(self) -> None:
        """Mark the sweep as in use, as long as this object lives."""
        self._held = RunFolder(self.path)
        self._held.hold()

    @property
    def sweep_file(self) -> Path:
        """The configuration and the status of each point."""
        return self.path / "sweep.json"

    @property
    def page_file(self) -> Path:
        """The HTML report."""
        return self.path / "sweep.html"

    @property
    def report_file(self) -> Path:
        """The Markdown report."""
        return self.path / "sweep.md"

    def point_folder(self, number: int) -> Path:
        """Return the run folder of a point."""
        return self.path / f"{number:03d}"

    def run(self, point: SweepPoint) -> Maybe[RunReader]:
        """Return the run of a point, or why there is none."""
        if not point.folder:
            return Missing(point.why or "the point was not run")
        try:
            return RunReader.open(self.path / point.folder)
        except (ConfigError, ParseError) as error:  # gone, or damaged
            return Missing(error.fact)

    def read(self) -> Sweep:
        """Read sweep.json. Raise ParseError if it is damaged."""
        sweep = read_record(self.sweep_file, Sweep)
        if sweep.schema > SCHEMA:
            raise ParseError(f"{self.sweep_file} was written by a newer version.", "Upgrade llm-perf-opt.")
        for point in sweep.points:
            if Path(point.folder).name != point.folder or "\0" in point.folder:
                raise ParseError(f"{self.sweep_file} names a run outside the sweep: {point.folder!r}.")
        return sweep

    def write(self, sweep: Sweep) -> None:
        """Replace sweep.json."""
        write_record(self.sweep_file, sweep)

    def update(self, number: int, point: SweepPoint) -> None:
        """Replace one point."""
        sweep = self.read()
        points = list(sweep.points)
        points[number] = point
        self.write(replace(sweep, points=tuple(points)))


def damage_of(point: SweepPoint, run: Maybe[RunReader]) -> Missing | None:
    """Return why the run of a complete point can no longer be used: its folder or its times are gone or damaged."""
    if point.status != "complete":
        return None
    if isinstance(run, Missing):
        return run
    damage = run.damage if run.manifest.pass_named("clean") is not None else None
    return None if damage is None else Missing(damage.fact)


def is_sweep(path: Path) -> bool:
    """Return whether the folder is a sweep."""
    return (path / "sweep.json").is_file()
