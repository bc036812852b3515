"""Read arrays of events into columns: with a fast reader where one accepts the array, otherwise by decoding the JSON.

A fast reader knows the exact layout that one program writes. It only saves time: without any, every row and every problem is the
same. To remove one, delete its folder and its line in `FAST_READERS`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from llm_perf_opt.traces.torch_json.codes import Codes
from llm_perf_opt.traces.torch_json.columns import PartialRead, TorchColumns
from llm_perf_opt.traces.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.traces.torch_json.events import EventDecoder


class FastReader(Protocol):
    """Reads the arrays of one file."""

    def read(self, array: bytes | memoryview) -> PartialRead | None:
        """Return what it can read of a JSON array of events, or None if the array has another layout."""


def _load(name: str) -> Callable[[Codes], FastReader]:
    module, reader = name.split(":")
    return cast("Callable[[Codes], FastReader]", getattr(import_module(module), reader))


FAST_READERS: list[Callable[[Codes], FastReader]] = [
    _load("llm_perf_opt.traces.torch_lines.lines:TorchLines"),
]
"""In the order in which they are tried."""
_SMALLEST_FAST_READ = 2048
"""Bytes. Single events, as in a damaged part of a file, are decoded faster than a fast reader finds their layout."""


class ArrayReader:
    """Reads the arrays of one file into columns."""

    def __init__(self, columns: TorchColumns) -> None:
        self._columns = columns
        self._fast = [reader(columns.codes) for reader in FAST_READERS]
        self._decoder = EventDecoder(columns.take)

    @property
    def not_events(self) -> int:
        """The number of array members that are not events."""
        return self._decoder.not_events

    def __call__(self, array: bytes | memoryview) -> int:
        """Add all events of an array to the columns and return their number, or raise and add none."""
        if len(array) >= _SMALLEST_FAST_READ:
            for reader in self._fast:
                read = reader.read(array)
                if read is None:
                    continue
                try:
                    others = self._decoder(read.others)
                except DECODE_FAILURES:  # the array only looks as if it had the layout
                    continue
                self._columns.add(read.tables)
                return read.events + others
        return self._decoder(array)
