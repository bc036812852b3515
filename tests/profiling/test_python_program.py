"""The torch.profiler pass of a user's Python program."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import CaptureError, ConfigError, ResourceError
from llm_perf_opt.core.host_records import ProgramProfile
from llm_perf_opt.core.records import Missing, OperatorRow
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.profiling import python_program as module
from llm_perf_opt.profiling.program import NCU, NSYS, ExecRequest, check_request
from llm_perf_opt.profiling.python_program import PythonProgram, check_python, profiled_argv, python_program
from llm_perf_opt.runners.measure import program_profiler
from llm_perf_opt.runners.measure.torch_profiler import PRESETS
from llm_perf_opt.workflows.analyze_program import _with_totals


@pytest.mark.parametrize(
    ("argv", "interpreter", "target"),
    [
        (["python", "x.py", "-m", "a"], ["python"], ["x.py", "-m", "a"]),
        (["/b/python3.12", "-u", "-X", "dev", "-Wignore", "x.py"], ["/b/python3.12", "-u", "-X", "dev", "-Wignore"], ["x.py"]),
        (["python", "-m", "pkg.mod", "a"], ["python"], ["-m", "pkg.mod", "a"]),
        (["python", "-mpkg", "a"], ["python"], ["-m", "pkg", "a"]),
        (["python", "-um", "pkg"], ["python", "-u"], ["-m", "pkg"]),
        (["python", "-c", "print(1)", "a b"], ["python"], ["-c", "print(1)", "a b"]),
    ],
)  # fmt: skip
def test_the_parts_of_a_python_command(argv: list[str], interpreter: list[str], target: list[str]) -> None:
    assert python_program(argv) == PythonProgram(tuple(interpreter), tuple(target))


@pytest.mark.parametrize(
    "argv",
    [
        ["torchrun", "x.py"],
        ["python", "-m", "torch.distributed.run", "x.py"],
        ["python", "-mtorch.distributed.launch", "x.py"],
        ["python", "-u", "/b/torchrun", "x.py"],
        ["python", "-m", "accelerate.commands.launch", "x.py"],
        ["./x.py"],
        ["python"],
        ["python", "-"],
        ["python", "-m"],
        ["python", "--version"],
        ["sh"],
    ],
)
def test_what_cannot_be_wrapped_is_refused_before_anything_starts(argv: list[str]) -> None:
    assert isinstance(python_program(argv), Missing)
    with pytest.raises(ConfigError, match="Python programs only"):
        check_python(argv)


def test_an_interpreter_without_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask", lambda *_, **__: "")
    with pytest.raises(ResourceError, match="does not have it"):
        check_python([sys.executable, "x.py"])


def test_the_command_runs_the_wrapper_by_its_path(tmp_path: Path) -> None:
    argv = profiled_argv(PythonProgram(("python", "-u"), ("x.py", "a")), tmp_path, "full")
    assert (argv[:2], argv[-2:]) == (["python", "-u"], ["x.py", "a"])
    assert Path(argv[2]).name == "program_profiler.py"
    assert '"with_flops": true' in argv[5]


def test_torch_runs_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExecRequest(("python", "x.py")).names == ("program", "nsys", "ncu")
    assert ExecRequest(("python", "x.py"), passes=("ncu", "torch")).names == ("torch", "ncu")
    with pytest.raises(ConfigError, match="Python programs only"):
        check_request(ExecRequest(("true",), passes=("torch",)))


@pytest.mark.parametrize(("worked", "lost"), [(True, False), (False, True), (None, False)])
def test_a_trace_without_an_operator_is_an_error(tmp_path: Path, worked: bool | None, lost: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.raw("torch").mkdir(parents=True)
    assert isinstance(module._lost(folder), CaptureError), "no trace"
    folder.torch_trace_file.write_bytes(b"")
    facts = {"torch_version": "2", "cuda": False, "profiled_s": 1.0, "preset": "minimal", "settings": {}}
    folder.program_profile_file.write_text(json.dumps(facts if worked is None else {**facts, "worked": worked}))
    assert isinstance(module._lost(folder), CaptureError) is lost


@pytest.mark.parametrize(
    ("request_", "option"),
    [
        (ExecRequest(("true",), torch_preset="full"), "--torch-preset full"),
        (ExecRequest(("true",), passes=("nsys",), ncu=replace(NCU, launch_count=2)), "--launch-count 2"),
        (ExecRequest(("true",), passes=("nsys",), ncu=replace(NCU, args=("--verbose",))), "--ncu-args --verbose"),
        (ExecRequest(("true",), passes=("nsys",), ncu=replace(NCU, top=3)), "--top 3"),
        (ExecRequest(("true",), passes=("program",), nsys=replace(NSYS, trace=("cuda",))), "--trace cuda"),
        (ExecRequest(("true",), passes=("program",), nsys=replace(NSYS, sample="system-wide")), "--sample system-wide"),
        (ExecRequest(("true",), passes=("program",), nsys=replace(NSYS, capture="cudaProfilerApi")), "--capture"),
        (ExecRequest(("true",), passes=("program",), range="a@b"), "--range"),
    ],
)
def test_options_of_a_pass_that_does_not_run_are_refused(request_: ExecRequest, option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} has no effect"):
        check_request(request_)


def test_the_gate_is_also_that_of_ncu() -> None:
    check_request(ExecRequest(("true",), passes=("program", "nsys", "ncu"), nsys=replace(NSYS, capture="cudaProfilerApi")))


def test_names_that_torch_lost_do_not_lose_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> list[object]:
        raise UnicodeDecodeError("utf-8", b"\x95", 0, 1, "invalid start byte")

    monkeypatch.setattr("torch.profiler.profile.key_averages", lost)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = "import torch; torch.mm(torch.ones(2, 3), torch.ones(3, 4))"
    monkeypatch.setattr(sys, "argv", ["program_profiler.py", str(tmp_path), "max", json.dumps(PRESETS["max"]), "-c", code])
    program_profiler.main()
    assert b"aten::mm" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
    facts = read_record(tmp_path / "program.json", ProgramProfile)
    assert facts.worked
    assert facts.operators == {}
    assert "invalid start byte" in facts.operators_why
    row = _with_totals(OperatorRow("aten::mm", 1, 2, 2, 0, 0, 0, 0), facts)
    assert row.flops == row.cpu_memory_bytes == Missing(facts.operators_why)
