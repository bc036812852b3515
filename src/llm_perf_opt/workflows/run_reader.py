"""The only way to read a run folder. Each file is parsed at most once; an absent or damaged file is `Missing(reason)`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.evidence import counted_in_stage
from llm_perf_opt.analysis.kernels.selection import Selection
from llm_perf_opt.analysis.overhead import without_profiler_events
from llm_perf_opt.analysis.ranks.document import RanksAnalysis
from llm_perf_opt.analysis.serving.points import MeasuredLoad
from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.analysis.verification import Verification
from llm_perf_opt.config.passes import trace_files
from llm_perf_opt.config.values import current
from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.core.host_records import ProgramProfile
from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.machine_records import CounterReport, FoundCeilings, Telemetry, read_ceilings
from llm_perf_opt.core.records import CleanTimings, Manifest, Maybe, Missing, TorchPass, WrappedPass
from llm_perf_opt.core.run_folder import RunFolder, read_fields, read_mapping, read_record, read_values
from llm_perf_opt.core.serving_records import LoadPoint, ServerFacts
from llm_perf_opt.core.user_files import COMPRESSED, open_unpacked, read_text
from llm_perf_opt.profiling.nsight_pass import NCU_PROGRAM, NCU_SELFTEST, NCU_STAGES
from llm_perf_opt.profiling.timelines import RecordedTrace, Timeline, read_recorded, timelines_of
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.pass_records import read_telemetry, read_timings, read_torch_pass
from llm_perf_opt.traces.trace_cache import CachedTrace, cached_trace
from llm_perf_opt.workflows.analyze_ranks import analyze_rank_files
from llm_perf_opt.workflows.load_reader import LoadFiles, read_measured, read_points

R = TypeVar("R")

_EXPERIMENT = re.compile(r"^experiment: *(['\"]?)(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\1 *$", re.MULTILINE)
_MODEL = re.compile(r"^model:\n(?:  .*\n)*?  name: *(['\"]?)(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\1 *$", re.MULTILINE)
_SOURCE = re.compile(r"^model:\n(?:  .*\n)*?  source: *(?P<name>random|pretrained) *$", re.MULTILINE)
COUNTING_PASSES = (*NCU_STAGES, NCU_PROGRAM)
"""The passes that count the program itself, not the self-test."""
_TEST_AGAIN = "Repeat the run: it counts work of known size before it reads counters"
RANK_TRACES = "rank*.trace.json*"
"""Traces of the ranks after the first, next to that of the pass."""
_LAST_BYTES = 16 * 1024


class Damaged(Missing):
    """A file that exists and cannot be read."""


class Untested(Missing):
    """Counters that no self-test checked."""


@dataclass(frozen=True)
class LogEnd:
    """The last lines of a log."""

    file: str
    """Relative to the run folder."""
    bytes: int
    lines: tuple[str, ...]


class RunReader:
    """A run, read lazily."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._traces: dict[str, Maybe[RecordedTrace]] = {}

    @classmethod
    def open(cls, path: Path) -> "RunReader":
        """Open a run. Raise ParseError if the folder is not a run."""
        return cls(RunFolder.open(path))

    @cached_property
    def manifest(self) -> Manifest:
        """The contents of run.json; ParseError if it cannot be read."""
        return self.folder.manifest()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in config.yaml; empty if there is none, ParseError if it is damaged."""
        return current(self.folder.parsed(self.folder.config_file, read_values))

    @cached_property
    def _config_text(self) -> str:
        """The text of config.yaml; empty if it cannot be read. The list goes on without it; the report says what is wrong."""
        try:
            return read_text(self.folder.config_file)
        except (OSError, ParseError, UnicodeDecodeError):
            return ""

    @property
    def names(self) -> tuple[str, str]:
        """Experiment and model, empty if config.yaml has none. Two lines are enough: a list reads thousands of files."""
        text = self._config_text
        experiment, model = (match["name"] if match else "" for match in (_EXPERIMENT.search(text), _MODEL.search(text)))
        return experiment, model

    @property
    def weights(self) -> str:
        """`random` or `real`; empty if config.yaml does not say."""
        match = _SOURCE.search(self._config_text)
        return "" if match is None else "random" if match["name"] == "random" else "real"

    @cached_property
    def env(self) -> Maybe[dict[str, Any]]:
        """The machine and the software."""
        return self._read(self.folder.env_file, read_fields)

    # --- results of the passes ---------------------------------------------------------------------------------------

    @cached_property
    def timings(self) -> Maybe[CleanTimings]:
        """The unprofiled times."""
        return self._of_pass("clean", self.folder.clean_file, read_timings)

    @property
    def damage(self) -> ParseError | None:
        """Why measured times are damaged or gone; None if they are readable, or were never measured."""
        entry = self.manifest.pass_named("clean")
        if entry is not None and entry.status == "failed":
            return None  # run.json says why
        left = self.manifest.status != "failed" and entry is not None and entry.status == "complete"
        if not left and not self.folder.clean_file.exists():
            return None
        try:
            self.folder.parsed(self.folder.clean_file, read_timings)
        except ParseError as error:
            return error
        return None

    @cached_property
    def torch(self) -> Maybe[TorchPass]:
        """The operators under torch.profiler, without its own work."""
        found = self._of_pass("torch", self.folder.torch_file, read_torch_pass)
        return found if isinstance(found, Missing) else without_profiler_events(found)

    @cached_property
    def program_profile(self) -> Maybe[ProgramProfile]:
        """What torch.profiler recorded of a user's program, apart from its trace."""
        return self._of_pass("torch", self.folder.program_profile_file, _read_program_profile)

    @cached_property
    def telemetry(self) -> Maybe[Telemetry]:
        """The readings of the sampler."""
        return self._of_pass("nvml", self.folder.telemetry_file, read_telemetry)

    @cached_property
    def ceilings(self) -> Maybe[FoundCeilings]:
        """The measured peaks of the device."""
        return self._of_pass("ceilings", self.folder.ceilings_file, read_ceilings)

    @cached_property
    def wrapped(self) -> dict[str, WrappedPass]:
        """The times of the measured process under each external tool; a damaged record is left out."""
        found = {entry.name: self._read(self.folder.wrapped_file(entry.name), _read_wrapped) for entry in self.manifest.passes}
        return {name: record for name, record in found.items() if not isinstance(record, Missing)}

    @cached_property
    def prompts_sha256(self) -> Maybe[str]:
        """The checksum of the prompts."""
        found = self._read(self.folder.clean_inputs_file, read_mapping)
        if isinstance(found, Damaged):
            return Missing("its prompt record is damaged")
        if isinstance(found, Missing):
            return Missing("it has no prompt record")
        checksum = found.get("sha256")
        return checksum if isinstance(checksum, str) and checksum else Missing("its prompt record has no checksum")

    @cached_property
    def tokens(self) -> Maybe[list[list[int]]]:
        """The new tokens of the unprofiled pass, per sequence."""
        return self._read(self.folder.clean_tokens_file, _read_tokens)

    @cached_property
    def logits(self) -> Maybe[Logits]:
        """The recorded logits of the new tokens."""
        return self._read(self.folder.clean_logits_file, _read_logits)

    @cached_property
    def verified(self) -> Maybe[Verification]:
        """The trials of findings."""
        return self._read(self.folder.verify_file, _read_verification)

    # --- a server under load -----------------------------------------------------------------------------------------

    @cached_property
    def server(self) -> Maybe[ServerFacts]:
        """The server that loads were put on."""
        return self._read(self.folder.server_file, _read_server)

    @cached_property
    def load_points(self) -> list[tuple[Path, LoadPoint]]:
        """The loads with their folders; ParseError if a point.json is damaged."""
        return read_points(self.folder)

    @cached_property
    def loads(self) -> list[MeasuredLoad]:
        """The loads with what their files hold; ParseError if a point.json is damaged."""
        files: LoadFiles = {}
        return [read_measured(folder, point, files) for folder, point in self.load_points]

    # --- counters ---------------------------------------------------------------------------------------------------

    @cached_property
    def selftest(self) -> Maybe[SelfTest]:
        """The self-test of the counters, or why there is none."""
        entry = self.manifest.pass_named(NCU_SELFTEST)
        if entry is None:
            return Missing("no self-test was run")
        if not self.folder.selftest_file.exists():
            return Missing(f"the self-test {entry.outcome}: {entry.why}" if entry.why else "the self-test left no result")
        return self._read(self.folder.selftest_file, _read_selftest)

    def counters(self, name: str) -> Maybe[CounterReport]:
        """Return the counters of a pass, even of one that was cut short, or why there are none."""
        entry, selftest = self.manifest.pass_named(name), self.selftest
        if entry is None:
            counted = any(other.name in COUNTING_PASSES for other in self.manifest.passes)
            return Missing("Nsight Compute did not run in this stage" if counted else "the run was made without Nsight Compute")
        if isinstance(selftest, SelfTest) and selftest.doubt is not None:
            return selftest.doubt
        if not self.folder.counters_file(name).exists():
            return Missing(f"{name} {entry.outcome}: {entry.why or 'it left no counters'}")
        if isinstance(selftest, Missing):
            return Untested(f"the counters are not used because no self-test checked them: {selftest.why}. {_TEST_AGAIN}")
        found = self._read(self.folder.counters_file(name), read_ncu)
        return found if isinstance(found, Missing) else counted_in_stage(found, name)

    def selection(self, name: str) -> Maybe[Selection]:
        """Return the launches that an ncu pass was to count."""
        return self._read(self.folder.selection_file(name), _read_selection)

    # --- traces -----------------------------------------------------------------------------------------------------

    def trace(self, name: str) -> Maybe[RecordedTrace]:
        """Return the trace of a pass, complete or not."""
        if name not in self._traces:
            self._traces[name] = read_recorded(self.folder, self.manifest, self.settings, name)
        return self._traces[name]

    def traces(self) -> list[Maybe[RecordedTrace]]:
        """Return the traces of the whole iteration, the preferred one first."""
        return [self.trace(name) for name, file in trace_files(self.folder).items() if file.is_file()]

    def ranks(self) -> Maybe[RanksAnalysis]:
        """Return the analysis of the torch traces of all ranks, or why there is none."""
        others = sorted(self.folder.raw("torch").glob(RANK_TRACES))
        files = [path for path in (self.folder.torch_trace_file, *others) if path.is_file()]
        if len(files) < 2:
            return Missing("the run has no traces of several ranks")
        try:
            return analyze_rank_files(files, str(self.folder.raw("torch")), use_cache=False).document
        except LlmPerfError as error:
            return Missing(f"the traces of the ranks cannot be analyzed: {error.fact}")

    def cached_trace(self) -> CachedTrace:
        """Return the first trace with its tables. Raise ParseError if there is none or it cannot be read."""
        for name, file in trace_files(self.folder).items():
            if file.is_file():
                return cached_trace(file, self.folder.tables(name), root=self.folder.path, columns=stage_columns)
        words = f"{self.folder.path} has no trace: neither its torch pass nor its nsys pass left one."
        raise ParseError(words, "See run.json for the reason.")

    @cached_property
    def timelines(self) -> tuple[Timeline | Missing, ...]:
        """Every usable trace, best first, or why a pass has none."""
        return tuple(timelines_of(self.folder, self.manifest, self.trace))

    # --- logs -------------------------------------------------------------------------------------------------------

    def log_end(self, name: str, lines: int) -> Maybe[LogEnd]:
        """Return the last lines of the log of a pass."""
        log = self.folder.log_file(name)
        if not log.is_file():
            return Missing(f"the {name} pass left no log")
        try:
            size, end = _end_of(log)
        except ValueError as error:
            return Missing(f"the log of the {name} pass cannot be read: {error}")
        found = end.decode(errors="replace").splitlines()[-lines:]
        return LogEnd(str(log.relative_to(self.folder.path)), size, tuple(found))

    # --- reading ----------------------------------------------------------------------------------------------------

    def _of_pass(self, name: str, path: Path, read: Callable[[Path], R]) -> Maybe[R]:
        """Return the record of a pass, or why there is none."""
        entry = self.manifest.pass_named(name)
        if entry is None:
            return Missing(f"the run was made without the {name} pass")
        if not path.exists():
            return Missing(f"the {name} pass {entry.outcome}: {entry.why or 'it left no result'}")
        return self._read(path, read)

    def _read(self, path: Path, read: Callable[[Path], R]) -> Maybe[R]:
        if not path.exists():
            return Missing(f"the run has no {path.name}")
        try:
            return self.folder.parsed(path, read)
        except ParseError as error:
            return Damaged(error.fact)


def _end_of(log: Path) -> tuple[int, bytes]:
    """Return the size of a log and its last bytes."""
    if log.suffix == COMPRESSED:
        size, end = 0, b""
        with open_unpacked(log) as unpacked:
            while piece := unpacked.read(_LAST_BYTES):
                size, end = size + len(piece), (end + piece)[-_LAST_BYTES:]
        return size, end
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(0, size - _LAST_BYTES))
        return size, file.read()


def _read_server(path: Path) -> ServerFacts:
    return read_record(path, ServerFacts)


def _read_program_profile(path: Path) -> ProgramProfile:
    return read_record(path, ProgramProfile)


def _read_wrapped(path: Path) -> WrappedPass:
    return read_record(path, WrappedPass)


def _read_tokens(path: Path) -> list[list[int]]:
    return read_record(path, list[list[int]])


def _read_logits(path: Path) -> Maybe[Logits]:
    from llm_perf_opt.traces.logit_file import read_logits

    return read_logits(path)


def _read_verification(path: Path) -> Verification:
    return read_record(path, Verification)


def _read_selftest(path: Path) -> SelfTest:
    return read_record(path, SelfTest)


def _read_selection(path: Path) -> Selection:
    return read_record(path, Selection)
