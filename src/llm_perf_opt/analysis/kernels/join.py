"""Launches that Nsight Compute sampled, joined to the kernels of a trace: by name, number of blocks and threads of a block."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llm_perf_opt.analysis.kernels.names import function_name, has_arguments, normal_name
from llm_perf_opt.core.machine_records import CountedKernel, KernelUse
from llm_perf_opt.core.records import Maybe, Missing

NOT_COLLECTED = Missing("the counter was not collected")

Variant = tuple[str, int, int]
"""Normal name, blocks, threads of a block."""


@dataclass(frozen=True)
class Joined:
    """The sampled launches that stand for one kernel in one launch size."""

    samples: tuple[CountedKernel, ...]
    weights: tuple[float, ...]
    by_name: bool
    """Whether they had another grid."""

    def counter(self, name: str) -> Maybe[float]:
        """A counter's mean; missing where one of the launches lacks it."""
        return self.mean(lambda sample: sample.counters.get(name, NOT_COLLECTED))

    def mean(self, value: Callable[[CountedKernel], Maybe[float]]) -> Maybe[float]:
        """The mean of anything that can be said of a launch."""
        return weighted([value(sample) for sample in self.samples], self.weights)


@dataclass(frozen=True)
class Join:
    """What was found for the kernels of one stage."""

    found: Mapping[Variant, Joined]
    unused: int
    """Sampled launches of kernels that the trace does not hold."""

    @property
    def counters(self) -> frozenset[str]:
        """Every counter that the joined launches carry, with a value or without."""
        return frozenset(name for joined in self.found.values() for sample in joined.samples for name in sample.counters)


def join(kernels: Sequence[CountedKernel], uses: Sequence[KernelUse]) -> Join:
    """Give every kernel and launch size of one stage the launches sampled of it, where there are any."""
    samples, unused = _by_name(kernels, uses)
    calls: dict[str, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    for use in uses:
        calls[normal_name(use.name)][(use.grid, use.block)] += use.calls
    found = {}
    for name, sizes in calls.items():
        for grid, block in sizes:
            chosen, by_name = _samples_for(grid, block, samples.get(name, []))
            if chosen:
                found[(name, grid, block)] = Joined(tuple(chosen), _weights(chosen, sizes), by_name)
    return Join(found, unused)


def weighted(values: Sequence[Maybe[float]], weights: Sequence[float]) -> Maybe[float]:
    """The weighted mean; missing where a value that has weight is."""
    total = 0.0
    for value, weight in zip(values, weights, strict=True):
        if isinstance(value, Missing):
            if weight:
                return value
        else:
            total += value * weight
    return total / sum(weights)


def _by_name(kernels: Sequence[CountedKernel], uses: Sequence[KernelUse]) -> tuple[dict[str, list[CountedKernel]], int]:
    """Sampled launches under the normal names of the trace, and how many found none.

    A name without its template arguments, as the tool prints on demand, is taken for the one kernel of the stage it can be.
    """
    names = {normal_name(use.name) for use in uses}
    instances: dict[Variant, set[str]] = defaultdict(set)
    for use in uses:
        instances[(function_name(use.name), use.grid, use.block)].add(normal_name(use.name))
    found: dict[str, list[CountedKernel]] = defaultdict(list)
    unused = 0
    for kernel in kernels:
        name = normal_name(kernel.name)
        if name not in names and not has_arguments(kernel.name):
            possible = instances.get((name, *_size(kernel)), set())
            name = next(iter(possible)) if len(possible) == 1 else ""
        if name in names:
            found[name].append(kernel)
        else:
            unused += 1
    return found, unused


def _samples_for(grid: int, block: int, samples: Sequence[CountedKernel]) -> tuple[list[CountedKernel], bool]:
    """Launches of the same size; failing those, of the same block with another grid. A size that is not known fits any."""
    same_block = [sample for sample in samples if _fits(block, prod(sample.block))]
    exact = [sample for sample in same_block if grid and grid == prod(sample.grid)]
    return (exact, False) if exact else (same_block, bool(same_block))


def _fits(one: int, other: int) -> bool:
    return one == other or not one or not other


def _weights(samples: Sequence[CountedKernel], calls: Mapping[tuple[int, int], int]) -> tuple[float, ...]:
    """Launches of one size count alike; several sizes count as often as the trace saw each."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for sample in samples:
        sizes[_size(sample)] += 1
    weights = [calls.get(_size(sample), 0) / sizes[_size(sample)] for sample in samples]
    # none of the sampled sizes is in the trace: no weight is better than another
    return tuple(weights) if any(weights) else (1.0,) * len(samples)


def _size(sample: CountedKernel) -> tuple[int, int]:
    return prod(sample.grid), prod(sample.block)
