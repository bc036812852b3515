"""Read the output file of any supported load generator. The format is detected from the content."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.serving_records import LoadRecords
from llm_perf_opt.traces.serving.json_files import head_of


@dataclass(frozen=True)
class LoadFormat:
    """The output format of a load generator."""

    name: str
    marks: tuple[bytes, ...]
    """Keys that the first 64 KiB of a file contain, all of them."""
    function: str
    """`module:function` of the reader, which takes a path and whether the file may be cut short."""


FORMATS = (
    LoadFormat("AIPerf", (b'"metadata"', b'"request_start_ns"'), "aiperf:read_aiperf"),
    LoadFormat("GuideLLM", (b'"guidellm_version"',), "guidellm:read_guidellm"),
    LoadFormat("vllm bench serve", (b'"num_prompts"', b'"request_rate"', b'"duration"'), "bench_serve:read_bench_serve"),
)
AIPERF_SUMMARY = (b'"aiperf_version"',)
"""Next to AIPerf's records, without requests of its own."""


def format_of(path: Path) -> LoadFormat:
    """Return the format of a file, or raise a ParseError."""
    head = head_of(path)
    for known in FORMATS:
        if all(mark in head for mark in known.marks):
            return known
    if all(mark in head for mark in AIPERF_SUMMARY):
        raise ParseError(f"{path} is AIPerf's summary, which has no single requests.", "Give profile_export.jsonl next to it.")
    raise ParseError(
        f"{path} is not the output of a known load generator.",
        "Known: AIPerf (profile_export.jsonl), vllm bench serve (--save-result --save-detailed) and GuideLLM (JSON).",
    )


def read_load(path: Path, *, cut_short: bool = False) -> list[LoadRecords]:
    """Return what a file holds, one entry per load. With `cut_short`, an incomplete last line is left out."""
    module, _, name = format_of(path).function.partition(":")
    read: Callable[[Path, bool], list[LoadRecords]]
    read = getattr(importlib.import_module(f"llm_perf_opt.traces.serving.{module}"), name)
    return read(path, cut_short)
