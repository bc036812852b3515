"""Damaged exports: each gives a Trace or a ParseError, quickly and in little memory.

`make test` takes a sample; `make test-all` runs them all.
"""

import gzip
import random
import resource
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fuzzing import SEED, TRIES, damaged
from llm_perf_opt.analysis.regions.regions import regions
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.health import examined
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from nsys_databases import cut_small
from rendered import regions_page

SHARDS = 4
MOST_EXTRA_BYTES = 2**30
CELLS = (
    "NULL",
    "'text'",
    "1.5",
    "-1",
    "0",
    "9223372036854775807",
    "-9223372036854775808",
    "x'ff00'",
    "CAST(x'c328ff' AS TEXT)",
    "''",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return cut_small(tmp_path_factory.mktemp("base") / "small.sqlite", kernels=25).read_bytes()


def outcome(path: Path) -> Trace | ParseError:
    """Do everything that is done with an export; any error but a ParseError fails the test."""
    try:
        trace = examined(read_nsys(path))
    except ParseError as error:
        return error
    for table in (trace.work, trace.calls, trace.ranges):
        assert (table.end_ns >= table.start_ns).all()
        assert (table.name >= -1).all()
        assert (table.name < len(trace.names)).all()
    report = regions(trace)
    assert all(group.check.reconciles for group in report.groups)
    regions_page(report).encode()
    return trace


def rewritten(path: Path, chance: random.Random) -> None:
    """Damage that leaves a valid database: columns dropped, renamed or shuffled, cells of other types and impossible values."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA journal_mode = MEMORY")
        for _ in range(chance.randint(1, 4)):
            tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = chance.choice(tables)
            columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
            column = chance.choice(columns)
            shuffled = ", ".join(f'"{name}"' for name in chance.sample(columns, chance.randint(1, len(columns))))
            statements = (
                [f'ALTER TABLE "{table}" DROP COLUMN "{column}"'],
                [f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{chance.choice([column.upper(), "renamed", "end"])}"'],
                [f'DROP TABLE "{table}"'],
                [f'DELETE FROM "{table}"'],
                [
                    f'CREATE TABLE loose AS SELECT {shuffled} FROM "{table}"',
                    f'DROP TABLE "{table}"',
                    f'ALTER TABLE loose RENAME TO "{table}"',
                ],
                [
                    f'CREATE TABLE loose AS SELECT * FROM "{table}"',
                    f'DROP TABLE "{table}"',
                    f'ALTER TABLE loose RENAME TO "{table}"',
                    f'UPDATE "{table}" SET "{column}" = {chance.choice(CELLS)} WHERE rowid % {chance.randint(1, 5)} = 0',
                ],
                [f'INSERT INTO "{table}" SELECT * FROM "{table}"'],
                [f'UPDATE "{table}" SET "{column}" = "{chance.choice(columns)}"'],
            )
            with suppress(sqlite3.Error):  # not every statement suits every table
                for statement in chance.choice(statements):
                    database.execute(statement)


def mutated(path: Path, base: bytes, number: int) -> None:
    chance = random.Random(SEED + number)
    kind = number % 5
    path.unlink(missing_ok=True)  # a new file is written faster than an old one anew
    if kind < 2:
        path.write_bytes(damaged(base, chance))
    elif kind < 4:
        path.write_bytes(base)
        rewritten(path, chance)
        if kind == 3 and chance.random() < 0.3:
            path.write_bytes(damaged(path.read_bytes(), chance))
    else:
        packed = gzip.compress(base if chance.random() < 0.5 else damaged(base, chance), 1)
        path.write_bytes(packed if chance.random() < 0.3 else damaged(packed, chance))


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_damaged_export_ends_in_a_trace_or_a_parse_error(shard: int, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = {Trace: 0, ParseError: 0}
    for number in range(shard, TRIES // 2, SHARDS):
        mutated(path, small, number)
        try:
            ends[type(outcome(path))] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
    if SEED == 0:  # other choices may be one-sided by chance
        assert min(ends.values()) > TRIES / SHARDS / 40, f"the damage is one-sided: {ends}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_EXTRA_BYTES


def test_the_undamaged_base_is_sound(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(small)
    trace = outcome(path)
    assert isinstance(trace, Trace)
    assert (len(trace.work), len(trace.ranges)) == (25 + 3 + 1, 9)
    assert len(small) < 150_000


def looping(path: Path, base: bytes, table: str) -> None:
    """Write a database with a table of 400⁸ leaves that are all the same page, which takes forever to read."""
    page_size = int.from_bytes(base[16:18], "big")
    pages = len(base) // page_size
    levels = 8
    path.write_bytes(base)
    with closing(sqlite3.connect(path)) as database:
        root = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    leaf = base[(root - 1) * page_size : root * page_size]
    added = [_inner_page(page_size, child=pages + 2 + level) for level in range(levels)] + [leaf]
    whole = bytearray(base + b"".join(added))
    whole[(root - 1) * page_size : root * page_size] = _inner_page(page_size, child=pages + 1)
    whole[28:32] = (pages + len(added)).to_bytes(4, "big")
    path.write_bytes(whole)


def _inner_page(size: int, child: int) -> bytes:
    """Return an inner page of a table whose 400 children are all the same page."""
    cells = [child.to_bytes(4, "big") + bytes([number % 100 + 1]) for number in range(400)]
    content = b"".join(cells)
    start = size - len(content)
    header = bytes([5, 0, 0]) + len(cells).to_bytes(2, "big") + start.to_bytes(2, "big") + b"\x00" + child.to_bytes(4, "big")
    pointers = b"".join((start + 5 * number).to_bytes(2, "big") for number in range(len(cells)))
    return (header + pointers).ljust(start, b"\x00") + content


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "NVTX_EVENTS"])
def test_a_tree_of_pages_that_multiplies_without_end_is_given_up(table: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    looping(path, small, table)
    with pytest.raises(ParseError, match=r"circle|more rows than"):
        read_nsys(path)
