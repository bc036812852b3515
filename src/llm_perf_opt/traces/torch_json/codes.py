"""The categories of torch events, and the numbers of names, shapes, processes and threads."""

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import NO_NAME, NameCodes, WorkKind

# The other spellings are from torch < 1.12 and from profilers of other devices.
WORK = {
    "kernel": WorkKind.KERNEL,
    "Kernel": WorkKind.KERNEL,
    "gpu_memcpy": WorkKind.MEMCPY,
    "Memcpy": WorkKind.MEMCPY,
    "gpu_memset": WorkKind.MEMSET,
    "Memset": WorkKind.MEMSET,
}
CALLS = (
    "cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver",
    "privateuse1_runtime", "privateuse1_driver", "mtia_runtime",
)  # fmt: skip
OPERATORS = ("cpu_op", "Operator")
RANGES = ("user_annotation",)
PYTHON = "python_function"
KEPT = frozenset((*WORK, *CALLS, *OPERATORS, *RANGES, PYTHON))
"""Categories whose events are kept."""
MODULE = "nn.Module: "
"""The prefix of the name of a Python frame that is a module."""
MODULE_DOMAIN = "nn.Module"
"""The domain of ranges from module frames (with_modules and with_stack)."""
LARGEST_NS = 2**62
MOST_IDENTITIES = 100_000
"""Distinct processes and threads. Far fewer make a trace unusable; this keeps reading it within bounds."""
_OTHERS_KEPT, _OTHER_LENGTH = 1000, 200


class ShapeCodes(dict[bytes, int]):
    """Shapes as the file spells them → the index of that text in the names."""

    def __init__(self, names: NameCodes) -> None:
        super().__init__({b"": NO_NAME, b"null": NO_NAME})
        self._names = names

    def __missing__(self, spelled: bytes) -> int:
        self._names.count(spelled)
        self[spelled] = code = self._names[spelled.decode("utf-8", "replace")]
        return code


class Identities(dict[int | str, int]):
    """Processes and threads → their number; names get negative numbers. Raise a ParseError beyond MOST_IDENTITIES.

    `names`: counts the memory of those that are texts, or numbers beyond 62 bits.
    """

    def __init__(self, source: str, names: NameCodes) -> None:
        super().__init__()
        self._source, self._names = source, names
        self._words = 0

    def __missing__(self, identity: int | str) -> int:
        if len(self) >= MOST_IDENTITIES:
            fact = f"{self._source}: it has more than {MOST_IDENTITIES:,} processes and threads; no program has that many."
            raise ParseError(fact, "Give the original trace of the profiler.")
        if isinstance(identity, str):
            identity_number = int(identity) if identity.isdecimal() and len(identity) < 19 else None
        else:
            identity_number = identity if abs(identity) < LARGEST_NS else None
        if identity_number is None:
            self._names.count(identity)
            self._words += 1
            identity_number = -1 - self._words
        self[identity] = identity_number
        return identity_number


class Codes:
    """The numbers of the texts of one file; `source` is its path, for errors."""

    def __init__(self, source: str) -> None:
        self.name = NameCodes(source)
        self.shapes = ShapeCodes(self.name)
        self.identity = Identities(source, self.name)
        self.others: set[str] = set()
        """The beginnings of the first thousand skipped categories, to report what a foreign trace contains."""

    def pass_over(self, category: str) -> bool:
        """Remember a skipped category. Return whether it is remembered whole."""
        if len(self.others) < _OTHERS_KEPT:
            self.others.add(category[:_OTHER_LENGTH])
        return category in self.others
