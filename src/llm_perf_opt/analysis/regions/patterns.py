"""Names chosen by patterns: `*gemm*` as in a shell, or `regex:` and a regular expression. Exclusion wins over inclusion."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llm_perf_opt.core.errors import ConfigError

REGEX = "regex:"


@dataclass(frozen=True)
class Selection:
    """Which names to take."""

    include: tuple[str, ...] = ()
    """Empty: all."""
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            _compiled(pattern)

    def takes(self, *spellings: str) -> bool:
        """Whether a thing that goes by these spellings is taken."""
        if any(_matches(pattern, spellings) for pattern in self.exclude):
            return False
        return not self.include or any(_matches(pattern, spellings) for pattern in self.include)

    def __str__(self) -> str:
        parts = [
            f"{word} {', '.join(patterns)}" for word, patterns in (("only", self.include), ("without", self.exclude)) if patterns
        ]
        return "; ".join(parts) or "all"


def _matches(pattern: str, spellings: Sequence[str]) -> bool:
    compiled = _compiled(pattern)
    return any(compiled.search(spelling) is not None for spelling in spellings)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A shell pattern has to match the whole name, a regular expression any part of it."""
    remedy = "Write a shell pattern such as *gemm*, or regex: and a regular expression such as regex:gemm|gemv."
    if not pattern.removeprefix(REGEX).strip():
        raise ConfigError(f"The pattern '{pattern}' is empty.", remedy)
    if not pattern.startswith(REGEX):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"The pattern '{pattern}' is no regular expression: {error}.", remedy) from error


ALL = Selection()
