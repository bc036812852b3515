"""Find the data files of a dataset, their format and their splits."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, nearest
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.workspace.data.compressed import GZIP, ZSTD

TOKENS_SUFFIX = ".bin"
INDEX_SUFFIX = ".idx"
Format = Literal["jsonl", "json", "parquet", "txt", "arrow", "tokens"]
FORMATS: tuple[Format, ...] = get_args(Format)
_PACKED = ("", GZIP, ZSTD)
SUFFIXES: dict[str, Format] = {
    **{f".jsonl{packed}": "jsonl" for packed in _PACKED},
    **{f".ndjson{packed}": "jsonl" for packed in _PACKED},
    **{f".json{packed}": "json" for packed in _PACKED},
    **{f".txt{packed}": "txt" for packed in _PACKED},
    ".parquet": "parquet",
    ".arrow": "arrow",
    TOKENS_SUFFIX: "tokens",
}
READ = (
    f".jsonl, .ndjson, .json and .txt, also compressed ({GZIP}, {ZSTD}), .parquet, "
    "or a folder saved by Hugging Face datasets (save_to_disk)"
)
JSON_FORMATS: tuple[Format, ...] = ("jsonl", "json")
"""Lines of JSON, and what is read as such: a .json file has one object per line, or an array of objects."""
_BESIDE: tuple[Format, ...] = ("txt", "json")
"""Next to another format, a .txt or .json file describes the data; next to a .json file, a .txt file does."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that never have records."""
WHOLE = "all"
"""The split of a file whose name has none."""
_SPLIT = re.compile(r"(?:^|[/._-])(train|validation|valid|val|dev|test)(?=$|[/._-]|\d)", re.IGNORECASE)
_STATE = "state.json"


@dataclass(frozen=True)
class DataFile:
    """A data file."""

    name: str
    """Relative to the source or the variant's data, with slashes."""
    path: Path
    format: Format
    split: str

    @property
    def bytes(self) -> int:
        """The size on disk."""
        return self.path.stat().st_size

    @property
    def stem(self) -> str:
        """The name without the suffix of the format."""
        suffix = suffix_of(self.name)
        return self.name[: len(self.name) - len(suffix)]


def data_files(files: Mapping[str, Path], where: Path, wanted: str | None = None) -> tuple[DataFile, ...]:
    """Return the data files. A .txt or .json file next to another format describes it; `wanted` decides between two others."""
    formats = {name: SUFFIXES[suffix_of(name)] for name in files if may_have_records(name)}
    found = set(formats.values())
    if "arrow" in found and not any(PurePosixPath(name).name == _STATE for name in files):
        raise ResourceError(
            f"{where} has .arrow files, but no {_STATE} that lists them.", "Save it with the datasets library's save_to_disk."
        )
    chosen = _chosen(found, where, wanted)
    names = [name for name, kind in formats.items() if kind == chosen]
    if chosen == "arrow":
        names = _listed_by_state(files, names, where)
    return tuple(DataFile(name, files[name], chosen, _split(name)) for name in names)


def only_split(files: Sequence[DataFile], split: str | None) -> tuple[DataFile, ...]:
    """Return the files of one split, or all."""
    if split is None:
        return tuple(files)
    kept = tuple(file for file in files if file.split == split)
    if not kept:
        known = sorted({file.split for file in files})
        raise ConfigError(f"There is no split {split!r}.{nearest(split, known)}", f"Known: {', '.join(known)}.")
    return kept


def suffix_of(name: str) -> str:
    """Return the longest known suffix, or an empty string."""
    low = name.lower()
    return max((suffix for suffix in SUFFIXES if low.endswith(suffix)), key=len, default="")


def may_have_records(name: str) -> bool:
    """Return whether a file has a known suffix and is neither hidden nor a description."""
    parts = PurePosixPath(name).parts
    return bool(suffix_of(name)) and parts[-1] not in _DESCRIPTIONS and not any(part.startswith(".") for part in parts)


def _chosen(found: set[Format], where: Path, wanted: str | None) -> Format:
    if wanted is not None:
        for kind in found:
            if kind == wanted:
                return kind
        raise ConfigError(f"{where} has no {wanted} file.", f"It has: {', '.join(sorted(found)) or 'no supported file'}.")
    rest = set(found)
    for weak in _BESIDE:
        rest = rest - {weak} if len(rest) > 1 else rest
    if not rest:
        raise ResourceError(f"{where} has no data files.", f"Supported: {READ}.")
    if len(rest) > 1:
        raise ConfigError(f"{where} contains several formats: {', '.join(sorted(rest))}.", "Select one: --format NAME.")
    return next(iter(rest))


def _split(name: str) -> str:
    """Return the last split named in a path: `data/train-00000-of-00002.parquet` is train."""
    found = _SPLIT.findall(name[: len(name) - len(suffix_of(name))])
    if not found:
        return WHOLE
    word = found[-1].lower()
    return "validation" if word in ("valid", "val", "dev") else word


def _listed_by_state(files: Mapping[str, Path], names: Sequence[str], where: Path) -> list[str]:
    """Return the .arrow files in the order of each folder's state.json; others are caches."""
    listed: list[str] = []
    for state_name in (name for name in files if PurePosixPath(name).name == _STATE):
        try:
            state = json.loads(read_bytes(files[state_name]))
            if state.get("_indices_data_files") or state.get("_indices_files"):
                raise ResourceError(
                    f"{where}/{state_name}: the dataset is a selection of rows of another.",
                    "Save it again after flatten_indices().",
                )
            data = [str(entry["filename"]) for entry in state["_data_files"]]
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ParseError(f"{where}/{state_name} does not list the data files.", "Save the dataset again.") from error
        folder = PurePosixPath(state_name).parent
        listed += [(folder / entry).as_posix() for entry in data]
    for name in listed:
        if name not in names:
            raise ResourceError(f"{where}: {name} is listed but does not exist.", "Save the dataset again.")
    return listed
