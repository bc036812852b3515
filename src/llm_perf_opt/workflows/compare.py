"""`llm-perf compare`: find the runs of both sides, baselines included, and compare them."""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare, gate_names
from llm_perf_opt.analysis.comparison.differences import check_distinct, check_one_side
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.gates import parse_gates
from llm_perf_opt.analysis.comparison.serving import ServingComparison
from llm_perf_opt.analysis.comparison.sides import side_of
from llm_perf_opt.analysis.comparison.statistics import DEFAULT_JUDGEMENT
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError, ParseError, nearest
from llm_perf_opt.core.file_lock import changing
from llm_perf_opt.core.inside import root_of
from llm_perf_opt.core.run_folder import RunFolder, read_record, write_record
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.compare_serving import are_under_load, compare_serving_runs, read_run
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import is_sweep

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Baseline:
    """The runs that a name refers to."""

    runs: tuple[str, ...]
    """Relative to the folder of the file if they are in the same project, otherwise absolute."""
    set_at: str


@dataclass(frozen=True)
class _File:
    baselines: dict[str, Baseline] = field(default_factory=dict)


class Baselines:
    """The baselines in a folder of runs."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir

    @property
    def file(self) -> Path:
        """The file that stores them."""
        return self.runs_dir / "baselines.json"

    def read(self) -> dict[str, Baseline]:
        """Return every baseline. Raise ParseError if the file is damaged."""
        if not self.file.exists():
            return {}
        found = read_record(self.file, _File).baselines
        if any("\0" in text for baseline in found.values() for text in baseline.runs):
            raise ParseError(f"{self.file} contains an impossible path.", "Remove the file, and set the baselines again.")
        return found

    def set(self, name: str, runs: list[Path]) -> Baseline:
        """Name runs; an existing baseline of that name is replaced."""
        check_name(name)
        folders = [RunFolder.open(run).path for run in runs]
        if len(set(folders)) < len(folders):
            raise ConfigError("A run is given twice.", "Name each run once.")
        if is_run(Path(name)):
            raise ConfigError(f"{name!r} is also the path of a run: `compare {name}` would be ambiguous.", "Choose another name.")
        baseline = Baseline(
            tuple(self._stored(folder) for folder in folders), datetime.now(timezone.utc).isoformat(timespec="seconds")
        )
        root = root_of(self.runs_dir)
        with changing(root, self.file):
            write_record(root, self.file, _File({**self.read(), name: baseline}))
        return baseline

    def remove(self, name: str) -> None:
        """Remove a baseline; its runs stay."""
        root = root_of(self.runs_dir)
        with changing(root, self.file):
            known = self.read()
            self._require(name, known)
            kept = {other: baseline for other, baseline in known.items() if other != name}
            write_record(root, self.file, _File(kept))

    def runs_of(self, name: str) -> list[Path]:
        """Return the run folders of a baseline. Raise ConfigError if one no longer exists."""
        known = self.read()
        self._require(name, known)
        found = []
        for text in known[name].runs:
            path = self.place(text)
            if not is_run(path):
                raise ConfigError(
                    f"The baseline {name!r} points to {path}, which is no longer a run.",
                    f"Restore the run, or set the baseline again: `llm-perf baseline set {name} RUN`.",
                )
            found.append(path)
        return found

    def place(self, text: str) -> Path:
        """Return the folder of a stored path."""
        return (self.runs_dir / text).resolve()

    def _stored(self, folder: Path) -> str:
        home = self.runs_dir.resolve()
        text = os.path.relpath(folder, home) if folder.is_relative_to(home.parent) else str(folder)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{text} cannot be stored: its name is not valid UTF-8.", "Rename the folder.") from error
        return text

    def _require(self, name: str, known: dict[str, Baseline]) -> None:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"There is no baseline {name!r}.{nearest(name, known)}", f"Baselines in {self.file}: {listed}.")


def check_name(name: str) -> None:
    """Reject a name that could be read as a path, an option or several names."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name for a baseline.",
            "Use letters, digits, '.', '_' and '-'; start with a letter or digit.",
        )


def is_run(path: Path) -> bool:
    """Return whether the folder is a run. Raise SpecialFileError if its run.json is not a regular file."""
    check_ordinary(RunFolder(path).manifest_file)
    return RunFolder(path).manifest_file.is_file()


def compare_runs(
    base: Sequence[str],
    new: Sequence[str],
    runs_dir: Path,
    *,
    experiment: Sequence[str] = (),
    allow: Sequence[str] = (),
    gates: Sequence[str] = (),
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Comparison | ServingComparison:
    """Compare two sides, each given as paths, patterns or baselines. Invalid gates are rejected before anything is read."""
    parsed = parse_gates(gates, gate_names())
    folders = [resolve(words, runs_dir, name) for words, name in ((base, "base"), (new, "new"))]
    for path in set(folders[0]) & set(folders[1]):
        raise ConfigError(f"{path} is on both sides.", "Give different runs: a run cannot be compared with itself.")
    if are_under_load(folders):
        return compare_serving_runs(folders, parsed, allow, judgement)
    base_side, new_side = sides_of(folders[0], folders[1])
    return compare(base_side, new_side, experiment, allow, parsed, judgement)


def sides_of(base: Sequence[Path], new: Sequence[Path], *, traces: bool = True) -> tuple[Side, Side]:
    """Return the runs of two sides, analyzed. Raise ParseError if one is damaged, ConfigError if one is a copy of another."""
    sides = [side_of([analyzed(path, traces) for path in paths]) for paths in (base, new)]
    check_distinct([*sides[0].runs, *sides[1].runs])
    return sides[0], sides[1]


def analyzed(path: Path, traces: bool = True) -> RunAnalysis:
    """Return the analysis of a run. Raise ParseError if its times are damaged."""
    found = analyze(RunReader.open(path), traces=traces)
    if found.damaged:  # an analysis goes on without times, a comparison cannot
        raise found.damaged
    return found


def check_baseline(name: str, runs: Sequence[Path]) -> None:
    """Reject what cannot be a side of a comparison: a sweep, a folder of runs, a damaged run, runs that are not repeats."""
    for path in runs:
        if path.is_dir() and not is_run(path):
            raise _no_run(path, str(path), ())
    if are_under_load([runs]):
        for path in runs:
            read_run(path)
        return
    found = [analyzed(path, traces=False) for path in runs]
    check_distinct(found)
    check_one_side(f"the baseline {name!r}", found)


def resolve(words: Sequence[str], runs_dir: Path, side: str) -> list[Path]:
    """Return the run folders of one side, given as paths, patterns and baselines, separated by commas."""
    found: list[Path] = []
    for word in words:
        parts = [word] if is_run(Path(word)) else [part for part in word.split(",") if part]
        for part in parts:
            found += [path.resolve() for path in _runs_of(part, runs_dir)]
    if not found:
        raise ConfigError(f"The {side} side has no run.", "Give a run folder or the name of a baseline.")
    twice = next((path for path in found if found.count(path) > 1), None)
    if twice:
        raise ConfigError(f"{twice} is given twice on the {side} side.", "Name each run once.")
    return found


def _runs_of(word: str, runs_dir: Path) -> list[Path]:
    path, baselines = Path(word), Baselines(runs_dir)
    named = baselines.read() if "/" not in word else {}
    if is_run(path):
        if word in named:
            raise ConfigError(f"{word!r} is both a baseline and a run.", f"Write ./{word} for the run, or remove the baseline.")
        return [path]
    if word in named:
        return baselines.runs_of(word)
    if any(char in word for char in "*?["):
        matched = [Path(text) for text in sorted(glob.glob(word)) if is_run(Path(text))]  # noqa: PTH207 - may be absolute
        if matched:
            return matched
        raise ConfigError(f"No run matches {word!r}.", "The pattern must match run folders: runs/baseline/tiny/*.")
    raise _no_run(path, word, named)


def _no_run(path: Path, word: str, named: Iterable[str]) -> ConfigError:
    if is_sweep(path):
        return ConfigError(f"{path} is a sweep of several configurations.", f"Name one of its runs, such as {path / '000'}.")
    if path.is_dir():
        inside = [child for child in sorted(path.iterdir()) if is_run(child)]
        if inside:
            fact = f"{path} is not a run, but contains {len(inside)} run{'' if len(inside) == 1 else 's'}."
            return ConfigError(fact, f"Name one of them, or all as repeats: '{path}/*'.")
        return ConfigError(f"{path} is not a run: it has no run.json.", "Give the folder that `llm-perf run` printed.")
    known = ", ".join(sorted(named)) or "none"
    return ConfigError(
        f"{word!r} is neither a run nor a baseline.{nearest(word, named)}", f"Baselines: {known}. `llm-perf runs` lists runs."
    )
