"""Whatever lies in a run folder, a verb ends well or with an error that says what is wrong: never with one of Python's."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import clean_end, llm_perf
from llm_perf_opt.core.run_folder import RunFolder, read_values
from llm_perf_opt.core.value_limits import MOST_LEVELS
from llm_perf_opt.report import html
from llm_perf_opt.workflows import analyze_run as analyze
from run_damage import RAW_VALUES, SAME_TYPE, WHOLE_FILE, parent_made_file, places, value_at, with_value
from whole_runs import whole_run

SEED = 7
PER_FILE = 3
"""Damages of each record; what is tried is the same each time, and each with one of the verbs in turn."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole") / "run", traces=False).path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to compare with: the same request, measured another time."""
    path = whole_run(tmp_path_factory.mktemp("other") / "run", traces=False).path
    timings = path / "raw" / "clean" / "timings.json"
    timings.write_text(timings.read_text().replace("160000000", "160000007"))
    return path


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library of the charts and the tables of DuckDB, which no damage here reaches, and no waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(html, "_plotly", lambda: "")
    monkeypatch.setattr(analyze, "write_run_tables", lambda *_: None)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(whole, tmp_path / "runs" / "run"))
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755)


VERBS = ("report", "runs", "compare", "baseline", "sql")


def ended(verb: str, run: Path, other: Path) -> subprocess.CompletedProcess[str]:
    """A verb that reads a run folder, and what it ends with."""
    kept = run.parent.parent / "kept"
    words = {
        "report": ["report", run, "--json"],
        "runs": ["runs", run.parent],
        "compare": ["compare", other, run],
        "baseline": ["baseline", "set", "mine", run, "--runs-dir", kept],
        "sql": ["sql", run],
    }[verb]
    return llm_perf(*words)


def assert_clean(run: Path, other: Path, what: object, verb: str) -> None:
    done = ended(verb, run, other)
    assert clean_end(done), (verb, what, done.stderr)


def other_values(path: Path, chance: random.Random) -> Iterator[tuple[str, str]]:
    """The file's text with another value somewhere, and what was changed."""
    text, is_yaml = path.read_text(), path.suffix == ".yaml"
    values = yaml.safe_load(text) if is_yaml else json.loads(text)
    everywhere = list(places(values))
    for number in range(PER_FILE):
        place = chance.choice(everywhere)
        choices = SAME_TYPE.get(type(value_at(values, place)), RAW_VALUES) if number % 2 else RAW_VALUES
        raw = chance.choice(choices)
        yield with_value(text, place, raw, is_yaml=is_yaml), f"{path.name}: {place} = {raw[:20]}"


RECORDS = (
    "run.json", "config.yaml", "env.json", "raw/clean/timings.json", "raw/clean/inputs.json", "raw/torch/operators.json",
    "raw/ceilings/ceilings.json", "raw/nsys/stages.json", "raw/ncu_decode/selection.json", "raw/ncu_selftest/selftest.json",
    "verify.json",
)  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_other_values(run: Path, other: Path, name: str) -> None:
    chance = random.Random(f"{SEED} {name}")
    for (text, what), verb in zip(other_values(run / name, chance), chance.sample(VERBS[:4], PER_FILE), strict=True):
        (run / name).write_text(text)
        assert_clean(run, other, what, verb)


@pytest.mark.parametrize("damage", [*WHOLE_FILE, parent_made_file])
def test_a_file_that_is_something_else(
    run: Path, other: Path, whole: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    chance = random.Random(f"{SEED} {damage.__name__}")
    names = chance.sample((*RECORDS[2:], "raw/nvml/samples.jsonl", "raw/ncu_decode/counters.csv", "inputs.yaml"), 2)
    for name, verb in zip(("run.json", "config.yaml", *names), (chance.choice(VERBS), *["report"] * 3), strict=True):
        if damage is parent_made_file and "/" not in name:
            continue
        damage(run / name, chance)
        assert_clean(run, other, f"{damage.__name__} {name}", verb)
        shutil.rmtree(run)
        shutil.copytree(whole, run)


@pytest.mark.parametrize(
    ("name", "key", "raw"),
    [
        ("env.json", "memory", "-1e308"),
        ("env.json", "tool", "NaN"),
        ("env.json", "tool", "null"),
        ("env.json", "cpu", "[]"),
        ("env.json", "packages", '"\\ud800"'),
        ("env.json", "packages", "[1]"),
        ("env.json", "gpu", "[" * 200 + "]" * 200),
        ("env.json", "host", "9" * 5000),
        ("config.yaml", "model", "[]"),
        ("config.yaml", "runtime", "9" * 5000),
        ("config.yaml", "hardware", "2026-13-45"),
        ("config.yaml", "profiling", "[" * 400),
        ("config.yaml", "experiment", '"\\ud800"'),
        ("run.json", "passes", "null"),
        ("run.json", "schema", "9" * 5000),
        ("raw/clean/timings.json", "model", "[]"),
        ("raw/clean/timings.json", "iterations", "{}"),
    ],
)
def test_values_that_once_were_errors_of_python(run: Path, other: Path, name: str, key: str, raw: str) -> None:
    path = run / name
    path.write_text(with_value(path.read_text(), (key,), raw, is_yaml=name.endswith("yaml")))
    assert_clean(run, other, (name, key, raw[:20]), "report")


def test_a_group_of_the_environment_that_is_none_is_left_out_and_said(run: Path) -> None:
    path = run / "env.json"
    path.write_text(with_value(path.read_text(), ("memory",), "-1"))
    found = json.loads(llm_perf("report", run, "--json").stdout)
    assert any("env.json" in text and "memory" in text for text in found["warnings"])
    assert "Memory | n/a: not recorded" in (run / "report.md").read_text()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "9" * 5000,
        "a: 2026-13-45",
        "a: !!timestamp x",
        "a: !!int x",
        f"a: {json.dumps(nested(MOST_LEVELS))}",
        "a: &a [*a]",
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)),
    ],
    ids=["digits", "date", "timestamp", "int", "deep", "itself", "laughs"],
)
def test_yaml_that_is_no_settings(tmp_path: Path, text: str) -> None:
    from llm_perf_opt.core.errors import ParseError

    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ParseError, match=r"config\.yaml"):
        read_values(RunFolder(tmp_path).config_file)


def test_settings_as_deep_as_any_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"a: {json.dumps(nested(MOST_LEVELS - 1))}\n")
    assert read_values(tmp_path / "config.yaml")["a"]


@pytest.mark.parametrize("raw", ['{"total_bytes": -1e308}', '{"total_bytes": 1e400}', '{"total_bytes": ' + "9" * 400 + "}"])
def test_an_impossible_number_costs_its_group_of_the_environment_and_no_more(run: Path, raw: str) -> None:
    path = run / "env.json"
    path.write_text(with_value(path.read_text(), ("memory",), raw))
    found = json.loads(llm_perf("report", run, "--json").stdout)
    assert any("env.json" in text and "memory" in text and "number" in text for text in found["warnings"])
    page = (run / "report.md").read_text()
    assert "Memory | n/a: not recorded" in page
    assert "a processor" in page, "the rest is still known"
