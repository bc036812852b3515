"""Keep what reading a file takes in proportion to its size: every reader of packed data counts what it unpacks."""

from pathlib import Path

from llm_perf_opt.core.errors import ParseError

HIGHEST_RATIO = 200
"""Of unpacked to packed size. Texts reach about 10, traces about 30; deflate at most 1,032, Zstandard more than 10,000, and the
encodings of a column have no limit: a row may take no byte at all."""
RATIO_COUNTS_FROM_BYTES = 16 << 20
STREAM_RATIO_COUNTS_FROM_BYTES = 256 << 20
"""For what is read in constant memory: repeated texts of this size are read."""
VALUE_BYTES = 64
"""What a line, a record or a row counts besides its bytes: reading an empty one takes as long as these."""


class DisproportionError(ValueError):
    """A file unpacks to far more than its size."""

    def __init__(self) -> None:
        super().__init__(f"it unpacks to more than {HIGHEST_RATIO} times its size")

    def of(self, path: Path) -> ParseError:
        """Return the error for users."""
        return ParseError(
            f"{path} unpacks to more than {HIGHEST_RATIO} times its size; texts do not.",
            "If it is real data, unpack it and use the unpacked file.",
        )


class Proportion:
    """Counts what a file unpacks to."""

    def __init__(self, free: int | None = None) -> None:
        """`free`: how many bytes any file may unpack to."""
        self._free = RATIO_COUNTS_FROM_BYTES if free is None else free
        self._produced = 0

    def add(self, consumed: int, size: int, values: int = 0) -> None:
        """Count bytes in so many values, unpacked from `consumed` bytes. Raise a DisproportionError if they are too many."""
        self._produced += size + VALUE_BYTES * values
        if self._produced > max(self._free, HIGHEST_RATIO * consumed):
            raise DisproportionError
