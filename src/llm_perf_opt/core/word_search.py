"""Find and replace words in a large text: each different word is looked at once."""

import re
from collections.abc import Callable, Iterator, Set

_NO_SPACE = re.compile(r"\S+")
_FEW = 100
"""Words that are faster to search for one after the other than by looking at all words of a text."""


def in_words(text: str, pattern: re.Pattern[str], least: int, shown: Callable[[re.Match[str]], str]) -> str:
    """Return `pattern.sub(shown, text)` for a pattern that matches no space, and at least so many characters."""
    found = {word: pattern.sub(shown, word) for word in set(text.split()) if len(word) >= least}
    changed = {word: new for word, new in found.items() if new != word}
    pieces, done = [], 0
    for start, end in spans_of(text, changed.keys(), _NO_SPACE):
        pieces += [text[done:start], changed[text[start:end]]]
        done = end
    return "".join((*pieces, text[done:]))


NAME = re.compile(r"[\w.-]+")
"""The characters of names: a name ends where a run of them ends."""


def last_word(run: str) -> str:
    """Return what follows the last dot: it decides what a name is, and a header may start there."""
    return run.rpartition(".")[2]


def spans_of(text: str, words: Set[str], run: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return where these words are in a text, in order. Each is all that `run` matches there, not a piece of it."""
    if len(words) > _FEW:
        return [found.span() for found in run.finditer(text) if found[0] in words]
    spans = []
    for word in words:
        at = text.find(word)
        while at >= 0:
            end = at + len(word)
            if not (at and run.match(text[at - 1])) and not run.match(text[end : end + 1]):
                spans.append((at, end))
            at = text.find(word, end)
    return sorted(spans)


def replaced(text: str, names: Set[str], pattern: re.Pattern[str], shown: Callable[[re.Match[str]], str]) -> Iterator[str]:
    """Yield the text in pieces, as `pattern.sub(shown, text)` has it, for a pattern that starts at the last word of a run."""
    done = 0
    for start, end in spans_of(text, names, NAME):
        found = pattern.match(text, end - len(last_word(text[start:end])))
        if found and found.start() >= done:
            yield text[done : found.start()]
            yield shown(found)
            done = found.end()
    yield text[done:]
