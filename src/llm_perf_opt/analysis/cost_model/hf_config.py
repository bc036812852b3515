"""Typed reading of a Hugging Face configuration; every failure names the field and the model_type."""

from collections.abc import Mapping, Sequence

from llm_perf_opt.analysis.stats import shown, whole_number
from llm_perf_opt.core.errors import ConfigError


class Fields:
    """The fields of one config. Null counts as absent, except where a reader says what null itself means."""

    def __init__(self, values: Mapping[str, object], model_type: str, prefix: str = "") -> None:
        self._values = values
        self._model_type = model_type
        self._prefix = prefix

    @property
    def model_type(self) -> str:
        """The config's own name for its architecture."""
        return self._model_type

    def error(self, name: str, problem: str, remedy: str = "") -> ConfigError:
        """A ConfigError about one field."""
        return ConfigError(f"{self._label(name)} {problem}", remedy)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least one. Further names are other spellings; without a default it must be there."""
        for name in names:
            if self.has(name):
                return whole_number(self._label(name), self._values[name], at_least=1)
        if default is None:
            raise self.error(names[0], "is missing.", f"'{self._model_type}' cannot be costed without it.")
        return default

    def nullable_size(self, name: str, absent: int | None) -> int | None:
        """A whole number of at least one, or None for null; `absent` where the field is not there at all."""
        if name not in self._values:
            return absent
        return self.size(name) if self.has(name) else None

    def count(self, name: str, default: int) -> int:
        """A whole number of at least zero."""
        return whole_number(self._label(name), self._values[name], at_least=0) if self.has(name) else default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        if not self.has(name):
            return default
        value = self._values[name]
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}.")
        return value

    def words(self, name: str, *, length: int, allowed: frozenset[str]) -> tuple[str, ...] | None:
        """A list of that many allowed words, or None."""
        if not self.has(name):
            return None
        value = self._list(name)
        if len(value) != length:
            raise self.error(name, f"has {len(value)} entries for {length} layers.")
        words = tuple(entry for entry in value if isinstance(entry, str) and entry in allowed)
        if len(words) != length:
            strange = next(entry for entry in value if entry not in words)
            raise self.error(name, f"holds {shown(strange)}; known: {', '.join(sorted(allowed))}.")
        return words

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer numbers; absent is empty."""
        entries = self._list(name) if self.has(name) else ()
        return frozenset(whole_number(self._label(name), entry, at_least=0) for entry in entries)

    def refuse(self, name: str, why: str) -> None:
        """Stop where the field is set to anything that changes the model: it would be guessed at, not computed."""
        value = self._values.get(name)
        if value not in (None, False, 0):
            raise self.error(name, f"is {shown(value)}: {why}")

    def _list(self, name: str) -> Sequence[object]:
        value = self._values[name]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(name, f"must be a list, not {shown(value)}.")
        return value

    def _label(self, name: str) -> str:
        return f"{self._prefix}{name} (model_type '{self._model_type}')"
