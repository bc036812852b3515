"""Which rows of an export can be true, and what is said about those that cannot."""

import numpy as np

from llm_perf_opt.events import Int64, TraceProblem, is_beyond_clocks
from llm_perf_opt.parsers.sqlite_tables import IntegerTable

_LARGEST_DEVICE = 2**16
LOST_SHARE = 0.01
"""Up to this share of rows without a time the sums are still believed."""


class RowChecks:
    """Collects the problems of all tables."""

    def __init__(self) -> None:
        self.problems: list[TraceProblem] = []

    def note(self, id: str, what: str, fatal: bool, remedy: str = "") -> None:
        """Add a problem, once."""
        problem = TraceProblem(id, what, fatal, remedy)
        if problem not in self.problems:
            self.problems.append(problem)

    def sound(self, table: str, read: IntegerTable, work: bool = False) -> dict[str, Int64]:
        """The columns without the rows that cannot be true; each kind of them is named. `work`: device work, which is summed."""
        columns = read.columns
        if read.dropped:
            self.note("bad_rows", f"{read.dropped:,} rows of {table} hold values of a wrong type, and are left out", fatal=True)
        start, end = columns["start"], columns["end"]
        absurd = is_beyond_clocks(start, end)
        if "device" in columns:
            absurd |= (columns["device"] < 0) | (columns["device"] > _LARGEST_DEVICE)
        backward = ~absurd & (end < start)
        untimed = ~absurd & (start == 0) & (end == 0) & work
        if absurd.any():
            what = f"{np.count_nonzero(absurd):,} rows of {table} hold times or devices that cannot be, and are left out"
            self.note("absurd_value", what, fatal=True)
        if backward.any():
            what = f"{np.count_nonzero(backward):,} rows of {table} end before they start, and are left out"
            self.note("negative_duration", what, fatal=work)
        if untimed.any():
            share = np.count_nonzero(untimed) / len(start)
            what = (
                f"{np.count_nonzero(untimed):,} of {len(start):,} rows of {table} were recorded without a time, and are left out"
            )
            self.note("untimed", what, fatal=bool(share > LOST_SHARE), remedy="Record a shorter stretch.")
        self._extents(columns)
        wrong = absurd | backward | untimed
        return {name: column[~wrong] for name, column in columns.items()} if wrong.any() else columns

    def _extents(self, columns: dict[str, Int64]) -> None:
        for extent in columns.keys() & {"grid", "block"}:
            if (columns[extent] < 0).any():
                what = f"some kernels have a {extent} that cannot be; it is shown as not known"
                self.note("absurd_value", what, fatal=False)
                columns[extent] = columns[extent].clip(0)
