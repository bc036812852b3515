"""The C++ compiler, with stand-ins on the PATH."""

import sys
from pathlib import Path

import pytest

from llm_perf_opt.core.compiler import Compiler, compiler_problem, find_compiler
from llm_perf_opt.core.missing import Missing

NAME = "clang++" if sys.platform == "darwin" else "g++"


def stand_in(folder: Path, name: str, compiles: bool = True) -> Path:
    file = folder / name
    file.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{name} 1.2.3" && echo more && exit 0\nexit {0 if compiles else 1}\n'
    )
    file.chmod(0o755)
    return file


@pytest.fixture(autouse=True)
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_the_compiler_is_the_one_torch_looks_for(only_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in(only_here, NAME)
    assert find_compiler() == Compiler(str(path), f"{NAME} 1.2.3")
    assert compiler_problem() == ""
    other = stand_in(only_here, "mine++")
    monkeypatch.setenv("CXX", str(other))
    assert find_compiler() == Compiler(str(other), "mine++ 1.2.3")


def test_no_compiler() -> None:
    assert isinstance(find_compiler(), Missing)
    assert NAME in compiler_problem()


@pytest.mark.skipif(sys.platform == "darwin", reason="torch uses clang++ there")
def test_another_compiler_must_be_named(only_here: Path) -> None:
    other = stand_in(only_here, "clang++")
    assert f"CXX={other}" in compiler_problem()


def test_a_compiler_that_does_not_compile(only_here: Path) -> None:
    stand_in(only_here, NAME, compiles=False)
    assert isinstance(find_compiler(), Compiler)
    assert compiler_problem()
