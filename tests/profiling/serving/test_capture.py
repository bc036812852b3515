"""A serving run from its request to its folder, with a server that fails on request and a stand-in for the generator."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.analysis.serving.outcome import LoadOutcome, Verdict
from llm_perf_opt.analysis.serving.slo import NO_SLO, parse_slo
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.config.serving import Generator, LoadRequest, Server
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, ResourceError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, MetricsSample, ServedRequest, ServerFacts
from llm_perf_opt.profiling.serving import capture, generators, load, metrics, server
from llm_perf_opt.profiling.serving import request as serving_request
from llm_perf_opt.profiling.serving.aiperf import GENERATOR
from llm_perf_opt.profiling.serving.capture import capture_serving
from llm_perf_opt.profiling.serving.generators import locate_generator
from llm_perf_opt.profiling.serving.http import Answered, ServedModel, ask, free_port
from llm_perf_opt.profiling.serving.request import Prepared, ServingRequest, prepare
from llm_perf_opt.traces.serving.load_file import read_load
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.serving import analyze_serving
from serve_command import running_server

STAND_INS = Path(__file__).parents[2] / "stand_ins"
QUICK = replace(
    GENERATOR,
    program="",
    launch=(str(STAND_INS / "load_generator.py"),),
    package="json",
)
"""AIPerf's arguments and records, sent by a script that starts at once."""
RUNTIME = Runtime(
    "pretend", "", server=Server("", start_profile="/start_profile", stop_profile="/stop_profile", traces="*.trace.json")
)


class Heard:
    """A listener that keeps what it hears; `on_load` is called in each second of a load."""

    def __init__(self, on_load: Any = None) -> None:
        self.ended: list[PassRecord] = []
        self._on_load = on_load

    def pass_started(self, name: str, label: str) -> None:
        """Ignored."""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        if name != "server" and self._on_load:
            self._on_load()

    def pass_ended(self, entry: PassRecord) -> None:
        self.ended.append(entry)


@pytest.fixture(autouse=True)
def _quick_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Generator] = {"aiperf": QUICK}
    monkeypatch.setattr(generators, "known_generators", lambda: known)
    monkeypatch.setattr(server, "_HEALTH_EVERY_S", 0.05)


def request(**changes: Any) -> ServingRequest:
    config = compose(["model=tiny", "runtime.prompt_tokens=8", "runtime.num_new_tokens=4"], None).config
    usual: dict[str, Any] = {"rates": (50.0,), "requests": 6, "generator_python": Path(sys.executable), "profiled": False}
    usual |= {"least_s": 0.0}
    return ServingRequest(config, **{**usual, **changes})


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: ServingRequest, *fault: str, heard: Heard | None = None
) -> "tuple[RunFolder, Exception | None, Heard]":
    def argv(config: Path, folder: Path, port: int, traces: Path | None, spans: str, code: Sequence[str]) -> list[str]:
        words = [sys.executable, str(STAND_INS / "fault_server.py"), "--port", str(port), *fault]
        return [*words, "--traces", str(traces)] if traces else words

    monkeypatch.setattr(capture, "runner_argv", argv)
    located = locate_generator("aiperf", Path(sys.executable))
    port = free_port(None)
    facts = ServerFacts(f"http://127.0.0.1:{port}", "tiny", slo_ns=parse_slo(asked.slo).limits if asked.slo else {})
    folder = RunFolder.create(tmp_path / "run")
    heard = heard or Heard()
    error = capture_serving(Prepared(asked, located, RUNTIME, facts, ""), folder, ["llm-perf"], heard)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server still runs"
    return folder, error, heard


def point(folder: RunFolder, number: int) -> LoadPoint:
    return read_record(folder.raw(f"load_{number:02d}") / "point.json", LoadPoint)


@pytest.mark.slow
def test_each_load_leaves_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, error, heard = run(tmp_path, monkeypatch, request(rates=(40.0, 80.0), spans=True))
    manifest = folder.manifest()
    assert (error, manifest.status, manifest.kind) == (None, "complete", "serving")
    assert [(entry.name, entry.status) for entry in manifest.passes] == [
        ("server", "complete"),
        ("load_01", "complete"),
        ("load_02", "complete"),
    ]
    facts = read_record(folder.raw("server") / "server.json", ServerFacts)
    assert (facts.model, facts.argv, facts.version, facts.notes) == ("pretend", ("fault",), "1", ("a note",))
    first, second = point(folder, 1), point(folder, 2)
    assert (first.asked, second.asked, first.arrival, first.kind) == (40.0, 80.0, "poisson", "rate")
    assert (first.status, first.requests, first.prompt_tokens, first.new_tokens) == ("complete", 6, 8, 4)
    assert first.seed != second.seed
    assert first.started_ns < first.ended_ns <= second.started_ns
    place = folder.raw("load_01")
    samples = [json.loads(line) for line in (place / first.metrics).read_text().splitlines()]
    assert samples
    assert samples[-1]["series"]["fault:request_success_total"] == 6
    assert set(samples[0]) == {"at_ns", "series"} == set(MetricsSample.__dataclass_fields__)
    assert (place / "cmd.txt").read_text().count("--request-rate 40")
    assert len((place / first.file).read_text().splitlines()) == 6
    assert [entry.name for entry in heard.ended] == ["load_01", "load_02", "server"]
    points = analyze_serving(RunReader(folder)).points
    assert [(one.point.asked, one.point.status, one.requests, one.failed) for one in points][:1] == [(40.0, "complete", 6, 0)]


@pytest.mark.slow
def test_without_rates_they_double_until_the_limit_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server carries is told: whether a busy machine answers in time is not asked here."""
    judged: list[float] = []

    def told(outcome: LoadOutcome, lower: Sequence[LoadOutcome]) -> Verdict:
        judged.append(outcome.point.asked)
        assert [one.point.asked for one in lower] == sorted({asked for asked in judged if asked < outcome.point.asked})
        return Verdict(outcome.point.number, outcome.point.asked, outcome.point.asked < 3 * judged[0])

    monkeypatch.setattr(capture, "verdict", told)
    folder, error, _ = run(tmp_path, monkeypatch, request(rates=(), points=4, slo="e2e=1000s"), "--token-ms", "10")
    assert error is None
    loads = [read_record(file, LoadPoint).asked for file in sorted(folder.path.glob("raw/load_*/point.json"))]
    assert read_record(folder.raw("server") / "server.json", ServerFacts).slo_ns == {"e2e": 10**12}
    assert loads[0] < 25  # one request takes 4 × 10 ms at least
    assert loads[1:] == pytest.approx([2 * loads[0], 4 * loads[0], 8**0.5 * loads[0]], rel=0.01)


@pytest.mark.slow
def test_a_server_that_dies_leaves_a_partial_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(rates=(20.0, 40.0), requests=20)
    folder, error, heard = run(tmp_path, monkeypatch, asked, "--fault", "die", "--after", "5", "--token-ms", "20")
    assert isinstance(error, CaptureError)
    assert "exit code 7" in error.fact
    assert "fault: out of luck" in error.fact
    assert folder.manifest().status == "partial"
    assert point(folder, 1).status == "partial"
    assert not folder.raw("load_02").exists()
    assert {entry.name: entry.status for entry in heard.ended} == {"load_01": "failed", "server": "failed"}


@pytest.mark.slow
@pytest.mark.parametrize("code", ["429", "500", "504"])
def test_failed_requests_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    folder, error, _ = run(tmp_path, monkeypatch, request(), "--fault", code, "--after", "4")
    assert error is None
    assert point(folder, 1).status == "complete"
    records = read_load(folder.raw("load_01") / "profile_export.jsonl")[0].requests
    failed = [one.error for one in records if one.error]
    assert len(failed) == 2
    assert all(text.startswith(code) for text in failed)
    assert folder.manifest().passes[-1].why == "2 of 6 requests failed."


@pytest.mark.slow
def test_a_load_that_fails_as_a_whole_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator then ends with an exit code of 1, which says less than the answers of the server."""
    folder, error, _ = run(tmp_path, monkeypatch, request(rates=(50.0, 60.0)), "--fault", "500")
    assert isinstance(error, CaptureError)
    assert error.fact.startswith("All 6 requests failed: 500")
    assert (point(folder, 1).status, folder.manifest().status) == ("partial", "partial")
    assert not folder.raw("load_02").exists()


@pytest.mark.slow
def test_a_hanging_stream_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(request_s=10.0, rates=(50.0, 60.0))  # seconds: the other requests end in time on a busy machine as well
    folder, error, _ = run(tmp_path, monkeypatch, asked, "--fault", "hang", "--after", "5")
    assert isinstance(error, CaptureError)
    assert "1 of 6 requests" in point(folder, 1).why
    assert (point(folder, 1).status, folder.manifest().status) == ("partial", "partial")
    assert point(folder, 2).number == 2  # the next load is still put on it


@pytest.mark.slow
def test_a_load_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GRACE_S", (0.5, 0.5, 0.5))
    asked = request(point_s=1.5, request_s=60.0)
    folder, error, _ = run(tmp_path, monkeypatch, asked, "--fault", "hang", "--after", "5")
    assert isinstance(error, CaptureError)
    assert "--point-s" in error.fact
    assert point(folder, 1).status == "partial"


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        records = tmp_path / "run" / "raw" / "load_01" / "profile_export.jsonl"
        if records.exists() and records.stat().st_size:
            raise KeyboardInterrupt

    monkeypatch.setattr(load, "GRACE_S", (0.5, 0.5, 0.5))
    asked = request(rates=(8.0,), requests=50)
    folder, error, _ = run(tmp_path, monkeypatch, asked, heard=Heard(interrupt))
    assert isinstance(error, Interrupted)
    assert (folder.manifest().status, point(folder, 1).status) == ("partial", "partial")
    assert 0 < len(read_load(folder.raw("load_01") / "profile_export.jsonl")[0].requests) < 50


@pytest.mark.slow
def test_a_load_that_cannot_be_judged_is_repeated_and_then_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(rates=(), points=3, requests=4)  # too few, and so are 16
    folder, error, _ = run(tmp_path, monkeypatch, asked)
    assert (error, folder.manifest().status) == (None, "complete")
    assert [point(folder, number).requests for number in (1, 2)] == [4, 16]
    assert point(folder, 1).asked == point(folder, 2).asked
    assert not folder.raw("load_03").exists()
    notes = read_record(folder.raw("server") / "server.json", ServerFacts).notes
    assert any("search for the knee ended" in note and "it needs 20" in note for note in notes)


@pytest.mark.slow
def test_a_search_without_a_verdict_still_profiles_and_repeats_only_with_more_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_SENDING_SHARE", 0.0)  # no time for more requests
    folder, error, _ = run(tmp_path, monkeypatch, request(rates=(), points=3, requests=4, profiled=True, profile_s=0.1))
    assert error is None
    assert [point(folder, number).profiled for number in (1, 2)] == [False, True]
    assert point(folder, 1).asked == point(folder, 2).asked
    assert not folder.raw("load_03").exists()


def test_cut_requests_are_not_among_the_failed() -> None:
    def reason(*requests: ServedRequest) -> str:
        made = LoadRequest("", "", "", "rate", 1.0, len(requests), 0, 1, 1, 0, 1.0, Path())
        found = load._incomplete(LoadRecords("x", requests), made)
        return found.fact if found else ""

    good = ServedRequest("a", 1, 2)
    failed, cut = replace(good, error="500 x"), replace(good, error="not finished", cut=True)
    assert reason(failed, failed) == "All 2 requests failed: 500 x."
    assert reason(failed, failed, cut) == "All 2 requests that ended failed: 500 x."
    assert reason(cut, cut).startswith("None of 2 requests ended")
    assert reason(good, cut) == reason(good, failed) == ""


def test_a_run_ends_if_every_request_failed_or_was_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = CaptureError("The load took too long.", "")
    for failed, cut, ends in ((2, 2, True), (1, 2, False)):
        made = LoadPoint(1, "rate", 5.0, "poisson", "x", "f", 4, 0, 0, "partial")
        outcome = LoadOutcome(made, 4, failed, cut, NO_SLO, False, False, NO_SLO, NO_SLO, False)
        monkeypatch.setattr(capture, "drive", lambda *_, outcome=outcome, made=made: load.Driven(made, outcome, error))
        facts = ServerFacts("http://127.0.0.1:1", "tiny")
        prepared = Prepared(request(), locate_generator("aiperf", Path(sys.executable)), RUNTIME, facts, "")
        going = capture._Capture(prepared, RunFolder.create(tmp_path / str(failed)), Heard())
        going._e2e_s[0.0] = 0.1
        with pytest.raises(CaptureError) if ends else nullcontext():
            going._drive_one(going._rig(None, None), 5.0)


def test_records_that_are_too_large_fail_their_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = ServerFacts("http://127.0.0.1:1", "tiny")
    prepared = Prepared(request(), locate_generator("aiperf", Path(sys.executable)), RUNTIME, facts, "")
    going = capture._Capture(prepared, RunFolder.create(tmp_path / "run"), Heard())
    (going._folder.raw("load_01")).mkdir(parents=True)

    def too_large(*_: object, **__: object) -> list[LoadRecords]:
        raise ResourceError("They take more than 400 MB of memory.", "Send fewer.")

    monkeypatch.setattr(load, "read_load", too_large)
    made = LoadPoint(1, "rate", 5.0, "poisson", "x", "f", 6, 0, 0, "partial")
    ended = load._ended(going._rig(None, None), made, going._load(1, 5.0, 6), None, None)
    assert (ended.point.status, ended.outcome) == ("failed", None)
    assert ended.error is not None
    assert "more than 400 MB" in ended.error.fact


def test_a_load_has_no_more_requests_than_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[int] = []

    def drive(rig: load.Rig, asked: LoadRequest, number: int, limit_s: float) -> load.Driven:
        sent.append(asked.requests)
        made = LoadPoint(number, "rate", asked.asked, "poisson", "x", "f", asked.requests, 0, 0, "complete")
        return load.Driven(made, LoadOutcome(made, asked.requests, 0, 0, NO_SLO, False, False, NO_SLO, NO_SLO, False))

    monkeypatch.setattr(capture, "drive", drive)
    monkeypatch.setattr(generators, "most_requests", lambda tokens, file: 50 if (tokens, file) == (4, QUICK.file) else 0)
    prepared = Prepared(
        request(least_s=1.0),
        locate_generator("aiperf", Path(sys.executable)),
        RUNTIME,
        ServerFacts("http://127.0.0.1:1", "tiny"),
        "",
    )
    going = capture._Capture(prepared, RunFolder.create(tmp_path / "run"), Heard())
    going._e2e_s[0.0] = 0.1
    for rate in (30.0, 80.0):
        going._drive_one(going._rig(None, None), rate)
    assert sent == [30, 50]
    assert going._repeated(30.0, 30) == 50
    assert [note for note in going._facts.notes if "50 requests, the most that can be read" in note]


@pytest.mark.slow
def test_a_server_without_a_profiler_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, profile in enumerate((None, 50.0)):
        place = tmp_path / str(number)
        place.mkdir()
        folder, error, _ = run(place, monkeypatch, request(profiled=True, profile=profile), "--fault", "no-profiler")
        if profile is None:
            notes = read_record(folder.raw("server") / "server.json", ServerFacts).notes
            assert (error, folder.manifest().status) == (None, "complete")
            assert any("was not profiled" in note and "404" in note for note in notes)
        else:
            assert isinstance(error, CaptureError)
            assert folder.manifest().status == "partial"


@pytest.mark.slow
def test_requests_that_do_not_fit_the_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["model=tiny", "runtime.prompt_tokens=4000", "runtime.num_new_tokens=97"], None).config
    _, error, _ = run(tmp_path, monkeypatch, replace(request(), config=config))
    assert isinstance(error, ConfigError)
    assert "its context is 4096" in error.fact


@pytest.mark.slow
def test_a_profiled_load_keeps_the_servers_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, error, _ = run(tmp_path, monkeypatch, request(profiled=True, profile_s=0.1, requests=20))
    assert error is None
    last = point(folder, 2)
    assert (last.profiled, last.requests, last.asked) == (True, 8, 50.0)
    assert json.loads((folder.raw("load_02") / last.trace).read_text()) == {"traceEvents": []}
    assert not point(folder, 1).profiled


def test_a_taken_port_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_request, "runtime_named", lambda _: RUNTIME)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"Port {port} of 127.0.0.1 is taken"):
            prepare(request(port=port))


def test_a_missing_generator_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generators, "known_generators", lambda: {"aiperf": GENERATOR})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(ResourceError, match="AIPerf is not installed") as found:
        prepare(request(generator_python=None))
    assert "pip install aiperf" in found.value.remedy


def test_a_runtime_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="pytorch has no server"):
        prepare(request())


# --- attached servers -------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """The address of a server that somebody else has started."""
    with running_server(tmp_path) as address:
        yield address


@pytest.mark.slow
def test_attach_to_a_server(running: str, tmp_path: Path) -> None:
    prepared = prepare(request(url=running + "/v1"))
    assert (prepared.facts.model, prepared.facts.engine, prepared.tokenizer) == ("pretend", "nobody", str(tmp_path))
    assert prepared.facts.metrics_url == running + "/metrics"
    folder = RunFolder.create(tmp_path / "run")
    prepared = replace(prepared, request=replace(prepared.request, profiled=True))
    assert capture_serving(prepared, folder, ["llm-perf"], Heard()) is None
    assert (point(folder, 1).status, folder.manifest().status) == ("complete", "complete")
    assert "was not profiled" in read_record(folder.raw("server") / "server.json", ServerFacts).notes[-1]
    assert [entry.name for entry in folder.manifest().passes] == ["load_01"]


def test_an_attached_server_is_not_profiled(running: str) -> None:
    with pytest.raises(ConfigError, match="--profile"):
        prepare(request(url=running, profile=4.0))


def test_a_tokenizer_is_a_folder(running: str, tmp_path: Path) -> None:
    """A generator would download the tokenizer of a name."""
    with pytest.raises(ConfigError, match="--tokenizer gpt2 is not a folder"):
        prepare(request(url=running, tokenizer="gpt2"))
    assert prepare(request(url=running, tokenizer=str(tmp_path))).tokenizer == str(tmp_path)
    served = ServedModel(str(tmp_path), "", "")  # an empty root is not the current folder
    assert serving_request._tokenizer(None, served) == str(tmp_path)
    with pytest.raises(ConfigError, match="not known"):
        serving_request._tokenizer(None, ServedModel("gpt2", "", ""))


def test_an_answer_that_never_ends_is_given_up() -> None:
    class Dribbling(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)

        def log_message(self, *words: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Dribbling) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        answer = ask(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s=0.2)
        server.shutdown()
    assert (answer.code, "timed out" in answer.why) == (0, True)


def test_headers_that_never_end_are_given_up() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def dribble() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.02)

        threading.Thread(target=dribble, daemon=True).start()
        answer = ask(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=0.2)
    assert (answer.code, "timed out" in answer.why) == (0, True)


def test_a_slow_answer_is_waited_for_longer_than_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def connect(_: Any, timeout: float, *__: Any) -> socket.socket:
        limits.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert ask("http://127.0.0.1:9/", timeout_s=30).why == "timed out"
    assert ask("http://127.0.0.1:9/", timeout_s=0.2).why == "timed out"
    assert limits == [5.0, 0.2]


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_sample_is_waited_for_unless_the_load_was_broken_off(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []

    def slow(_: str, timeout_s: float) -> Answered:
        limits.append(timeout_s)
        return Answered(0, why="timed out")

    monkeypatch.setattr(metrics, "ask", slow)
    with suppress(KeyboardInterrupt), metrics.MetricsSampler("http://127.0.0.1:9/", tmp_path / "samples", every_s=0.01):
        if fails:
            raise KeyboardInterrupt
    assert set(limits[:-1]) <= {0.04}
    assert limits[-1] == (0.04 if fails else 20.0)


def test_a_server_is_ready_when_its_own_words_were_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a busy machine, the thread that reads its output may be later than its answer to the health check."""
    process = server.ServerProcess(["x"], tmp_path / "log", {})
    monkeypatch.setattr(server.ServerProcess, "alive", True)
    monkeypatch.setattr(process, "wait", lambda _: process.messages.put({"event": "server"}))
    monkeypatch.setattr(server, "ask", lambda _: Answered(200))
    heard: list[str] = []
    server.wait_until_ready(process, "http://127.0.0.1/health", 60.0, lambda message: heard.append(message["event"]))
    assert heard == ["tick", "server"]


@pytest.mark.parametrize(("code", "said"), [(200, "answers, but has not reported its settings"), (503, "was not ready")])
def test_a_server_that_is_not_ready_in_time_says_what_is_missing(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = server.ServerProcess(["x"], tmp_path / "log", {})
    monkeypatch.setattr(server.ServerProcess, "alive", True)
    monkeypatch.setattr(server, "ask", lambda _: Answered(code))
    with pytest.raises(CaptureError) as caught:
        server.wait_until_ready(process, "http://127.0.0.1/health", 0.0, lambda _: None)
    assert f"The server {said} after 0 s." in caught.value.fact


def test_a_server_that_never_started_is_not_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The group 0 is that of the caller."""
    process = server.ServerProcess(["x"], tmp_path / "log", {})
    states = iter([True, True, False])
    monkeypatch.setattr(process, "_thread", Interrupting(states))
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("killed"))
    process.stop()


class Interrupting:
    """A thread during whose end Ctrl-C is pressed."""

    def __init__(self, states: Iterator[bool]) -> None:
        self._states = states

    def is_alive(self) -> bool:
        return next(self._states)

    def join(self, _: float) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("url", ["ftp://host", "127.0.0.1:8000", "http://host:port", "http://host/other"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        prepare(request(url=url))


def test_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(ResourceError, match="cannot be reached"):
        prepare(request(url=f"http://127.0.0.1:{free_port(None)}"))
