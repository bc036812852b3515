"""The house rules: imports run downward, heavy libraries stay in their rooms, modules stay small."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import llm_perf_opt

ROOT = Path(llm_perf_opt.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
# A module may import modules of its own floor and of those below.
FLOORS = [
    {"__main__", "cli"},
    {"commands"},
    {"comparing", "run_listing"},
    {"sweeps"},
    {"advice", "capture", "analyse", "analyse_program", "analyse_trace", "costing"},
    {"capturing", "externals", "images"},
    {"reading"},
    {"provenance"},
    {"runners"},
    {"profiling"},
    {"report"},
    {"parsers", "analysis", "data", "counters"},
    {"composition", "choices", "stored_ceilings", "baselines", "run_folder"},
    {"config"},
    {
        "runtimes",
        "host",
        "stages",
        "events",
        "launch_calls",
        "kernel_records",
        "runtime_records",
        "records",
        "sql_files",
        "units",
    },
    {"user_files"},
    {"errors", "terminal"},
]
# The same inside analysis/, the largest room; modules that stand alone there belong to the floor named "".
ANALYSIS_FLOORS = [{"comparison"}, {""}, {"regions"}, {"trace"}, {"kernels"}, {"limits"}, {"cost_model"}]
ANALYSIS_GROUND = {"checks", "dtypes", "separable", "stats"}
HEAVY = {"torch", "transformers", "vllm", "tensorrt_llm", "pynvml", "nvtx", "accelerate", "safetensors"}
LONGEST_MODULE = 450
LONGEST_FUNCTION = 80


def floor_of(module: str) -> int:
    room = module.split(".")[0]
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether it is imported at the top of the file."""
    tree = parsed(path)
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = node.module in (
                "llm_perf_opt",
                "llm_perf_opt.profiling",
                "llm_perf_opt.runners",
                "llm_perf_opt.profiling.vendor",
            )
            found += [(f"{node.module}.{alias.name}" if package else node.module, id(node) in top) for alias in node.names]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        if name.startswith("llm_perf_opt.") and not name.endswith("__version__"):
            assert floor_of(name.removeprefix("llm_perf_opt.")) >= floor_of(module), f"{module} imports {name}"


def analysis_floor(module: str) -> int:
    inner = module.removeprefix("analysis.").split(".")
    if inner[0] in ANALYSIS_GROUND:
        return len(ANALYSIS_FLOORS)
    room = inner[0] if len(inner) > 1 and inner[0] != "rules" else ""
    return next(index for index, rooms in enumerate(ANALYSIS_FLOORS) if room in rooms)


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("analysis.")])
def test_imports_inside_analysis_run_downward(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        inner = name.removeprefix("llm_perf_opt.")
        if inner.startswith("analysis."):
            assert analysis_floor(inner) >= analysis_floor(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_stay_in_their_rooms(module: str) -> None:
    if module.split(".")[0] in ("runners", "profiling"):
        return
    assert not {name.split(".")[0] for name, _ in imports(MODULES[module])} & HEAVY


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in ("analysis", "report")])
def test_analysis_and_report_know_no_parser_path_or_process(module: str) -> None:
    forbidden = {"pathlib", "os", "subprocess", "shutil", "llm_perf_opt.run_folder"}
    names = {name for name, _ in imports(MODULES[module])}
    assert not names & forbidden
    assert not any(name.startswith("llm_perf_opt.parsers") for name in names)


@pytest.mark.parametrize("module", MODULES)
def test_only_launch_starts_processes(module: str) -> None:
    if module != "profiling.vendor.launch":
        assert "subprocess" not in {name for name, _ in imports(MODULES[module])}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_copies_the_process(module: str) -> None:
    tree = parsed(MODULES[module])
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not called & {"fork", "forkpty", "posix_spawn"}
    assert "multiprocessing" not in {name.split(".")[0] for name, _ in imports(MODULES[module])}


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_stay_small_and_documented(module: str) -> None:
    text = MODULES[module].read_text()
    tree = parsed(MODULES[module])
    assert ast.get_docstring(tree), f"{module} has no docstring"
    assert text.count("\n") <= LONGEST_MODULE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= LONGEST_FUNCTION, f"{module}.{node.name}"


def test_every_module_has_its_floor() -> None:
    for module in MODULES:
        if module.split(".")[0] != "conf":
            floor_of(module)


def test_help_loads_nothing_heavy() -> None:
    from llm_perf_opt.profiling.vendor.launch import ask

    code = "import sys; from llm_perf_opt import cli; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(ast.literal_eval(ask([sys.executable, "-c", code]) or "[]"))
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "hydra", "omegaconf", "numpy", "duckdb", "plotly", "rich", "psutil"}


def test_the_public_surface_is_what_it_says() -> None:
    assert llm_perf_opt.__all__ == ["__version__"]
