"""Finding the tools, querying them, caching their answers."""

import os
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor import probe
from llm_perf_opt.profiling.vendor.probe import (
    NcuProbe,
    NsysProbe,
    find_importer,
    find_tool,
    locate,
    long_options,
    newest_first,
    probe_ncu,
    probe_nsys,
    tool_version,
)


def script(path: Path, text: str = "#!/bin/sh\necho 'NVIDIA Nsight Systems version 2024.1.2.3-xyz'\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without tools, with a folder for its own."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setattr(probe, "_INSTALL_FOLDERS", {"nsys": (str(tmp_path / "opt/*/bin/nsys"),)})
    monkeypatch.setattr(probe, "_IMPORTERS", (str(tmp_path / "opt/*/host-linux-*/QdstrmImporter"),))
    return tmp_path


def test_nothing_is_found_where_there_is_nothing(bare: Path) -> None:
    assert locate("nsys").path is None
    assert locate("nsys").warning == ""


def test_the_newest_version_is_taken_by_number_not_by_letter(bare: Path) -> None:
    for version in ("2023.4.4", "2023.10.1", "2022.12.9"):
        script(bare / "opt" / version / "bin" / "nsys")
    assert find_tool("nsys") == bare / "opt/2023.10.1/bin/nsys"
    assert [path.parts[-3] for path in newest_first(str(bare / "opt/*/bin/nsys"))] == ["2023.10.1", "2023.4.4", "2022.12.9"]


def test_the_variable_comes_first_and_the_path_second(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bare / "opt/2023.4.4/bin/nsys")
    on_path = script(bare / "empty" / "nsys")
    assert find_tool("nsys") == on_path
    named = script(bare / "mine" / "nsys")
    monkeypatch.setenv("NSYS", str(named))
    assert locate("nsys") == probe.Located(named)


@pytest.mark.parametrize("there", [False, True])
def test_a_variable_that_names_nothing_usable_is_told(bare: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    named = bare / "mine"
    if there:
        named.write_text("not a program")
    monkeypatch.setenv("NSYS", str(named))
    assert locate("nsys").path is None
    assert str(named) in locate("nsys").warning
    other = script(bare / "opt/2023.4.4/bin/nsys")
    assert locate("nsys").path == other
    assert f"{other} is used instead" in locate("nsys").warning


@pytest.mark.parametrize("layout", ["bin/nsys", "target-linux-x64/nsys"])
def test_the_importer_of_the_same_installation(bare: Path, layout: str) -> None:
    nsys = script(bare / "opt/2023.4.4" / layout)
    assert find_importer(nsys) is None
    elsewhere = script(bare / "opt/2025.1.1/host-linux-x64/QdstrmImporter")
    assert find_importer(nsys) == elsewhere
    beside = script(bare / "opt/2023.4.4/host-linux-x64/QdstrmImporter")
    assert find_importer(nsys) == beside
    link = bare / "link"
    link.symlink_to(nsys)
    assert find_importer(link) == beside, "the binary's real place counts"


def test_a_tool_that_does_not_tell_its_version_is_missing(bare: Path) -> None:
    assert isinstance(probe_nsys(script(bare / "mute", "#!/bin/sh\nexit 1\n")), Missing)
    assert isinstance(probe_ncu(script(bare / "mute", "#!/bin/sh\necho hello\n")), Missing)


def test_options_are_read_from_either_tools_help() -> None:
    usage = """
\t-b, --backtrace=

\t(Experimental) --ib-switch=<GUID>
\t   Possible values; see --not-introduced-here.
  -h [ --help ]      Print
  --list-sets        List --set
  -c [ --launch-count ] arg
"""
    assert long_options(usage) == ("--backtrace", "--ib-switch", "--help", "--list-sets", "--launch-count")


TOOL = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
--version) echo 'NVIDIA Nsight Systems version {version}';;
profile) echo '	--trace='; echo; echo "   values 'cuda', 'nvtx'"; echo '   Select the API';;
stats) echo '  gpukernsum[:base] -- old names'; exit 1;;
esac
"""


def test_a_binary_is_asked_once_until_it_changes(bare: Path) -> None:
    calls = bare / "calls"
    path = bare / "nsys"
    script(path, TOOL.format(calls=calls, version="2022.1.1"))
    first = probe_nsys(path)
    assert isinstance(first, NsysProbe)
    assert (first.version, first.release, first.report_style) == ("2022.1.1", (2022, 1, 1), "gpukernsum")
    assert first.trace_modules == ("cuda", "nvtx")
    assert first.importer is None
    calls.unlink()
    assert probe_nsys(path) == first
    assert calls.read_text() == "--version\n", "only its version: a wrapper script hides the tool behind it"
    script(path, TOOL.format(calls=calls, version="2022.1.2"))
    again = probe_nsys(path)
    assert isinstance(again, NsysProbe)
    assert again.version == "2022.1.2"


@pytest.mark.parametrize("damage", ["{", "[]", '{"path": "other", "version": "1"}'])
def test_damaged_answers_are_asked_anew_and_noted(bare: Path, damage: str) -> None:
    path = script(bare / "nsys", TOOL.format(calls=bare / "calls", version="2022.1.1"))
    first = probe_nsys(path)
    (file,) = (bare / "cache" / "llm-perf-opt" / "tools").iterdir()
    file.write_text(damage)
    again = probe_nsys(path)
    assert isinstance(again, NsysProbe)
    assert isinstance(first, NsysProbe)
    assert again.flags == first.flags
    assert "queried again" in again.notes[0]
    assert probe_nsys(path) == first, "and mended"


def test_a_cache_that_cannot_be_written_is_noted(bare: Path) -> None:
    path = script(bare / "nsys", TOOL.format(calls=bare / "calls", version="2022.1.1"))
    (bare / "cache").write_text("a file in the way")
    found = probe_nsys(path)
    assert isinstance(found, NsysProbe)
    assert "not cached" in found.notes[0]


# --- the real tools -----------------------------------------------------------------------------------------------------


def test_the_real_nsys_is_what_the_probe_says(real_nsys: Path) -> None:
    found = probe_nsys(real_nsys)
    assert isinstance(found, NsysProbe)
    assert found.version in (ask([str(real_nsys), "--version"]) or "")
    assert found.version == tool_version(real_nsys)
    usage = ask([str(real_nsys), "profile", "--help"], timeout_s=HANG_S) or ""
    assert all(flag in usage for flag in found.flags)
    assert {"--capture-range", "--nvtx-capture", "--trace", "--output", "--env-var", "--force-overwrite"} <= set(found.flags)
    assert {"cuda", "nvtx", "osrt", "cublas"} <= set(found.trace_modules)
    assert "nvlink" not in found.trace_modules
    assert found.report_style == "cuda_gpu_kern_sum"
    assert "nvtx_gpu_proj_sum" in found.reports
    assert "sqlite" in found.export_types
    assert found.importer
    assert os.access(found.importer, os.X_OK)
    assert probe_nsys(real_nsys) == found


def test_the_real_ncu_is_what_the_probe_says(real_ncu: Path) -> None:
    found = probe_ncu(real_ncu)
    assert isinstance(found, NcuProbe)
    assert {"basic", "detailed", "full", "roofline", "nvlink"} <= set(found.sets)
    assert {"SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats"} <= set(found.sections)
    assert not {"Identifier", "----------"} & {*found.sets, *found.sections}
    assert {"gh100", "ga100", "ad102", "ga10b"} <= set(found.chips)
    assert {"--nvtx-include", "--kernel-name", "--launch-skip", "--launch-count", "--metrics"} <= set(found.flags)
    assert probe_ncu(real_ncu) == found
