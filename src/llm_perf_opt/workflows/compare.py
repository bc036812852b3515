"""What `llm-perf compare` asks: words → run folders → the two sides."""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt.analysis.comparison.compare import Comparison, compare, gate_names
from llm_perf_opt.analysis.comparison.differences import check_distinct, check_one_side
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.gates import parse_gates
from llm_perf_opt.analysis.comparison.sides import side_of
from llm_perf_opt.analysis.comparison.statistics import DEFAULT_JUDGEMENT
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError, ParseError, nearest
from llm_perf_opt.core.run_folder import RunFolder, read_record, write_record
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import is_sweep

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Baseline:
    """What a name stands for."""

    runs: tuple[str, ...]
    """Relative to the folder that holds the file, where they lie in the same project; else absolute."""
    set_at: str


@dataclass(frozen=True)
class _File:
    baselines: dict[str, Baseline] = field(default_factory=dict)


class Baselines:
    """The baselines of one folder of runs."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir

    @property
    def file(self) -> Path:
        """Where they are written down."""
        return self.runs_dir / "baselines.json"

    def read(self) -> dict[str, Baseline]:
        """Every name; none where nothing was set yet. A damaged file is a ParseError."""
        if not self.file.exists():
            return {}
        found = read_record(self.file, _File).baselines
        if any("\0" in text for one in found.values() for text in one.runs):
            raise ParseError(f"{self.file} names a path that there cannot be.", "Remove the file, and set the baselines anew.")
        return found

    def set(self, name: str, runs: list[Path]) -> Baseline:
        """Give a name to runs; an earlier meaning of the name is replaced."""
        check_name(name)
        folders = [RunFolder.open(run).path for run in runs]
        if len(set(folders)) < len(folders):
            raise ConfigError("One run is named twice.", "A run is no repeat of itself: name each once.")
        if is_run(Path(name)):
            raise ConfigError(
                f"{name!r} is also the path of a run here: `compare {name}` could mean either.", "Choose another name."
            )
        baseline = Baseline(
            tuple(self._written(folder) for folder in folders), datetime.now(timezone.utc).isoformat(timespec="seconds")
        )
        write_record(self.file, _File({**self.read(), name: baseline}))
        return baseline

    def remove(self, name: str) -> None:
        """Forget a name; the runs stay."""
        known = self.read()
        self._known(name, known)
        write_record(self.file, _File({one: baseline for one, baseline in known.items() if one != name}))

    def runs_of(self, name: str) -> list[Path]:
        """The run folders behind a name; one that is gone is named as such."""
        known = self.read()
        self._known(name, known)
        found = []
        for text in known[name].runs:
            path = self.place(text)
            if not is_run(path):
                raise ConfigError(
                    f"The baseline {name!r} points to {path}, and there is no run there any more.",
                    f"Bring the run back, or set it anew: `llm-perf baseline set {name} RUN`.",
                )
            found.append(path)
        return found

    def place(self, text: str) -> Path:
        """Where a written path lies."""
        return (self.runs_dir / text).resolve()

    def _written(self, folder: Path) -> str:
        home = self.runs_dir.resolve()
        text = os.path.relpath(folder, home) if folder.is_relative_to(home.parent) else str(folder)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{text} cannot be written down: its name is no UTF-8.", "Rename the folder.") from error
        return text

    def _known(self, name: str, known: dict[str, Baseline]) -> None:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none is set"
            raise ConfigError(f"No baseline is called {name!r}.{nearest(name, known)}", f"Baselines in {self.file}: {listed}.")


def check_name(name: str) -> None:
    """Refuse a name that could be read as a path, an option or several names."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a baseline.", "Use letters, digits, '.', '_' and '-', beginning with a letter or digit."
        )


def is_run(path: Path) -> bool:
    """Whether a run lies here; a SpecialFileError where its run.json is no ordinary file."""
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
) -> Comparison:
    """Compare what the words of each side stand for. Wrong gates are told before anything is read."""
    parsed = parse_gates(gates, gate_names())
    folders = [resolve(words, runs_dir, name) for words, name in ((base, "base"), (new, "new"))]
    for path in set(folders[0]) & set(folders[1]):
        raise ConfigError(f"{path} stands on both sides.", "A run is not compared with itself.")
    sides = [side_of([_analyzed(path) for path in paths]) for paths in folders]
    check_distinct([*sides[0].runs, *sides[1].runs])
    return compare(sides[0], sides[1], experiment, allow, parsed, judgement)


def _analyzed(path: Path, traces: bool = True) -> RunAnalysis:
    """A run as it is compared, or a ParseError where its times are not what a measurement leaves."""
    found = analyze(RunReader.open(path), traces=traces)
    if found.damaged:  # the analysis leaves the times out and goes on: here they are what is asked for
        raise found.damaged
    return found


def check_baseline(name: str, runs: Sequence[Path]) -> None:
    """Refuse what cannot be a side of a comparison: a sweep, a folder of runs, a damaged run, runs that are not repeats."""
    for path in runs:
        if path.is_dir() and not is_run(path):
            raise _no_run(path, str(path), ())
    found = [_analyzed(path, traces=False) for path in runs]
    check_distinct(found)
    check_one_side(f"the baseline {name!r}", found)


def resolve(words: Sequence[str], runs_dir: Path, side: str) -> list[Path]:
    """Run folders of one side: paths, patterns, names of baselines, each also several with commas between."""
    found: list[Path] = []
    for word in words:
        parts = [word] if is_run(Path(word)) else [part for part in word.split(",") if part]
        for part in parts:
            found += [path.resolve() for path in _runs_of(part, runs_dir)]
    if not found:
        raise ConfigError(f"The {side} side names no run.", "Give a run folder or the name of a baseline.")
    twice = next((path for path in found if found.count(path) > 1), None)
    if twice:
        raise ConfigError(f"{twice} stands twice on the {side} side.", "A run is no repeat of itself: name each once.")
    return found


def _runs_of(word: str, runs_dir: Path) -> list[Path]:
    path, baselines = Path(word), Baselines(runs_dir)
    named = baselines.read() if "/" not in word else {}
    if is_run(path):
        if word in named:
            raise ConfigError(
                f"{word!r} is a baseline and also a run here.", f"Write ./{word} for the run, or remove the baseline."
            )
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
        return ConfigError(f"{path} is a sweep: many configurations.", f"Name one of its runs, such as {path / '000'}.")
    if path.is_dir():
        inside = [child for child in sorted(path.iterdir()) if is_run(child)]
        if inside:
            return ConfigError(
                f"{path} is not a run but holds {len(inside)}.", f"Name one, or all as repeats of each other: '{path}/*'."
            )
        return ConfigError(f"{path} is not a run: it has no run.json.", "Give the folder that `llm-perf run` printed.")
    known = ", ".join(sorted(named)) or "none is set"
    return ConfigError(
        f"{word!r} is neither a run nor a baseline.{nearest(word, named)}", f"Baselines: {known}. `llm-perf runs` lists runs."
    )
