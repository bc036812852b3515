"""What doctor reports about the tools: what is installed, the consequences of a missing one, how to install it."""

import os
from pathlib import Path

import pytest

from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor import checks
from llm_perf_opt.profiling.vendor.checks import Check, check_machine
from llm_perf_opt.profiling.vendor.compatibility import Permission
from llm_perf_opt.profiling.vendor.probe import Located, NcuProbe, NsysProbe

NSYS = NsysProbe(
    "/opt/nsys", "2023.4.4.54", ("--trace",), ("cuda", "nvtx"), ("cuda_gpu_kern_sum",), ("sqlite",), "/opt/QdstrmImporter"
)


def found(name: str) -> Check:
    return {check.name: check for check in check_machine()}[name]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with both tools, all in order."""
    monkeypatch.setattr(checks, "locate", lambda name: Located(Path(f"/opt/{name}")))
    monkeypatch.setattr(checks, "find_tool", lambda name: Path(f"/opt/{name}"))
    monkeypatch.setattr(checks, "tool_version", lambda path: "2023.4.4.54")
    monkeypatch.setattr(checks, "find_importer", lambda path, version: Path("/opt/QdstrmImporter"))
    monkeypatch.setattr(checks, "probe_nsys", lambda path: NSYS)
    monkeypatch.setattr(
        checks, "probe_ncu", lambda path: NcuProbe("/opt/ncu", "2024.1.1.0", ("--set",), ("basic", "full"), ("A",))
    )
    monkeypatch.setattr(checks, "cuda_runtime", lambda: (12, 4))
    monkeypatch.setattr(checks, "nvtx_version", lambda: "0.2.11")
    monkeypatch.setattr(checks, "counter_permission", lambda: Permission("ok", "everyone may"))
    return monkeypatch


def test_all_in_order(tools: pytest.MonkeyPatch) -> None:
    for name in ("nvtx", "Nsight Systems", "nsys importer", "Nsight Compute", "GPU counters"):
        assert found(name).status == "ok", found(name)
    assert "cuda_gpu_kern_sum" in found("Nsight Systems").found
    assert "basic, full" in found("Nsight Compute").found


def test_an_old_nsys_is_a_warning(tools: pytest.MonkeyPatch) -> None:
    tools.setattr(checks, "cuda_runtime", lambda: (13, 0))
    assert found("Nsight Systems").status == "warning"
    assert "CUDA 13.0" in found("Nsight Systems").found


def test_a_variable_that_names_nothing_is_a_warning(tools: pytest.MonkeyPatch) -> None:
    tools.setattr(checks, "locate", lambda name: Located(Path("/opt/nsys"), "the variable NSYS names /nope"))
    assert found("Nsight Systems").status == "warning"
    assert "/nope" in found("Nsight Systems").found


@pytest.mark.parametrize(("nvtx", "status"), [("0.2.11", "ok"), ("0.2.12", "missing")])
def test_nvtx_that_this_nsys_does_not_see(tools: pytest.MonkeyPatch, nvtx: str, status: str) -> None:
    tools.setattr(checks, "nvtx_version", lambda: nvtx)
    assert found("nvtx").status == status
    tools.setattr(checks, "find_tool", lambda name: None)
    assert found("nvtx").status == ("ok" if status == "ok" else "warning")


@pytest.mark.parametrize(
    ("replaced", "value", "name"),
    [
        ("locate", lambda name: Located(None), "Nsight Systems"),
        ("locate", lambda name: Located(None), "Nsight Compute"),
        ("probe_nsys", lambda path: Missing("it does not tell its version"), "Nsight Systems"),
        ("probe_ncu", lambda path: Missing("it does not tell its version"), "Nsight Compute"),
        ("find_importer", lambda path, version: None, "nsys importer"),
        ("find_tool", lambda name: None, "nsys importer"),
        ("counter_permission", lambda: Permission("denied", "administrators only"), "GPU counters"),
        ("counter_permission", lambda: Permission("unknown", "there is no driver"), "GPU counters"),
        ("nvtx_version", lambda: Missing("not installed"), "nvtx"),
    ],
)
def test_what_is_missing_says_what_it_costs_and_how_to_get_it(
    tools: pytest.MonkeyPatch, replaced: str, value: object, name: str
) -> None:
    tools.setattr(checks, replaced, value)
    check = found(name)
    assert check.status != "ok"
    assert check.costs
    assert check.remedy


def test_the_cache_of_traces_is_named_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "llm-perf-opt" / "traces"
    empty = found("Trace cache")
    assert (empty.status, empty.found) == ("ok", f"0 bytes of at most 5.0 GB in {folder}")
    (folder / "entry" / "tables").mkdir(parents=True)
    (folder / "entry" / "tables" / "kernels.parquet").write_bytes(bytes(1_234_000))
    assert checks._cache().found.startswith("1.2 MB of")
    monkeypatch.setattr(os, "access", lambda *_: False)
    shut = checks._cache()
    assert (shut.status, bool(shut.costs), bool(shut.remedy)) == ("warning", True, True)
    monkeypatch.setattr(checks, "cache_folder", lambda: Missing("no home"))
    assert checks._cache().found == "no home"
