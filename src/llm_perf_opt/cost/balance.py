"""Answers to operators that need data, which tensors without memory do not have: routing is taken to be balanced.

How many values of a one-hot tensor are set is known from its making: one of E, or k of E where a token scatters its k choices.
Rows are then dealt out so that all experts together get every choice once; a share that is no whole number is carried on.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

import torch

COPIES = frozenset(("_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh"))
"""Operators whose result has the values of their source."""
_SHARE_KEPT = COPIES | {"index", "index_select", "permute", "bitwise_and", "logical_and"}
_SCATTERED = ("scatter", "scatter_")
NEED_DATA = frozenset(
    ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "bincount", "histc", "_unique2", "unique_dim",
     "unique_consecutive", "repeat_interleave", "_assert_async")
)  # fmt: skip
"""Operators whose result, or its size, depends on values."""


class Balance:
    """What is known of values in one forward."""

    def __init__(self) -> None:
        self._shares: dict[int, Fraction] = {}
        """Mean of the values of a tensor, by storage."""
        self._carried: dict[Any, Fraction] = defaultdict(Fraction)
        self._kept: list[torch.Tensor] = []  # a storage that is freed gives its address to another one
        self.guessed: set[str] = set()

    def follow(self, name: str, args: Sequence[Any], output: Any) -> None:
        """Note what is known of the result of an operator."""
        if not isinstance(output, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return
        source = args[0]
        share = self._shares.get(_storage(source)) if self._shares else None
        if name in _SCATTERED and len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].ndim:
            self._note(output, Fraction(args[2].shape[args[1]], output.shape[args[1]]))
        elif name == "eq" and isinstance(args[1], torch.Tensor) and _is_one_hot(source, args[1], output):
            self._note(output, Fraction(1, output.shape[-1]))
        elif share is not None and name in _SHARE_KEPT:
            self._note(output, share)
        elif share is not None and name == "sum":
            self._note(output, share * source.numel() / max(output.numel(), 1))

    def answer(self, where: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Return what an operator that needs data returns if everything is balanced."""
        source = args[0]
        if name == "_local_scalar_dense":
            return self._scalar(source)
        self.guessed.add(name)
        if name in ("is_nonzero", "equal"):
            return True
        if name == "_assert_async":
            return None
        if name == "nonzero":
            return self._nonzero(where, source)
        if name == "masked_select":
            return source.new_empty(self._number(where, args[1]))
        if name in ("bincount", "histc"):
            bins = next((value for value in (*args[1:], *kwargs.values()) if isinstance(value, int)), 1)
            counts = source.new_empty(max(bins, 1), dtype=torch.long if name == "bincount" else source.dtype)
            self._note(counts, Fraction(source.numel(), max(bins, 1)))
            return counts
        if name == "repeat_interleave":
            return source.new_empty(int(self._shares.get(_storage(source), Fraction(1)) * source.numel()))
        indices = torch.empty(source.numel(), dtype=torch.long, device=source.device)
        return source.flatten().new_empty(source.numel()), indices, indices.new_empty(source.numel())

    def on_cpu(self, source: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return values for a tensor that the program wants to read."""
        self.guessed.add("_to_copy")
        share = self._shares.get(_storage(source), Fraction(1))
        marks = [int(share * number) for number in range(source.numel() + 1)]
        values = [after - before for before, after in pairwise(marks)]
        return torch.tensor(values, dtype=dtype or source.dtype, device="cpu").reshape(source.shape)

    def _scalar(self, source: torch.Tensor) -> bool | int | float:
        self.guessed.add("_local_scalar_dense")
        if source.dtype is torch.bool:
            return True
        return 1.0 if source.dtype.is_floating_point else 1

    def _nonzero(self, where: Any, source: torch.Tensor) -> torch.Tensor:
        number = self._number(where, source)
        if (
            source.ndim == 1 and number == source.numel()
        ):  # all of a list: as real numbers, with which a program may go through it
            return torch.arange(number, device="cpu")[:, None]
        return source.new_empty((number, source.ndim), dtype=torch.long)

    def _number(self, where: Any, source: torch.Tensor) -> int:
        """Return how many values are set: the known share, otherwise all of a list and half of anything else."""
        share = self._shares.get(_storage(source))
        if share is None:
            return source.numel() if source.ndim <= 1 else max(1, source.numel() // 2)
        due = self._carried[where, tuple(source.shape)] + share * source.numel()
        self._carried[where, tuple(source.shape)] = due - int(due)
        return int(due)

    def _note(self, value: torch.Tensor, share: Fraction) -> None:
        self._kept.append(value)
        self._shares[_storage(value)] = share


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _is_one_hot(left: torch.Tensor, right: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether choices are compared with all that could be chosen."""
    if left.dtype.is_floating_point or not output.ndim:
        return False
    return (left.shape[-1:] == (1,) and prod(right.shape) == output.shape[-1] > 1) and left.ndim > 1
