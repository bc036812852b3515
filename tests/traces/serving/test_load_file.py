"""Real output of three load generators, and damaged forms of it."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.traces.serving import json_files
from llm_perf_opt.traces.serving.load_file import format_of, read_load

FILES = Path(__file__).parents[2] / "fixtures" / "serving"
AIPERF, BENCH, GUIDELLM = (FILES / name for name in ("profile_export.jsonl", "vllm_bench_serve.json", "guidellm.json"))
ALL = (AIPERF, BENCH, GUIDELLM)


def test_the_format_is_recognized_by_content(tmp_path: Path) -> None:
    for file, name in zip(ALL, ("AIPerf", "vllm bench serve", "GuideLLM"), strict=True):
        renamed = tmp_path / "x.bin"
        renamed.write_bytes(file.read_bytes())
        assert format_of(renamed).name == name


@pytest.mark.parametrize("file", ALL, ids=lambda path: path.name)
def test_requests_have_times_and_tokens(file: Path) -> None:
    (load,) = read_load(file)
    assert len(load.requests) == 12
    assert (load.asked, load.kind, load.arrival, load.model) == (2.0, "rate", "poisson", "tiny")
    for request in load.requests:
        assert request.error == ""
        assert request.output_tokens == 16
        assert request.sent_ns < request.token_ns[0] <= request.token_ns[-1] <= request.end_ns
    assert [request.sent_ns for request in load.requests] == sorted(request.sent_ns for request in load.requests)


def test_aiperf_counts_are_the_servers() -> None:
    (load,) = read_load(AIPERF)
    first = load.requests[0]
    assert (first.output_tokens, first.client_tokens, len(first.token_ns)) == (16, 20, 14)
    assert first.end_ns - first.sent_ns == 310_756_708
    assert first.token_ns[0] - first.sent_ns == 76_570_502
    assert first.scheduled_ns == 1794786385005945347
    assert load.own["ttft"]["p50"] == pytest.approx(52_516_370)
    assert (load.version, load.url, load.clock) == ("0.13.0", "http://127.0.0.1:18000", "unix")


def test_bench_serve_counts_from_its_own_clock() -> None:
    (load,) = read_load(BENCH)
    assert load.clock == "monotonic"
    assert load.requests[0].sent_ns == 5_944_916_808_970
    assert set(load.own["e2e"]) == {"mean", "p50", "p99"}


def test_guidellm_has_no_times_between_first_and_last_token() -> None:
    (load,) = read_load(GUIDELLM)
    request = load.requests[0]
    assert len(request.token_ns) == 1
    assert not isinstance(request.last_token_ns, Missing)
    assert request.last_token_ns > request.token_ns[0]
    assert load.notes  # its arrivals are not what it says


def test_aiperf_without_its_summary_has_no_load(tmp_path: Path) -> None:
    alone = tmp_path / AIPERF.name
    alone.write_bytes(AIPERF.read_bytes())
    (load,) = read_load(alone)
    assert isinstance(load.asked, Missing)
    assert len(load.requests) == 12
    assert not load.own


def canceled(line: dict[str, Any], message: str | None) -> dict[str, Any]:
    """Return the record of a request that AIPerf 0.13 canceled: at the end of the measurement, or as the user asked."""
    error = {"error": {"code": 499, "type": "RequestCancellationError", "message": message}} if message else {}
    return {"metadata": line["metadata"] | {"was_cancelled": True}, "metrics": {}, **error}


def test_warm_up_is_left_out_and_failures_are_kept(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in AIPERF.read_text().splitlines()]
    lines[0]["metadata"]["benchmark_phase"] = "warmup"
    lines[1] |= {"metrics": {}, "error": {"code": 429, "type": "Too Many Requests", "message": "busy"}}
    lines[2] = canceled(lines[2], "Request cancelled by external signal")
    lines[3] = canceled(lines[3], "Request cancelled 0.050s after being sent")
    lines[4] = canceled(lines[4], None)
    file = tmp_path / "profile_export.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (load,) = read_load(file)
    assert len(load.requests) == 11
    assert [request.error for request in load.requests[:4]] == [
        "429 Too Many Requests busy",
        "not finished when the measurement ended",
        "499 RequestCancellationError Request cancelled 0.050s after being sent",
        "canceled without a message",
    ]
    assert [request.cut for request in load.requests[:4]] == [False, True, False, False]
    assert [request.failed for request in load.requests[:4]] == [True, False, True, True]


@pytest.mark.parametrize(("duration", "grace", "noted"), [(3.0, 0.0, True), (3.0, 30.0, False), (None, None, False)])
def test_requests_that_aiperf_does_not_write_are_noted(
    tmp_path: Path, duration: float | None, grace: float | None, noted: bool
) -> None:
    """Its summary names 3.3 s from start to end."""
    file = tmp_path / AIPERF.name
    file.write_bytes(AIPERF.read_bytes())
    summary = json.loads((AIPERF.parent / "profile_export_aiperf.json").read_text())
    summary["input_config"]["phases"][-1] |= {"duration": duration, "grace_period": grace}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary))
    assert any("still running after 3 s" in note for note in read_load(file)[0].notes) is noted


def changed(file: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(file.read_text())
    change(content)
    made = tmp_path / file.name
    made.write_text(json.dumps(content))
    return made


def test_a_failed_request_of_bench_serve(tmp_path: Path) -> None:
    def fail(content: dict[str, Any]) -> None:
        content["errors"][3], content["output_lens"][3], content["ttfts"][3], content["itls"][3] = (
            "Service Unavailable",
            0,
            0.0,
            [],
        )
        content["output_lens"][4] = 0
        content["mean_tpot_ms"] = float("nan")  # as Python writes it

    (load,) = read_load(changed(BENCH, tmp_path, fail))
    assert [request.error for request in load.requests[3:5]] == ["Service Unavailable", "failed without a message"]
    assert load.requests[3].token_ns == ()
    assert "mean" not in load.own["tpot"]


@pytest.mark.parametrize(
    ("rate", "concurrency", "load", "kind", "arrival"),
    [("inf", 8, 8.0, "concurrency", "closed"), ("inf", None, 12.0, "concurrency", "burst"), (4.0, 8, 4.0, "rate", "poisson")],
)
def test_the_load_of_bench_serve(
    tmp_path: Path, rate: object, concurrency: int | None, load: float, kind: str, arrival: str
) -> None:
    file = changed(BENCH, tmp_path, lambda content: content.update(request_rate=rate, max_concurrency=concurrency))
    (found,) = read_load(file)
    assert (found.asked, found.kind, found.arrival) == (load, kind, arrival)


@pytest.mark.parametrize(
    ("burstiness", "arrival"),
    [(1.0, "poisson"), (float("inf"), "constant"), (0.5, Missing("its gaps have a burstiness of 0.5"))],
)
def test_the_gaps_of_bench_serve(tmp_path: Path, burstiness: float, arrival: object) -> None:
    """Python writes infinity as `Infinity`."""
    (found,) = read_load(changed(BENCH, tmp_path, lambda content: content.update(request_rate=4.0, burstiness=burstiness)))
    assert found.arrival == arrival


def test_gaps_of_bench_serve_without_a_first_token_are_refused(tmp_path: Path) -> None:
    def damage(content: dict[str, Any]) -> None:
        content["ttfts"][3] = float("nan")

    with pytest.raises(ParseError, match="request 3: ttfts is not a number"):
        read_load(changed(BENCH, tmp_path, damage))


def test_requests_that_guidellm_cut_are_no_failures(tmp_path: Path) -> None:
    def cut(content: dict[str, Any]) -> None:
        requests = content["benchmarks"][0]["requests"]
        requests["incomplete"], requests["successful"] = requests["successful"][:3], requests["successful"][3:]

    (load,) = read_load(changed(GUIDELLM, tmp_path, cut))
    assert [sum(getattr(request, name) for request in load.requests) for name in ("cut", "failed")] == [3, 0]


def test_the_duration_of_a_measurement_is_the_generators(tmp_path: Path) -> None:
    for file, expected in ((AIPERF, 3.303536), (BENCH, 6.379436), (GUIDELLM, 4.788152)):
        (load,) = read_load(file)
        assert load.duration_s == pytest.approx(expected)


def test_several_benchmarks_are_several_loads(tmp_path: Path) -> None:
    def repeat(content: dict[str, Any]) -> None:
        second = json.loads(json.dumps(content["benchmarks"][0]))
        second["config"]["strategy"] = {"type_": "concurrent", "streams": 4}
        second["requests"]["errored"] = second["requests"]["successful"][:2]
        second["requests"]["successful"] = second["requests"]["successful"][2:]
        content["benchmarks"].append(second)

    loads = read_load(changed(GUIDELLM, tmp_path, repeat))
    assert [(load.asked, load.kind) for load in loads] == [(2.0, "rate"), (4.0, "concurrency")]
    assert sum(bool(request.error) for request in loads[1].requests) == 2


# --- damage -----------------------------------------------------------------------------------------------------------------


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    lines = AIPERF.read_text().splitlines(keepends=True)
    file = tmp_path / "profile_export.jsonl"
    file.write_text("".join([*lines[:4], "{not json}\n", *lines[4:]]))
    with pytest.raises(ParseError, match=r"profile_export\.jsonl, line 5"):
        read_load(file)
    file.write_text("".join([*lines[:4], lines[4][:200]]))
    with pytest.raises(ParseError, match=r"line 5.*ends in the middle"):
        read_load(file)
    (load,) = read_load(file, cut_short=True)
    assert len(load.requests) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"{}", "not the output"),
        (b"\x00\xff\xfe", "not the output"),
        (b'{"aiperf_version": "0.13"}', "summary"),
        (b'{"num_prompts": 1, "request_rate": 1, "duration": 1}', "only a summary"),
        (b'{"metadata": {"request_start_ns": "x", "request_end_ns": 1}}\n', "line 1"),
        (b'{"metadata": {"request_start_ns": 5, "request_end_ns": 1}}\n', "line 1"),
        (b'{"guidellm_version": 1, "benchmarks": []}', "no request"),
        (b'{"guidellm_version": 1, "benchmarks": [', "line 1"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "odd"
    file.write_bytes(content)
    with pytest.raises(ParseError, match=words):
        read_load(file)


def test_impossible_times_are_refused(tmp_path: Path) -> None:
    for value in (-1.0, 1e300):
        file = changed(BENCH, tmp_path, lambda content, value=value: content["ttfts"].__setitem__(2, value))  # type: ignore[misc]
        with pytest.raises(ParseError):
            read_load(file)
    unequal = changed(BENCH, tmp_path, lambda content: content["itls"].pop())
    with pytest.raises(ParseError, match="itls 11"):
        read_load(unequal)


def test_special_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParseError):
        read_load(tmp_path / "none")
    with pytest.raises((ParseError, ConfigError)):
        read_load(Path("/dev/zero"))
    with pytest.raises(ParseError):
        read_load(tmp_path)


def test_huge_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_BYTES", 1000)
    with pytest.raises(ResourceError, match="larger than"):
        read_load(BENCH)
    monkeypatch.setattr(json_files, "MOST_LINE_BYTES", 1000)
    with pytest.raises(ParseError, match="line 1 is longer"):
        read_load(AIPERF)


def test_hostile_names_are_data(tmp_path: Path) -> None:
    name = "../../etc/passwd\x1b[31m<script>"
    file = changed(BENCH, tmp_path, lambda content: content.update(model_id=name, errors=[name] * 12))
    (load,) = read_load(file)
    assert load.model == name
    assert {request.error for request in load.requests} == {name}


@pytest.mark.parametrize("file", ALL, ids=lambda path: path.name)
def test_random_damage_never_raises_another_error(file: Path, tmp_path: Path) -> None:
    draw, content = random.Random(7), file.read_bytes()
    damaged = tmp_path / file.name
    for _ in range(60):
        made = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(made))
            if draw.random() < 0.3:
                del made[at:]
                break
            made[at] = draw.randrange(256)
        damaged.write_bytes(made)
        with suppress(LlmPerfError):
            read_load(damaged)
