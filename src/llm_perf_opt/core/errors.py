"""The errors of this package. Each states a fact and a remedy, and carries the exit code of the command.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a bug in this program; or a verdict, which is not raised: a regression (`compare --gate`), a difference (`check`) |
| 2 | the request is wrong: a key, a value, a combination, or the name of something that does not exist |
| 3 | something the request needs is missing: a package, the target of a link, memory, disk space, a device |
| 4 | a pass failed while it ran; what was captured before it is kept |
| 5 | a file could not be parsed |
| 6 | a result is impossible, such as a utilization above 100 % |
| 129 | ended by SIGHUP (a closed terminal); cleans up as for an interrupt |
| 130 | interrupted |
| 140 | ended by SIGUSR2 (a scheduler, before the time limit of a job); cleans up as for an interrupt |
| 143 | ended by SIGTERM (a scheduler); cleans up as for an interrupt |
"""

import difflib
import errno
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from llm_perf_opt.core.secrets import hidden

_LEAST_PART = 3
"""Letters. A shorter word is part of too many names to suggest them."""
_ALIKE, _ALIKE_SHORT, _SHORT_WORD = 0.5, 0.6, 4
"""The least similarity of a suggested name (difflib's ratio); short words need more, as half of their letters match by chance."""
_MOST_NAMED = 5
"""Names that are suggested at most because they contain the word."""
_LONG_WORD = re.compile(r"\S{500,}")
"""Errors quote their input, which may be a number of thousands of digits; such words are shortened."""


def _cut(word: re.Match[str]) -> str:
    return f"{word[0][:200]}… ({len(word[0]):,} characters)"


class LlmPerfError(Exception):
    """What went wrong (`fact`) and what the user can do about it (`remedy`). Credentials in both are hidden."""

    exit_code = 1

    def __init__(self, fact: str, remedy: str = "") -> None:
        self.fact = hidden(_LONG_WORD.sub(_cut, fact))
        self.remedy = hidden(_LONG_WORD.sub(_cut, remedy))
        super().__init__(self.fact, self.remedy)

    def __str__(self) -> str:
        return f"{self.fact}\n{self.remedy}" if self.remedy else self.fact


class ConfigError(LlmPerfError):
    """The request itself is wrong."""

    exit_code = 2


class ResourceError(LlmPerfError):
    """The request is valid, but something it needs is missing or too small."""

    exit_code = 3


class CaptureError(LlmPerfError):
    """A pass failed while it was measuring."""

    exit_code = 4


class ParseError(LlmPerfError):
    """A file cannot be parsed."""

    exit_code = 5


class ImplausibleError(LlmPerfError):
    """An impossible result: some input of it is wrong."""

    exit_code = 6


class Interrupted(LlmPerfError):  # noqa: N818 - not a failure
    """The user stopped the command."""

    exit_code = 130


def interrupted(error: KeyboardInterrupt, remedy: str) -> Interrupted:
    """Return the error for a KeyboardInterrupt: Ctrl-C, or the signal that its message names."""
    return Interrupted(str(error) or "Interrupted.", remedy)


def unexpected(defect: Exception) -> LlmPerfError:
    """Return what run.json records of an exception that nothing expected."""
    said = " ".join(str(defect).split())[:300]
    return LlmPerfError(f"The run ended with {type(defect).__name__}: {said}", "--debug shows where.")


def unreported(error: KeyboardInterrupt | Interrupted, run: Path, earlier: LlmPerfError | None = None) -> Interrupted:
    """Return the error for an interrupt while the report of a run was written. `earlier`: the error of the run itself."""
    fact = (error if isinstance(error, Interrupted) else interrupted(error, "")).fact
    words = "Interrupted while the report was written." if fact == "Interrupted." else f"{fact} The report was not written."
    before = "" if earlier is None or isinstance(earlier, Interrupted) else f" Before that: {earlier.fact}"
    remedy = f"`llm-perf report {shlex.quote(str(run))}` writes the report."
    return Interrupted(f"{words}{before}", f"{earlier.remedy if earlier else ''} {remedy}".lstrip())


class Terminated(Interrupted):
    """Another program stopped the command (SIGTERM)."""

    exit_code = 143


class Preempted(Interrupted):
    """The scheduler announced that it ends the job (SIGUSR2)."""

    exit_code = 140


class HungUp(Interrupted):
    """The terminal was closed (SIGHUP)."""

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
        Preempted,
        HungUp,
    )
}


def error_from(kind: str, fact: str, remedy: str) -> LlmPerfError:
    """Return the error that a child process reported by class name."""
    return _KINDS.get(kind, CaptureError)(fact, remedy)


def words_of(error: BaseException) -> str:
    """Return the text of an error for users: without advice to programmers, and without the number and path of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _DIGITS.sub(r"a number has more than \1 digits", str(error))


_DIGITS = re.compile(r"Exceeds the limit \((\d+) digits\) for integer string conversion.*", re.DOTALL)
_NAMED_WRONG = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""Errors of a wrong path; any other is caused by the state of the machine."""


def file_error(error: OSError, remedy: str = "Check the path.") -> LlmPerfError:
    """Return a ConfigError if the path is wrong, or a ResourceError if the machine does not allow reading it."""
    name = f"{error.filename}: " if error.filename else ""
    fact = f"{name}{error.strerror or error}."
    if error.errno in _NAMED_WRONG:
        return ConfigError(fact, remedy)
    return ResourceError(fact, "Check the permissions, the free disk space and the limits of this machine.")


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the choices that `word` may mean, or an empty string if none is close."""
    return did_you_mean(close_names(word, choices))


def did_you_mean(names: Iterable[str]) -> str:
    """Return ` Did you mean 'x' or 'y'?`, or an empty string without names."""
    quoted = [f"'{name}'" for name in names]
    return f" Did you mean {' or '.join(filter(None, (', '.join(quoted[:-1]), quoted[-1])))}?" if quoted else ""


def close_names(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that `word` may mean: itself, another spelling, names that contain it (`h100`), or the most similar."""
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
    """Return the name with `_` between its parts, whatever separates them."""
    return "_".join("".join(char if char.isalnum() else " " for char in name.casefold()).split())
