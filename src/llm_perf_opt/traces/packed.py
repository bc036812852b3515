"""Read a trace file that is plain, gzipped or in a zip, piece by piece. The format is detected from the first bytes.

A small file that unpacks to an enormous size is refused: by its ratio, and by a limit that `LLM_PERF_MAX_TRACE_GB` sets. No read
unpacks more than the requested size.
"""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.inside import open_new
from llm_perf_opt.core.proportion import HIGHEST_RATIO, DisproportionError, Proportion
from llm_perf_opt.core.user_files import open_ordinary
from llm_perf_opt.traces.trace_mark import Checksum

MOST_CONTENTS_BYTES = 1 << 20
"""The size of the table of contents of an archive, which is kept in memory."""
LARGEST_DICTIONARY = 64 << 20
"""The memory that LZMA may use; the strongest preset uses as much."""
_MEMBER_READ_BYTES = 1 << 16
_LENGTHS = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field in the header of a file."""
_LZMA = struct.Struct("<xxHBL")
"""The length of the properties, the coding of literals, the size of the dictionary."""


class _Unpacker(Protocol):
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class ZipMember:
    """The only file in a zip, read once from start to end. Raises BadZipFile or another error of `zipfile` if it is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        self.consumed = 0
        """Packed bytes read so far."""
        self._file = file
        archive = zipfile.ZipFile(_Contents(file))
        files = [info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
        if len(files) != 1:
            raise zipfile.BadZipFile(f"it contains {len(files):,} files; one trace was expected")
        (info,) = files
        archive.open(info).close()  # raises if it is encrypted, has an unknown method or no header
        self._left, self._packed_left = info.file_size, info.compress_size
        self._crc, self._expected_crc = 0, info.CRC
        file.seek(info.header_offset)
        header = file.read(_LENGTHS.size)
        self._place = info.header_offset + len(header) + sum(_LENGTHS.unpack(header))
        self._damage: type[Exception] = zlib.error
        """The error that the unpacker raises for damaged data."""
        self._unpacker = self._unpacker_for(info.compress_type)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        size = min(size, self._left)
        data = bytearray()
        while len(data) < size:
            packed = self._packed(_MEMBER_READ_BYTES) if self._unpacker.needs_input else b""
            try:
                piece = self._unpacker.decompress(packed, size - len(data))
            except self._damage as error:
                raise zipfile.BadZipFile(str(error)) from error
            if not packed and not piece:
                raise EOFError("it ends too early")
            data += piece
        self._left -= len(data)
        self._crc = zlib.crc32(data, self._crc)
        if not self._left and self._crc != self._expected_crc:
            raise zipfile.BadZipFile("its checksum is wrong")
        return bytes(data)

    def _packed(self, size: int) -> bytes:
        self._file.seek(self._place)
        data = self._file.read(min(size, self._packed_left))
        self._place += len(data)
        self._packed_left -= len(data)
        self.consumed += len(data)
        return data

    def _unpacker_for(self, method: int) -> _Unpacker:
        if method == zipfile.ZIP_STORED:
            return _Stored()
        if method == zipfile.ZIP_DEFLATED:
            return _Deflated()
        if method == zipfile.ZIP_BZIP2:
            import bz2

            self._damage = OSError
            return bz2.BZ2Decompressor()
        return self._lzma()

    def _lzma(self) -> _Unpacker:
        import lzma

        header = self._packed(_LZMA.size)
        if len(header) < _LZMA.size:
            raise zipfile.BadZipFile("it ends too early")
        size, coding, dictionary = _LZMA.unpack(header)
        if size != _LZMA.size - 4 or coding >= 9 * 5 * 5:
            raise zipfile.BadZipFile("its LZMA properties are wrong")
        if dictionary > LARGEST_DICTIONARY:
            raise zipfile.BadZipFile(
                f"LZMA would need {dictionary >> 20:,} MiB of memory; the limit is {LARGEST_DICTIONARY >> 20}"
            )
        literals, positions = coding % 9, coding // 9
        properties = {"lc": literals, "lp": positions % 5, "pb": positions // 5, "dict_size": dictionary}
        self._damage = lzma.LZMAError
        try:
            return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA1, **properties}])
        except lzma.LZMAError as error:
            raise zipfile.BadZipFile(f"its LZMA properties are wrong: {error}") from error


class _Stored:
    """Unpacked bytes, passed through."""

    def __init__(self) -> None:
        self._data = b""

    @property
    def needs_input(self) -> bool:
        return not self._data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        data = self._data + data
        self._data = data[max_length:]
        return data[:max_length]


class _Deflated:
    """Deflate, with the interface of the other unpackers."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(-15)

    @property
    def needs_input(self) -> bool:
        return not self._inflater.unconsumed_tail and not self._inflater.eof

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)


class _Contents:
    """A file that `zipfile` reads the table of contents from; refuses an enormous table."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        if size > MOST_CONTENTS_BYTES:
            raise zipfile.BadZipFile(f"its table of contents has more than {MOST_CONTENTS_BYTES >> 20} MiB")
        return self._file.read(size)


LIMIT_VARIABLE = "LLM_PERF_MAX_TRACE_GB"
DEFAULT_LIMIT_GB = 32.0
_READ_BYTES = 1 << 18
_WRITE_BYTES = 1 << 20
_FED_BYTES = 1 << 13
"""Packed bytes per call of zlib, which returns a copy of those that it did not need."""
_GZIP = b"\x1f\x8b"
_MANY_MEMBERS, _LEAST_MEMBER_BYTES = 10_000, 64
"""A gzip file with more members must have this many bytes per member on average; those of bgzip have 65,280."""


class PackedFile:
    """A file whose unpacked bytes are read once, from start to end."""

    def __init__(self, path: Path, checksum: Checksum | None = None) -> None:
        """Open a file. `checksum` receives its packed bytes, except for a zip, which is not read from start to end."""
        self.path = path
        self._checksum = checksum
        self.cut_short = False
        """Whether the packed data ends before its end marker."""
        self._produced = self._consumed = 0
        """Unpacked bytes so far, and the packed bytes of a gzip file that were read for them."""
        self._proportion = Proportion()
        self._limit = _limit_bytes()
        try:
            self._file = open_ordinary(path)
            magic = self._file.read(4)
            self._file.seek(0)
        except OSError as error:
            raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
        self._member: ZipMember | None = None
        self._inflater: zlib._Decompress | None = None
        self._members = 0
        """Members of a gzip file read so far, except the last."""
        self._pending = memoryview(b"")
        if magic.startswith(_GZIP):
            self._inflater = zlib.decompressobj(31)
        elif magic == b"PK\x03\x04":
            self._member = self._only_member(self._file)

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def is_packed(self) -> bool:
        """Whether the file is compressed or an archive."""
        return self._inflater is not None or self._member is not None

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        try:
            if self._inflater is not None:
                data = self._inflate(self._inflater, size)
            elif self._member is not None:
                data = self._member.read(size)
            else:
                return self._plain(size)
        except (zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise ParseError(
                f"{self.path} is damaged: it cannot be unpacked beyond its first {self._produced:,} bytes ({error}).",
                "Copy it again from its origin.",
            ) from error
        except OSError as error:
            raise ParseError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        self._produced += len(data)
        self._check_size(len(data))
        return data

    def read_into(self, buffer: memoryview) -> int:
        """Read the next bytes into a buffer, which may be filled partly. Return their number, 0 at the end."""
        if self.is_packed:
            data = self.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        try:
            count = self._file.readinto(buffer)
        except OSError as error:
            raise ParseError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if self._checksum is not None:
            self._checksum.add(buffer[:count])
        return count

    def _plain(self, size: int) -> bytes:
        """Return the next bytes of the file as they are on disk."""
        data = self._file.read(size)
        if self._checksum is not None:
            self._checksum.add(data)
        return data

    def _inflate(self, inflater: "zlib._Decompress", size: int) -> bytes:
        """Return the next unpacked bytes of a gzip file, which may have several members."""
        data = bytearray()
        while len(data) < size:
            if inflater.eof:
                if not self._has_next_member(self._produced + len(data)):
                    break
                self._inflater = inflater = zlib.decompressobj(31)
            if not self._pending:
                self._pending = self._more_packed()
            if not self._pending:
                self.cut_short = True
                data += inflater.flush()[: size - len(data)]
                break
            fed = self._pending[:_FED_BYTES]
            data += inflater.decompress(fed, size - len(data))
            left = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            self._pending = self._pending[len(fed) - len(left) :]
        return bytes(data)

    def _more_packed(self) -> memoryview:
        data = self._plain(_READ_BYTES)
        self._consumed += len(data)
        return memoryview(data)

    def _has_next_member(self, produced: int) -> bool:
        """Return whether another member follows, rather than padding or the end of the file."""
        if len(self._pending) < len(_GZIP):  # the marker of the next member may be split
            self._pending = memoryview(bytes(self._pending) + self._more_packed())
        if self._pending[: len(_GZIP)] != _GZIP:
            return False
        self._members += 1
        if self._members > _MANY_MEMBERS and produced < _LEAST_MEMBER_BYTES * self._members:
            raise ParseError(
                f"{self.path} is packed in more than {_MANY_MEMBERS:,} members of a few bytes each; traces are not.",
                "Unpack it and give the trace itself.",
            )
        return True

    def _only_member(self, file: BinaryIO) -> ZipMember:
        remedy = "Unpack it and give the trace itself."
        try:
            return ZipMember(file)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, zlib.error) as error:
            raise ParseError(f"{self.path} is a zip file that cannot be opened: {error}.", remedy) from error

    def add_values(self, count: int) -> None:
        """Count values that were decoded from the bytes: empty ones take as long as long ones. Raise a ParseError if too many."""
        if self.is_packed:
            self._check_size(0, count)

    def _check_size(self, size: int, values: int = 0) -> None:
        packed = self._consumed if self._member is None else self._member.consumed
        if self._produced > self._limit:
            raise ParseError(
                f"{self.path} unpacks to more than {self._limit / 1e9:.0f} GB.", f"If it is a real trace, set {LIMIT_VARIABLE}."
            )
        if LIMIT_VARIABLE in os.environ:
            return
        try:
            self._proportion.add(packed, size, values)
        except DisproportionError as error:
            raise ParseError(
                f"{self.path} unpacks to more than {HIGHEST_RATIO} times its size; traces do not.",
                f"If it is a real trace, set {LIMIT_VARIABLE} to its size in gigabytes.",
            ) from error


def is_gzip(path: Path) -> bool:
    """Return whether the content of a file is gzip."""
    with open_ordinary(path) as file:
        return file.read(len(_GZIP)) == _GZIP


def unpack(path: Path, to: Path) -> None:
    """Unpack `path` into the file `to`, piece by piece and with the same limits. Raise a ParseError if it is truncated."""
    with PackedFile(path) as packed, open_new(to.parent, to) as unpacked:
        while piece := packed.read(_WRITE_BYTES):
            try:
                unpacked.write(piece)
            except OSError as error:
                raise ResourceError(
                    f"{path} cannot be unpacked into {to.parent}: {error.strerror}.",
                    "Free some disk space, or set TMPDIR to a folder with more.",
                ) from error
        if packed.cut_short:
            raise ParseError(
                f"{path} is a damaged or truncated gzip file: it ends before its end marker.",
                "Copy it again, or regenerate the report.",
            )


def _limit_bytes() -> float:
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        gigabytes = float(text) if text else DEFAULT_LIMIT_GB
    except ValueError:
        gigabytes = -1.0
    if not gigabytes > 0:
        raise ConfigError(f"{LIMIT_VARIABLE}={text} is not a size.", "Give a number of gigabytes, such as 64.")
    return gigabytes * 1e9
