"""Layout of the datasets/ and models/ trees, and the names they allow.

datasets/<name>/source-data → link        datasets/<name>/<variant>/data/
datasets/<name>/metadata.yaml             datasets/<name>/<variant>/metadata.yaml
datasets/<name>/README.md                 models/<name> → link
conf/dataset/<name>.yaml
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.inside import make_folder, move, open_lock, remove, remove_if_possible
from llm_perf_opt.core.user_files import FOLDER_NAME, PROJECT_MODELS, check_ordinary
from llm_perf_opt.workspace.data.formats import may_have_records

DATASETS_ROOT = Path("datasets")
MODELS_ROOT = PROJECT_MODELS
SOURCE = "source-data"
METADATA = "metadata.yaml"
_README = "README.md"
_IGNORED = ".gitignore"
_DATA = "data"
_NO_VARIANTS = ("analysis",)
TAKEN = (SOURCE, METADATA, _README, _DATA)
SAMPLES = "samples"
PART_SUFFIX = ".part"

_READ_AS_VALUES = re.compile(r"null|true|false|nan|inf|[0-9][0-9_]*([.][0-9_]*)?(e-?[0-9_]+)?", re.IGNORECASE)
"""Names that `dataset=NAME` on the command line would read as a number or null."""


def checked_name(name: str, what: str) -> str:
    """Return `name` if it is safe as a folder and on the command line, or raise a ConfigError."""
    if not FOLDER_NAME.fullmatch(name) or name.endswith(PART_SUFFIX):
        raise ConfigError(
            f"{name!r} cannot name a {what}.",
            "Use at most 100 letters, digits, '.', '_' and '-', starting with a letter or digit.",
        )
    if _READ_AS_VALUES.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a {what}: on the command line it would be read as a value.", "Add a letter, such as v1."
        )
    return name


def _visible_folders(parent: Path) -> list[Path]:
    entries = sorted(parent.iterdir()) if parent.is_dir() else []
    return [path for path in entries if path.is_dir() and not path.name.startswith(".")]


@dataclass(frozen=True)
class VariantFolder:
    """A variant of a dataset on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The value for `dataset.variant=`."""
        return self.path.name

    @property
    def data(self) -> Path:
        """The folder with its files: `data`, or the variant itself if a script put them there."""
        inside = self.made_data
        return self.path if self.path.is_dir() and not inside.is_dir() and any(self._files()) else inside

    @property
    def made_data(self) -> Path:
        """The folder where `prepare` puts the files."""
        return self.path / _DATA

    @property
    def metadata_file(self) -> Path:
        """The file that records what it was made from and how."""
        return self.path / METADATA

    @property
    def is_there(self) -> bool:
        """Whether the folder is a variant: it has metadata, or files in a format of data. Results of an analysis are none."""
        named = self.metadata_file.is_file() or self.made_data.is_dir()
        return named or (self.name not in _NO_VARIANTS and any(may_have_records(entry.name) for entry in self._files()))

    def _files(self) -> Iterator[Path]:
        return (entry for entry in self.path.iterdir() if entry.is_file() and not self._is_description(entry))

    @staticmethod
    def _is_description(entry: Path) -> bool:
        return entry.name in (METADATA, _IGNORED) or entry.name.lower().startswith("readme")


@dataclass(frozen=True)
class DatasetFolder:
    """A dataset on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The value for `dataset=`."""
        return self.path.name

    @property
    def source(self) -> Path:
        """The link to the original data, which is never modified."""
        return self.path / SOURCE

    @property
    def metadata_file(self) -> Path:
        """The file that records where it comes from and what it contains."""
        return self.path / METADATA

    @property
    def readme_file(self) -> Path:
        """The description for people."""
        return self.path / _README

    def variants(self) -> tuple[VariantFolder, ...]:
        """Return every variant, by name."""
        return tuple(folder for folder in self._folders() if folder.is_there)

    def _folders(self) -> list[VariantFolder]:
        return [VariantFolder(path) for path in _visible_folders(self.path) if path.name != SOURCE]

    def variant(self, name: str) -> VariantFolder:
        """Return an existing variant, or raise an error that lists the existing ones."""
        known = [variant.name for variant in self.variants()]
        if name not in known:
            have = f"It has: {', '.join(known)}." if known else "It has none yet."
            raise ConfigError(
                f"{self.name} has no variant {name!r}.{nearest(name, known)}",
                f"{have} Make one with `llm-perf dataset prepare {self.name} --variant NAME …`.",
            )
        return VariantFolder(self.path / name)

    def new_variant(self, name: str) -> VariantFolder:
        """Return the folder of a new variant."""
        checked_name(name, "variant")
        if name in TAKEN:
            raise ConfigError(f"{name!r} cannot name a variant: the dataset uses this name itself.", "Choose another name.")
        folder = VariantFolder(self.path / name)
        refuse_existing(folder.path, "Choose another name, or remove that folder first.")
        return folder

    def unfinished(self) -> tuple[Path, ...]:
        """Return what a killed `prepare` left behind."""
        return tuple(sorted(entry for entry in self.path.iterdir() if entry.name.startswith(".") and is_part(entry)))


@dataclass(frozen=True)
class DatasetTree:
    """The datasets/ folder of a project."""

    root: Path

    @property
    def ignore_file(self) -> Path:
        """The .gitignore that keeps data out of version control."""
        return self.root / _IGNORED

    def datasets(self) -> tuple[DatasetFolder, ...]:
        """Return every dataset, by name."""
        found = (DatasetFolder(path) for path in _visible_folders(self.root))
        return tuple(folder for folder in found if folder.metadata_file.exists())

    def without_metadata(self) -> tuple[DatasetFolder, ...]:
        """Return folders with a dataset's source but without metadata."""
        found = (DatasetFolder(path) for path in _visible_folders(self.root))
        bare = (folder for folder in found if not folder.metadata_file.exists())
        return tuple(folder for folder in bare if folder.source.exists() or folder.source.is_symlink())

    def dataset(self, name: str) -> DatasetFolder:
        """Return an existing dataset, or raise an error that lists the existing ones."""
        checked_name(name, "dataset")
        folder = DatasetFolder(self.root / name)
        check_ordinary(folder.metadata_file)
        if not folder.metadata_file.is_file():
            known = [entry.name for entry in self.datasets()]
            have = f"Known in {self.root}: {', '.join(known)}." if known else f"{self.root} has none yet."
            raise ConfigError(
                f"There is no dataset {name!r}.{nearest(name, known)}",
                f"{have} Add it with `llm-perf dataset add {name} --source PATH`.",
            )
        return folder

    def new_dataset(self, name: str) -> DatasetFolder:
        """Return the folder of a new dataset."""
        folder = DatasetFolder(self.root / checked_name(name, "dataset"))
        refuse_existing(folder.path, "Choose another name, or remove that folder first.")
        return folder


def given_root(root: Path, usual: Path, option: str = "--root") -> Path:
    """Return the root of a tree. The default one may be absent; raise if another one does not exist."""
    try:
        exists = root.is_dir()
    except OSError:  # the name is too long, or a folder is not accessible
        exists = False
    if root != usual and not exists:
        raise ConfigError(f"{option} {root}: no such folder.", f"Omit it to use {usual}/ in the current directory.")
    return root


def option_file(conf: Path, name: str) -> Path:
    """Return the path of the Hydra option for `dataset=NAME`."""
    return conf / "dataset" / f"{name}.yaml"


def is_part(path: Path) -> bool:
    """Return whether a folder is still being created."""
    return path.name.endswith(PART_SUFFIX) and path.is_dir()


def refuse_existing(path: Path, remedy: str) -> None:
    """Raise a ConfigError if the path exists, even as a dangling link."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} already exists.", remedy)


def dangling(path: Path) -> bool:
    """Return whether `path` is a dangling or circular link."""
    try:
        return path.is_symlink() and not path.exists()
    except OSError as error:  # on some Python versions a circular link raises
        return error.errno == errno.ELOOP


def dangling_error(path: Path) -> LlmPerfError:
    """Return the error for a dangling link."""
    return ResourceError(
        f"{path} is a link to {path.readlink()}, which does not exist.",
        "Mount or restore the target, or remove the link and create it again.",
    )


# --- creation ---------------------------------------------------------------------------------------------------------


_LOCK = ".lock"


@contextmanager
def made_whole(root: Path, final: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `final`, inside `root`, if the block succeeds and is removed otherwise.

    A folder left by a killed process is cleared; one that another process is filling is an error.
    """
    part = final.with_name(f".{final.name}{PART_SUFFIX}")
    try:
        make_folder(root, final.parent)
        lock = _locked(root, part, final)
    except OSError as error:
        raise write_error(error, part) from error
    try:
        yield part
        _settle(part)
        refuse_existing(final, "It appeared in the meantime and is not overwritten.")
        remove(root, part / _LOCK)
        move(root, part, final)
    except BaseException as error:
        remove_if_possible(root, part)
        if isinstance(error, OSError):
            raise write_error(error, final) from error
        raise
    finally:
        os.close(lock)


def write_error(error: OSError, path: Path) -> LlmPerfError:
    """Return the error for a failed read or write under `path`."""
    where = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"No space left on the disk while writing {where}.",
            "Nothing unfinished was left behind. Free some space and try again.",
        )
    return ResourceError(f"{where} cannot be used: {error.strerror or error}.", "Check its path and permissions.")


def _locked(root: Path, part: Path, final: Path) -> int:
    """Create an empty `part` folder with a lock that ends with this process."""
    if part.is_symlink():
        raise ResourceError(f"{part} is a link, which is not followed.", "Remove it.")
    make_folder(root, part)
    lock = open_lock(part, part / _LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ResourceError(f"{final} is being created by another process.", "Wait for it to finish.") from error
    for left in part.iterdir():  # left by a killed process
        if left.name != _LOCK:
            remove(part, left)
    return lock


def _settle(folder: Path) -> None:
    """Flush every file to disk before the folder is renamed."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file, suppress(OSError):  # not every file system supports fsync
                os.fsync(file.fileno())
