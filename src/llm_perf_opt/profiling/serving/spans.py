"""Receive OpenTelemetry spans of a server on loopback (OTLP over HTTP) and write them as JSON lines.

The protobuf messages are decoded here: https://github.com/open-telemetry/opentelemetry-proto defines the field numbers. The lines
have the form that the protobuf library gives these messages in JSON.
"""

import base64
import gzip
import io
import json
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from llm_perf_opt.config.serving import LOOPBACK
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.inside import PRIVATE, open_to_append
from llm_perf_opt.traces.serving.json_files import MOST_LINE_BYTES

PATH = "/v1/traces"
_MOST_BYTES = MOST_LINE_BYTES
"""The largest export: packed, unpacked and as a line. An exporter sends at most some hundred spans at a time, a kilobyte each."""
_MOST_DIGITS = 12
_POLL_S = 0.05
"""How long closing may take to be noticed."""
_TOO_LARGE = f"it is larger than {_MOST_BYTES >> 20} MiB"
_IDLE_S = 120.0
"""A connection that is silent for longer is closed."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")

_Value = int | bytes
_Message = dict[str, Any]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            raise ParseError("a number has more than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of each field of a protobuf message, or raise a ParseError."""
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, at = _varint(data, at)
                yield number, value
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
                yield number, int.from_bytes(_piece(data, at, size), "little")
                at += size
            elif kind == _BYTES:
                size, at = _varint(data, at)
                yield number, _piece(data, at, size)
                at += size
            else:
                raise ParseError(f"a field has the unknown type {kind}")
    except IndexError:
        raise ParseError("the message is cut off") from None


def _piece(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise IndexError
    return data[at : at + size]


def _text(value: _Value) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _id(value: _Value) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _inner(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise ParseError("a message is a number")
    return value


def _signed(value: _Value) -> str:
    number = int(value) if isinstance(value, int) else 0
    return str(number - 2**64 if number >= 2**63 else number)


def _double(value: _Value) -> float | str:
    """Return a number; JSON has no NaN and no infinity, which protobuf writes as text."""
    number = float(struct.unpack("<d", int(value).to_bytes(8, "little"))[0]) if isinstance(value, int) else 0.0
    return number if math.isfinite(number) else "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _list(key: str, read: Callable[[bytes], Any]) -> Callable[[bytes], _Message]:
    return lambda data: {key: [read(_inner(value)) for number, value in fields(data) if number == 1]}


def _any_value(data: bytes) -> _Message:
    readers: dict[int, tuple[str, Callable[[_Value], Any]]] = {
        1: ("stringValue", _text),
        2: ("boolValue", bool),
        3: ("intValue", _signed),
        4: ("doubleValue", _double),
        5: ("arrayValue", lambda value: _list("values", _any_value)(_inner(value))),
        6: ("kvlistValue", lambda value: _list("values", _attribute)(_inner(value))),
        7: ("bytesValue", _id),
    }
    for number, value in fields(data):
        if number in readers:
            name, read = readers[number]
            return {name: read(value)}
    return {}


def _attribute(data: bytes) -> _Message:
    found: _Message = {}
    for number, value in fields(data):
        if number == 1:
            found["key"] = _text(value)
        elif number == 2:
            found["value"] = _any_value(_inner(value))
    return found


def _span(data: bytes) -> _Message:
    found: _Message = {"attributes": []}
    names = {1: ("traceId", _id), 2: ("spanId", _id), 4: ("parentSpanId", _id), 5: ("name", _text)}
    for number, value in fields(data):
        if number in names:
            name, read = names[number]
            found[name] = read(value)
        elif number == 6:
            found["kind"] = f"SPAN_KIND_{_KINDS[value] if isinstance(value, int) and value < len(_KINDS) else _KINDS[0]}"
        elif number in (7, 8):
            found["startTimeUnixNano" if number == 7 else "endTimeUnixNano"] = str(value)
        elif number == 9:
            found["attributes"].append(_attribute(_inner(value)))
    return found


def _attributes(data: bytes) -> _Message:
    return {"attributes": [_attribute(_inner(value)) for number, value in fields(data) if number == 1]}


def _scope_spans(data: bytes) -> _Message:
    found: _Message = {"scope": {}, "spans": []}
    for number, value in fields(data):
        if number == 1:
            found["scope"] = {"name": _text(name)} if (name := dict(fields(_inner(value))).get(1)) is not None else {}
        elif number == 2:
            found["spans"].append(_span(_inner(value)))
    return found


def _resource_spans(data: bytes) -> _Message:
    found: _Message = {"resource": {}, "scopeSpans": []}
    for number, value in fields(data):
        if number == 1:
            found["resource"] = _attributes(_inner(value))
        elif number == 2:
            found["scopeSpans"].append(_scope_spans(_inner(value)))
    return found


def decode_traces(data: bytes) -> _Message:
    """Return an ExportTraceServiceRequest as JSON values, or raise a ParseError."""
    return _list("resourceSpans", _resource_spans)(data)


def _unpacked(body: bytes) -> bytes:
    """Return a gzip body with all its members, or raise an error if it is larger than an export can be, or cut off."""
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise ParseError(_TOO_LARGE)
    return found


def _wrong_with(path: str, length: str) -> str:
    """Return why an export is not read, or nothing."""
    if path != PATH:
        return f"it was sent to {path[:80]!r} instead of {PATH!r}"
    if not length:
        return "it has no Content-Length"
    if not (length.isascii() and length.isdigit()):
        return f"its Content-Length is {length[:20]!r}, which is not a number"
    return _TOO_LARGE if len(length) > _MOST_DIGITS or int(length) > _MOST_BYTES else ""


class SpanReceiver:
    """Listens on a free port of loopback and writes each export as a line of the current file; without one it is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Path | None = None
        self.exports = 0
        """Exports written to the current file."""
        self.refused, self.problem = 0, ""
        """Exports since the current file began that could not be read, and why not the last of them."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _IDLE_S

            def do_POST(self) -> None:
                code = receiver.take(self.path, self.headers, self.rfile.read)
                self.send_response(code)
                if code != 200:  # what was not read of the body would be taken for the next request
                    self.send_header("Connection", "close")
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="spans", daemon=True)

    @property
    def url(self) -> str:
        """The address that an exporter sends to."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}{PATH}"

    def __enter__(self) -> "SpanReceiver":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_to(self, file: Path | None) -> int:
        """Write to this file from now on; return how many exports went to the previous one."""
        with self._lock:
            written, self.exports, self._file = self.exports, 0, file
            if file is not None:
                self.refused, self.problem = 0, ""
        return written

    def take(self, path: str, headers: Any, read: Callable[[int], bytes]) -> int:
        """Read one export and return the status of its answer."""
        wrong = _wrong_with(path, length := str(headers.get("Content-Length") or ""))
        if wrong:
            return self._refuse(wrong)
        try:
            body = read(int(length))
            if headers.get("Content-Encoding") == "gzip":
                body = _unpacked(body)
            line = json.dumps(decode_traces(body)).encode() + b"\n"
            if len(line) > _MOST_BYTES:
                raise ParseError(_TOO_LARGE)
        except (ParseError, OSError, EOFError, zlib.error, RecursionError) as error:
            return self._refuse(str(error))
        with self._lock:
            if self._file is not None:
                with open_to_append(self._file.parent, self._file, PRIVATE) as file:
                    file.write(line)
                self.exports += 1
        return 200

    def _refuse(self, why: str) -> int:
        with self._lock:
            self.refused += 1
            self.problem = why
        return 400
