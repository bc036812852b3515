"""Reading a small file takes little memory and work, whatever its encoding makes of it."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.core.proportion import HIGHEST_RATIO, DisproportionError, Proportion
from llm_perf_opt.workspace.data.formats import DataFile, Format
from llm_perf_opt.workspace.data.inventory import ignore
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import count_records, objects, texts
from work import lines_run

LONG = "a" * (1 << 20)
MOST_BYTES = 450 << 20
"""Python with DuckDB, pyarrow and NumPy takes 110 MB of these."""
CHILD = """
import sys
from pathlib import Path
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.workspace.data.formats import SUFFIXES, DataFile
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.parquet_files import write_json
from llm_perf_opt.workspace.data.record_streams import count_records, objects, texts
path = Path(sys.argv[1])
file = DataFile(path.name, path, SUFFIXES["." + path.name.split(".", 1)[1]], "all")
bad, ignore = BadRecords(skip=True), lambda done: None
def all_of(blocks):
    for block in blocks:
        del block
reads = [
    lambda: count_records(file, ignore),
    lambda: all_of(objects(file, bad, ignore)),
    lambda: all_of(texts(file, "text", bad, ignore)),
]
if file.format == "parquet":
    reads.append(lambda: write_json(path, path.with_name("out"), ignore))
for read in reads:
    try:
        read()
    except LlmPerfError as error:
        print(type(error).__name__)
    else:
        print("read")
status = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))
"""


def repeated(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))


def lists(values: pa.Array) -> pa.Table:
    return pa.table({"text": pa.array(["x"]), "of": pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)})


TABLES = {
    "long texts": lambda: pa.table({"text": repeated(LONG, 4096)}),
    "rows": lambda: pa.table({"text": repeated("abc", 5_000_000)}),
    "list of long texts": lambda: lists(repeated(LONG, 10_000)),
    "list": lambda: lists(repeated("abc", 3_000_000)),
    "one long text": lambda: pa.table({"text": pa.array([LONG * 300])}),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_that_repeats_its_values_takes_little_memory(tmp_path: Path, name: str, suffix: str) -> None:
    if (name, suffix) == ("rows", ".arrow"):
        pytest.skip("each row takes bytes in this format")
    path, table = tmp_path / f"a{suffix}", TABLES[name]()
    if suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False, row_group_size=len(table))
        assert path.stat().st_size < 200_000
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    *found, peak = done.stdout.split()
    assert "ParseError" in found or "ResourceError" in found
    stored = path.stat().st_size
    assert int(peak) < MOST_BYTES + (3 * stored if suffix == ".arrow" else 0)


@pytest.mark.parametrize("text", [b"\n", b" ", b"[", b'"', b",", b"0", b'{"a":'])
@pytest.mark.parametrize(("suffix", "kind"), [(".jsonl.gz", "jsonl"), (".json.gz", "json"), (".txt.gz", "txt")])
def test_packed_repetitions_are_refused_after_little_work(
    tmp_path: Path, text: bytes, suffix: str, kind: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_perf_opt.workspace.data.compressed.STREAM_RATIO_COUNTS_FROM_BYTES", 1 << 20)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress((b"[" if kind == "json" else b"") + text * (8 << 20)))

    def read() -> None:
        with pytest.raises(ParseError):
            count_records(DataFile(path.name, path, kind, "all"), ignore)

    assert lines_run(read) < 60_000


def test_short_lines_that_pack_well_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    records = [{"text": f"yes {number % 7}"} for number in range(200_000)]
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    assert count_records(DataFile(path.name, path, "jsonl", "all"), ignore) == len(records)


def test_ordinary_tables_are_read_in_blocks(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "n": [n, None], "s": {"a": "x" * (n % 50), "b": None}} for n in range(5000)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    for kind in ("parquet", "arrow"):
        file = DataFile(f"a.{kind}", tmp_path / f"a.{kind}", kind, "all")
        blocks = list(objects(file, BadRecords(skip=False), ignore))
        assert [row for block in blocks for row in block] == rows
        assert max(map(len, blocks)) <= 1024
        assert [text for block in texts(file, "text", BadRecords(skip=False), ignore) for text in block] == [
            row["text"] for row in rows
        ]


def test_long_records_make_small_blocks(tmp_path: Path) -> None:
    table = pa.table({"text": [LONG * 4] * 20 + ["short"] * 20})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
    file = DataFile("a.parquet", tmp_path / "a.parquet", "parquet", "all")
    blocks = [len(block) for block in texts(file, "text", BadRecords(skip=False), ignore)]
    assert sum(blocks) == 40
    assert max(blocks[:2]) == 8


def test_values_count_besides_their_bytes() -> None:
    proportion = Proportion(1000)
    proportion.add(1, 900)
    with pytest.raises(DisproportionError, match=str(HIGHEST_RATIO)):
        proportion.add(1, 0, values=2)
    Proportion(0).add(1000, HIGHEST_RATIO * 1000)


def test_the_error_names_the_file(tmp_path: Path) -> None:
    error = DisproportionError().of(tmp_path / "a.gz")
    assert isinstance(error, LlmPerfError)
    assert str(tmp_path / "a.gz") in error.fact


def compressed(path: Path, column: pa.Array, codec: str) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    batch = pa.record_batch([column], names=["text"])
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return path


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("dictionary", [False, True], ids=["values", "dictionary"])
def test_compressed_buffers_count_before_they_are_unpacked(tmp_path: Path, dictionary: bool, codec: str) -> None:
    column = pa.array([LONG] * 300)
    column = pa.DictionaryArray.from_arrays(pa.array([0]), column) if dictionary else column
    path = compressed(tmp_path / "a.arrow", column, codec)
    file, before = DataFile("a.arrow", path, "arrow", "all"), pa.total_allocated_bytes()
    with pytest.raises(ParseError, match=f"more than {HIGHEST_RATIO} times"):
        count_records(file, ignore)
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_usual_compressed_buffers_are_read(tmp_path: Path, codec: str) -> None:
    column = pa.array([f"text {number} " * 9 for number in range(5000)] + [None])
    file = DataFile("a.arrow", compressed(tmp_path / "a.arrow", column, codec), "arrow", "all")
    assert [row["text"] for block in objects(file, BadRecords(skip=True), ignore) for row in block] == column.to_pylist()
