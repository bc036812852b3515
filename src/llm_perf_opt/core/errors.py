"""One family of errors: each states the fact, a remedy, and the exit code the command ends with.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a defect of this program; or a verdict, which is not raised: a regression (`compare --gate`), a difference (`check`) |
| 2 | the request is wrong: a key, a value, a combination, the name of something that is not there |
| 3 | something the request needs is not here: a package, data behind a link, memory, disk space, a device |
| 4 | a pass failed while it ran; what was captured before it is kept |
| 5 | a file could not be read as what it should be |
| 6 | a figure came out impossible, such as a utilization above 100 % |
| 129 | ended by SIGHUP, as a closed terminal does, with the same care |
| 130 | interrupted |
| 143 | ended by SIGTERM, as schedulers do, with the same care |
"""

import difflib
import errno
import re
from collections.abc import Iterable

_LEAST_PART = 3
"""So many letters of a name are no accident."""
_ALIKE, _ALIKE_SHORT, _SHORT_WORD = 0.5, 0.6, 4
"""How alike a name must be (difflib's ratio); of a word of few letters, half of them are a matter of chance."""
_MOST_NAMED = 5
"""So many names are an answer; more are a list."""
_LONG_WORD = re.compile(r"\S{500,}")
"""Errors quote what they were given: a number of thousands of digits, a path that no system takes."""


def _cut(word: re.Match[str]) -> str:
    return f"{word[0][:200]}… ({len(word[0]):,} characters)"


class LlmPerfError(Exception):
    """What went wrong (`fact`) and what the user can do about it (`remedy`)."""

    exit_code = 1

    def __init__(self, fact: str, remedy: str = "") -> None:
        super().__init__(fact, remedy)
        self.fact = _LONG_WORD.sub(_cut, fact)
        self.remedy = _LONG_WORD.sub(_cut, remedy)

    def __str__(self) -> str:
        return f"{self.fact}\n{self.remedy}" if self.remedy else self.fact


class ConfigError(LlmPerfError):
    """The request itself is wrong."""

    exit_code = 2


class ResourceError(LlmPerfError):
    """The request is sound, but something it needs is missing or too small."""

    exit_code = 3


class CaptureError(LlmPerfError):
    """A pass ended badly while it was measuring."""

    exit_code = 4


class ParseError(LlmPerfError):
    """A file is not what it should be."""

    exit_code = 5


class ImplausibleError(LlmPerfError):
    """A figure that cannot be: something that went into it is wrong."""

    exit_code = 6


class Interrupted(LlmPerfError):  # noqa: N818 - not an error of anything
    """The user asked to stop."""

    exit_code = 130


def interrupted(error: KeyboardInterrupt, remedy: str) -> Interrupted:
    """What a KeyboardInterrupt means: Ctrl-C, or the signal whose name whoever raised it gave."""
    return Interrupted(str(error) or "Interrupted.", remedy)


class Terminated(Interrupted):
    """Another program asked to stop."""

    exit_code = 143


class HungUp(Interrupted):
    """The terminal was closed."""

    exit_code = 129


_KINDS = {
    kind.__name__: kind
    for kind in (
        LlmPerfError,
        ConfigError,
        ResourceError,
        CaptureError,
        ParseError,
        ImplausibleError,
        Interrupted,
        Terminated,
        HungUp,
    )
}


def error_from(kind: str, fact: str, remedy: str) -> LlmPerfError:
    """Rebuild an error that a child process reported by class name."""
    return _KINDS.get(kind, CaptureError)(fact, remedy)


def words_of(error: BaseException) -> str:
    """What an error says, without its advice to programmers; of a file's, without number and name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _DIGITS.sub(r"a number has more than \1 digits", str(error))


_DIGITS = re.compile(r"Exceeds the limit \((\d+) digits\) for integer string conversion.*", re.DOTALL)
_NAMED_WRONG = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""What the system says of a path that cannot be meant; anything else is the state of the machine."""


def file_error(error: OSError, remedy: str = "Check the path.") -> LlmPerfError:
    """What a file's error means to the user: a path that is wrong, or a machine that does not let it be read."""
    name = f"{error.filename}: " if error.filename else ""
    fact = f"{name}{error.strerror or error}."
    if error.errno in _NAMED_WRONG:
        return ConfigError(fact, remedy)
    return ResourceError(fact, "Check the permissions, the free disk space and the limits of this machine.")


def nearest(word: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest choice, or all that `word` may stand for; empty when none is close."""
    return did_you_mean(close_names(word, choices))


def did_you_mean(names: Iterable[str]) -> str:
    """` Did you mean 'x' or 'y'?`; empty where there is no name."""
    quoted = [f"'{name}'" for name in names]
    return f" Did you mean {' or '.join(filter(None, (', '.join(quoted[:-1]), quoted[-1])))}?" if quoted else ""


def close_names(word: str, choices: Iterable[str]) -> list[str]:
    """What `word` may stand for: itself, the same in another spelling, names it is a part of (`h100`), else the most alike."""
    known = list(dict.fromkeys(choices))
    if word in known:
        return [word]
    letters = _letters(word)
    if not letters:
        return []
    spelled = {_letters(name): name for name in reversed(known)}
    if letters in spelled:
        return [spelled[letters]]
    within = [name for name in known if f"_{_parts(word)}_" in f"_{_parts(name)}_"]
    if len(letters) >= _LEAST_PART and 0 < len(within) <= _MOST_NAMED:
        return within
    cutoff = _ALIKE if len(letters) > _SHORT_WORD else _ALIKE_SHORT
    return [spelled[found] for found in difflib.get_close_matches(letters, spelled, n=1, cutoff=cutoff)]


def _letters(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())


def _parts(name: str) -> str:
    """The name with one sign between its parts, whatever they are."""
    return "_".join("".join(char if char.isalnum() else " " for char in name.casefold()).split())
