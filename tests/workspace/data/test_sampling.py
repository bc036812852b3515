"""The sample is uniform, independent of the blocks of the stream, and the same on every machine."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.workspace.data.subset import Reservoir, ranks, sample_places


def splitmix(state: int, count: int) -> list[int]:
    """The published generator, written out: the n-th number from a starting state."""
    found = []
    for index in range(count):
        mixed = (state + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        found.append(mixed ^ (mixed >> 31))
    return found


def test_ranks_are_the_published_generator() -> None:
    # splitmix64 from seed 0 begins with 0xE220A8397B1DCDAF: it adds the golden ratio first, as the start does here
    assert splitmix(0x9E3779B97F4A7C15, 1) == [0xE220A8397B1DCDAF]
    assert ranks(0, np.arange(5, dtype=np.int64)).tolist() == splitmix(0xE220A8397B1DCDAF, 5)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 400), st.integers(1, 500), st.integers(0, 2**63 - 1), st.lists(st.integers(1, 50), max_size=20))
def test_the_sample_is_the_lowest_ranks_in_the_streams_order(count: int, size: int, seed: int, blocks: list[int]) -> None:
    places = np.arange(count, dtype=np.int64)
    lowest = sorted(places.tolist(), key=lambda place: int(ranks(seed, places)[place]))[:size]
    assert sample_places(count, size, seed).tolist() == sorted(lowest)
    reservoir, start = Reservoir(size, seed), 0
    for length in [*blocks, count]:
        block = places[start : start + length]
        chosen = block[reservoir.candidates(block)]
        reservoir.keep(chosen, chosen * 10)
        start += length
    found, numbers = reservoir.sample()
    assert found.tolist() == sorted(lowest)
    assert numbers.tolist() == [place * 10 for place in sorted(lowest)]
    assert reservoir.offered == count


def test_a_long_stream_needs_only_the_samples_room() -> None:
    reservoir = Reservoir(100, 7)
    kept = 0
    for start in range(0, 2_000_000, 50_000):
        block = np.arange(start, start + 50_000, dtype=np.int64)
        chosen = block[reservoir.candidates(block)]
        kept += len(chosen)
        reservoir.keep(chosen, chosen)
        assert reservoir._held <= 2 * 100 + 65_536
    assert kept < 200_000, "once full, hardly anything is a candidate"
    assert reservoir.sample()[0].tolist() == sample_places(2_000_000, 100, 7).tolist()


def test_every_place_is_taken_equally_often() -> None:
    counts = np.zeros(50)
    for seed in range(4000):
        counts[sample_places(50, 10, seed)] += 1
    # each place is in 1 of 5 samples: 800 expected, standard deviation √(4000 · 0.2 · 0.8) ≈ 25; six of them
    assert np.all(np.abs(counts - 800) < 150)
    assert 20 < counts.std() < 32, "neither uneven nor suspiciously even"


def test_another_seed_gives_another_sample() -> None:
    samples = {tuple(sample_places(1000, 10, seed).tolist()) for seed in range(200)}
    assert len(samples) == 200
