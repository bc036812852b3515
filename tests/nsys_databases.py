"""Exports of Nsight Systems for tests: cut from the real ones, then altered."""

import gzip
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "h200"
DECODE = FIXTURES / "nsys_decode.sqlite.gz"
TRUNCATED = FIXTURES / "nsys_truncated.sqlite.gz"

PROCESS = 281517204963328
"""Of the real decode report."""


def altered(to: Path, statements: Iterable[str] = (), source: Path = DECODE) -> Path:
    """A copy of a real export with SQL run on it."""
    to.write_bytes(gzip.decompress(source.read_bytes()))
    with closing(sqlite3.connect(to, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)
    return to


def cut_small(to: Path, kernels: int = 40) -> Path:
    """A real export with a few kernels, their calls, and a memcpy table: small enough to damage ten thousand times."""
    return altered(
        to,
        [
            f"DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid > {kernels}",
            "DELETE FROM CUPTI_ACTIVITY_KIND_MEMSET WHERE rowid > 3",
            "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME "
            "WHERE correlationId NOT IN (SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL)",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, "
            "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL)",
            f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (94000000, 94000500, 0, 7, 373, {PROCESS}, 4096, 1)",
            "DELETE FROM StringIds WHERE id NOT IN (SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME "
            "UNION SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL UNION SELECT textId FROM NVTX_EVENTS WHERE textId > 0)",
            "DROP TABLE ENUM_NSYS_EVENT_TYPE",
            "DROP TABLE META_DATA_CAPTURE",
            "VACUUM",
        ],
    )
