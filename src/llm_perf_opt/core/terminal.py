"""Text as a terminal may show it. Names in traces, files and records are data: none may move the cursor or hide a word."""

import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from llm_perf_opt.core.errors import LlmPerfError

_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 controls, ESC among them; newline and tab stay
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"  # direction, separators, unseen
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of a pair, which no file can hold; invisible tags
)
"""Characters that a terminal obeys, or that change how others are read without being seen."""
_NON_ASCII = re.compile(r"[^\x00-\x7e]")


def visible(text: str) -> str:
    r"""The text with every character that acts rather than shows as an escape, such as `\x1b`; ends of lines and tabs stay."""
    return _ACTING.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The same on one line: a cell of a table, a name inside a sentence."""
    return visible("".join(" " if char.isspace() else char for char in text))


def indented(text: str) -> str:
    """Return the text with every line but its first indented, so that a line break in a name begins no message."""
    return text.replace("\n", "\n    ")


def json_text(value: Any, encoding: str = "utf-8") -> str:
    """JSON for another program, valid and with the data intact in any terminal and any encoding."""
    import msgspec

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a file name that is no UTF-8
        text = json.dumps(_finite(msgspec.to_builtins(value)), separators=(",", ":"))
    return (_ACTING if _is_utf8(encoding) else _NON_ASCII).sub(_json_escape, text)


class SafeStream:
    """A text stream that shows everything written to it and obeys none of it. It has no `buffer`: there is no way around it."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """For a program that draws, and cleans what it draws itself."""
        self._encoding = "" if _is_utf8(stream.encoding) else stream.encoding

    def write(self, text: str) -> int:
        """Write it, cleaned; what the stream's encoding lacks is an escape, too."""
        shown = visible(text)
        if self._encoding:
            shown = shown.encode(self._encoding, "backslashreplace").decode(self._encoding)
        self.raw.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.raw, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Standard output and standard error as safe streams, for as long as it lasts.

    Without standard error what is said there goes nowhere, and not to standard output; without standard output data are lost,
    which is an error.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - no file of ours
        out = cast("TextIO | None", before[0]) or cast("TextIO", _Closed())
        err = cast("TextIO | None", before[1]) or nowhere
        sys.stdout, sys.stderr = cast("TextIO", SafeStream(out)), cast("TextIO", SafeStream(err))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Closed(io.TextIOBase):
    """Standard output of a program that was started without one, as by `>&-`."""

    def write(self, text: str) -> int:
        """There is nowhere to write to."""
        raise LlmPerfError("Standard output is closed, and the answer goes there.", "Send it to a file, or to /dev/null.")


def raw_stream(stream: TextIO) -> TextIO:
    """What lies below a safe stream, also where another stream wraps that; any other as it is."""
    return cast("TextIO", getattr(stream, "raw", stream))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


def _is_utf8(encoding: str | None) -> bool:
    return (encoding or "utf-8").lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def _finite(value: Any) -> Any:
    """Plain values as msgspec writes them: a number that JSON has not is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
