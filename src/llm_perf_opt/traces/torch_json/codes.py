"""What the texts of a torch trace stand for: categories by where their events go; names, shapes and threads by number."""

from llm_perf_opt.traces.events import NO_NAME, WorkKind

# Category → where it goes. The second spellings are those of torch < 1.12 and of other devices' profilers.
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
"""How the name of a Python frame begins that is a module's."""
MODULE_DOMAIN = "nn.Module"
"""The domain of ranges made of the profiler's module frames (with_modules and with_stack)."""
LARGEST_NS = 2**62
_OTHERS_KEPT = 1000


class NameCodes(dict[str, int]):
    """Name → its index, growing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, name: str) -> int:
        self[name] = code = len(self.names)
        self.names.append(name)
        return code


class ShapeCodes(dict[bytes, int]):
    """Shapes as the file spells them → the index of that text among the names."""

    def __init__(self, names: NameCodes) -> None:
        super().__init__({b"": NO_NAME, b"null": NO_NAME})
        self._names = names

    def __missing__(self, spelled: bytes) -> int:
        self[spelled] = code = self._names[spelled.decode("utf-8", "replace")]
        return code


class Identities(dict[int | str, int]):
    """Process and thread numbers; those that are words get numbers below zero."""

    def __init__(self) -> None:
        super().__init__()
        self._words = 0

    def __missing__(self, identity: int | str) -> int:
        if isinstance(identity, str):
            identity_number = int(identity) if identity.isdecimal() and len(identity) < 19 else None
        else:
            identity_number = identity if abs(identity) < LARGEST_NS else None
        if identity_number is None:
            self._words += 1
            identity_number = -1 - self._words
        self[identity] = identity_number
        return identity_number


class Codes:
    """The numbers of one file's texts."""

    def __init__(self) -> None:
        self.name = NameCodes()
        self.shapes = ShapeCodes(self.name)
        self.identity = Identities()
        self.others: set[str] = set()
        """Categories that are passed over, to say what a foreign trace holds; the first thousand."""

    def pass_over(self, category: str) -> bool:
        """Remember a category of which nothing is kept; whether it was among the first."""
        if len(self.others) < _OTHERS_KEPT:
            self.others.add(category)
        return category in self.others
