"""Any profiler's trace by its content: a torch trace, an nsys export, or what else is in the registry."""

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
    """A format that is known by its first bytes."""

    name: str
    starts: bytes
    """Of the content, unpacked where the file is packed."""
    reader: str
    """`module:function`, loaded when a file of the format is read: a function of the path that returns the Trace."""

    def read(self, path: Path) -> Trace:
        """The trace in a file, or a ParseError."""
        module, name = self.reader.split(":")
        return cast("Callable[[Path], Trace]", getattr(import_module(module), name))(path)


FORMATS = [TraceFormat("nsys", b"SQLite format 3\x00", "llm_perf_opt.traces.nsys_sqlite:read_nsys")]
"""Every format but torch.profiler's JSON, which is what a file is taken for otherwise."""


def read_trace(path: Path, checksum: "Checksum | None" = None) -> Trace:
    """The trace in a file, whatever its name, plain or packed; or a ParseError.

    `checksum` is given the bytes of the file as they are read, if they are read from front to end.
    """
    found = format_of(path)
    if found is not None:
        return found.read(path)
    from llm_perf_opt.traces.torch_json.trace import read_torch_trace

    return read_torch_trace(path, checksum)


def format_of(path: Path) -> TraceFormat | None:
    """The format of a file by its first bytes; None for torch.profiler's JSON."""
    from llm_perf_opt.traces.packed import PackedFile

    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise ParseError(
            f"{path} is nsys's own format, which only nsys reads.", f"nsys export --type sqlite -o {path.stem}.sqlite {path.name}"
        )
    if path.is_dir():
        raise ParseError(f"{path} is a folder.", "Give a trace file, or a run folder that `llm-perf run` printed.")
    check_ordinary(path)
    with PackedFile(path) as file:
        first = file.read(_PREVIEW_BYTES)
    return next((one for one in FORMATS if first.startswith(one.starts)), None)
