"""How load generators are found and started: nothing in the working folder runs."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.profiling.serving import generators
from llm_perf_opt.profiling.serving.generators import known_generators, locate_generator

PROGRAM = "#!/bin/sh\ntouch {mark}\n"
MODULE = "open({mark!r}, 'w').close()\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file that programs and modules in the working folder create if they run."""
    mark, here = tmp_path / "ran", tmp_path / "here"
    for generator in known_generators().values():
        for folder in generator.folders:
            program = here / folder / "bin" / "python"
            program.parent.mkdir(parents=True)
            program.write_text(PROGRAM.format(mark=mark))
            program.chmod(0o755)
    for name in ("csv", "email", "zipfile", "vllm", "aiperf"):
        (here / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    return mark


@pytest.mark.parametrize("name", sorted(known_generators()))
def test_an_environment_in_the_working_folder_is_not_used(hostile: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "find_spec", lambda _: None)
    with pytest.raises(ResourceError, match=r"--generator-python|not installed"):
        locate_generator(name, None)
    assert not hostile.exists()


def test_one_next_to_the_environment_of_this_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ".venv-aiperf" / "bin" / "aiperf"
    program.parent.mkdir(parents=True)
    for path in (program, program.with_name("python")):
        path.write_text("#!/bin/sh\necho 1.2\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    found = locate_generator("aiperf", None)
    assert (found.launch, found.version) == ((str(program),), "1.2")


@pytest.mark.parametrize("name", sorted(known_generators()))
def test_asking_an_interpreter_imports_nothing_from_the_working_folder(hostile: Path, name: str) -> None:
    with suppress(ResourceError):  # this environment may have no generator
        locate_generator(name, Path(sys.executable))
    assert not hostile.exists()
