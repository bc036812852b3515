"""The checksum of a file's bytes, taken while they are read for another purpose, or by reading them for it."""

import zlib
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import open_ordinary

_READ_BYTES = 1 << 20


@dataclass
class Checksum:
    """CRC-32, the fastest check that misses no single change, and the number of bytes it is of."""

    crc: int = 0
    size: int = 0

    def add(self, data: bytes | memoryview) -> None:
        """The file's next bytes."""
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)

    def __str__(self) -> str:
        return f"{self.size:x}-{self.crc:08x}"


def checksum_of(path: Path) -> Checksum:
    """Of all bytes of a file, or a ParseError."""
    checksum = Checksum()
    with memoryview(bytearray(_READ_BYTES)) as room:
        try:
            with open_ordinary(path) as file:
                while count := file.readinto(room):
                    checksum.add(room[:count])
        except OSError as error:
            raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    return checksum
