"""The only file in a zip archive, unpacked piece by piece: never more at once than is asked for, whatever the archive claims.

`zipfile` finds the file. It would unpack LZMA and bzip2 in pieces as large as the data makes them.
"""

import struct
import zipfile
import zlib
from typing import Any, BinaryIO, Protocol

MOST_CONTENTS_BYTES = 1 << 20
"""Of the archive's table of contents, which is held in memory."""
LARGEST_DICTIONARY = 64 << 20
"""What LZMA may look back at, and takes in memory; the strongest preset takes as much."""
_READ_BYTES = 1 << 16
_LENGTHS = struct.Struct("<26xHH")
"""Of the name and of the extra field, in the header before a file."""
_LZMA = struct.Struct("<xxHBL")
"""Length of the properties, and these: how literals are coded, the size of the dictionary."""


class _Unpacker(Protocol):
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class ZipMember:
    """The file's bytes, read once, from the front. What is wrong with it is a BadZipFile or another of `zipfile`'s errors."""

    def __init__(self, file: BinaryIO) -> None:
        self.consumed = 0
        """Packed bytes that were read so far."""
        self._file = file
        archive = zipfile.ZipFile(_Contents(file))
        files = [info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
        if len(files) != 1:
            raise zipfile.BadZipFile(f"it holds {len(files):,} files; one trace was expected")
        (info,) = files
        archive.open(info).close()  # says what cannot be read: encrypted, of an unknown method, no header
        self._left, self._packed_left = info.file_size, info.compress_size
        self._crc, self._expected_crc = 0, info.CRC
        file.seek(info.header_offset)
        header = file.read(_LENGTHS.size)
        self._place = info.header_offset + len(header) + sum(_LENGTHS.unpack(header))
        self._damage: type[Exception] = zlib.error
        """What the unpacker raises for damaged data."""
        self._unpacker = self._unpacker_for(info.compress_type)

    def read(self, size: int) -> bytes:
        """`size` bytes more, or as many as there are; none at the end."""
        size = min(size, self._left)
        data = bytearray()
        while len(data) < size:
            packed = self._packed(_READ_BYTES) if self._unpacker.needs_input else b""
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
                f"LZMA would need {dictionary >> 20:,} MiB of memory, and may have {LARGEST_DICTIONARY >> 20}"
            )
        literals, positions = coding % 9, coding // 9
        properties = {"lc": literals, "lp": positions % 5, "pb": positions // 5, "dict_size": dictionary}
        self._damage = lzma.LZMAError
        try:
            return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA1, **properties}])
        except lzma.LZMAError as error:
            raise zipfile.BadZipFile(f"its LZMA properties are wrong: {error}") from error


class _Stored:
    """Bytes that are not packed."""

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
    """zlib's own object, which hands back what it did not need."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(-15)

    @property
    def needs_input(self) -> bool:
        return not self._inflater.unconsumed_tail and not self._inflater.eof

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)


class _Contents:
    """A file for `zipfile` to find its table of contents in; one of enormous length is refused."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """As any file does."""
        if size > MOST_CONTENTS_BYTES:
            raise zipfile.BadZipFile(f"its table of contents has more than {MOST_CONTENTS_BYTES >> 20} MiB")
        return self._file.read(size)
