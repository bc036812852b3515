"""Fill a run folder with loads on a server: start it or attach to it, drive it load by load, and profile a short one."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from llm_perf_opt import __version__
from llm_perf_opt.analysis.serving.outcome import verdict
from llm_perf_opt.analysis.serving.slo import recorded_slo
from llm_perf_opt.config.composition import config_to_yaml
from llm_perf_opt.config.serving import LoadRequest
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ResourceError, interrupted, unexpected
from llm_perf_opt.core.inside import make_folder
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.records import LOAD_PREFIX, SCHEMA, SERVER, Manifest, PassRecord, load_name
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.serving_records import ServerFacts
from llm_perf_opt.profiling.passes import Listener, begin_pass, closed
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.serving.http import check_lengths, check_request, served_model
from llm_perf_opt.profiling.serving.load import Driven, Rig, drive, profiled_requests
from llm_perf_opt.profiling.serving.profile import NoProfilerError, profiled_load
from llm_perf_opt.profiling.serving.rates import first_rate, knee, next_rate
from llm_perf_opt.profiling.serving.request import Prepared, metrics_url_of
from llm_perf_opt.profiling.serving.server import ServerProcess, model_folder, runner_argv, wait_until_ready
from llm_perf_opt.profiling.serving.spans import SpanReceiver
from llm_perf_opt.profiling.vendor.launch import child_environment

TRACES = "traces"
"""Where the server's profiler writes, below `raw/server`."""
_SENDING_SHARE = 0.5
"""Of the time limit of a load, the share in which requests may be sent when it is repeated."""
REPEATED_TIMES = 4
"""A load of the search that cannot be judged is repeated once, with up to so many times the requests."""


# --- the capture ------------------------------------------------------------------------------------------------------


def capture_serving(prepared: Prepared, folder: RunFolder, command: Sequence[str], listener: Listener) -> LlmPerfError | None:
    """Fill the folder and return the first error. What was captured before it is kept."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    folder.write_manifest(
        Manifest(SCHEMA, __version__, "partial", created, tuple(command), why="The run has not ended.", kind="serving")
    )
    capture = _Capture(prepared, folder, listener)
    error: LlmPerfError | None = None
    try:
        _write_settings(prepared, folder)
        with capture.serving() as rig:
            capture.drive_all(rig)
    except LlmPerfError as raised:
        error = raised
    except KeyboardInterrupt as stopped:
        error = interrupted(stopped, "What was captured so far is kept.")
    except Exception as defect:
        _close(folder, unexpected(defect), captured=capture.captured)  # the run has ended, whatever happened
        raise
    return _close(folder, error or capture.first_error, captured=capture.captured)


def _write_settings(prepared: Prepared, folder: RunFolder) -> None:
    config = prepared.request.config
    text = config_to_yaml(config)
    if prepared.runtime is None:  # model and runtime of an attached server are not those of the settings
        lengths = {"prompt_tokens": config.runtime.prompt_tokens, "num_new_tokens": config.runtime.num_new_tokens}
        text = yaml.safe_dump({"runtime": lengths}, sort_keys=False)
    text += yaml.safe_dump({"serving": prepared.request.settings()}, sort_keys=False)
    folder.write(folder.config_file, text.encode())
    folder.write_record(folder.env_file, environment(config.hardware.device_index))


def _close(folder: RunFolder, error: LlmPerfError | None, *, captured: bool) -> LlmPerfError | None:
    try:
        manifest = folder.manifest()
        status = "complete" if error is None else "partial" if captured else "failed"
        if isinstance(error, Interrupted) and not captured:
            error = Interrupted(error.fact, "Nothing had been captured yet.")
        why, remedy = (error.fact, error.remedy) if error else ("", "")
        folder.write_manifest(
            replace(manifest, status=status, passes=closed(manifest.passes), why=why, remedy=remedy)  # type: ignore[arg-type]
        )
    except LlmPerfError as late:
        return error or late
    return error


class _Capture:
    """A serving run while it goes on."""

    def __init__(self, prepared: Prepared, folder: RunFolder, listener: Listener) -> None:
        self._prepared, self._folder, self._listener = prepared, folder, listener
        self._request = prepared.request
        self._deadline = time.monotonic() + self._request.timeout_s
        self._tokenizer, self._random_ids = prepared.tokenizer, False
        self._facts = prepared.facts
        self._driven: list[Driven] = []
        self._e2e_s: dict[float, float] = {}
        """Load → median end-to-end time there, of loads that the server carries; 0: of a single request."""
        self._ready = False
        self.first_error: LlmPerfError | None = None

    @property
    def captured(self) -> bool:
        """Whether a load left records."""
        return any(one.outcome is not None for one in self._driven) or any(
            entry.name.startswith(LOAD_PREFIX) and self._left_records(entry.name) for entry in self._folder.manifest().passes
        )

    def _left_records(self, name: str) -> bool:
        file = self._folder.raw(name) / self._prepared.located.generator.file
        return file.exists() and file.stat().st_size > 0

    # --- the server ---------------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[Rig]:
        """Yield the rig of a server that is ready; a server that was started is always ended."""
        if self._prepared.runtime is None:
            self._write_facts()
            yield self._rig(None, None)
            return
        with ExitStack() as stack:
            model = Path(stack.enter_context(model_folder()))
            spans = stack.enter_context(SpanReceiver() if self._request.spans else nullcontext(None))
            server = self._start(model, spans)
            try:
                self._await(server)
                yield self._rig(server, spans)
            except BaseException as error:
                self._end(server, error)
                raise
            self._end(server, None)

    def _start(self, model: Path, spans: SpanReceiver | None) -> ServerProcess:
        port = int(self._facts.url.rpartition(":")[2])
        traces = self._folder.raw(SERVER) / TRACES if self._request.profiled else None
        argv = runner_argv(self._folder.config_file, model, port, traces, spans.url if spans else "", self._request.code)
        begin_pass(self._folder, SERVER, argv)
        if traces is not None:
            make_folder(self._folder.path, traces)
        self._listener.pass_started(SERVER, f"{self._prepared.runtime.name if self._prepared.runtime else ''} server")
        self._folder.update_pass(PassRecord(SERVER, "started", tuple(argv)))
        variables = {"OTEL_BSP_SCHEDULE_DELAY": "500"}  # milliseconds: spans arrive before the load that they belong to ends
        server = ServerProcess(argv, self._folder.log_file(SERVER), {**child_environment(), **variables})
        server.start()
        return server

    def _await(self, server: ServerProcess) -> None:
        """Wait until the server is ready and write what is known about it."""
        declared = self._prepared.server
        limit = min(self._request.startup_s, self._left())
        wait_until_ready(server, self._facts.url + declared.health, limit, self._take)
        self._ready = True
        self._facts = replace(self._facts, metrics_url=metrics_url_of(self._facts.url, declared.metrics))
        self._write_facts()

    def _take(self, message: dict[str, Any]) -> None:
        """Keep what the server's process says about itself."""
        if message.get("event") == "server":
            self._tokenizer, self._random_ids = str(message["tokenizer"]), bool(message["random_ids"])
            self._facts = replace(
                self._facts,
                model=str(message["model"]),
                argv=tuple(message["argv"]),
                engine=self._prepared.runtime.name if self._prepared.runtime else ServerFacts.engine,
                version=str(message["version"]),
                notes=tuple(message["notes"]),
            )
            self._listener.pass_message(SERVER, {"event": "phase", "text": "loading the model"})
        else:
            self._listener.pass_message(SERVER, message)

    def _write_facts(self) -> None:
        self._folder.write_record(self._folder.server_file, self._facts)

    def _end(self, server: ServerProcess, error: BaseException | None) -> None:
        """End the server and record how it ended."""
        failed = not server.alive or not self._ready
        server.stop()
        found = self._folder.manifest().pass_named(SERVER) or PassRecord(SERVER)
        why = error if failed and isinstance(error, LlmPerfError) else None
        entry = replace(
            found,
            status="failed" if failed else "complete",
            exit_code=server.exit_code,
            seconds=round(server.seconds, 3) if server.seconds is not None else None,
            tool_version=str(self._facts.version) if not isinstance(self._facts.version, Missing) else "",
            why=why.fact if why else "",
            remedy=why.remedy if why else "",
        )
        self._folder.update_pass(entry)
        self._listener.pass_ended(entry)

    # --- the loads ----------------------------------------------------------------------------------------------------

    def _rig(self, server: ServerProcess | None, spans: SpanReceiver | None) -> Rig:
        return Rig(
            folder=self._folder,
            listener=self._listener,
            facts=self._facts,
            located=self._prepared.located,
            server=server,
            spans=spans,
            slo=recorded_slo(self._facts.slo_ns),
        )

    def _load(self, number: int, asked: float, requests: int) -> LoadRequest:
        runtime = self._request.config.runtime
        return LoadRequest(
            url=self._facts.url,
            model=self._facts.model,
            tokenizer=self._tokenizer,
            kind=self._request.kind,
            asked=asked,
            requests=requests,
            warmup=self._request.warmup,
            prompt_tokens=runtime.prompt_tokens,
            new_tokens=runtime.num_new_tokens,
            seed=self._request.seed + number,
            request_s=self._request.request_s,
            folder=self._folder.raw(load_name(number)),
            random_ids=self._random_ids,
        )

    def drive_all(self, rig: Rig) -> None:
        """Put every load on the server, then profile one."""
        self._e2e_s[0.0] = self._single_request()
        loads = self._request.rates or self._request.concurrency
        low: float | None
        high: float | None
        if loads:
            carried = {load: self._carried(self._drive_one(rig, load)) for load in loads}
            low, high = knee({load: found for load, found in carried.items() if not isinstance(found, Missing)})
        else:
            low, high = self._search(rig)
        at = self._request.profile or low or high or self._driven[0].point.asked  # the last: no load could be judged
        if self._request.profiled:
            self._profile(rig, at)

    def _single_request(self) -> float:
        """Return the seconds of one request; raise if the server does not answer it, or its lengths do not fit the model."""
        runtime, facts = self._request.config.runtime, self._facts
        with suppress(ResourceError):  # a server without a list of models
            check_lengths(served_model(facts.url, facts.model), runtime.prompt_tokens, runtime.num_new_tokens)
        limit = self._time_left(self._request.request_s)
        return check_request(facts.url, facts.model, runtime.prompt_tokens, runtime.num_new_tokens, limit)

    def _search(self, rig: Rig) -> tuple[float | None, float | None]:
        """Look for the knee; return the highest rate that was carried and the lowest that was not."""
        tried: dict[float, bool] = {}
        rate: float | None = first_rate(self._e2e_s[0.0])
        while rate is not None:
            driven = self._drive_one(rig, rate)
            carried = self._carried(driven)
            if isinstance(carried, Missing) and driven.error is None:
                more = self._repeated(rate, driven.point.requests)
                carried = self._carried(self._drive_one(rig, rate, more)) if more > driven.point.requests else carried
            if isinstance(carried, Missing):
                self._note(f"The search for the knee ended at {rate:g} requests/s, which cannot be judged: {carried.why}")
                break
            tried[rate] = carried
            rate = next_rate(tried, self._request.points)
        return knee(tried)

    def _repeated(self, rate: float, requests: int) -> int:
        """Return the requests of a load that is repeated, as many as fit its time limit."""
        fitting = math.floor(rate * _SENDING_SHARE * self._time_for_a_load())
        return min(REPEATED_TIMES * requests, fitting, self._most_requests)

    @property
    def _most_requests(self) -> int:
        """How many requests can be read from the file of the load generator."""
        return self._prepared.located.most_requests(self._request.config.runtime.num_new_tokens)

    def _carried(self, driven: Driven) -> Maybe[bool]:
        if driven.outcome is None:
            return Missing("the load left no records")
        lower = [one.outcome for one in self._driven if one.outcome and one.point.asked < driven.point.asked]
        return verdict(driven.outcome, sorted(lower, key=lambda one: one.point.asked)).carried

    def _drive_one(self, rig: Rig, load: float, requests: int | None = None) -> Driven:
        """Put one load on the server; raise if no further load can be put on it."""
        number = len(self._driven) + 1
        smaller = max(tried for tried in self._e2e_s if tried < load)
        count = requests or self._request.requests_at(load, self._e2e_s[smaller])
        if count > self._most_requests:
            count = self._most_requests
            self._note(f"Load {number} was shortened to {count:,} requests, the most that can be read.")
        driven = drive(rig, self._load(number, load, count), number, self._time_for_a_load())
        self._driven.append(driven)
        piling = self._request.kind == "rate" and self._carried(driven) is False  # times then grow with the length of the load
        if driven.e2e_s is not None and not piling:
            self._e2e_s[load] = driven.e2e_s
        self.first_error = self.first_error or driven.error
        found = driven.outcome
        dead = rig.server is not None and not rig.server.alive
        if driven.error and (dead or found is None or found.failed + found.cut == found.requests):
            raise driven.error
        return driven

    def _profile(self, rig: Rig, load: float) -> None:
        """Profile a load. A server that cannot be profiled is an error only if the user asked for the profile."""
        if rig.server is None:
            self._note("The server was not profiled: llm-perf did not start it, and it writes its trace where it runs")
            return
        number = len(self._driven) + 1
        requests = profiled_requests(load, self._request.kind, self._request.requests, self._request.profile_s)
        made, traces = self._load(number, load, requests), self._folder.raw(SERVER) / TRACES
        try:
            driven = profiled_load(rig, self._prepared.server, traces, made, number, self._time_left)
        except NoProfilerError as error:
            if self._request.profile is not None:
                raise
            self._note(f"The server was not profiled: {error.fact}")
            return
        self._driven.append(driven)
        self.first_error = self.first_error or driven.error

    def _note(self, note: str) -> None:
        self._facts = replace(self._facts, notes=(*self._facts.notes, note.rstrip(".") + "."))
        self._write_facts()

    def _time_left(self, limit_s: float) -> float:
        """Return how long a wait may take: at most the limit, and not beyond that of the run or of a load."""
        return min(limit_s, self._time_for_a_load())

    def _time_for_a_load(self) -> float:
        left = self._left()
        if left <= 0:
            raise CaptureError(
                f"The run reached its limit of {self._request.timeout_s:g} s.",
                "Raise --timeout-s, or ask for fewer loads or --requests.",
            )
        return min(self._request.point_s, left)

    def _left(self) -> float:
        return self._deadline - time.monotonic()
