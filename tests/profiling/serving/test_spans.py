"""Spans that an exporter sends are written as JSON lines."""

import base64
import gzip
import http.client
import json
import math
import struct
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.profiling.serving import spans
from llm_perf_opt.profiling.serving.spans import SpanReceiver, decode_traces
from llm_perf_opt.traces.serving.server_files import read_spans


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value % 2**64)


def fixed(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 1) + value


def piece(field: int, value: bytes | str) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(content)) + content


def attribute(key: str, value: bytes) -> bytes:
    return piece(1, key) + piece(2, value)


SPAN = (
    piece(1, b"t" * 16)
    + piece(2, b"s" * 8)
    + piece(5, "llm_request")
    + number(6, 2)
    + fixed(7, struct.pack("<Q", 1_794_786_503_671_016_726))
    + fixed(8, struct.pack("<Q", 1_794_786_503_671_016_999))
    + piece(9, attribute("gen_ai.request.id", piece(1, "cmpl-1-0")))
    + piece(9, attribute("gen_ai.latency.time_in_queue", fixed(4, struct.pack("<d", 0.25))))
    + piece(9, attribute("gen_ai.usage.completion_tokens", number(3, -16)))
    + piece(9, attribute("many", piece(5, piece(1, piece(1, "x")) + piece(1, number(2, 1)))))
    + number(16, 256)  # a field that is not kept
)
EXPORT = piece(
    1, piece(1, piece(1, attribute("service.name", piece(1, "test")))) + piece(2, piece(1, piece(1, "scope")) + piece(2, SPAN))
)


def test_an_export_is_decoded() -> None:
    (found,) = decode_traces(EXPORT)["resourceSpans"]
    assert found["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "test"}}]
    (scope,) = found["scopeSpans"]
    (span,) = scope["spans"]
    assert scope["scope"] == {"name": "scope"}
    assert (span["name"], span["kind"]) == ("llm_request", "SPAN_KIND_SERVER")
    assert span["traceId"] == base64.b64encode(b"t" * 16).decode()
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("1794786503671016726", "1794786503671016999")
    assert {one["key"]: one["value"] for one in span["attributes"]} == {
        "gen_ai.request.id": {"stringValue": "cmpl-1-0"},
        "gen_ai.latency.time_in_queue": {"doubleValue": 0.25},
        "gen_ai.usage.completion_tokens": {"intValue": "-16"},
        "many": {"arrayValue": {"values": [{"stringValue": "x"}, {"boolValue": True}]}},
    }


def test_damaged_exports_are_refused() -> None:
    refused = 0
    for end in range(1, len(EXPORT)):
        try:
            decode_traces(EXPORT[:end])
        except ParseError:
            refused += 1
    assert refused == len(EXPORT) - 1


def send(url: str, body: bytes, **headers: str) -> int:
    request = urllib.request.Request(url, body, headers={"Content-Type": "application/x-protobuf", **headers})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_receiver_writes_to_the_file_of_the_load(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    with SpanReceiver() as receiver:
        assert receiver.url.startswith("http://127.0.0.1:")
        assert send(receiver.url, EXPORT) == 200  # before the first load: dropped
        receiver.write_to(file)
        assert send(receiver.url, EXPORT) == 200
        assert send(receiver.url, gzip.compress(EXPORT), **{"Content-Encoding": "gzip"}) == 200
        packed = gzip.compress(EXPORT) + gzip.compress(EXPORT)  # two members: the exports one after the other
        assert send(receiver.url, packed, **{"Content-Encoding": "gzip"}) == 200
        assert send(receiver.url, b"\xff") == 400
        assert send(receiver.url + "/other", EXPORT) == 400
        assert receiver.write_to(None) == 3
        assert receiver.problem
    lines = file.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [decode_traces(EXPORT), decode_traces(EXPORT), decode_traces(EXPORT + EXPORT)]


def test_a_refused_export_does_not_break_the_connection() -> None:
    with SpanReceiver() as receiver:
        port = int(receiver.url.partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        connection.request("POST", "/other", EXPORT)
        answer = connection.getresponse()
        assert (answer.status, answer.read(), answer.will_close) == (400, b"", True)
        assert receiver.refused == 1
        connection.request("POST", "/v1/traces", EXPORT)  # a new connection
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize(
    ("path", "length", "words"),
    [
        ("/other", "123", "'/other' instead of '/v1/traces'"),
        ("/v1/traces", None, "no Content-Length"),
        ("/v1/traces", "12x", "'12x', which is not a number"),
        ("/v1/traces", str(9 * 2**20), "larger than 8 MiB"),
        ("/v1/traces", "9" * 5000, "larger than 8 MiB"),
    ],
)
def test_the_reason_of_a_refusal_says_what_is_wrong(path: str, length: str | None, words: str) -> None:
    receiver = SpanReceiver()
    headers = {} if length is None else {"Content-Length": length}
    assert receiver.take(path, headers, lambda _: pytest.fail("read")) == 400
    assert words in receiver.problem
    receiver._server.server_close()


def test_an_export_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_MOST_BYTES", 10_000)
    with SpanReceiver() as receiver:
        packed = gzip.compress(bytes(100_000))
        assert len(packed) < 1000
        assert send(receiver.url, packed, **{"Content-Encoding": "gzip"}) == 400
        assert send(receiver.url, gzip.compress(EXPORT)[:-20], **{"Content-Encoding": "gzip"}) == 400
        assert receiver.refused == 2


def test_an_export_whose_line_would_not_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_MOST_BYTES", len(EXPORT) + 10)
    with SpanReceiver() as receiver:
        assert send(receiver.url, EXPORT) == 400
        assert "larger than" in receiver.problem


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_numbers_that_json_has_not_are_text(value: float, text: str, tmp_path: Path) -> None:
    span = SPAN + piece(9, attribute("odd", fixed(4, struct.pack("<d", value))))
    file = tmp_path / "spans.jsonl"
    with SpanReceiver() as receiver:
        receiver.write_to(file)
        assert send(receiver.url, piece(1, piece(2, piece(2, span)))) == 200
    line = json.loads(file.read_text(), parse_constant=pytest.fail)
    attributes = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
    assert {"key": "odd", "value": {"doubleValue": text}} in attributes
    assert read_spans(file) == ()  # this one lacks the times of a request


@pytest.mark.parametrize("body", [b"\x0b", varint(1 << 3) + b"\xff" * 11])
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ParseError):
        decode_traces(body)
