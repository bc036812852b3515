"""The C++ compiler that torch.compile uses on a CPU."""

import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llm_perf_opt.core.inside import write
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.processes import ask

INSTALL = (
    "Install it: `apt-get install g++ python3-dev` (Debian, Ubuntu), `dnf install gcc-c++ python3-devel` (Fedora, RHEL), "
    "`xcode-select --install` or `brew install llvm` (macOS). CXX=PATH selects another compiler."
)
_PROGRAM = "#include <Python.h>\n#include <vector>\nint main() { return std::vector<int>().size(); }\n"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    path: str
    version: str
    """The first line of its `--version`."""


def find_compiler() -> Maybe[Compiler]:
    """Return the compiler that torch.inductor uses: CXX, otherwise clang++ on macOS and g++ elsewhere."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    if path is None:
        other = shutil.which("clang++")
        hint = f"; to use {other}, set CXX={other}" if other else ""
        return Missing(f"there is no {name} on the PATH{hint}")
    version = ask([path, "--version"])
    return Compiler(path, version.partition("\n")[0]) if version else Missing(f"{path} --version fails")


def compiler_problem() -> str:
    """Return why no program for Python can be compiled, or an empty string."""
    found = find_compiler()
    return found.why if isinstance(found, Missing) else _problem(found.path, sysconfig.get_path("include"))


@cache
def _problem(compiler: str, include: str) -> str:
    with tempfile.TemporaryDirectory(prefix="llm-perf-") as folder:
        source = Path(folder) / "program.cpp"
        write(Path(folder), source, _PROGRAM.encode())
        if ask([compiler, "-fsyntax-only", "-std=c++17", f"-I{include}", str(source)], 60.0) is not None:
            return ""
    headers = (Path(include) / "Python.h").exists()
    return f"{compiler} cannot compile a small program" if headers else f"the Python headers are not in {include}"
