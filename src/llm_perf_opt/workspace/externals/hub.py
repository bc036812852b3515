"""A snapshot of a Hugging Face repository: source files of one commit, each verified; never weights."""

import fnmatch
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.inside import make_folder, remove_if_possible
from llm_perf_opt.workspace.externals.git import edited, is_empty_or_missing
from llm_perf_opt.workspace.externals.listing import External, Standing, check_inner_path
from llm_perf_opt.workspace.externals.places import Locked, Places, blob_id

SOURCE_PATTERNS = (
    *("*.py", "*.json", "*.md", "*.txt", "*.jinja", "*.yaml", "*.yml", "*.toml", "*.cu", "*.cuh", "*.cpp", "*.h"),
    *("tokenizer*", "vocab*", "merges*", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
    *("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*"),
)
WEIGHT_PATTERNS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data"),
    *("*.pkl", "*.pickle", "*.npz", "*.npy", "*.tflite", "*.engine", "*.plan", "*.tar", "*.gz", "*.zip"),
)
LARGEST_FILE = 64 * 1024 * 1024
"""Bytes; a larger file is not source, whatever its name."""
PATIENCE_S = 10.0
"""Time limit for the Hub's first answer."""


@dataclass(frozen=True)
class _Remote:
    """A file as the Hub lists it."""

    path: str
    size: int
    blob: str
    sha256: str | None
    """Set for a file that the Hub keeps outside git; its blob is then a pointer."""


def is_source(path: str) -> bool:
    """Return whether a file of this name is downloaded."""
    name = path.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SOURCE_PATTERNS) and not any(
        fnmatch.fnmatch(name.lower(), pattern) for pattern in WEIGHT_PATTERNS
    )


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Compare every file with the Hub's list for the pin."""
    folder = places.folder(entry)
    if is_empty_or_missing(folder):
        return Standing("missing")
    if folder.is_symlink() or not folder.is_dir():
        return Standing("foreign", "a link or file where a snapshot belongs")
    if locked is None or not locked.files:
        return Standing("unverified", "externals.lock.json has no content for the commit")
    if locked.commit != entry.commit:
        return Standing("other commit", f"at {locked.commit}", locked.commit)
    found = _content(folder)
    changed = sorted(path for path in {*found, *locked.files} if found.get(path) != locked.files.get(path))
    return Standing("edited", edited(changed), locked.commit) if changed else Standing("ok", "", locked.commit)


def make(places: Places, entry: External) -> Locked:
    """Download to a temporary folder, verify each file against the Hub's list for the commit, then move it into place."""
    folder = places.make_room(entry)
    with places.staging() as staging:
        taken = staging / "taken"
        make_folder(staging, taken)
        for remote in _wanted(entry):
            _download(entry, remote, taken)
        remove_if_possible(staging, taken / ".cache")
        files = _content(taken)
        places.put(taken, folder)
    return Locked(entry.commit, files=files)


move = make
"""Replace the snapshot; the old one stays until the new one is complete."""


def _content(folder: Path) -> dict[str, str]:
    """Return the blob id by path; a link counts as its target path, as in git."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path.relative_to(folder).as_posix()] = "link"
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = blob_id(path.read_bytes())
    return found


def _hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise ResourceError("huggingface_hub is not installed.", "pip install huggingface_hub") from error
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings come back as errors, reported once
    return huggingface_hub


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that the library raises; they derive from its HTTP client, which differs between versions."""
    bases = _hub().errors.HfHubHTTPError.__bases__
    return (OSError, ValueError, RuntimeError, *bases)


def _wanted(entry: External) -> list[_Remote]:
    hub = _hub()
    try:
        api = hub.HfApi()
        hub.utils.get_session().head(api.endpoint, timeout=PATIENCE_S)  # the library itself retries for half a minute
        listed = list(api.list_repo_tree(entry.source, recursive=True, revision=entry.commit))
    except _failures() as error:
        raise _unreachable(entry, error) from error
    files = [
        _Remote(item.path, item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
        for item in listed
        if hasattr(item, "blob_id")
    ]
    wanted = [file for file in files if is_source(file.path) and file.size <= LARGEST_FILE]
    for file in wanted:
        check_inner_path(f"{entry.name}: a file on the Hub", file.path)
    if not wanted:
        raise ConfigError(
            f"{entry.name}: {entry.source} has no source files at {entry.commit}.", "Check repo; weights are never downloaded."
        )
    return wanted


def _download(entry: External, remote: _Remote, taken: Path) -> None:
    try:
        _hub().hf_hub_download(entry.source, remote.path, revision=entry.commit, local_dir=str(taken))
        path = taken / remote.path
        if not path.resolve().is_relative_to(taken.resolve()) or path.is_symlink():
            raise ResourceError(f"{entry.name}: {remote.path} was written outside its folder.", "Do not use this repository.")
        content = path.read_bytes()
    except _failures() as error:
        raise _unreachable(entry, error) from error
    good = hashlib.sha256(content).hexdigest() == remote.sha256 if remote.sha256 else blob_id(content) == remote.blob
    if not good:
        raise ResourceError(
            f"{entry.name}: {remote.path} does not match the Hub's list for {entry.commit}.", "Try again. Nothing was changed."
        )


def _unreachable(entry: External, error: Exception) -> ResourceError:
    kind = type(error).__name__
    facts = {
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
        "GatedRepoError": "it is gated, and you are not logged in or have no access",
        "RepositoryNotFoundError": "there is no such repository, or you have no access",
        "RevisionNotFoundError": f"it has no commit {entry.commit}",
    }
    why = facts.get(kind, " ".join(str(error).split())[:200].rstrip(".") or kind)
    return ResourceError(
        f"{entry.name}: {entry.source} cannot be downloaded from the Hub: {why}.",
        "Check the name, the commit, the network and your login; nothing was changed.",
    )
