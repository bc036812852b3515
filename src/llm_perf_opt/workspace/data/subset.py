"""The transform `subset`: a seeded random sample of unchanged records, in source order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.inside import open_new, remove
from llm_perf_opt.workspace.data import arrow_files, parquet_files
from llm_perf_opt.workspace.data.formats import JSON_FORMATS, WHOLE, DataFile, Format
from llm_perf_opt.workspace.data.inventory import Advance, ignore
from llm_perf_opt.workspace.data.layout import SAMPLES
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import checked_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ROOM = 65_536


def ranks(seed: int, places: "NDArray[np.int64]") -> "NDArray[np.uint64]":
    """Return the rank of each position: the n-th number of the splitmix64 generator with this seed."""
    import numpy as np

    start = _mixed_number((seed + _GOLDEN) & _MASK)
    mixed = places.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return found


def _mixed_number(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class Reservoir:
    """The `size` positions of lowest rank among those offered, each with a number for the caller."""

    def __init__(self, size: int, seed: int) -> None:
        import numpy as np

        self._size, self._seed = size, seed
        self._kept: list[tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._held = 0
        self._limit = np.uint64(_MASK)
        self.offered = 0

    def candidates(self, places: "NDArray[np.int64]") -> "NDArray[np.intp]":
        """Return which of these positions (as indices) may still be in the sample; only those must be passed to `keep`."""
        import numpy as np

        self.offered += len(places)
        return np.flatnonzero(ranks(self._seed, places) <= self._limit)

    def keep(self, places: "NDArray[np.int64]", numbers: "NDArray[np.int64]") -> None:
        """Add candidates."""
        self._kept.append((ranks(self._seed, places), places, numbers))
        self._held += len(places)
        if self._held >= 2 * self._size + _ROOM:
            self._shrink()

    def sample(self) -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
        """Return the chosen positions in stream order, and their numbers."""
        import numpy as np

        self._shrink()
        _, places, numbers = self._kept[0]
        order = np.argsort(places, kind="stable")
        return places[order], numbers[order]

    def _shrink(self) -> None:
        import numpy as np

        empty = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
        found, places, numbers = (np.concatenate(column) for column in zip(empty, *self._kept, strict=True))
        order = np.lexsort((places, found))[: self._size]  # for equal ranks, the earlier position
        self._kept = [(found[order], places[order], numbers[order])]
        self._held = len(order)
        if self._held == self._size:
            self._limit = found[order[-1]]


def sample_places(count: int, size: int, seed: int) -> "NDArray[np.int64]":
    """Return a sample of `count` positions without reading them."""
    import numpy as np

    reservoir = Reservoir(size, seed)
    for start in range(0, count, 2**20):
        places = np.arange(start, min(count, start + 2**20), dtype=np.int64)
        chosen = places[reservoir.candidates(places)]
        reservoir.keep(chosen, chosen)
    return reservoir.sample()[0]


_SPILL = ".spill"
_CONVERT_FIRST = "Make a variant without such records with `--to jsonl --skip-bad`, and sample that one with `--from VARIANT`."


@dataclass(frozen=True)
class Sample:
    """The requested sample."""

    size: int
    seed: int = 0
    at_most: bool = False
    """Whether all records are the sample if there are fewer."""

    def check(self, found: int) -> None:
        """Raise a ResourceError if there are too few records."""
        if not found:
            raise ResourceError("There are no records to sample from.", "Fix the data.")
        if found < self.size and not self.at_most:
            raise ResourceError(
                f"{self.size} samples were requested, but there are {found} records.", f"Use --num-samples {found} or less."
            )


def write_subset(
    files: Sequence[DataFile], out: Path, sample: Sample, bad: BadRecords, advance: Advance
) -> tuple[Format, dict[str, int]]:
    """Write the sample of `files` to one file under `out`. Lines are copied unchanged; rows become JSON lines."""
    if files[0].format in (*JSON_FORMATS, "txt"):
        kind: Format = "txt" if files[0].format == "txt" else "jsonl"
        return kind, {WHOLE: _sampled_lines(files, out / f"{SAMPLES}.{kind}", sample, bad, advance)}
    return "jsonl", {WHOLE: _sampled_rows(files, out / f"{SAMPLES}.jsonl", sample, advance)}


def _sampled_lines(files: Sequence[DataFile], out: Path, sample: Sample, bad: BadRecords, advance: Advance) -> int:
    """Sample in one pass; candidate lines wait on disk, so memory holds only their positions."""
    import numpy as np

    reservoir, base = Reservoir(sample.size, sample.seed), 0
    spill_file = out.with_name(_SPILL)
    with open_new(out.parent, spill_file, readable=True) as spill:
        for file in files:
            for block in checked_lines(file, bad, advance):
                if not block:
                    continue
                places = np.arange(base, base + len(block), dtype=np.int64)  # of records: blank lines do not count
                base += len(block)
                chosen = reservoir.candidates(places)
                starts = np.empty(len(chosen), np.int64)
                for index, candidate in enumerate(chosen.tolist()):
                    starts[index] = spill.tell()
                    spill.write(block[candidate][1] + b"\n")
                reservoir.keep(places[chosen], starts)
        sample.check(reservoir.offered)
        with open_new(out.parent, out) as kept:
            for start in reservoir.sample()[1].tolist():
                spill.seek(start)
                kept.write(spill.readline())
    remove(out.parent, spill_file)
    return min(sample.size, reservoir.offered)


def _sampled_rows(files: Sequence[DataFile], out: Path, sample: Sample, advance: Advance) -> int:
    """Draw positions from the row counts, then write only the chosen rows."""
    reader = arrow_files if files[0].format == "arrow" else parquet_files
    counts = [reader.count_rows(file.path) for file in files]
    sample.check(sum(counts))
    places = sample_places(sum(counts), sample.size, sample.seed)
    first = 0
    with open_new(out.parent, out) as kept:
        for file, count in zip(files, counts, strict=True):
            inside = (places[(places >= first) & (places < first + count)] - first).tolist()
            if inside and file.format == "parquet":
                _append_parquet_rows(file, inside, out.with_name(_SPILL), kept)
            elif inside:
                _append_arrow_rows(file, inside, kept)
            first += count
            advance(file.bytes)
    return len(places)


def _append_parquet_rows(file: DataFile, rows: list[int], spill: Path, kept: BinaryIO) -> None:
    """Check each line again before keeping it, so that the sample has the requested size without invalid JSON."""
    parquet_files.write_json(file.path, spill, ignore, rows)
    made, count = DataFile(f"{file.name} as JSON lines", spill, "jsonl", file.split), 0
    for block in checked_lines(made, BadRecords(skip=False, how_to_skip=_CONVERT_FIRST), ignore):
        kept.writelines(line + b"\n" for _, line in block)
        count += len(block)
    if count != len(rows):
        raise ParseError(
            f"{file.name}: {len(rows)} rows were requested, but {count} were read.", "Please report this with the file."
        )
    remove(spill.parent, spill)


def _append_arrow_rows(file: DataFile, rows: list[int], kept: BinaryIO) -> None:
    wanted, place = iter([*rows, -1]), 0
    following = next(wanted)
    for block in arrow_files.objects(file.path, ignore):
        while place <= following < place + len(block):
            kept.write(msgspec.json.encode(block[following - place]) + b"\n")
            following = next(wanted)
        place += len(block)
