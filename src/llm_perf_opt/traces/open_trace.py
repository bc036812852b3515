"""Read a trace of any supported format: torch.profiler JSON, an nsys export, or another format of the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.traces.events import Trace

if TYPE_CHECKING:
    from llm_perf_opt.traces.trace_mark import Checksum

_PREVIEW_BYTES = 64


@dataclass(frozen=True)
class TraceFormat:
    """A format that is detected by its first bytes."""

    name: str
    starts: bytes
    """The first bytes of the unpacked content."""
    reader: str
    """`module:function`, imported when a file of the format is read: takes the path and returns the Trace."""

    def read(self, path: Path) -> Trace:
        """Return the trace in a file, or raise a ParseError."""
        module, name = self.reader.split(":")
        return cast("Callable[[Path], Trace]", getattr(import_module(module), name))(path)


FORMATS = [TraceFormat("nsys", b"SQLite format 3\x00", "llm_perf_opt.traces.nsys_sqlite:read_nsys")]
"""Every format except torch.profiler JSON, which any other file is read as."""


def read_trace(path: Path, checksum: "Checksum | None" = None) -> Trace:
    """Return the trace in a plain or packed file with any name, or raise a ParseError.

    `checksum` receives the bytes of the file, if they are read from start to end.
    """
    found = format_of(path)
    if found is not None:
        return found.read(path)
    from llm_perf_opt.traces.torch_json.trace import read_torch_trace

    return read_torch_trace(path, checksum)


def format_of(path: Path) -> TraceFormat | None:
    """Return the format of a file by its first bytes; None for torch.profiler JSON."""
    from llm_perf_opt.traces.packed import PackedFile

    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise ParseError(
            f"{path} is in the format of nsys, which only nsys reads.",
            f"nsys export --type sqlite -o {path.stem}.sqlite {path.name}",
        )
    if path.is_dir():
        raise ParseError(f"{path} is a folder.", "Give a trace file, or a run folder that `llm-perf run` printed.")
    check_ordinary(path)
    with PackedFile(path) as file:
        first = file.read(_PREVIEW_BYTES)
    return next((known for known in FORMATS if first.startswith(known.starts)), None)
