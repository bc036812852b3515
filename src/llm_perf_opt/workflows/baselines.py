"""Named baselines of a project: a name for one run or for several repeats of one configuration."""

import os
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ParseError, nearest
from llm_perf_opt.core.run_folder import RunFolder, read_record, write_record
from llm_perf_opt.core.user_files import check_ordinary

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
