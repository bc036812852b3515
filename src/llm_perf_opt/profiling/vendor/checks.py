"""Check this machine: what is installed, what is missing, the consequences, and how to install it."""

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.compiler import INSTALL, compiler_problem, find_compiler
from llm_perf_opt.core.host import available_memory_bytes, cpu_has_native_bf16, cpu_name, usable_cpus
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import LEAST_FREE_BYTES
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.profiling.vendor.compatibility import (
    NVTX_REMEDY,
    REMEDY,
    blind_to_ranges,
    counter_permission,
    cuda_runtime,
    nvtx_version,
    too_old_for,
)
from llm_perf_opt.profiling.vendor.probe import (
    Located,
    find_importer,
    find_tool,
    locate,
    probe_ncu,
    probe_nsys,
    tool_version,
)
from llm_perf_opt.runners.measure.device import loaded_torch
from llm_perf_opt.runners.measure.gpu import describe, handle_of, nvml
from llm_perf_opt.traces.trace_mark import MOST_BYTES, cache_folder, kept_bytes

_LAST_BLIND_NSYS = "2023.4.4"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    costs: str = ""
    """What does not work because of it."""
    remedy: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    """Facts about a tool: paths, version, options, reports, sets, sections."""


def check_machine() -> list[Check]:
    """Return the results of all checks."""
    checks: tuple[Callable[[], Check], ...] = (
        _python, _processor, _memory, _disk, _cache, _torch, _transformers, _gpu, _nvtx, _nsys, _importer, _ncu, _counters,
        _compiler,
    )  # fmt: skip
    return [check() for check in checks]


def _python() -> Check:
    return Check("Python", "ok", platform.python_version())


def _processor() -> Check:
    native = "native bf16" if cpu_has_native_bf16() else "no native bf16: dtype auto is fp32 on the CPU"
    return Check("CPU", "ok", f"{cpu_name()}, {usable_cpus()} usable CPUs, {native}")


def _memory() -> Check:
    return Check("Memory", "ok", f"{available_memory_bytes() / 2**30:.1f} GiB available")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 2**30:.1f} GiB free in the current folder"
    if free < LEAST_FREE_BYTES:
        return Check("Disk", "missing", found, "No run can start in this folder.", "Free some space, or set hydra.run.dir=DIR.")
    return Check("Disk", "ok", found)


def _cache() -> Check:
    """Check the size of the trace cache, and whether it is writable."""
    name, costs = "Trace cache", "Traces are parsed again each time."
    folder = cache_folder()
    if isinstance(folder, Missing):
        return Check(name, "warning", folder.why, costs, "Set XDG_CACHE_HOME to a folder.")
    found = f"{byte_count(kept_bytes(folder))} of at most {byte_count(MOST_BYTES)} in {folder}"
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not os.access(existing, os.W_OK):
        remedy = f"Make {existing} writable, or set XDG_CACHE_HOME to another folder."
        return Check(name, "warning", f"{found}, which is not writable", costs, remedy)
    return Check(name, "ok", found)


def _torch() -> Check:
    torch = loaded_torch()
    if isinstance(torch, Missing):
        return Check("torch", "missing", torch.why, "No model can be run.", "pip install torch")
    cuda = f"CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    found = f"{torch.version} ({cuda}, {torch.devices} devices)"
    with nvml() as library:
        gpus = 0 if isinstance(library, Missing) else int(library.nvmlDeviceGetCount())
    if gpus and not torch.devices:
        return Check("torch", "warning", found, "torch cannot use the GPU.", "Install a torch build for CUDA.")
    return Check("torch", "ok", found)


def _transformers() -> Check:
    try:
        return Check("transformers", "ok", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Check("transformers", "missing", "not installed", "No model can be built.", "pip install transformers")


def _gpu() -> Check:
    with nvml() as library:
        if isinstance(library, Missing):
            return Check(
                "NVIDIA GPU", "missing", str(library),
                "Models run on the CPU, without GPU power, clocks or energy, and without Nsight Compute.",
                "Run on a machine with an NVIDIA GPU and its driver.",
            )  # fmt: skip
        handle = handle_of(library, 0)
        if isinstance(handle, Missing):
            return Check("NVIDIA GPU", "missing", str(handle), "Models run on the CPU.", "Check CUDA_VISIBLE_DEVICES.")
        facts = describe(library, handle)
        count = int(library.nvmlDeviceGetCount())
        memory = facts["memory_bytes"]
        size = f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else str(memory)
        driver = library.nvmlSystemGetDriverVersion()
        return Check("NVIDIA GPU", "ok", f"{facts['name']}, {size}, driver {driver}; {count} in total")


def _nvtx() -> Check:
    costs = "Nsight tools cannot see the stages."
    version = nvtx_version()
    if isinstance(version, Missing):
        return Check("nvtx", "missing", str(version.why), costs, "pip install 'nvtx>=0.2.10,<0.2.12'")
    nsys = find_tool("nsys")
    release = tool_version(nsys) if nsys else None
    if release and blind_to_ranges(release, version):
        return Check(
            "nvtx", "missing", f"{version}, whose ranges nsys {release} does not see", "The nsys pass cannot run.", NVTX_REMEDY
        )
    if blind_to_ranges(_LAST_BLIND_NSYS, version):
        return Check("nvtx", "warning", version, "Nsight Systems up to 2023.4 does not see its ranges.", NVTX_REMEDY)
    return Check("nvtx", "ok", version)


def _nsys() -> Check:
    title, costs = "Nsight Systems", "Nsight Systems cannot record a timeline of kernels."
    place = locate("nsys")
    if place.path is None:
        return _absent("nsys", title, costs, place)
    found = probe_nsys(place.path)
    if isinstance(found, Missing):
        return Check(title, "warning", found.why, costs, _where("nsys", title))
    facts = f"{found.version} at {found.path}, {len(found.trace_modules)} traceable APIs, "
    facts += f"report names like {found.report_style}" if found.report_style else "no report scripts (not needed)"
    doubts = [*found.notes, *filter(None, (place.warning, too_old_for(found.version, cuda_runtime())))]
    if "sqlite" not in found.export_types:
        doubts.append("it cannot export to SQLite")
    if doubts:
        return Check(
            title, "warning", f"{facts}; {'; '.join(doubts)}", "Its report may be missing or incomplete.", _where("nsys", title),
            asdict(found),
        )  # fmt: skip
    return Check(title, "ok", facts, details=asdict(found))


def _importer() -> Check:
    title = "nsys importer"
    path = find_tool("nsys")
    if path is None:
        return Check(title, "missing", "there is no nsys", "nsys cannot create reports.", _where("nsys", "Nsight Systems"))
    importer = find_importer(path, tool_version(path) or "")
    if importer is not None:
        return Check(title, "ok", str(importer))
    return Check(
        title, "warning", f"no QdstrmImporter near {path}",
        "If nsys leaves only a .qdstrm, no report can be created from it.",
        "Install all of Nsight Systems: its host components as well as its target components.",
    )  # fmt: skip


def _ncu() -> Check:
    title, costs = "Nsight Compute", "Hardware counters of kernels cannot be read."
    place = locate("ncu")
    if place.path is None:
        return _absent("ncu", title, costs, place)
    found = probe_ncu(place.path)
    if isinstance(found, Missing):
        return Check(title, "warning", found.why, costs, _where("ncu", title))
    facts = f"{found.version} at {found.path}, sets {', '.join(found.sets) or 'none'}, {len(found.sections)} sections"
    doubts = [*found.notes, *filter(None, (place.warning, "" if found.sets else "it lists no sets"))]
    if doubts:
        return Check(
            title, "warning", f"{facts}; {'; '.join(doubts)}", "Counters may be incomplete.", _where("ncu", title), asdict(found)
        )
    return Check(title, "ok", facts, details=asdict(found))


def _counters() -> Check:
    permission = counter_permission()
    if permission.status == "ok":
        return Check("GPU counters", "ok", permission.why)
    costs = "Nsight Compute and GPU metrics sampling fail (ERR_NVGPUCTRPERM)."
    if permission.status == "denied":
        return Check("GPU counters", "missing", permission.why, costs, REMEDY)
    found = f"permission unknown: {permission.why}"
    return Check("GPU counters", "warning", found, "Nsight Compute may fail.", "Try a run with profiling=ncu.")


def _compiler() -> Check:
    found, problem = find_compiler(), compiler_problem()
    if isinstance(found, Missing) or problem:
        return Check("C++ compiler", "warning", problem, "runtime.compile on the CPU fails.", INSTALL)
    return Check("C++ compiler", "ok", f"{found.path}, {found.version}", details=asdict(found))


def _where(name: str, title: str) -> str:
    return f"Install {title} from NVIDIA or with the CUDA toolkit, or set {name.upper()} to the binary."


def _absent(name: str, title: str, costs: str, place: Located) -> Check:
    found = place.warning or f"no {name} on the PATH or in the usual folders"
    return Check(title, "missing", found, costs, _where(name, title))
