"""The runs of a search: made once, recorded, and read back when the search is resumed; the time budget."""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.analysis.comparison.facts import flatten
from llm_perf_opt.analysis.metrics import compile_seconds
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.config.composition import with_overrides
from llm_perf_opt.core.errors import Interrupted, LlmPerfError
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.report.text import known
from llm_perf_opt.workflows.tune_folder import MadeRun, TuneFolder, resume_command

Clock = Callable[[], float]
_NOT_COMPARED = ("profiling", "project", "experiment")
_LEAST_S = 1.0
_COMPILED_AGAIN = 0.3
"""Share of the compile time that a further run of a configuration is expected to take: torch keeps compiled code for the next
process. On an H200, 26.2 s became 6.4 s (24 %)."""
_MARGIN, _MARGIN_S = 1.25, 10.0
"""How much longer than expected runs may take in a budget that is suggested, and the time to read the earlier ones."""


@dataclass(frozen=True)
class Configuration:
    """The configuration of the base with some settings replaced."""

    overrides: tuple[str, ...]
    signature: str
    """Equal for equal configurations, however they are written."""


def configuration(values: Mapping[str, Any], overrides: tuple[str, ...]) -> Configuration:
    """Return a configuration; the last override of a key counts. Raise ConfigError if it is invalid."""
    by_key = {text.partition("=")[0]: text for text in overrides}
    merged = tuple(by_key.values())
    plain = {key: value for key, value in asdict(with_overrides(values, merged)).items() if key not in _NOT_COMPARED}
    text = json.dumps(sorted(flatten(plain).items()))
    return Configuration(merged, hashlib.sha256(text.encode()).hexdigest()[:16])


class Runs(Protocol):
    """Measures configurations and reads their runs."""

    def measure(
        self, overrides: tuple[str, ...], name: str, *, profiled: bool, limit_s: float
    ) -> tuple[Path | None, LlmPerfError | None]:
        """Make a run inside the folder of the search; return its folder, and the error that ended it."""

    def read(self, path: Path, *, profiled: bool) -> Tried:
        """Read a run; with its trace if it is profiled."""


class OutOfBudgetError(Exception):
    """The next run would not end within the budget."""


class StoppedError(Exception):
    """The user stopped the search."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(error.fact)
        self.error = error


class Recorder:
    """Makes each run of the search once. A resumed search gets the recorded ones."""

    def __init__(self, folder: TuneFolder, runs: Runs, clock: Clock = time.monotonic) -> None:
        self._folder, self._runs, self._clock = folder, runs, clock
        state = folder.read()
        self._known = {made.key: made for made in state.runs}
        self._resumed, self._made_here = bool(state.runs), set[str]()
        self._numbers: dict[tuple[str, str], int] = {}
        self._before_s, self._begun = state.spent_s, clock()
        self.budget_s = state.options.budget_s
        self._took: dict[str, float] = {}
        """Configuration → seconds that another run of it is expected to take."""
        self._compiling_s: dict[str, float] = {}
        """Configuration → seconds that its first run took longer than another one is expected to take."""
        self._profiled_s = 0.0
        """What the profiled passes of a run are expected to add."""
        self._usual = ""
        """The configuration that a new one is expected to take as long as."""

    def expect(self, base: Configuration, seconds: float, profiled_s: float, timings: Maybe[CleanTimings]) -> None:
        """Note how long the unprofiled pass of the base took, how long the others, and its times."""
        self._note(base, seconds, timings)
        self._profiled_s = profiled_s
        self.changes_from(base)

    def changes_from(self, current: Configuration) -> None:
        """Expect a run of a new configuration to take as long as one of this."""
        self._usual = current.signature

    @property
    def profiled_s(self) -> float:
        """What the profiled passes of a run are expected to add."""
        return self._profiled_s

    @property
    def left_s(self) -> float:
        """The time that is left."""
        return self.budget_s - self.spent_s

    @property
    def spent_s(self) -> float:
        """The time of the search so far, over all processes that worked on it."""
        return self._before_s + self._clock() - self._begun

    def resume_command(self, more_s: float) -> str:
        """Return the command that continues the search for a little longer than this."""
        budget_s = math.ceil((self.spent_s + _MARGIN * more_s + _MARGIN_S) / 10) * 10
        return resume_command(self._folder.read().base, "--budget", f"{budget_s}s")

    def run(
        self, wanted: Configuration, name: str, *, profiled: bool = False, reserve_s: float = 0.0, purpose: str = ""
    ) -> Maybe[Tried]:
        """Return a new run of the configuration, or why it has no result.

        `purpose`: what it is compared with. A resumed search gets a recorded run only for the purpose it was made for, so that
        the runs of a comparison stay those that alternated. Raise OutOfBudgetError if it may not end in time for `reserve_s`
        to remain, StoppedError if the user stops it.
        """
        number = self._numbers.get((wanted.signature, purpose), 0)
        self._numbers[wanted.signature, purpose] = number + 1
        key = f"{_key(wanted, number, purpose)}{':profiled' if profiled else ''}"
        made = self._known.get(key) or self._make(key, wanted, name, profiled, reserve_s)
        if made.why:
            return Missing(made.why)
        try:
            tried = self._runs.read(self._folder.path / made.run, profiled=profiled)
        except Interrupted as error:
            raise StoppedError(error) from error
        except LlmPerfError as error:
            return Missing(error.fact)
        timings = tried.timings
        if isinstance(timings, Missing):
            return timings
        if not profiled:
            self._note(wanted, made.seconds, timings)
        return tried

    def _note(self, wanted: Configuration, took_s: float, timings: Maybe[CleanTimings]) -> None:
        """Note how long a run of a configuration took. The shortest one counts, and the one that compiled longest."""
        key, seconds = wanted.signature, again_s(took_s, timings)
        self._took[key] = min(self._took.get(key, seconds), seconds)
        self._compiling_s[key] = max(self._compiling_s.get(key, 0.0), took_s - seconds)

    def require(self, seconds: float, first: Configuration, purpose: str) -> None:
        """Raise OutOfBudgetError if runs that take so long do not fit, unless the first of them was already made."""
        if self.left_s < seconds and not self.has(first, purpose):
            raise OutOfBudgetError

    def is_from_before(self, run: Tried, wanted: Configuration, purpose: str, of_change: str = "") -> bool:
        """Return whether a run of an earlier process must be made again for `purpose`, because `wanted` was not run after it.

        `of_change`: what the runs of `wanted` are recorded for.
        """
        again = any(key.endswith(f":0:{purpose}") for key in self._known)
        return again or (self._resumed and not self.has(wanted, of_change) and run.path not in self._made_here)

    def has(self, wanted: Configuration, purpose: str = "") -> bool:
        """Return whether a run of the configuration was recorded for a purpose."""
        return _key(wanted, 0, purpose) in self._known

    def expected_s(self, *configurations: Configuration) -> float:
        """Return how long a run of each configuration is expected to take; for a new one, as long as the current one."""
        usual = self._took.get(self._usual, 0.0)
        return sum(max(self._took.get(one.signature, usual), _LEAST_S) for one in configurations)

    def compiling_s(self, wanted: Configuration) -> float:
        """Return how much longer the first run of a new configuration is expected to take: as much as that of the current one."""
        return 0.0 if wanted.signature in self._took else self._compiling_s.get(self._usual, 0.0)

    def _make(self, key: str, wanted: Configuration, name: str, profiled: bool, reserve_s: float) -> MadeRun:
        left = self.left_s
        expected_s = self.expected_s(wanted) + self.compiling_s(wanted) + (self._profiled_s if profiled else 0.0)
        if left < expected_s + reserve_s:
            raise OutOfBudgetError
        begun, limit_s = self._clock(), left - reserve_s
        folder, error = self._runs.measure(wanted.overrides, name, profiled=profiled, limit_s=limit_s)
        seconds = self._clock() - begun
        if isinstance(error, Interrupted):
            if folder is not None and _is_usable(folder, profiled=profiled):
                self._add(MadeRun(key, folder.name, seconds))
            raise StoppedError(error)
        if error is not None and seconds >= limit_s:  # the budget ended it: with a larger one it is made again
            self._folder.spend(self.spent_s)
            raise OutOfBudgetError
        self._made_here.add(str(folder))
        return self._add(MadeRun(key, folder.name if folder else "", seconds, error.fact if error else ""))

    def _add(self, made: MadeRun) -> MadeRun:
        self._folder.add(made, self.spent_s)
        return made


def _is_usable(run: Path, *, profiled: bool) -> bool:
    """Return whether an interrupted run has what it was made for."""
    try:
        manifest = RunFolder(run).manifest()
    except LlmPerfError:
        return False
    return manifest.status == "complete" if profiled else manifest.has_times


def _key(wanted: Configuration, number: int, purpose: str = "") -> str:
    return f"{wanted.signature}:{number}{f':{purpose}' if purpose else ''}"


def again_s(seconds: float, timings: Maybe[CleanTimings]) -> float:
    """Return how long a further run of a configuration is expected to take, from one that took `seconds`."""
    compiling = 0.0 if isinstance(timings, Missing) else known(compile_seconds(timings), 0.0)
    return max(seconds - (1 - _COMPILED_AGAIN) * compiling, _LEAST_S)


def folder_name(number: int, words: str, run: int | str) -> str:
    """Return the name of a trial's folder: its number, its change and the number of the run."""
    values = "-".join(text.partition("=")[2] for text in words.split()) or words
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9.]+', '-', values).strip('-.')[:40] or 'change'}-{run}"
