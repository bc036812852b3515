"""The rules of the house: eleven rooms, imports run downward, heavy libraries stay in one room, everything stays small."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import llm_perf_opt

ROOT = Path(llm_perf_opt.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
FLOORS = {
    "cli": 8,
    "workflows": 7,
    "profiling": 6,
    "runners": 5,
    "report": 5,
    "analysis": 4,
    "counters": 3,
    "workspace": 3,
    "traces": 3,
    "cost": 3,
    "config": 2,
    "core": 1,
}
"""A room may import rooms of lower floors only."""
MOST_ARROWS = 50
EVENT_MODEL = {"events", "graph_capture", "health", "nesting", "projection", "silent_stages"}
"""What analysis knows of traces: the event model, and no parser."""
# The same inside analysis/, the largest room; modules that stand alone there belong to the floor named "".
ANALYSIS_FLOORS = [
    {"tuning"},
    {"comparison"},
    {""},
    {"regions", "serving", "ranks"},
    {"trace"},
    {"kernels"},
    {"limits"},
    {"cost_model"},
]
ANALYSIS_GROUND = {"separable", "stats"}
HEAVY = {
    "torch", "transformers", "vllm", "tensorrt_llm", "onnxruntime_genai", "openvino_genai", "xllamacpp", "pynvml", "nvtx",
    "accelerate", "safetensors",
}  # fmt: skip
COUNTS_MODELS = {"cost.balance", "cost.counting", "cost.models", "cost.recorder"}
"""They run models without memory. The rest of `cost` needs no torch."""
NAMES_ENGINES = {
    "analysis.cost_model.sharding",
    "analysis.kernels.classes",
    "traces.serving.bench_serve",
    "traces.serving.load_file",
    "cli.import_load",
}
WRITE_FILES = {"core.inside", "core.terminal"}
"""The second opens /dev/null. Besides these, only the measured process writes, into the folder that it was given: `runners`."""
WRITES = {
    "chmod", "hardlink_to", "makedirs", "mkdir", "rename", "renames", "rmdir", "rmtree", "symlink_to", "touch", "unlink",
    "write_bytes", "write_text",
}  # fmt: skip
"""Methods of a path, or functions of a module, that change files."""
WRITES_OF_MODULES = {
    "copy", "copy2", "copyfile", "copymode", "copytree", "link", "move", "remove", "replace", "symlink", "truncate",
}  # fmt: skip
"""The same in os and shutil; elsewhere such names mean something else."""
START_PROCESSES = {"profiling.vendor.launch", "core.processes"}
LONGEST_MODULE = 400
LONGEST_FUNCTION = 80
USUAL_FUNCTION = 30
"""95 of 100 functions are not longer."""
MOST_PARAMETERS = 8


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that this one imports, at its top or inside a function."""
    found = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name.removeprefix("llm_perf_opt.") in MODULES else node.module for name in inner}
    return frozenset(found)


def own_imports(module: str) -> list[str]:
    names = [name.removeprefix("llm_perf_opt.") for name in imports(module) if name.startswith("llm_perf_opt.")]
    return [name for name in names if name != "__version__"]


def test_no_modules_import_each_other() -> None:
    """Imports inside functions count, too."""
    order = TopologicalSorter({module: [name for name in own_imports(module) if name in MODULES] for module in MODULES})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def room_of(module: str) -> str:
    return module.split(".")[0]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_nothing_stands_outside_the_rooms() -> None:
    beside = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert beside == {*FLOORS, "__init__.py", "__main__.py", "py.typed"}


def test_imports_run_downward(capsys: pytest.CaptureFixture[str]) -> None:
    arrows = {(room_of(module), room_of(name)) for module in MODULES for name in own_imports(module)}
    between = {(above, below) for above, below in arrows if above != below and above != "__main__"}
    with capsys.disabled():
        print(f"\n{len(FLOORS)} rooms, {len(set(FLOORS.values()))} floors, {len(between)} arrows between rooms")
    assert [arrow for arrow in between if FLOORS[arrow[0]] <= FLOORS[arrow[1]]] == []
    assert len(between) <= MOST_ARROWS


def analysis_floor(module: str) -> int:
    inner = module.removeprefix("analysis.").split(".")
    if inner[0] in ANALYSIS_GROUND:
        return len(ANALYSIS_FLOORS)
    room = inner[0] if len(inner) > 1 and inner[0] != "findings" else ""
    return next(index for index, rooms in enumerate(ANALYSIS_FLOORS) if room in rooms)


def test_imports_inside_analysis_run_downward() -> None:
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        if room_of(module) == "analysis"
        for name in own_imports(module)
        if room_of(name) == "analysis" and analysis_floor(name) < analysis_floor(module)
    ]
    assert upward == []


def test_heavy_libraries_stay_in_the_runners() -> None:
    heavy = {module: {name.split(".")[0] for name in imports(module)} & HEAVY for module in MODULES}
    allowed = {module for module in MODULES if room_of(module) == "runners"} | COUNTS_MODELS
    assert {module: found for module, found in heavy.items() if found and module not in allowed} == {}


def test_engines_are_named_in_the_runners_alone() -> None:
    """The table of kernel classes aside, which says whose kernels it has seen, the formats of load generators, and the module
    that says whose way of splitting a model it follows."""
    outside = [module for module in MODULES if room_of(module) != "runners" and module not in NAMES_ENGINES]
    named = {
        module
        for module in outside
        if re.search("vllm|tensorrt|onnxruntime|openvino|llamacpp", MODULES[module].read_text(), re.IGNORECASE)
    }
    assert named == set()


def test_analysis_and_report_know_no_parser_path_or_process() -> None:
    forbidden = {"pathlib", "os", "subprocess", "shutil", "llm_perf_opt.core.run_folder"}
    for module in MODULES:
        if room_of(module) in ("analysis", "report"):
            assert not imports(module) & forbidden, module
            parsers = {name for name in own_imports(module) if room_of(name) == "traces"}
            assert {name.split(".")[1] for name in parsers} <= EVENT_MODEL, module


def test_one_module_reads_run_folders() -> None:
    """Above the passes that check what they left, RunReader alone parses the records of a run."""
    parsers = {"traces.pass_records", "traces.ncu_csv"}
    assert parsers <= set(MODULES)
    above = [module for module in MODULES if room_of(module) in ("workflows", "cli")]
    assert {module for module in above if parsers & set(own_imports(module))} == {"workflows.run_reader"}


def test_two_modules_start_processes() -> None:
    assert {module for module in MODULES if "subprocess" in imports(module)} == START_PROCESSES


def _writes(module: str) -> Iterator[str]:
    """Yield the calls that write, move or remove files."""
    for node in nodes(MODULES[module]):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        modes = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        changes = name in WRITES or (owner in ("os", "shutil") and name in WRITES_OF_MODULES)
        if changes or (name == "open" and any(re.fullmatch(r"[rbt+]*[wax][rbt+]*", mode) for mode in modes)):
            yield f"{module}:{node.lineno} {name}"


def test_one_module_writes_files() -> None:
    found = [call for module in MODULES if room_of(module) != "runners" and module not in WRITE_FILES for call in _writes(module)]
    assert found == []


def test_nothing_copies_the_process() -> None:
    for module, path in MODULES.items():
        called = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        assert not called & {"fork", "forkpty", "posix_spawn"}, module
        assert "multiprocessing" not in {name.split(".")[0] for name in imports(module)}, module


def test_modules_stay_small_and_documented() -> None:
    long = {module: path.read_text().count("\n") for module, path in MODULES.items()}
    assert {module: lines for module, lines in long.items() if lines > LONGEST_MODULE} == {}
    assert [module for module, path in MODULES.items() if not ast.get_docstring(parsed(path))] == []


def test_functions_stay_small() -> None:
    lengths = {name: length(node) for name, node in functions()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}
    assert sorted(lengths.values())[int(0.95 * len(lengths))] <= USUAL_FUNCTION


def test_parameter_lists_stay_short() -> None:
    """The verbs of the command line aside: each of their parameters is an option that a user types."""
    counts = {
        name: len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for name, node in functions()
        if room_of(name) != "cli"
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_reports_ask_seldom_whether_a_value_is_missing() -> None:
    """`cell`, `then`, `known` and `when_known` ask: a missing value is put in once, when a table is built."""
    asked = [
        module
        for module, path in MODULES.items()
        for node in nodes(path)
        if room_of(module) == "report" and isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if "Missing" in ast.unparse(node.args[1])
    ]
    assert len(asked) <= 50


@pytest.mark.parametrize(
    "shown", ["cli.app", "workflows.analyze_trace, llm_perf_opt.report.trace_document"], ids=["help", "a cached analysis"]
)
def test_what_is_shown_at_once_loads_nothing_heavy(shown: str) -> None:
    from llm_perf_opt.core.processes import ask

    code = f"import sys, llm_perf_opt.{shown}; print(sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = set(ast.literal_eval(ask([sys.executable, "-c", code]) or "[]"))
    assert "llm_perf_opt" in loaded
    assert not loaded & {*HEAVY, "hydra", "omegaconf", "numpy", "duckdb", "plotly", "rich", "psutil"}


def test_the_public_surface_is_what_it_says() -> None:
    assert llm_perf_opt.__all__ == ["__version__"]
