"""Any profiler's trace by its content: a torch trace or an nsys export."""

from pathlib import Path
from typing import TYPE_CHECKING

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.traces.events import Trace

if TYPE_CHECKING:
    from llm_perf_opt.traces.checksum import Checksum

_SQLITE = b"SQLite format 3\x00"
_PREVIEW_BYTES = 64


def read_trace(path: Path, checksum: "Checksum | None" = None) -> Trace:
    """The trace in a file, whatever its name: torch.profiler's JSON or nsys's SQLite, plain or packed; or a ParseError.

    `checksum` is given the bytes of the file as they are read, if they are read from front to end.
    """
    if is_nsys(path):
        from llm_perf_opt.traces.nsys_sqlite import read_nsys

        return read_nsys(path)
    from llm_perf_opt.traces.torch_json.trace import read_torch_trace

    return read_torch_trace(path, checksum)


def is_nsys(path: Path) -> bool:
    """Whether a file is an nsys SQLite export, by its first bytes."""
    from llm_perf_opt.traces.packed import PackedFile

    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise ParseError(
            f"{path} is nsys's own format, which only nsys reads.", f"nsys export --type sqlite -o {path.stem}.sqlite {path.name}"
        )
    if path.is_dir():
        raise ParseError(f"{path} is a folder.", "Give a trace file, or a run folder that `llm-perf run` printed.")
    check_ordinary(path)
    with PackedFile(path) as file:
        return file.read(_PREVIEW_BYTES).startswith(_SQLITE)
