"""What the texts between the numbers of an event say: each is decoded once, whole, and refused where a number beside it would
mean something else than is taken for granted."""

from math import prod
from typing import Any

import msgspec

from llm_perf_opt.parsers.torch_json.codes import LARGEST_NS
from llm_perf_opt.parsers.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.parsers.torch_json.events import NO_ARGUMENTS, Arguments
from llm_perf_opt.parsers.torch_json.known_texts import Said

CORRELATION = b'"correlation": '
_READ_ARGUMENTS = msgspec.json.Decoder(Arguments).decode
_HEAD = [("cat", str), ("name", str), ("pid", int), ("tid", int)]


def head_in(text: bytes) -> dict[str, Any] | None:
    """Category, name, process and thread, if these stand there and nothing else does; the latter two as numbers: words get theirs
    in the order of the file."""
    said = _decoded(b"{" + text.removesuffix(b",") + b"}")
    if said is None or not text.endswith(b",") or [(key, type(value)) for key, value in said.items()] != _HEAD:
        return None
    return said if max(abs(said["pid"]), abs(said["tid"])) < LARGEST_NS else None


def plain_in(text: bytes) -> tuple[bytes | None, bool] | None:
    """Of arguments without their first and last number: the shapes of an operator's inputs as they are spelled, if that number is
    none of them; and whether it is the correlation."""
    said = _arguments(text)
    if said is None:
        return None
    cut_off = text.endswith(b": ") and bytes(said.shapes) == b"0"
    return None if cut_off else bytes(said.shapes), _ends_in_correlation(text)


def place_in(text: bytes) -> Said | None:
    """The device and the stream, of what stands before the correlation."""
    said = _arguments(text)
    if said is None or not _ends_in_correlation(text) or _launch(said) != _launch(NO_ARGUMENTS):
        return None
    known = 0 <= said.device < 2**31 and 0 <= said.stream < LARGEST_NS
    return (said.device, said.stream) if known else None


def launch_in(text: bytes) -> Said | None:
    """Blocks, threads of one and the node of the graph, of what stands behind the correlation."""
    if text and (not text.startswith(b",") or text.endswith(b": ")):
        return None
    said = _arguments(text)
    if said is None or {"correlation", "device", "stream"} & set(_keys(text)):
        return None
    launch = _launch(said)
    return launch if all(abs(number) < LARGEST_NS for number in launch) else None


def _closed(text: bytes) -> bytes:
    """An object of it, with a number where one was cut off before it and behind it."""
    before = b'{"":0' if text.startswith(b",") else b"{"
    return before + text + (b"0}" if text.endswith(b": ") else b"}")


def _arguments(text: bytes) -> Arguments | None:
    if _decoded(_closed(text)) is None:  # also what is wrong in values that nobody reads
        return None
    try:
        return _READ_ARGUMENTS(_closed(text))
    except (*DECODE_FAILURES, OverflowError):
        return None


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = msgspec.json.decode(text)
    except DECODE_FAILURES:
        return None
    return said


def _keys(text: bytes) -> list[str]:
    return list(_decoded(_closed(text)) or ())


def _ends_in_correlation(text: bytes) -> bool:
    return text.endswith(CORRELATION) and _keys(text)[-1:] == ["correlation"]


def _launch(said: Arguments) -> tuple[int, int, int]:
    return prod(said.grid), prod(said.block), said.graph_node
