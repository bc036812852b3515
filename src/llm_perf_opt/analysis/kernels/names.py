"""Normalize kernel names across tools.

Nsight Systems, Nsight Compute and the framework's profiler print the same C++ function differently: with or without its
parameters, its inner namespaces, casts before constants, `T1` for a template argument, `<unnamed>` or `(anonymous namespace)`.
The normal form keeps what all of them print: the function, its template arguments, and the functions that enclose lambdas.
Overloads that differ only in parameter types share one normal form; grid and block of a launch distinguish them.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

DEEPEST = 100
"""Levels of brackets in a name; a name with more, which no compiler produces, stays unchanged."""
LONGEST = 20_000
"""Characters of the longest name that is parsed."""

_UNNAMED = re.compile(r"\(anonymous namespace\)|<unnamed>(?=::)|\{anonymous\}|`anonymous namespace'|_GLOBAL__N__\w+(?=::)")
_CAST = re.compile(r"\([A-Za-z_][\w:]*(?: [A-Za-z_]\w*)*\)\s*(?=-?\d)")
_LAMBDA = re.compile(r"[\[{]\s*lambda")
_ABI_TAG = re.compile(r"\[abi:\w+\]")
_OPERATOR = re.compile(r"\boperator\s*(\(\s*\)|<=>|<<=|>>=|->\*|<<|>>|<=|>=|->|<|>)")
_TOKEN = re.compile(r"\s+|::|-?\d+[uUlL]{1,3}\b|-?\d[\w.]*|~?[A-Za-z_$\ue000-\uf8ff][\w$#\ue000-\uf8ff]*|.", re.DOTALL)
_INTEGER = re.compile(r"(-?\d+)[uUlL]{0,3}$")
_MANGLED = re.compile(r"_Z(?:N[rVK]*)?(?:St)?")
_LENGTH = re.compile(r"L?([1-9]\d{0,5})")
_IGNORED = {"const", "volatile", "struct", "class", "enum", "__restrict__"}
_CONSTANTS = {"true": "1", "false": "0"}
_OPERATOR_BASE = 0xE000
"""Operators are replaced by one private-use character while brackets are counted."""
_OPERATORS = ("()", "<=>", "<<=", ">>=", "->*", "<<", ">>", "<=", ">=", "->", "<", ">")


@lru_cache(maxsize=65_536)
def normal_name(name: str) -> str:
    """Return the normal form to join by. In a mangled name, or one that is not a C++ function, only whitespace changes."""
    words = _parsed(name)
    return _collapsed(name) if words is None else words[-1].text()


@lru_cache(maxsize=65_536)
def function_name(name: str) -> str:
    """Return the function without return type, namespaces, template arguments and parameters (the tools' base name)."""
    words = _parsed(name)
    return _mangled_function(name) or _collapsed(name) if words is None else _restored(words[-1].parts[-1].name)


def _mangled_function(name: str) -> str:
    """Return the function of a mangled name, in which each part follows its length; "" if it is not one.

    Only a name that starts with _ZN has several parts. After the only part of another, the types of its parameters follow.

    Profilers leave names mangled that are too long to demangle. Nothing after the first template arguments is read.
    """
    start = _MANGLED.match(name)
    at, found = (start.end() if start else len(name)), ""
    while (length := _LENGTH.match(name, at)) is not None and length.end() + int(length[1]) <= len(name):
        at = length.end() + int(length[1])
        found = name[length.end() : at]
        if not name.startswith("_ZN"):
            break
    return found


def has_arguments(name: str) -> bool:
    """Return whether a name has template arguments; without them it covers every instance of the function."""
    return normal_name(name) != function_name(name)


def short_name(name: str, width: int) -> str:
    """Return the normal form in at most `width` characters, cut in the middle because kernels often differ at their ends."""
    whole = normal_name(name)
    if len(whole) <= width:
        return whole
    tail = (width - 1) // 3
    head = max(width - 1 - tail, 0)
    return f"{whole[:head]}…{whole[len(whole) - tail :]}"


def short_names(first: str, second: str, width: int) -> tuple[str, str]:
    """Return two names cut to `width` characters so that different names stay different."""
    shown = short_name(first, width), short_name(second, width)
    names = normal_name(first), normal_name(second)
    if shown[0] != shown[1] or names[0] == names[1]:
        return shown
    parting = next((at for at, (a, b) in enumerate(zip(*names, strict=False)) if a != b), min(map(len, names)))
    return _around(names[0], parting, width), _around(names[1], parting, width)


def _around(name: str, place: int, width: int) -> str:
    """Return a name's beginning and the text around a position."""
    head = width // 3
    room = width - head - 2
    start = max(head, place - room // 4)
    end = start + room
    return f"{name[:head]}{'…' if start > head else ''}{name[start:end]}{'…' if end < len(name) else ''}"


# --- parsing C++ names ------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """The text between two `::`."""

    name: str
    arguments: str | None = None
    called: bool = False
    """Whether a parameter list follows, which makes it a function."""

    @property
    def plain(self) -> bool:
        """Whether it is a namespace or a class that looks like one."""
        return self.arguments is None and not self.called and not _is_operator(self.name[-1:]) and "#" not in self.name

    def text(self) -> str:
        return _restored(self.name) + (f"<{self.arguments}>" if self.arguments is not None else "")


@dataclass
class _Word:
    """A scoped name with the punctuation after it."""

    parts: list[_Part] = field(default_factory=list)
    marks: str = ""

    def text(self) -> str:
        around = [part.text() + ("()" if part.called else "") for part in self.parts[:-1] if not part.plain]
        return "::".join([*around, self.parts[-1].text()]) + self.marks


class _NotCppError(Exception):
    """The text is not a C++ name."""


def _parsed(name: str) -> list[_Word] | None:
    """Return the words of a function declaration up to its parameters, or None if it is not one."""
    if len(name) > LONGEST or name.startswith("_Z"):
        return None
    try:
        words = _Reader(_tokens(name)).declaration()
    except _NotCppError:
        return None
    if not words or not words[-1].parts[-1].name:
        return None
    written_out = words[-1].parts[-1].called or words[0].text() == "void"
    return words if written_out or len(words) == 1 else None


def _tokens(name: str) -> list[str]:
    text = _ABI_TAG.sub("", _UNNAMED.sub("unnamed", name))
    text = _OPERATOR.sub(_as_one_character, text)
    text = _CAST.sub("", _without_lambda_types(text))
    found = []
    for piece in _TOKEN.findall(text):
        integer = _INTEGER.match(piece)
        piece = integer[1] if integer else _CONSTANTS.get(piece, piece)
        if not piece.isspace() and piece not in _IGNORED:
            found.append(piece)
    return found


def _without_lambda_types(text: str) -> str:
    """Replace `{lambda(int)#2}` and `[lambda(int) (instance 2)]` by `lambda#2`."""
    out, position = [], 0
    while found := _LAMBDA.search(text, position):
        end = _closing(text, found.start())
        number = re.search(r"(?:#|\(instance )(\d+)\)?\s*$", text[max(found.end(), end - 40) : end])
        if number is None:
            raise _NotCppError
        out += [text[position : found.start()], f"lambda#{number[1]}"]
        position = end + 1
    return "".join(out) + text[position:]


def _closing(text: str, start: int) -> int:
    opening, closing = text[start], {"{": "}", "[": "]"}[text[start]]
    depth = 0
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if depth == 0:
                return index
    raise _NotCppError


def _as_one_character(found: re.Match[str]) -> str:
    return "operator" + chr(_OPERATOR_BASE + _OPERATORS.index("".join(found[1].split())))


def _restored(name: str) -> str:
    return "".join(_OPERATORS[ord(char) - _OPERATOR_BASE] if _is_operator(char) else char for char in name)


def _is_operator(char: str) -> bool:
    return len(char) == 1 and 0 <= ord(char) - _OPERATOR_BASE < len(_OPERATORS)


def _collapsed(name: str) -> str:
    return " ".join(name.split())


class _Reader:
    """Read tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def declaration(self) -> list[_Word]:
        """Return a function's return type and name, up to its parameter list."""
        return self._words(closing="", whole=True)

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _words(self, closing: str, whole: bool = False) -> list[_Word]:
        """Return the words up to a comma or `closing`; with `whole`, up to a parameter list without a scope after it."""
        words: list[_Word] = []
        joined = False
        while (piece := self._next()) not in ("", closing, ","):
            self._at += 1
            if piece == "::":
                joined = True
            elif _is_name(piece):
                self._named(words, piece, joined)
                joined = False
            elif piece == "<":
                self._last(words).arguments = self._list(">")
            elif piece == "(":
                if self._group(words) and whole:
                    return words
            elif piece in (")", ">", "]", "}"):
                raise _NotCppError
            else:
                if not words:
                    words.append(_Word([_Part("")]))
                words[-1].marks += piece
        if (self._next() == "" and closing) or (whole and self._next() == ","):
            raise _NotCppError
        return words

    def _named(self, words: list[_Word], piece: str, joined: bool) -> None:
        if joined and words:
            words[-1].parts.append(_Part(piece))
        else:
            words.append(_Word([_Part(piece)]))

    def _last(self, words: list[_Word]) -> _Part:
        if not words or words[-1].marks or words[-1].parts[-1].arguments is not None:
            raise _NotCppError
        return words[-1].parts[-1]

    def _group(self, words: list[_Word]) -> bool:
        """Read a parenthesis; return whether it is the parameter list that ends the last word."""
        inside = self._list(")")
        if self._next() == "::":
            if not words:
                raise _NotCppError
            words[-1].parts[-1].called = True
            return False
        if words and not words[-1].marks and self._depth == 0:
            words[-1].parts[-1].called = True
            return True
        if not words:
            words.append(_Word([_Part("")]))
        words[-1].marks += f"({inside})"
        return False

    def _list(self, closing: str) -> str:
        """Return the arguments up to `closing` in normal form."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise _NotCppError
        found = []
        while True:
            found.append(_argument(self._words(closing)))
            if self._next() != ",":
                break
            self._at += 1
        self._at += 1
        self._depth -= 1
        return ",".join(found) if found != [""] else ""


def _is_name(piece: str) -> bool:
    return piece[0].isalnum() or piece[0] in "_$~" or (piece[0] == "-" and len(piece) > 1) or _is_operator(piece[0])


def _argument(words: list[_Word]) -> str:
    """Return one argument without the return type of a function that encloses a lambda, which not every tool prints."""
    if words and any(part.called for part in words[-1].parts):
        words = words[-1:]
    return " ".join(word.text() for word in words)
