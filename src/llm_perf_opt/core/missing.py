"""A value that may be missing, with the reason."""

from dataclasses import dataclass
from typing import TypeVar, Union

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """A missing value and the reason. A missing value is never zero and never an empty string."""

    why: str

    def __str__(self) -> str:
        return f"n/a: {self.why}"


Maybe = Union[T, Missing]  # noqa: UP007 - an alias over a type variable
"""A value, or the reason why it is missing."""
