"""Damage to files that hold a table as text: what disks, pipes, editors, other machines and bad luck do to a CSV."""

import csv
import gzip
import io
import random
from collections.abc import Callable

Mutator = Callable[[random.Random, bytes], bytes]

ODD_CELLS = (
    *("", "n/a", "(!) n/a", "nan", "-inf", "1e999", "-5", "1,2,3", "1.234.567", "1.234,5", "9" * 400, "0x1f", "1\u202f234", "½"),
    *('"', '""', "\x00", "=1+1", "(1, 2)", "(1, 2, 3", "(99999999999, 1, 1)", "==ERROR== no", "\ud7ff\U0001f600", "a" * 200_000),
)


def mutated(random_source: random.Random, data: bytes) -> bytes:
    """One to three kinds of damage, one after the other."""
    for mutator in random_source.choices(MUTATORS, k=random_source.randint(1, 3)):
        data = mutator(random_source, data)
    return data


def cut_short(source: random.Random, data: bytes) -> bytes:
    """A disk that was full, a process that was killed."""
    return data[: source.randint(0, len(data))]


def bits_flipped(source: random.Random, data: bytes) -> bytes:
    """A few bits the other way."""
    changed = bytearray(data)
    for _ in range(min(source.randint(1, 12), len(changed))):
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


def bytes_inserted(source: random.Random, data: bytes) -> bytes:
    """Noise in one place."""
    at = source.randint(0, len(data))
    return data[:at] + source.randbytes(source.randint(1, 40)) + data[at:]


def piece_repeated(source: random.Random, data: bytes) -> bytes:
    """A block written twice."""
    start, end = sorted(source.randint(0, len(data)) for _ in range(2))
    return data[:end] + data[start:end] + data[end:]


def columns_shuffled(source: random.Random, data: bytes) -> bytes:
    """Columns in another order, some gone, some twice."""
    rows = _rows(data)
    if not rows:
        return data
    width = max(map(len, rows))
    order = source.sample(range(width), width)
    order = order[: source.randint(1, width)] + source.choices(range(width), k=source.randint(0, 3))
    return _written([[row[index] if index < len(row) else "" for index in order] for row in rows])


def rows_shuffled(source: random.Random, data: bytes) -> bytes:
    """Lines in another order."""
    lines = data.splitlines(keepends=True)
    source.shuffle(lines)
    return b"".join(lines)


def lines_dropped(source: random.Random, data: bytes) -> bytes:
    """The header, the units or a kernel gone."""
    return b"".join(line for line in data.splitlines(keepends=True) if source.random() > 0.3)


def cells_changed(source: random.Random, data: bytes) -> bytes:
    """Cells that hold what no cell should."""
    rows = _rows(data)
    for row in source.sample(rows, min(2, len(rows))):
        if row:
            row[source.randrange(len(row))] = source.choice(ODD_CELLS)
    return _written(rows)


def chatter_inserted(source: random.Random, data: bytes) -> bytes:
    """The tool or the program speaking between the lines."""
    lines = data.splitlines(keepends=True)
    said = source.choice(
        (b"==PROF== Report: x\n", b"==ERROR== ERR_NVGPUCTRPERM\n", b"==WARNING== \xff\n", b"loss: 1,2\n", b"\n\n")
    )
    lines.insert(source.randint(0, len(lines)), said)
    return b"".join(lines)


def encoded_otherwise(source: random.Random, data: bytes) -> bytes:
    """Another encoding, with or without its mark."""
    text = data.decode("utf-8", "replace")
    return text.encode(source.choice(("utf-16", "utf-16-le", "utf-8-sig", "latin-1", "utf-7", "utf-32")), "replace")


def packed(source: random.Random, data: bytes) -> bytes:
    """Compressed, and perhaps damaged then."""
    small = gzip.compress(data, 1)
    return small if source.random() < 0.5 else source.choice((cut_short, bits_flipped))(source, small)


def line_ends_changed(source: random.Random, data: bytes) -> bytes:
    """As another system ends its lines."""
    return data.replace(b"\n", source.choice((b"\r\n", b"\r", b"\n\n", b"")))


def other_marks(source: random.Random, data: bytes) -> bytes:
    """Separators of another locale, or of another kind of table."""
    old, new = source.choice(((b",", b";"), (b".", b","), (b'"', b"'"), (b'","', b"\t"), (b",", b".")))
    return data.replace(old, new)


MUTATORS: tuple[Mutator, ...] = (
    cut_short,
    bits_flipped,
    bytes_inserted,
    piece_repeated,
    columns_shuffled,
    rows_shuffled,
    lines_dropped,
    cells_changed,
    chatter_inserted,
    encoded_otherwise,
    packed,
    line_ends_changed,
    other_marks,
)


def _rows(data: bytes) -> list[list[str]]:
    text = data.decode("utf-8", "replace").replace("\x00", "")
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error:
        return []


def _written(rows: list[list[str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue().encode("utf-8", "replace")
