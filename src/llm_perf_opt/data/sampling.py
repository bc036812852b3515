"""A uniform sample of a stream of unknown length, the same on every machine.

Every place in the stream gets a 64-bit rank from the seed alone, and the places with the lowest ranks are the sample. This is
reservoir sampling: each subset of the asked size is equally likely, one pass, memory for the sample's places only. Ranks are
whole numbers, so no machine's floating point decides who is in, and the blocks the stream comes in do not matter.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ROOM = 65_536


def ranks(seed: int, places: "NDArray[np.int64]") -> "NDArray[np.uint64]":
    """The rank of each place: the splitmix64 generator, started by the seed and asked for its n-th number."""
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
    """The `size` places of lowest rank among those offered, each with a number its owner may keep."""

    def __init__(self, size: int, seed: int) -> None:
        import numpy as np

        self._size, self._seed = size, seed
        self._kept: list[tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._held = 0
        self._limit = np.uint64(_MASK)
        self.offered = 0

    def candidates(self, places: "NDArray[np.int64]") -> "NDArray[np.intp]":
        """Which of these places (as indices) may still be in the sample; only those need to be handed to `keep`."""
        import numpy as np

        self.offered += len(places)
        return np.flatnonzero(ranks(self._seed, places) <= self._limit)

    def keep(self, places: "NDArray[np.int64]", numbers: "NDArray[np.int64]") -> None:
        """Take candidates in."""
        self._kept.append((ranks(self._seed, places), places, numbers))
        self._held += len(places)
        if self._held >= 2 * self._size + _ROOM:
            self._shrink()

    def sample(self) -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
        """The chosen places in the stream's order, and their numbers."""
        import numpy as np

        self._shrink()
        _, places, numbers = self._kept[0]
        order = np.argsort(places, kind="stable")
        return places[order], numbers[order]

    def _shrink(self) -> None:
        import numpy as np

        empty = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
        found, places, numbers = (np.concatenate(column) for column in zip(empty, *self._kept, strict=True))
        order = np.lexsort((places, found))[: self._size]  # equal ranks, should they ever meet: the earlier place
        self._kept = [(found[order], places[order], numbers[order])]
        self._held = len(order)
        if self._held == self._size:
            self._limit = found[order[-1]]


def sample_places(count: int, size: int, seed: int) -> "NDArray[np.int64]":
    """The sample among `count` places that need not be read."""
    import numpy as np

    reservoir = Reservoir(size, seed)
    for start in range(0, count, 2**20):
        places = np.arange(start, min(count, start + 2**20), dtype=np.int64)
        chosen = places[reservoir.candidates(places)]
        reservoir.keep(chosen, chosen)
    return reservoir.sample()[0]
