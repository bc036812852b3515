"""Hostile files of load generators and servers: reading them stays below a gigabyte, and what is not used takes nothing."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command import HANG_S
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.traces.serving import aiperf, guidellm, json_files
from llm_perf_opt.traces.serving.load_file import format_of, read_load

FILES = Path(__file__).parents[2] / "fixtures" / "serving"
AIPERF, BENCH, GUIDELLM = (FILES / name for name in ("profile_export.jsonl", "vllm_bench_serve.json", "guidellm.json"))

READ = """
import sys
from pathlib import Path
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.traces.serving.load_file import read_load
from llm_perf_opt.traces.serving.server_files import read_samples, read_spans
read = {"spans.jsonl": read_spans, "metrics.jsonl": read_samples}.get(Path(sys.argv[1]).name, read_load)
try:
    print(f"{len(read(Path(sys.argv[1])))} read")
except LlmPerfError as error:
    print(error.fact.replace("\\n", " ")[:200])
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""

RECORD = b'{"metadata":{"request_start_ns":1,"request_end_ns":2},"metrics":{%s}}\n'
BENCH_HEAD = b'{"num_prompts":1,"request_rate":1,"duration":1,"output_lens":[],'
SPAN = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":[%s]}]}]}]}\n'
GUIDELLM_HEAD = b'{"guidellm_version":1,"benchmarks":[{"requests":{"successful":['


def repeated(value: bytes, size: int) -> bytes:
    """Return values separated by commas, about `size` bytes."""
    return value + (b"," + value) * (size // (len(value) + 1) - 1)


def aiperf_metric(name: bytes, value: bytes, size: int) -> bytes:
    return RECORD % (b'"%s":{"value":[%s]}' % (name, repeated(value, size)))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "metric that is not used": lambda: aiperf_metric(b"other", b"[]", 8_000_000),
    "metric that is too long": lambda: aiperf_metric(b"other", b"[]", 60_000_000),
    "number that is a list": lambda: aiperf_metric(b"request_latency", b"[]", 8_000_000),
    "chunks": lambda: aiperf_metric(b'time_to_first_token":{"value":1},"inter_chunk_latency', b"0", 8_000_000) * 12,
    "requests": lambda: RECORD % b"" * 1_900_000,
    "bench serve: gaps": lambda: BENCH_HEAD + b'"itls":[' + repeated(b"[1]", 128_000_000) + b"]}",
    "bench serve: gaps within the limit": lambda: BENCH_HEAD + b'"itls":[' + repeated(b"[1]", 11_900_000) + b"]}",
    "bench serve: a wide text": lambda: BENCH_HEAD + b'"errors":["' + b"x" * (95 << 20) + b'\\ud83d\\ude00"]}',
    "bench serve: a wide text and not finite": lambda: (
        BENCH_HEAD + b'"x":NaN,"errors":["' + b"x" * (95 << 20) + b'\\ud83d\\ude00"]}'
    ),
    "bench serve: figures": lambda: (
        BENCH_HEAD[:-2] + b'1],"mean_ttft_ms":[' + repeated(b"[]", 8_000_000) + b'],"ttfts":[1],"itls":[[]]}'
    ),
    "bench serve: escapes and not finite": lambda: (
        BENCH_HEAD + b'"x":NaN,"errors":["' + b"\\n" * 24_000_000 + b'"],"ttfts":[1],"itls":[[]]}'
    ),
    "bench serve: an open text and not finite": lambda: BENCH_HEAD + b'"x":NaN,"errors":["' + b'\\"' * 24_000_000,
    "bench serve: not finite": lambda: BENCH_HEAD + b'"x":[' + repeated(b'{"":0}', 20_000_000) + b'],"ttfts":[NaN]}',
    "spans.jsonl: attributes": lambda: (
        SPAN % repeated(b'{"key":"x","value":%s}' % (b'{"":' * 900 + b"1" + b"}" * 900), 7_900_000)
    ),
    "spans.jsonl: scopes": lambda: b'{"resourceSpans":[' + repeated(b'{"scopeSpans":[{}]}', 8_000_000) + b"]}",
    "spans.jsonl: empty": lambda: b'{"resourceSpans":[' + repeated(b"{}", 8_000_000) + b"]}",
    "metrics.jsonl: series": lambda: b"".join(
        b'{"at_ns":1,"series":{' + b",".join(b'"%d%06d":1' % (line, place) for place in range(500_000)) + b"}}\n"
        for line in range(9)
    ),
    "guidellm: requests": lambda: GUIDELLM_HEAD + repeated(b'{"info":{"timings":{"request_start":1}}}', 48_000_000) + b"]}}]}",
    "guidellm: empty": lambda: GUIDELLM_HEAD + repeated(b'{"info":{"timings":{}}}', 35_000_000) + b"]}}]}",
    "guidellm: loads": lambda: b'{"guidellm_version":1,"benchmarks":[' + repeated(b'{"requests":{}}', 31_000_000) + b"]}",
}

OUTCOMES = {
    "metric that is not used": "1 read",
    "metric that is too long": "line 1 is longer than 8 MiB",
    "number that is a list": "request_latency is very long",
    "chunks": "take more than 400 MB",
    "requests": "take more than 400 MB",
    "bench serve: gaps": "larger than 96 MiB",
    "bench serve: gaps within the limit": "no single requests",
    "bench serve: a wide text": "no single requests",
    "bench serve: a wide text and not finite": "no single requests",
    "bench serve: figures": "a value of more than 1 MiB",
    "bench serve: escapes and not finite": "output_lens 0",
    "bench serve: an open text and not finite": "truncated",
    "bench serve: not finite": "itls 0",
    "spans.jsonl: attributes": "0 read",
    "spans.jsonl: scopes": "0 read",
    "spans.jsonl: empty": "0 read",
    "metrics.jsonl: series": "take more than 400 MB",
    "guidellm: requests": "take more than 400 MB",
    "guidellm: empty": "no request",
    "guidellm: loads": "more than 1,000 loads",
}
"""What came of each: none is refused before the part that it is about is read."""


def reading(file: Path) -> tuple[str, int]:
    """Read a file in a process of its own and remove it. Return what came of it, and the most memory."""
    done = subprocess.run([sys.executable, "-c", READ, file], capture_output=True, text=True, check=True, timeout=HANG_S)
    file.unlink()
    outcome, kilobytes = done.stdout.splitlines()
    return outcome, 1024 * int(kilobytes)


def peak_of(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    lists = b"[" + repeated(b"[]", 1_000_000) + b"]"
    records = tmp_path / "profile_export.jsonl"
    records.write_bytes(RECORD % (b'"other":{"value":%s}' % lists))
    assert peak_of(lambda: read_load(records)) < 4_000_000
    records.write_bytes(RECORD % b"")
    for key in ("other", "input_config", "time_to_first_token"):
        (tmp_path / "profile_export_aiperf.json").write_bytes(b'{"%s":{"avg":%s}}' % (key.encode(), lists))
        assert peak_of(lambda: read_load(records)) < (4_000_000 if key == "other" else 80_000_000)
    bench = tmp_path / "bench.json"
    bench.write_bytes(BENCH.read_bytes().rstrip()[:-1] + b',"other":%s}' % lists)
    assert peak_of(lambda: read_load(bench)) < 4_000_000


def test_the_format_of_a_packed_file_is_recognized_from_its_first_bytes(tmp_path: Path) -> None:
    packed = tmp_path / "load.gz"
    packed.write_bytes(gzip.compress(AIPERF.read_bytes() + b"\n" * (12 << 20)))
    assert peak_of(lambda: format_of(packed)) < 1 << 20
    lines = tmp_path / "load.jsonl.gz"
    lines.write_bytes(gzip.compress(AIPERF.read_bytes()))
    assert read_load(lines)[0].requests == read_load(AIPERF)[0].requests


def test_a_packed_file_is_refused_at_its_unpacked_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_BYTES", 2 << 20)
    packed = tmp_path / "load.gz"
    packed.write_bytes(gzip.compress(BENCH.read_bytes() + b" " * (12 << 20)))

    def refused() -> None:
        with pytest.raises(ResourceError, match="larger than 2 MiB"):
            read_load(packed)

    assert peak_of(refused) < 4 << 20


def test_too_many_values_or_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_KEPT_BYTES", 5000)
    for file in (AIPERF, BENCH, GUIDELLM):
        with pytest.raises(ResourceError, match="records of"):
            read_load(file)
    monkeypatch.setattr(json_files, "MOST_VALUES", 300)
    with pytest.raises(ResourceError, match="more than 300 commas"):
        read_load(BENCH)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_as_many_requests_as_said_can_be_read(tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the generators write them: times of 17 digits, texts of four escaped letters per token, ids of 36."""
    for limit, small in (("MOST_KEPT_BYTES", 2_000_000), ("MOST_BYTES", 500_000), ("MOST_VALUES", 30_000)):
        monkeypatch.setattr(json_files, limit, small)
    gap = 0.01234567890123456
    lines, whole = tmp_path / "load.jsonl", tmp_path / "load.json"
    count = json_files.most_requests(tokens, lines.name)
    assert count > 1.5 * json_files.most_requests(tokens, whole.name)
    about = {"request_start_ns": 1, "request_end_ns": 2, "x_request_id": "x" * 36}
    times = {"time_to_first_token": {"value": 1.0}, "inter_chunk_latency": {"value": [gap * 1000] * (tokens - 1)}}
    lines.write_text((json.dumps({"metadata": about, "metrics": times}) + "\n") * count)
    assert len(read_load(lines)[0].requests) == count
    count = json_files.most_requests(tokens, whole.name)
    content = json.loads(BENCH.read_bytes()) | {
        "itls": [[gap] * (tokens - 1)] * count,
        "generated_texts": ["слов" * tokens] * count,
    }
    content |= {name: [gap] * count for name in ("ttfts", "start_times", "latencies")}
    content |= {"input_lens": [10] * count, "output_lens": [tokens] * count, "errors": [""] * count}
    whole.write_text(json.dumps(content))
    assert len(read_load(whole)[0].requests) == count


def test_lines_up_to_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_REQUESTS", 3)
    lines = tmp_path / "load.jsonl"
    lines.write_bytes(RECORD % b"" * 3)
    assert len(read_load(lines)[0].requests) == 3
    lines.write_bytes(RECORD % b"" * 4)
    with pytest.raises(ResourceError, match="more than 3 lines"):
        read_load(lines)


def test_what_all_loads_of_guidellm_share_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a megabyte, and a file a thousand loads."""
    read: list[int] = []

    def counted(path: Path, value: msgspec.Raw) -> Any:
        read.append(memoryview(value).nbytes)
        return json_files.plain(path, value)

    monkeypatch.setattr(guidellm, "plain", counted)
    content = json.loads(GUIDELLM.read_bytes())
    content["benchmarks"] *= 20
    content["metadata"]["other"] = "x" * 100_000
    file = tmp_path / "guidellm.json"
    file.write_text(json.dumps(content))
    assert len(read_load(file)) == 20
    assert sum(size >= 100_000 for size in read) == 1


@pytest.mark.slow
def test_a_summary_stays_below_a_gigabyte(tmp_path: Path) -> None:
    """Each of its parts is as long as one may be, of dictionaries that take the most memory."""
    nested = b'{"":' * 900 + b"1" + b"}" * 900
    part = b"[" + repeated(nested, (1 << 20) - 2 * len(nested)) + b"]"
    (tmp_path / "profile_export_aiperf.json").write_bytes(
        b"{%s}" % b",".join(b'"%s":%s' % (n.encode(), part) for n in aiperf._SUMMARY)
    )
    records = tmp_path / "profile_export.jsonl"
    records.write_bytes(RECORD % b"")
    outcome, most = reading(records)
    assert outcome == "1 read"
    assert 2e8 < most < 1e9


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE)
def test_reading_stays_below_a_gigabyte(hostile: str, tmp_path: Path) -> None:
    file = tmp_path / hostile.partition(":")[0].replace(" ", "_")
    file.write_bytes(HOSTILE[hostile]())
    outcome, most = reading(file)
    assert most < 1e9
    assert OUTCOMES[hostile] in outcome
