"""The models/ tree: links to model folders outside the project, and their checks."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.config.choices import HUB_NAME, model_remedy, packaged_options
from llm_perf_opt.config.weights import USE_RANDOM
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, file_error, nearest, words_of
from llm_perf_opt.core.inside import link, make_folder, root_of
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.user_files import open_ordinary, read_bytes
from llm_perf_opt.workspace.data.layout import MODELS_ROOT, checked_name, dangling, dangling_error, refuse_existing, write_error

_TAKEN = ("hf", "random")
"""Options that are no model: with their names, `model=NAME` would never select a link."""
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described in the header."""

    dtype: str
    elements: int
    bytes: int


class _Described(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, or raise a ParseError that says how it is damaged."""
    try:
        size = path.stat().st_size
        with open_ordinary(path) as file:
            length = int.from_bytes(start, "little") if len(start := file.read(8)) == 8 else -1
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise _damaged(path, "it does not begin with the length of a header")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        described = {name: msgspec.json.decode(raw, type=_Described) for name, raw in header.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header is invalid ({error})") from error
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from error
    return _checked(path, described, size - 8 - length)


def _checked(path: Path, described: dict[str, _Described], stored: int) -> dict[str, StoredTensor]:
    """Return the tensors, which must be contiguous and end at the end of the file."""
    found, end = {}, 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        begin, until = tensor.data_offsets
        if begin != end or until < begin or any(length < 0 for length in tensor.shape):
            raise _damaged(path, f"the tensor {name!r} has a wrong position")
        elements = math.prod(tensor.shape)
        if tensor.dtype in _BITS and elements * _BITS[tensor.dtype] != (until - begin) * 8:
            raise _damaged(path, f"the tensor {name!r} has {until - begin} bytes, which does not match its shape and dtype")
        found[name] = StoredTensor(tensor.dtype, elements, until - begin)
        end = until
    if end != stored:
        state = "truncated" if stored < end else "too long"
        raise _damaged(path, f"it is {state}: it has {stored} bytes of weights, but its header lists {end}")
    return found


def _damaged(path: Path, why: str) -> ParseError:
    return ParseError(f"{path.name} is damaged: {why}.", "Download or copy it again.")


_CONFIG = "config.json"
_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_SHARD = re.compile(rf"(?P<stem>.+)-(?P<number>[0-9]{{1,9}})-of-(?P<count>[0-9]{{1,9}}){re.escape(_WEIGHTS)}")
_SHOWN = 10
_GIVE_A_FOLDER = f"Give a local Hugging Face folder, with {_CONFIG} and *{_WEIGHTS}."


@dataclass(frozen=True)
class ModelCheck:
    """A linked model, and every reason why it would not run."""

    name: str
    target: str
    problems: list[str]
    notes: list[str]
    model_type: Maybe[str]
    dtypes: dict[str, int]
    """Bytes stored per dtype, largest first."""
    files: int
    bytes: Maybe[int]
    """Of the weights."""
    parameters: Maybe[int]
    tokenizer: Maybe[str]

    @property
    def ok(self) -> bool:
        """Whether it has no problems."""
        return not self.problems


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def link_model(root: Path, name: str, target: Path) -> Path:
    """Create the link models/NAME to a folder outside, and return it. Nothing is overwritten."""
    place = root / checked_name(name, "model")
    if name in _TAKEN:
        raise ConfigError(f"A model cannot be called {name}: model={name} is an option.", "Choose another name.")
    refuse_existing(place, "Nothing is overwritten: choose another name, or remove that link first.")
    try:
        if not target.is_dir():
            what = "a dangling link" if dangling(target) else "not a folder"
            raise ConfigError(f"{target} is {what}.", _GIVE_A_FOLDER)
        if dangling(target / _CONFIG):
            raise dangling_error(target / _CONFIG)
        if not (target / _CONFIG).is_file():
            raise ResourceError(f"{target} has no {_CONFIG}.", _GIVE_A_FOLDER)
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise file_error(error, _GIVE_A_FOLDER) from error
    if root.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target} contains {root} itself.", "Give the folder of the weights.")
    try:
        make_folder(root_of(root), root)
        link(root_of(root), place, target.resolve())
    except OSError as error:
        raise write_error(error, place) from error
    return place


def model_folder(path: str) -> Path:
    """Return the folder that `model.path` names, or raise an error that says what is there instead."""
    folder = Path(path).expanduser()
    if dangling(folder):
        raise ConfigError(
            f"model.path={path} is a link to {folder.readlink()}, which does not exist.",
            "Mount or restore the target, or remove the link and create it again: `llm-perf model link NAME DIR`.",
        )
    try:
        if not folder.is_dir():
            if HUB_NAME.fullmatch(path) and not folder.parent.exists():
                raise ConfigError(f"model.path={path}: no such folder. It looks like a name on the Hub.", model_remedy(path))
            what = "is a file, not a folder" if folder.exists() else "no such folder"
            raise ConfigError(f"model.path={path}: {what}.{_siblings(folder)}", _remedy(folder))
        if dangling(folder / _CONFIG):
            raise dangling_error(folder / _CONFIG)
        if not (folder / _CONFIG).is_file():
            raise ConfigError(f"model.path={path} has no {_CONFIG}.{_models_inside(folder)}", _GIVE_A_FOLDER)
    except (OSError, ValueError) as error:  # the name is too long, not accessible, or has a zero byte
        raise ConfigError(f"model.path={path!r} cannot be accessed: {words_of(error)}.", _GIVE_A_FOLDER) from error
    return folder


def _remedy(folder: Path) -> str:
    """Return what to do about a folder that does not exist."""
    if folder.parent.name != MODELS_ROOT.name:
        return _GIVE_A_FOLDER
    random = f" For random weights, add {USE_RANDOM}." if folder.name in packaged_options("model") else ""
    return f"Link the weights: `llm-perf model link {folder.name} DIR`.{random}"


def _siblings(folder: Path) -> str:
    """Return the nearest existing name, and what is in that folder."""
    parent = folder.parent
    known = [path.name for path in _folders(parent)]
    if folder.exists() or not known:
        return ""
    return f"{nearest(folder.name, known)} {_there(parent, known)}"


def _models_inside(folder: Path) -> str:
    known = [path.name for path in _folders(folder) if (path / _CONFIG).is_file()]
    return f" {_there(folder, known)}" if known else ""


def _there(parent: Path, known: Sequence[str]) -> str:
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"In {parent} there are: {', '.join(known[:_SHOWN])}{more}."


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError:  # missing or not accessible
        return []


def linked_models(root: Path) -> list[Path]:
    """Return every model in the tree, including dangling links, by name."""
    if not root.is_dir():
        return []
    return sorted(entry for entry in root.iterdir() if not entry.name.startswith(".") and (entry.is_dir() or dangling(entry)))


def model_named(root: Path, name: str) -> Path:
    """Return an existing model, or raise an error that lists the existing ones."""
    place = root / checked_name(name, "model")
    if not (place.is_symlink() or place.is_dir()):
        known = [path.name for path in linked_models(root)]
        have = f"Known in {root}: {', '.join(known)}." if known else f"{root} has none yet."
        raise ConfigError(
            f"There is no model {name!r}.{nearest(name, known)}", f"{have} Link it with `llm-perf model link {name} DIR`."
        )
    return place


def check_model(place: Path) -> ModelCheck:
    """Return configuration, shards, dtypes, sizes and tokenizer, read from file headers only."""
    target = str(place.readlink()) if place.is_symlink() else str(place)
    if dangling(place):
        why = Missing("the link is dangling")
        problem = f"a dangling link: {target} does not exist"
        return ModelCheck(place.name, target, [problem], [], why, {}, 0, why, why, why)
    problems: list[str] = []
    notes: list[str] = []
    config = _config(place, problems)
    before = len(problems)
    tensors, files = _tensors(place, problems)
    partly = Missing("not all weights could be read") if tensors and len(problems) > before else None
    dtypes: Counter[str] = Counter()
    for tensor in tensors.values():
        dtypes[tensor.dtype] += tensor.bytes
    tokenizer = next((name for name in _TOKENIZERS if (place / name).is_file()), None)
    if tokenizer is None:
        notes.append("no tokenizer: texts are fed byte by byte")
    return ModelCheck(
        place.name,
        target,
        problems,
        notes,
        _model_type(config, problems),
        {} if partly else dict(dtypes.most_common()),  # some of the weights would pass for all of them
        files,
        partly or (sum(dtypes.values()) if tensors else Missing("no weights could be read")),
        partly or _parameters(config, tensors),
        tokenizer or Missing("none found"),
    )


def _config(place: Path, problems: list[str]) -> dict[str, Any] | None:
    path = place / _CONFIG
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except FileNotFoundError:
        state = f"a dangling link: {path.readlink()} does not exist" if dangling(path) else "missing"
        problems.append(f"{_CONFIG} is {state}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"{_CONFIG} is not a JSON object ({error})")
    except OSError as error:
        problems.append(f"{_CONFIG} cannot be read: {error.strerror or error}")
    return None


def _model_type(config: dict[str, Any] | None, problems: list[str]) -> Maybe[str]:
    if config is None:
        return Missing(f"{_CONFIG} cannot be read")
    found = config.get("model_type")
    if isinstance(found, str):
        return found
    problems.append(f"{_CONFIG} has no model_type")
    return Missing(f"{_CONFIG} has no model_type")


def _parameters(config: dict[str, Any] | None, tensors: dict[str, StoredTensor]) -> Maybe[int]:
    if not tensors:
        return Missing("no weights could be read")
    if config is not None and config.get("quantization_config"):
        return Missing("the weights are quantized: several parameters may share one stored number")
    return sum(tensor.elements for tensor in tensors.values())


def _tensors(place: Path, problems: list[str]) -> tuple[dict[str, StoredTensor], int]:
    """Return every stored tensor and the number of files; add what is missing or damaged to `problems`."""
    indices = sorted(place.glob(f"*{_INDEX}"))
    if not indices:
        names = sorted(path.name for path in place.glob(f"*{_WEIGHTS}"))
        if not names:
            pickled = any(next(place.glob(pattern), None) for pattern in _PICKLED)
            problems.append(f"no *{_WEIGHTS}" + ("; pickled weights are not read: convert them" if pickled else ""))
        else:
            problems += _shard_problems(names)
        stored, _ = _read_shards(place, names, problems)
        if names and not stored and not problems:
            problems.append(f"the *{_WEIGHTS} contain no tensor")
        return stored, len(names)
    found: dict[str, StoredTensor] = {}
    shards: set[str] = set()
    for path in indices:
        try:
            weight_map = msgspec.json.decode(read_bytes(path), type=_Index).weight_map
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            problems.append(f"{path.name} cannot be read: {words_of(error)}")
            continue
        if not weight_map:
            problems.append(f"{path.name} lists no tensor")
        outside = sorted({name for name in weight_map.values() if Path(name).name != name})
        problems += [f"{path.name} lists {name!r}, which is not a file in this folder" for name in outside]
        listed = sorted(set(weight_map.values()) - set(outside))
        tensors, readable = _read_shards(place, listed, problems)
        lost = sorted(name for name, shard in weight_map.items() if name not in tensors and shard in readable)
        if lost:
            problems.append(f"{len(lost)} tensors are listed but not stored, the first is {lost[0]!r}")
        found |= tensors
        shards.update(listed)
    return found, len(shards)


def _shard_problems(names: list[str]) -> list[str]:
    """Return the problems of shards without an index: loaders need one, and shards may be missing."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            sets.setdefault((found["stem"], int(found["count"])), set()).add(int(found["number"]))
    problems = []
    for (stem, count), have in sorted(sets.items()):
        beyond = sorted(number for number in have if not 1 <= number <= count)
        lost = count - (len(have) - len(beyond))
        if beyond:
            problems.append(f"{stem} has a shard {beyond[0]} of {count}")
        if lost:  # counted, not listed: the count in a name can be any number
            first = list(itertools.islice((number for number in range(1, count + 1) if number not in have), _SHOWN))
            more = f" and {lost - len(first)} more" if lost > len(first) else ""
            problems.append(f"{stem} is missing the shards {', '.join(map(str, first))}{more} of {count}")
    if sets:
        shards = sum(map(len, sets.values()))
        problems.append(f"{shards} shard{'s' if shards > 1 else ''}, but no *{_INDEX} that lists them")
    return problems


def _read_shards(place: Path, names: list[str], problems: list[str]) -> tuple[dict[str, StoredTensor], set[str]]:
    """Return the tensors and the names of the readable shards; add what is wrong with the others to `problems`."""
    found: dict[str, StoredTensor] = {}
    readable: set[str] = set()
    for name in names:
        path = place / name
        if dangling(path):
            problems.append(f"the shard {name} is a dangling link")
        elif not path.is_file():
            problems.append(f"the shard {name} is missing")
        else:
            try:
                found |= read_header(path)
                readable.add(name)
            except ParseError as error:
                problems.append(error.fact.rstrip("."))
    return found, readable
