"""What the name of a variant asks for: `subset-1k` is a sample of 1,000 records, `tokenized-gpt2` are ids of its tokenizer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ResourceError, nearest
from llm_perf_opt.workspace.data.conversion import TARGETS
from llm_perf_opt.workspace.data.layout import MODELS_ROOT, SOURCE
from llm_perf_opt.workspace.data.tokenizing import BYTES, TOKENIZER_FILE

_SUBSET = re.compile(r"subset-(\d{1,9})([km]?)", re.IGNORECASE)
_TOKENIZED = re.compile(r"tokenized-(.+)")
_SPLIT = re.compile(r"(?:split-|(?P<within>.+)-)?(?P<split>train|validation|valid|val|test)(?:-split)?")
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}
_DEV = ("dev", "dev-split")
_NOT_WRITTEN = ("tfrecord", "tfrecords", "arrow", "csv")
"""Usual names of formats that can be asked for, but are not made."""
CLEANED = "cleaned"
DEV_SAMPLES = 1000
"""The most records of a `dev-split`: the usual size of a sample for quick tests."""
PATTERNS = (
    "subset-N (subset-1k: 1,000 records), dev-split, split-NAME or DIR-NAME (en-validation), tokenized-NAME (models/NAME), "
    f"{CLEANED}, {', '.join(TARGETS)}"
)


@dataclass(frozen=True)
class Preparation:
    """The request: at most one of `num_samples`, `tokenizer`, `to` and `clean`; with none, all records of a split."""

    variant: str
    parent: str = SOURCE
    split: str | None = None
    within: str | None = None
    """Only files in this folder of the parent; None: all."""
    num_samples: int | None = None
    at_most: bool = False
    """Whether fewer records than `num_samples` are enough."""
    seed: int | None = None
    """Seed of a subset; None: 0."""
    tokenizer: str | None = None
    to: str | None = None
    clean: bool = False
    text_field: str | None = None
    join_lines: bool = False
    skip_bad: bool = False

    @property
    def transforms(self) -> dict[str, object]:
        """The transforms that are given, by option."""
        given = {"--num-samples": self.num_samples, "--tokenizer": self.tokenizer, "--to": self.to, "--clean": self.clean or None}
        return {option: value for option, value in given.items() if value is not None}

    @property
    def transform(self) -> str:
        """The name of the transform, as recorded."""
        if self.num_samples is not None:
            return "subset"
        return "tokenized" if self.tokenizer else "converted" if self.to else CLEANED if self.clean else "split"


def completed(request: Preparation, splits: Sequence[str], folders: Sequence[str], models: Path = MODELS_ROOT) -> Preparation:
    """Return the request with the transform that the variant's name asks for, unless one is given.

    `splits` and `folders` are those of the parent. Raise a ConfigError if neither the options nor the name say what to make.
    """
    if request.transforms:
        return request
    name = request.variant
    if match := _SUBSET.fullmatch(name):
        return replace(request, num_samples=int(match[1]) * _FACTORS[match[2].lower()])
    if name in _DEV:
        split = request.split or ("validation" if "validation" in splits else None)
        return replace(request, num_samples=DEV_SAMPLES, at_most=True, split=split)
    if match := _TOKENIZED.fullmatch(name):
        return replace(request, tokenizer=_tokenizer(match[1], models))
    if name in TARGETS:
        return replace(request, to=name)
    if name == CLEANED:
        return replace(request, clean=True)
    if request.split or request.within:
        return request
    if match := _SPLIT.fullmatch(name):
        return _split(request, match, folders)
    if name in _NOT_WRITTEN:
        raise ConfigError(
            f"Variants are not written as {name}.",
            f"Formats that are written: {', '.join(TARGETS)}, and token ids (tokenized-NAME).",
        )
    raise ConfigError(
        f"The name {name!r} selects no transform, and no transform is given.",
        "Give one of: --num-samples N (a subset), --tokenizer bytes|DIR (token ids), --to FORMAT (another format), --clean, "
        f"--split NAME (all records of a split). Or use a name that selects one: {PATTERNS}.",
    )


def _split(request: Preparation, match: "re.Match[str]", folders: Sequence[str]) -> Preparation:
    split = "validation" if match["split"] in ("valid", "val") else match["split"]
    within = match["within"]
    if within is not None and folders and within not in folders:
        raise ConfigError(
            f"The name {request.variant!r} names the folder {within!r}, which the data does not have.{nearest(within, folders)}",
            f"Folders with data files: {', '.join(folders)}. For the split of all of them, add --split {split}.",
        )
    return replace(request, split=split, within=within if folders else None)


def _tokenizer(name: str, models: Path) -> str:
    """Return the tokenizer of a variant `tokenized-NAME`: `bytes`, or that of the project's model of this name."""
    folder = models / name
    if name == BYTES:
        return BYTES
    if (folder / TOKENIZER_FILE).is_file():
        return str(folder)
    raise ResourceError(
        f"tokenized-{name} needs the tokenizer of {name}, and {folder / TOKENIZER_FILE} does not exist.",
        f"Link a folder that has one: `llm-perf model link {name} DIR`. Or name it: --tokenizer DIR.",
    )
