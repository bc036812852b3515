"""What a tool writes while it runs, kept within a budget: a trace can fill a disk in a minute."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ResourceError
from llm_perf_opt.core.run_folder import LEAST_FREE_BYTES

BYTES_PER_GB = 10**9


class DiskWatch:
    """Looks at the folders a tool writes to. Cheap: they hold a handful of files."""

    def __init__(
        self, folders: Sequence[Path], max_bytes: int, *, interval_s: float = 1.0, least_free_bytes: int = LEAST_FREE_BYTES
    ) -> None:
        self.folders = tuple(folders)
        self.max_bytes = max_bytes
        self.interval_s = interval_s
        self._least_free_bytes = least_free_bytes
        self._next = 0.0
        self._before = self.used_bytes()

    def used_bytes(self) -> int:
        """Disk space that the folders take now."""
        return sum(_allocated(folder) for folder in self.folders)

    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._next

    def problem(self) -> LlmPerfError | None:
        """Why the tool must be stopped, if it must."""
        self._next = time.monotonic() + self.interval_s
        written = self.used_bytes() - self._before
        if written > self.max_bytes:
            return CaptureError(
                f"What the tool wrote grew to {written / BYTES_PER_GB:.2f} GB, above the "
                f"{self.max_bytes / BYTES_PER_GB:g} GB of profiling.max_trace_gb, and the pass was stopped.",
                "Raise profiling.max_trace_gb, or record less: fewer new tokens, fewer kernels, fewer traced APIs.",
            )
        for folder in self.folders:
            with suppress(OSError):  # not there yet
                free = os.statvfs(folder)
                if free.f_bavail * free.f_frsize < self._least_free_bytes:
                    return ResourceError(
                        f"The disk of {folder} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB left, "
                        f"less than {self._least_free_bytes / 1e6:.0f} MB, and the pass was stopped.",
                        "Free some space, put the run elsewhere with hydra.run.dir=DIR, or set TMPDIR to a larger disk.",
                    )
        return None


def _allocated(folder: Path) -> int:
    return sum(state.st_blocks * 512 for state in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Every regular file below a folder; what goes away meanwhile is passed over."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False)
