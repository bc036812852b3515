"""Text that is safe to print. Names in traces, files and records are data: they must not move the cursor or hide text."""

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
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"  # direction, separators, hidden
    "\ud800-\udfff\U000e0000-\U000e007f]"  # single surrogates, which UTF-8 cannot encode; invisible tags
)
"""Characters that control a terminal, or invisibly change how other characters are shown."""
_NON_ASCII = re.compile(r"[^\x00-\x7e]")


def visible(text: str) -> str:
    r"""Return the text with control and invisible characters as escapes, such as `\x1b`; newlines and tabs stay."""
    if text.isprintable():  # no such character is printable, and pages have hundreds of thousands of texts
        return text
    return _ACTING.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return the same on one line, for a table cell or a name in a sentence."""
    if text.isprintable():  # then its only spaces are plain ones
        return text
    return visible("".join(" " if char.isspace() else char for char in text))


def indented(text: str) -> str:
    """Return the text with every line but the first indented, so that a newline in a name cannot imitate a message."""
    return text.replace("\n", "\n    ")


def json_text(value: Any, encoding: str = "utf-8") -> str:
    """Return JSON for another program: valid and with unchanged data in any terminal and encoding."""
    import msgspec

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8
        text = json.dumps(_finite(msgspec.to_builtins(value, enc_hook=_from_raw)), separators=(",", ":"))
    return (_ACTING if _is_utf8(encoding) else _NON_ASCII).sub(_json_escape, text)


class SafeStream:
    """A text stream that escapes control characters. It has no `buffer`, so nothing can bypass it."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """For code that draws on the terminal and escapes its own text."""
        self._encoding = "" if _is_utf8(stream.encoding) else stream.encoding

    def write(self, text: str) -> int:
        """Write the text with escapes, also for characters that the encoding of the stream does not have."""
        shown = visible(text)
        if self._encoding:
            shown = shown.encode(self._encoding, "backslashreplace").decode(self._encoding)
        self.raw.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.raw, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace standard output and standard error by safe streams while the context is open.

    If standard error is closed, messages are discarded. If standard output is closed, writing to it is an error.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - not a file of a run
        out = cast("TextIO | None", before[0]) or cast("TextIO", _Closed())
        err = cast("TextIO | None", before[1]) or nowhere
        sys.stdout, sys.stderr = cast("TextIO", SafeStream(out)), cast("TextIO", SafeStream(err))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Closed(io.TextIOBase):
    """The standard output of a process that was started without one (`>&-`)."""

    def write(self, text: str) -> int:
        """Raise: there is no output to write to."""
        raise LlmPerfError("Standard output is closed, so nothing can be printed.", "Redirect it to a file or to /dev/null.")


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream inside a safe stream, or the stream itself."""
    return cast("TextIO", getattr(stream, "raw", stream))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


def _is_utf8(encoding: str | None) -> bool:
    return (encoding or "utf-8").lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def _from_raw(value: Any) -> Any:
    """Return what an encoded part of a record states."""
    import msgspec

    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    raise NotImplementedError(f"{type(value).__name__} has no JSON")


def _finite(value: Any) -> Any:
    """Return plain values as msgspec writes them: NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
