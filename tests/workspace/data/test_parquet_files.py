"""Parquet through DuckDB: names with a special meaning, and signals during a long statement."""

import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from command import HANG_S
from dataset_builders import added, read_jsonl, write_jsonl
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare

PATTERNS = {"d[1]": "bracket", "d1": "one", "d*": "star", "d?": "mark", "lang=en/d": "folder"}


def parquet_source(folder: Path) -> Path:
    """Files whose names are patterns for one another, and one below a folder that looks like a partition."""
    for name, text in PATTERNS.items():
        file = folder / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.parent / "made"
        duckdb.sql(f"COPY (SELECT '{text}' AS text, 'de' AS lang) TO '{beside}' (FORMAT parquet)")
        beside.rename(file)
    return folder


@pytest.mark.slow
def test_names_that_are_patterns_or_partitions_stand_for_their_own_file(tmp_path: Path) -> None:
    folder, metadata = added(tmp_path, parquet_source(tmp_path / "source"))
    assert metadata.size.records == len(PATTERNS)
    prepare(folder, Preparation(variant="lines", to="jsonl"))
    prepare(folder, Preparation(variant="texts", to="txt"))
    prepare(folder, Preparation(variant="some", num_samples=len(PATTERNS)))
    for name, text in PATTERNS.items():
        assert read_jsonl(folder.variant("lines").data / f"{name}.jsonl") == [{"text": text, "lang": "de"}]
        assert (folder.variant("texts").data / f"{name}.txt").read_text() == f"{text}\n"
    chosen = read_jsonl(folder.variant("some").data / "samples.jsonl")
    assert sorted(record["text"] for record in chosen) == sorted(PATTERNS.values())
    assert {record["lang"] for record in chosen} == {"de"}


def test_lines_become_parquet_from_their_own_file(tmp_path: Path) -> None:
    for name, text in PATTERNS.items():
        write_jsonl(tmp_path / "source" / f"{name}.jsonl", [{"text": text}])
    folder, _ = added(tmp_path, tmp_path / "source")
    prepare(folder, Preparation(variant="rows", to="parquet"))
    prepare(folder, Preparation(variant="back", parent="rows", to="jsonl"))
    for name, text in PATTERNS.items():
        assert read_jsonl(folder.variant("back").data / f"{name}.jsonl") == [{"text": text}]


ENDLESS = """
import signal
import sys
from pathlib import Path
from llm_perf_opt.workspace.data import parquet_files
told = lambda done: print("under way", flush=True)
source, out = Path(sys.argv[1]), Path(sys.argv[2])
parquet_files.parquet_rows = lambda path: "(SELECT sum(sin(range)) AS text FROM range(1000000000000))"
stopped = []

def interrupted(*_):
    if not stopped:  # a later one is no longer about the statement
        stopped.append(True)
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
try:
    parquet_files.write_json(source, out, told)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize("signals", [1, 3])
def test_an_interrupt_ends_a_long_statement_and_not_the_process(tmp_path: Path, signals: int, attempt: int) -> None:
    source = tmp_path / "a.parquet"
    duckdb.sql(f"COPY (SELECT 'a' AS text) TO '{source}' (FORMAT parquet)")
    argv = [sys.executable, "-c", ENDLESS, str(source), str(tmp_path / "a.jsonl")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "under way\n"
        for _ in range(signals):
            child.send_signal(signal.SIGINT)
        told, said = child.communicate(timeout=HANG_S)
    assert (child.returncode, said, told.splitlines()[-1:]) == (0, "", ["stopped"])


@pytest.mark.slow
@pytest.mark.parametrize("column", ["file_row_number", "File_Row_Number", "place_0"])
def test_a_column_called_like_the_databases_own_is_sampled_alike(tmp_path: Path, column: str) -> None:
    chosen = {}
    for name in (column, "other"):
        file = tmp_path / name / "source" / "a.parquet"
        file.parent.mkdir(parents=True)
        rows = "SELECT 'text ' || range AS text, -range AS file_row_number, range AS place_0 FROM range(10000)"
        rows = f'SELECT text, file_row_number AS "{name}", place_0 AS second FROM ({rows})'
        duckdb.sql(f"COPY ({rows}) TO '{file}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
        folder, _ = added(tmp_path / name, file.parent)
        prepare(folder, Preparation(variant="some", num_samples=300, seed=5))
        records = read_jsonl(folder.variant("some").data / "samples.jsonl")
        assert all(record[name] == -record["second"] for record in records)
        chosen[name] = [record["text"] for record in records]
    assert chosen[column] == chosen["other"]
    assert len(set(chosen[column])) == 300
