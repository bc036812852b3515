"""The folder of a search: its runs, tune.json with every run made so far, and the pages.

The search itself is not stored. It is a function of its runs, so a resumed search repeats its decisions from the runs in
tune.json and continues with the first run that is not there. A run that was cut off is not in it.
"""

import fcntl
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.file_lock import folder_lock
from llm_perf_opt.core.inside import check_links
from llm_perf_opt.core.run_folder import OwnFolder, RunFolder, read_record, there
from llm_perf_opt.core.user_files import check_folder, is_file_name

SCHEMA = 1
SUFFIX = "-tune"
STATE = "tune.json"
"""Options and runs of a search."""
STAIRCASE = "staircase.svg"


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for."""

    objective: str = "tpot"
    constraints: tuple[str, ...] = ()
    budget_s: float = 1800.0
    tokens: str = "same"
    allow_lossy: bool = False
    top: int | None = None
    """Findings of each run that are tried at most; None: all."""
    max_steps: int | None = None
    runs: int | None = None
    """Runs per side of a decision; None: by the device."""
    levers: tuple[str, ...] = ()
    """Levers of the user, KEY=VALUE,VALUE."""
    max_logit_diff: float | None = None
    """How far logits may be from those of the base after changes of precision, which it permits; None: no limit."""

    @property
    def lossy(self) -> bool:
        """Whether changes of precision are tried."""
        return self.allow_lossy or self.max_logit_diff is not None

    @property
    def logits(self) -> bool:
        """Whether runs record logits: if a decision may depend on them."""
        return self.tokens == "same" or self.lossy


@dataclass(frozen=True)
class MadeRun:
    """One run of the search."""

    key: str
    """The configuration, the number of the run of it, and its purpose."""
    run: str
    """Its folder inside the search; empty if there is none."""
    seconds: float
    why: str = ""
    """Why it has no result; empty if it has one."""


@dataclass(frozen=True)
class TuneState:
    """The contents of tune.json."""

    schema: int
    tool_version: str
    created: str
    command: tuple[str, ...]
    base: str
    """Absolute path of the run that the search starts from."""
    fresh: bool
    """Whether the base was measured for this search."""
    options: TuneOptions
    calibration: tuple[CalibrationPoint, ...] = ()
    """Earlier trials, as they were when the search began: they decide the order."""
    runs: tuple[MadeRun, ...] = ()
    spent_s: float = 0.0
    ended: str = ""
    """Why the search ended; empty while it has not."""


class TuneFolder(OwnFolder):
    """A search on disk. Only one process at a time may continue it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = self._locked()
        self._state: TuneState | None = None
        self.begun_here = False
        """Whether this process began the search, so that its options were typed."""

    @classmethod
    def create(cls, base: Path, state: TuneState) -> "TuneFolder":
        """Create the folder next to the base."""
        path = RunFolder.create(base.with_name(base.name + SUFFIX)).path
        made = cls(path)
        made.write_state(state)
        made.begun_here = True
        return made

    @classmethod
    def find(cls, path: Path) -> "TuneFolder":
        """Open the search of a run, or the search itself. Of several, the last one. Raise ConfigError if there is none."""
        there(path, "Give the run that was tuned, or the folder of the search.")
        if is_search(path):
            return cls.open(path)
        base = path.resolve()
        found = [
            folder
            for folder in base.parent.glob(f"{_escaped(base.name)}{SUFFIX}*")
            if is_search(folder) and not folder.is_symlink()
        ]
        if not found:
            raise ConfigError(f"{path} has no search to resume.", f"Start one: `llm-perf tune {shlex.quote(str(path))}`.")
        return cls.open(max(found, key=lambda folder: (read_record(folder / STATE, TuneState).created, folder.name)))

    @classmethod
    def open(cls, path: Path) -> "TuneFolder":
        """Open a search. Raise an OutsideError for a link in it that leads out of it."""
        check_folder(path)
        check_links(path)
        return cls(path.resolve())

    @property
    def state_file(self) -> Path:
        """Options and runs."""
        return self.path / STATE

    @property
    def page_file(self) -> Path:
        """The HTML page."""
        return self.path / "tune.html"

    @property
    def report_file(self) -> Path:
        """The Markdown page."""
        return self.path / "tune.md"

    @property
    def image_file(self) -> Path:
        """The staircase, which the Markdown page shows."""
        return self.path / STAIRCASE

    @property
    def result_file(self) -> Path:
        """The result as JSON, as `--json` prints it."""
        return self.path / "result.json"

    def read(self) -> TuneState:
        """Return the state. Raise ParseError if tune.json is damaged, or names a run neither inside the search nor next to it."""
        if self._state is None:
            state = read_record(self.state_file, TuneState)
            if state.schema > SCHEMA:
                raise ParseError(f"{self.state_file} was written by a newer version.", "Upgrade llm-perf-opt.")
            for made in state.runs:
                if made.run and not is_file_name(made.run):
                    raise ParseError(f"{self.state_file} names a run outside the search: {made.run!r}.")
            if Path(state.base).parent.resolve() != self.path.resolve().parent:
                fact = f"{self.state_file} starts from a run elsewhere: {state.base}."
                raise ParseError(fact, "A search lies next to its run: move it there.")
            self._state = state
        return self._state

    def write_state(self, state: TuneState) -> None:
        """Replace tune.json."""
        self.write_record(self.state_file, state)
        self._state = state

    def add(self, made: MadeRun, spent_s: float) -> None:
        """Record a run."""
        state = self.read()
        self.write_state(replace(state, runs=(*state.runs, made), spent_s=spent_s))

    def spend(self, spent_s: float) -> None:
        """Record the time of a run that is not kept."""
        self.write_state(replace(self.read(), spent_s=spent_s))

    def _locked(self) -> int | None:
        try:
            return folder_lock(self.path, fcntl.LOCK_EX)
        except BlockingIOError:
            raise ResourceError(f"{self.path} is in use by another process.", "Wait until it has ended.") from None

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def resume_command(base: str, *options: str) -> str:
    """Return the command that continues the search of a run, as it can be pasted."""
    return shlex.join(["llm-perf", "tune", base, "--resume", *options])


def is_search(path: Path) -> bool:
    """Return whether the folder is a search."""
    return (path / STATE).is_file()


def _escaped(name: str) -> str:
    """Return a name for a glob pattern."""
    return "".join(f"[{char}]" if char in "[*?" else char for char in name)
