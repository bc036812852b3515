"""Packages of somebody else's, as pip leaves them: a module, and the metadata with its entry point."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import command
from llm_perf_opt.config import runtimes
from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.config.runtimes import known_runtimes

ROOT = Path(__file__).parents[1]


def the_minimal_runner() -> str:
    """The module that docs/runtimes.md shows."""
    page = (ROOT / "docs" / "runtimes.md").read_text()
    return page.split("```python\n# echo_runner.py\n")[1].split("```")[0]


def bring(
    site: Path, name: str, target: str, module: str = "", distribution: str = "echo-runner", group: str = runtimes.GROUP
) -> Path:
    """Install a package with one entry point into a site folder."""
    site.mkdir(parents=True, exist_ok=True)
    if module:
        (site / f"{target.partition(':')[0]}.py").write_text(module)
    information = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    return site


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """The site folder on the path of this process; what is known is looked up again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        _forget()
        try:
            yield
        finally:
            _forget()
            for module in site.glob("*.py"):
                sys.modules.pop(module.stem, None)


def _forget() -> None:
    known_runtimes.cache_clear()
    known_passes.cache_clear()


def llm_perf(*words: str, cwd: Path, site: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command where this site folder is on the path; a new module of a known name is loaded again."""
    if site is None:
        return command.llm_perf(*words, cwd=cwd)
    with installed(site):
        return command.llm_perf(*words, cwd=cwd)


def llm_perf_process(*words: str, cwd: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """The same in a process of its own."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return command.llm_perf_process(*words, cwd=cwd, env={"PYTHONPATH": os.pathsep.join(paths)})
