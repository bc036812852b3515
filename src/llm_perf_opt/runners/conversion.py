"""Convert a model into the format of an engine, before anything is measured. The result is kept in the user's cache.

The converter comes with the engine. It reads a local Hugging Face folder; random weights are written to one first, with the
same seed as for the PyTorch runtime, so that both run the same weights. Nothing is downloaded.
"""

import contextlib
import hashlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import LlmPerfError, ResourceError
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.run_folder import read_record, write_record
from llm_perf_opt.core.weight_records import ModelConversion
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.child import send
from llm_perf_opt.workspace.data.model_tree import model_folder

if TYPE_CHECKING:
    import torch

_RECORD = "conversion.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Converter:
    """What converts a Hugging Face folder for an engine."""

    runtime: str
    name: str
    """The program, as shown in reports."""
    modules: tuple[str, ...]
    """The packages that it imports."""
    distributions: tuple[str, ...]
    """Those whose versions decide the result; the first is the converter's own."""
    expected: str
    """The file that a converted folder has; a pattern."""
    command: str
    """How a user converts a folder by hand."""
    convert: Callable[[Path, Path, "torch.dtype"], None]
    """Reads a Hugging Face folder and writes a converted one."""
    refuse: Callable[[Any], None] = lambda _: None
    """Takes the model's configuration and raises a ConfigError if it is known to be unsupported."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.modules if find_spec(name) is None]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of its distributions."""
        return {name: _version(name) for name in self.distributions}


@dataclass(frozen=True)
class ConvertedModel:
    """A model in the format of its engine."""

    folder: Path
    conversion: ModelConversion | None
    """None: the user converted it."""
    seconds: float = 0.0
    """What the conversion took in this process; zero if it was taken from the cache."""


def converted_model(request: RunnerRequest, dtype: "torch.dtype", converter: Converter) -> ConvertedModel:
    """Return the request's model in the engine's format: as given by `model.path`, from the cache, or converted now."""
    model = request.config.model
    given = model_folder(model.path or "") if model.source == "pretrained" else None
    if given is not None and any(given.glob(converter.expected)):
        return ConvertedModel(given, None)
    if converter.missing:
        raise _not_convertible(given, converter)
    converter.refuse(request.architecture)
    cache = user_cache_folder("converted")
    if isinstance(cache, Missing):
        raise ResourceError(f"The model cannot be converted for {converter.runtime}: {cache.why}.")
    folder = cache / converter.runtime / _key(request, given, dtype, converter)
    kept = _kept(folder)
    if kept is not None:
        return ConvertedModel(folder, replace(kept, reused=True))
    return _convert(request, given, dtype, converter, folder)


@dataclass(frozen=True)
class _Kept:
    """What a folder in the cache contains."""

    conversion: ModelConversion
    files: dict[str, int]
    """Path inside the folder → bytes."""


def _files(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _kept(folder: Path) -> ModelConversion | None:
    """Return the conversion in this folder of the cache; None if there is none, or if it is damaged."""
    with contextlib.suppress(LlmPerfError, OSError):
        kept, there = read_record(folder / _RECORD, _Kept), _files(folder)
        if kept.files and all(there.get(name) == size for name, size in kept.files.items()):
            return kept.conversion
    return None


def _convert(
    request: RunnerRequest, given: Path | None, dtype: "torch.dtype", converter: Converter, folder: Path
) -> ConvertedModel:
    begun = time.monotonic()
    send("phase", text=f"converting {request.config.model.name} with {converter.name}; the result is kept in {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as working:
            source = write_source(request, dtype, given, Path(working) / "source")
            target = Path(working) / "target"
            with _converting(converter):
                converter.convert(source, target, dtype)
            if not any(target.glob(converter.expected)):
                raise ResourceError(f"{converter.name} wrote no {converter.expected}.", "See the pass's log.txt.")
            if not (target / "config.json").exists():
                shutil.copyfile(source / "config.json", target / "config.json")
            seconds = time.monotonic() - begun
            made = ModelConversion(converter.name, converter.versions[converter.distributions[0]], seconds, str(given or ""))
            write_record(target, target / _RECORD, _Kept(made, _files(target)))
            if _kept(folder) is None:  # another process may have converted it meanwhile
                if os.path.lexists(folder):  # a damaged one, which is removed with the working folder
                    folder.rename(Path(working) / "damaged")
                target.rename(folder)
    except OSError as error:
        raise ResourceError(
            f"The model cannot be converted for {converter.runtime}: {error.strerror or error}.",
            f"Make {folder.parent} writable and free some space, or set XDG_CACHE_HOME to another folder.",
        ) from error
    return ConvertedModel(folder, made, seconds)


def write_source(request: RunnerRequest, dtype: "torch.dtype", given: Path | None, folder: Path) -> Path:
    """Return a Hugging Face folder for a converter: the given one, or one with the request's random weights.

    Converters copy a tokenizer, so one is added if there is none. Prompts are passed as token ids, which do not use it.
    """
    if given is not None and any((given / name).exists() for name in _TOKENIZERS):
        return given
    folder.mkdir()
    if given is None:
        import torch

        config = request.config
        models.build_model(request.architecture, config.model, config.runtime, torch.device("cpu"), dtype).save_pretrained(folder)
    else:
        for path in given.iterdir():
            if path.exists():  # a link may lead nowhere
                (folder / path.name).symlink_to(path.resolve())
    _write_tokenizer(int(request.architecture.get_text_config(decoder=True).vocab_size), folder)
    return folder


def _write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer with one word per id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    first = "<0>"
    words = Tokenizer(WordLevel({f"<{number}>": number for number in range(vocabulary)}, unk_token=first))
    special = {"unk_token": first, "eos_token": first, "pad_token": first}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def run_module(name: str, arguments: list[str]) -> None:
    """Run the command `python -m NAME` in this process, with the module's own folder first on the path: some import from it."""
    spec = find_spec(name)
    own = [str(Path(spec.origin).parent)] if spec and spec.origin else []
    before, path = sys.argv, [*sys.path]
    sys.argv, sys.path[:] = [name, *arguments], [*own, *path]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"{name} exited with {error.code}") from error
    finally:
        sys.argv, sys.path[:] = before, path


def _key(request: RunnerRequest, given: Path | None, dtype: "torch.dtype", converter: Converter) -> str:
    """Return a name for the result: it changes with the weights, the dtype and the versions of what converts."""
    if given is None:
        weights: Any = [request.config.model.architecture, request.config.model.seed]
    else:
        found = [(path.name, path.stat()) for path in given.iterdir() if path.exists()]
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
        weights = [str(given.resolve()), sorted(files)]
    versions = {**converter.versions, "torch": _version("torch"), "transformers": _version("transformers")}
    parts = json.dumps([weights, str(dtype), converter.name, versions], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _not_convertible(given: Path | None, converter: Converter) -> ResourceError:
    what = f"{given} has no {converter.expected}" if given else "Random weights must be converted"
    packages = " ".join(converter.missing)
    return ResourceError(
        f"{what}, and the converter for {converter.runtime} needs packages that are not installed: {packages}.",
        f"Install them in this environment, or convert the model elsewhere and give the folder with model=hf model.path=DIR: "
        f"`{converter.command}`; copy the model's config.json into it.",
    )


@contextlib.contextmanager
def _converting(converter: Converter) -> Iterator[None]:
    """Keep the converter offline, and raise its error as a ResourceError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    except LlmPerfError:
        raise
    except Exception as error:  # a converter raises anything for a model that it does not know
        text = " ".join(str(error).split())[:500] or type(error).__name__
        raise ResourceError(
            f"{converter.name} {converter.versions[converter.distributions[0]]} cannot convert this model: {text}",
            "Choose a model that the engine supports; the full error is in the pass's log.txt.",
        ) from error
