"""The commands of the Nsight passes, for a model and for a program, with stand-ins for the tools."""

import gzip
import itertools
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.analysis.trace.stage_launches import all_launches
from llm_perf_opt.config.composition import compose, config_to_yaml
from llm_perf_opt.config.passes import pass_named, planned_passes
from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.counters.manifest import resolve
from llm_perf_opt.profiling import capture as pipeline
from llm_perf_opt.profiling import ncu_counters, nsys_timeline
from llm_perf_opt.profiling.passes import Capture, NothingToCountError, PassPlan, Program
from llm_perf_opt.profiling.program import SPELLINGS, ExecRequest, _profiling
from llm_perf_opt.profiling.vendor.compatibility import Permission
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.probe import NcuProbe, NsysProbe
from llm_perf_opt.traces.nsys_sqlite import read_nsys

RECORDED = Path(__file__).parents[1] / "fixtures" / "h200" / "nsys_decode.sqlite.gz"
PROBE = NsysProbe("nsys", "2025.3.1", flags=("--gpu-metrics-devices",), trace_modules=("cuda", "nvtx", "osrt"))


class Nobody:
    """Is told and says nothing."""

    def pass_started(self, name: str, label: str) -> None: ...

    def pass_message(self, name: str, message: dict[str, Any]) -> None: ...

    def pass_ended(self, entry: PassRecord) -> None: ...


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[PassPlan]:
    """The plans of the passes that were launched, on a machine that has a GPU and both tools."""
    made: list[PassPlan] = []

    def launched(folder: RunFolder, plan: PassPlan, *_: object) -> None:
        made.append(plan)
        folder.update_pass(PassRecord(plan.name, "complete", tuple(plan.argv)))

    monkeypatch.setattr(Capture, "tool", lambda self, name, label: Path(f"/opt/{name}"))
    monkeypatch.setattr(Capture, "gpu", True)
    monkeypatch.setattr(nsys_timeline, "probe_nsys", lambda _: PROBE)
    monkeypatch.setattr(nsys_timeline, "check_ranges_visible", lambda _: None)
    monkeypatch.setattr(nsys_timeline, "record_timeline", launched)
    monkeypatch.setattr(ncu_counters, "counter_permission", lambda: Permission("ok", ""))
    monkeypatch.setattr(ncu_counters, "counted_metrics", lambda asked, index, ncu: resolve(asked.sets or (), chip="gh100"))
    monkeypatch.setattr(ncu_counters, "tool_version", lambda _: "2025.3")
    monkeypatch.setattr(ncu_counters, "probe_ncu", lambda _: NcuProbe("ncu", "2025.3", set_sections={"full": 20}))
    monkeypatch.setattr(ncu_counters, "run_selftest", lambda capture, counting: None)
    monkeypatch.setattr(ncu_counters, "read_counters", launched)
    return made


def folder_with_timeline(path: Path, names: tuple[str, ...], recorded: str) -> RunFolder:
    """A run folder in which this pass has recorded a decode, and the others have not begun."""
    folder = RunFolder.create(path)
    folder.raw(recorded).mkdir(parents=True)
    folder.timeline_file(recorded).write_bytes(gzip.decompress(RECORDED.read_bytes()))
    began = int(read_nsys(folder.timeline_file(recorded)).facts["started_utc_ns"]) / 1e9
    created = datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="seconds")
    entries = tuple(PassRecord(name, "complete" if name == recorded else "pending", seconds=20.0) for name in names)
    folder.write_manifest(Manifest(SCHEMA, "0", "partial", created, ("llm-perf",), entries))
    return folder


def of_model(path: Path, *words: str) -> Capture:
    config = compose(["profiling=stage2", "profiling.clean=false", "profiling.torch.enable=false", *words]).config
    names = planned_passes(config)
    folder = folder_with_timeline(path, (*names, "nsys_decode"), "nsys_decode")
    folder.config_file.write_text(config_to_yaml(config))
    return Capture(folder, Nobody(), names, config.profiling, config)


def of_program(path: Path, range_: str = "", *, as_available: bool = False) -> Capture:
    names = ("program", "nsys", "ncu")
    program = Program(("./serve", "a b"), range_, as_available, SPELLINGS)
    return Capture(
        folder_with_timeline(path, names, "nsys"), Nobody(), names, _profiling(ExecRequest(("./serve", "a b"))), program=program
    )


def launch(name: str, capture: Capture) -> None:
    found = pass_named(name)
    assert found is not None
    found.start(capture)


def test_a_timeline_is_gated_on_the_measured_iteration(tmp_path: Path, plans: list[PassPlan]) -> None:
    launch("nsys", of_model(tmp_path / "run", "profiling.nsys.decode_steps=5"))
    (plan,) = plans
    assert plan.argv[0] == "/opt/nsys"
    assert "--nvtx-capture=profile@LLM" in plan.argv
    assert plan.argv[-6:-4] == ["--pass", "plain"]
    assert plan.argv[-2:] == ["--decode-steps", "5"]
    assert (plan.tool_version, plan.environment) == ("nsys 2025.3.1", None)


def test_decode_alone_is_recorded_where_the_whole_cannot_be_read(
    tmp_path: Path, plans: list[PassPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = nsys_timeline.record_timeline

    def failing_once(folder: RunFolder, plan: PassPlan, *more: Any) -> None:
        launched(folder, plan, *more)
        if plan.name == "nsys":
            raise CaptureError("It cannot be read.", "")

    monkeypatch.setattr(nsys_timeline, "record_timeline", failing_once)
    capture = of_model(tmp_path / "run")
    capture.folder.raw("nsys").mkdir()
    (capture.folder.raw("nsys") / "run.nsys-rep").write_bytes(b"x")
    launch("nsys", capture)
    assert [plan.name for plan in plans] == ["nsys", "nsys_decode"]
    assert "--nvtx-capture=decode@LLM" in plans[1].argv


@pytest.mark.parametrize(("range_", "gate"), [("", []), ("outer@mine", ["--nvtx-capture=outer@mine"])])
def test_a_program_is_recorded_whole_or_in_its_range(tmp_path: Path, plans: list[PassPlan], range_: str, gate: list[str]) -> None:
    launch("nsys", of_program(tmp_path / "run", range_))
    (plan,) = plans
    assert [word for word in plan.argv if word.startswith("--nvtx-capture")] == gate
    assert list(plan.argv[-2:]) == ["./serve", "a b"]
    assert plan.environment is not None
    assert "LLM_PERF_PARENT_PID" not in plan.environment


def test_a_sub_stage_of_prefill_is_counted_alone(tmp_path: Path, plans: list[PassPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["profiling=stage2", "profiling.ncu.substage=sam"]).config
    assert [name for name in planned_passes(config) if name.startswith("ncu")] == ["ncu_selftest", "ncu_prefill"]
    own = compose(["profiling=stage2", "profiling.ncu.substage=first", "model.substages.first=model.layers.0"]).config
    assert "ncu_decode" in planned_passes(own)
    monkeypatch.setattr(ncu_counters, "substage_launches", lambda trace, projection, stage, name: all_launches(trace, projection))
    launch("ncu_selftest", of_model(tmp_path / "run", "profiling.ncu.substage=sam"))
    (plan,) = plans
    assert plan.argv[plan.argv.index("--nvtx-include") + 1] == "LLM@sam/"


def test_a_sub_stage_is_recorded_alone(tmp_path: Path, plans: list[PassPlan]) -> None:
    config = compose(["profiling=stage2", "profiling.nsys.substage=sam"]).config
    assert [name for name in planned_passes(config) if name.startswith("nsys")] == ["nsys_substage"]
    launch("nsys_substage", of_model(tmp_path / "run", "profiling.nsys.substage=sam"))
    (plan,) = plans
    assert "--nvtx-capture=sam@LLM" in plan.argv


@pytest.mark.parametrize("words", [["profiling=minimal"], ["profiling=nsys", "profiling.nsys.capture=cudaProfilerApi"]])
def test_a_sub_stage_that_cannot_be_recorded_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"profiling\.nsys\.substage=sam"):
        compose([*words, "profiling.nsys.substage=sam"])


def test_the_kernels_of_a_decode_step_are_counted_within_the_budget(tmp_path: Path, plans: list[PassPlan]) -> None:
    capture = of_model(tmp_path / "run", "profiling.ncu.budget_s=40")
    with pytest.raises(CaptureError, match="No launch of prefill was selected"):  # the recording contains only decode
        launch("ncu_selftest", capture)
    (plan,) = plans
    assert plan.name == "ncu_decode"
    assert "LLM@decode/decode_step/" in plan.argv
    assert capture.folder.selection_file("ncu_decode").exists()
    assert (plan.timeout_s, plan.limit) == (5 * 20.0 + 60 + 3 * 40, "profiling.ncu.budget_s")
    statuses = {entry.name: entry.status for entry in capture.folder.manifest().passes}
    assert (statuses["ncu_prefill"], statuses["ncu_decode"]) == ("skipped", "complete")


def test_the_kernels_of_a_program_are_counted(tmp_path: Path, plans: list[PassPlan]) -> None:
    capture = of_program(tmp_path / "run", "decode@*")
    launch("ncu", capture)
    (plan,) = plans
    assert (plan.name, list(plan.argv[-2:])) == ("ncu", ["./serve", "a b"])
    assert "LLM@decode/" in plan.argv, "the domain that any stands for is the one of the timeline"
    assert plan.spellings == SPELLINGS


def test_a_program_without_kernels_is_not_counted(tmp_path: Path, plans: list[PassPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_counters, "run_selftest", lambda *_: pytest.fail("there is nothing to count"))
    capture = of_program(tmp_path / "run", "no-such-range@mine")
    with pytest.raises(NothingToCountError, match="No launch was selected"):
        launch("ncu", capture)
    assert plans == []
    entry = capture.folder.manifest().pass_named("ncu")
    assert entry is not None
    assert entry.status == "skipped"


def test_a_self_test_that_fails_leaves_the_counters_unread(
    tmp_path: Path, plans: list[PassPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise CaptureError("The counter self-test failed.", "")

    monkeypatch.setattr(ncu_counters, "run_selftest", failing)
    capture = of_model(tmp_path / "run")
    with pytest.raises(CaptureError, match="self-test failed"):
        launch("ncu_selftest", capture)
    assert plans == []
    skipped = [entry for entry in capture.folder.manifest().passes if entry.name in ("ncu_prefill", "ncu_decode")]
    assert [entry.status for entry in skipped] == ["skipped", "skipped"]
    assert all("The counters were not read" in entry.why for entry in skipped)


@pytest.mark.parametrize("as_available", [True, False])
def test_a_tool_that_nobody_named_may_be_missing(
    tmp_path: Path, plans: list[PassPlan], monkeypatch: pytest.MonkeyPatch, as_available: bool
) -> None:
    def nowhere(self: Capture, name: str, label: str) -> Path:
        raise ResourceError(f"There is no {name}.", "")

    monkeypatch.setattr(Capture, "tool", nowhere)
    monkeypatch.setattr("llm_perf_opt.profiling.passes.run_pass", lambda folder, plan, *_, **__: folder.update_pass(
        PassRecord(plan.name, "complete")
    ))  # fmt: skip
    capture = of_program(tmp_path / "run", as_available=as_available)
    error: LlmPerfError | None = pipeline.fill(capture, ["llm-perf"], lambda: None, "exec")
    manifest = capture.folder.manifest()
    assert [entry.status for entry in manifest.passes] == ["complete", "skipped", "skipped"]
    assert (error is None, manifest.status) == ((True, "complete") if as_available else (False, "partial"))


def test_the_commands_take_the_fields_of_a_request_as_keywords() -> None:
    nsys, ncu, out, work = Path("nsys"), Path("ncu"), Path("out"), ["python", "x.py"]
    assert build_nsys_cmd(nsys, out, work, trace=("cuda",)) == build_nsys_cmd(nsys, out, work, NsysRequest(trace=("cuda",)))
    assert build_ncu_cmd(ncu, out, work, launch_skip=3) == build_ncu_cmd(ncu, out, work, NcuRequest(launch_skip=3))


def test_the_settings_of_the_tools_reach_their_commands(tmp_path: Path, plans: list[PassPlan]) -> None:
    words = [
        "profiling.nsys.trace=[cuda]", "profiling.nsys.sample=process-tree", 'profiling.nsys.args="--gpuctxsw true"',
        "profiling.ncu.set=full", "profiling.ncu.sections=[Occupancy]", "profiling.ncu.clock_control=base",
        "profiling.ncu.launch_skip=5", "profiling.ncu.launch_count=2", "profiling.ncu.kernel_regex=nvjet",
        "profiling.ncu.args=[--import-source,yes]",
    ]  # fmt: skip
    capture = of_model(tmp_path / "run", *words)
    launch("nsys", capture)
    with pytest.raises(CaptureError, match="prefill"):  # the recording contains only decode
        launch("ncu_selftest", capture)
    nsys, ncu = (list(plan.argv) for plan in plans)
    assert {"--trace=cuda,nvtx", "--sample=process-tree", "--gpuctxsw=true"} <= set(nsys), "the gate needs nvtx"
    values = dict(itertools.pairwise(ncu))
    assert (values["--set"], values["--clock-control"], values["--cache-control"]) == ("full", "base", "none")
    assert (values["--launch-skip"], values["--launch-count"]) == ("5", "2")
    assert "--import-source=yes" in ncu
    assert all(name.startswith("nvjet") for name in values["--kernel-name"][len("regex:^(") : -2].split("|"))


def test_a_program_is_gated_by_its_profiler_calls(tmp_path: Path, plans: list[PassPlan]) -> None:
    capture = of_program(tmp_path / "run")
    nsys = replace(capture.profiling.nsys, capture="cudaProfilerApi")
    capture = replace(capture, profiling=replace(capture.profiling, nsys=nsys))
    launch("nsys", capture)
    launch("ncu", capture)
    assert "--capture-range=cudaProfilerApi" in plans[0].argv
    assert dict(itertools.pairwise(plans[1].argv))["--profile-from-start"] == "off"
