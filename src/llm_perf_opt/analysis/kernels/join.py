"""Join launches sampled by Nsight Compute to the kernels of a trace: by name, number of blocks and threads per block."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llm_perf_opt.analysis.kernels.names import function_name, has_arguments, normal_name
from llm_perf_opt.core.machine_records import CountedKernel, KernelUse
from llm_perf_opt.core.records import Maybe, Missing

NOT_COLLECTED = Missing("the counter was not collected")

Variant = tuple[str, int, int]
"""Normal name, blocks, threads per block."""


@dataclass(frozen=True)
class Joined:
    """The sampled launches that represent one kernel at one launch size."""

    samples: tuple[CountedKernel, ...]
    weights: tuple[float, ...]
    by_name: bool
    """Whether they had a different grid."""

    def counter(self, name: str) -> Maybe[float]:
        """Return the mean of a counter; Missing if a launch does not have it."""
        return self.mean(lambda sample: sample.counters.get(name, NOT_COLLECTED))

    def mean(self, value: Callable[[CountedKernel], Maybe[float]]) -> Maybe[float]:
        """Return the mean of a value of each launch."""
        return weighted([value(sample) for sample in self.samples], self.weights)


@dataclass(frozen=True)
class Join:
    """The sampled launches for the kernels of one stage."""

    found: Mapping[Variant, Joined]
    unused: int
    """Sampled launches of kernels that are not in the trace."""

    @property
    def counters(self) -> frozenset[str]:
        """Every counter of the joined launches, including those without a value."""
        return frozenset(name for joined in self.found.values() for sample in joined.samples for name in sample.counters)


def join(kernels: Sequence[CountedKernel], uses: Sequence[KernelUse]) -> Join:
    """Return the sampled launches for each kernel and launch size of one stage."""
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


def counter_sum(kernels: Iterable[CountedKernel], factors: Mapping[str, int]) -> Maybe[float]:
    """Return the sum of counter × factor over launches and the collected counters; Missing if one of them has no value."""
    total, collected = 0.0, False
    for kernel in kernels:
        for name, factor in factors.items():
            value = kernel.counters.get(name)
            if isinstance(value, Missing):
                return value
            if value is not None:
                total, collected = total + value * factor, True
    return total if collected else NOT_COLLECTED


def weighted(values: Sequence[Maybe[float]], weights: Sequence[float]) -> Maybe[float]:
    """Return the weighted mean; Missing if a value with weight is missing."""
    total = 0.0
    for value, weight in zip(values, weights, strict=True):
        if isinstance(value, Missing):
            if weight:
                return value
        else:
            total += value * weight
    return total / sum(weights)


def _by_name(kernels: Sequence[CountedKernel], uses: Sequence[KernelUse]) -> tuple[dict[str, list[CountedKernel]], int]:
    """Return the sampled launches by the trace's normal names, and how many match none.

    A name without template arguments, which the tool prints on request, matches if it fits one kernel of the stage only.
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
    """Return launches of the same size, otherwise of the same block with a different grid. An unknown size fits any."""
    same_block = [sample for sample in samples if not block or prod(sample.block) in (block, 0)]
    exact = [sample for sample in same_block if grid and grid == prod(sample.grid)]
    return (exact, False) if exact else (same_block, bool(same_block))


def _weights(samples: Sequence[CountedKernel], calls: Mapping[tuple[int, int], int]) -> tuple[float, ...]:
    """Return the weight of each launch: sizes count by their calls in the trace, launches of one size equally."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for sample in samples:
        sizes[_size(sample)] += 1
    weights = [calls.get(_size(sample), 0) / sizes[_size(sample)] for sample in samples]
    # if none of the sampled sizes is in the trace, all launches count equally
    return tuple(weights) if any(weights) else (1.0,) * len(samples)


def _size(sample: CountedKernel) -> tuple[int, int]:
    return prod(sample.grid), prod(sample.block)
