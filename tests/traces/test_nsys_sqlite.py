"""The SQLite export of Nsight Systems: recorded reports, layouts of other versions, and damaged files."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llm_perf_opt.core import proportion
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import RangeKind, Trace, WorkKind
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.projection import project, step_of_work
from nsys_databases import DECODE, PROCESS, TRUNCATED, altered, cut_small

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"


def kernel_ns(trace: Trace) -> int:
    kernels = trace.work.rows(trace.work.kind == WorkKind.KERNEL)
    return int((kernels.end_ns - kernels.start_ns).sum())


def problems(trace: Trace) -> dict[str, bool]:
    return {problem.id: problem.fatal for problem in trace.problems}


# --- the real reports ---------------------------------------------------------------------------------------------------


def test_the_decode_report_is_complete_and_has_1528_kernels_of_4_651_ms() -> None:
    trace = examined(read_nsys(DECODE), Expected(gpu=True, ranges=("decode", "decode_step")))
    assert trace.problems == ()
    assert np.count_nonzero(trace.work.kind == WorkKind.KERNEL) == 1528
    assert kernel_ns(trace) == 4_651_439
    steps = step_of_work(trace, project(trace))[trace.work.kind == WorkKind.KERNEL]
    assert np.unique(steps, return_counts=True)[1].tolist() == [191] * 8


def test_the_truncated_report_is_called_incomplete() -> None:
    trace = examined(read_nsys(TRUNCATED))
    assert not trace.complete
    assert problems(trace)["ranges_without_kernels"]
    assert any("8 of 8 decode_step" in problem.what for problem in trace.problems)


def test_rows_carry_what_the_report_says() -> None:
    trace = read_nsys(DECODE)
    first = trace.work.rows([0])
    assert (first.start_ns[0], first.end_ns[0]) == (93793329, 93795345)
    assert (first.process[0], first.device[0], first.stream[0], first.correlation[0]) == (PROCESS, 0, 7, 373)
    assert (first.grid[0], first.block[0], first.size_bytes[0], first.graph_node[0]) == (12, 128, -1, 0)
    assert "indexSelectSmallIndex<c10::BFloat16" in trace.name_of(first.name[0])  # whole and demangled
    sets = trace.work.rows(trace.work.kind == WorkKind.MEMSET)
    assert {trace.name_of(name) for name in sets.name} == {"[CUDA memset]"}
    assert sets.size_bytes.tolist() == [4] * 16
    assert {trace.name_of(name) for name in trace.ranges.domain} == {"LLM"}
    assert len(set(trace.names)) == len(trace.names)


def test_rows_are_in_order_whatever_the_file_says(tmp_path: Path) -> None:
    shuffled = [
        statement
        for table in (KERNELS, CALLS, "NVTX_EVENTS")
        for statement in (
            f"CREATE TABLE shuffled AS SELECT * FROM {table} ORDER BY (start * 7919) % 1000003",
            f"DROP TABLE {table}",
            f"ALTER TABLE shuffled RENAME TO {table}",
        )
    ]
    found, usual = read_nsys(altered(tmp_path / "a.sqlite", shuffled)), read_nsys(DECODE)
    for table in ("work", "calls", "ranges"):
        assert (np.diff(getattr(found, table).start_ns) >= 0).all()
        assert getattr(found, table).end_ns.tolist() == getattr(usual, table).end_ns.tolist()
    assert found.ranges.name[0] != found.ranges.name[1]
    assert found.name_of(found.ranges.name[0]) == "decode"


def test_facts_tell_of_the_recording_and_not_of_the_environment() -> None:
    facts = read_nsys(DECODE).facts
    assert facts["tool_version"] == "2023.4.4.54"
    assert facts["device.0"] == "NVIDIA H200"
    assert facts["chip.0"] == "GH100"
    assert facts["command"] == "python3 make_fixtures.py"
    assert facts[f"pid.{PROCESS}"] == "2517 python3"
    assert int(facts["recorded_ns"]) == 663302566


def test_environment_variables_are_not_read(tmp_path: Path) -> None:
    secret = "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'TOKEN=hidden')"
    trace = read_nsys(altered(tmp_path / "a.sqlite", [secret]))
    assert "hidden" not in repr(trace.facts) + repr(trace.names)


# --- other layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param([f"ALTER TABLE {KERNELS} DROP COLUMN {name}" for name in ("graphNodeId", "greenContextId")], id="2022"),
        pytest.param([f"ALTER TABLE {KERNELS} DROP COLUMN globalPid"], id="no process of a kernel"),
        pytest.param([f"ALTER TABLE {KERNELS} ADD COLUMN somethingNew TEXT DEFAULT 'x'"], id="a column of the future"),
        pytest.param(
            [
                f"CREATE TABLE CUPTI_ACTIVITY_KIND_DRIVER AS SELECT * FROM {CALLS} WHERE eventClass = 1",
                f"DELETE FROM {CALLS} WHERE eventClass = 1",
            ],
            id="driver calls apart",
        ),
        pytest.param(["DROP TABLE TARGET_INFO_GPU", "DROP TABLE META_DATA_EXPORT", "DROP TABLE PROCESSES"], id="no facts"),
        pytest.param(
            ["UPDATE NVTX_EVENTS SET text = (SELECT value FROM StringIds WHERE id = textId), textId = NULL WHERE eventType = 59"],
            id="range names inline",
        ),
        pytest.param(
            [
                "INSERT INTO StringIds VALUES (987654, 'LLM')",
                "UPDATE NVTX_EVENTS SET text = NULL, textId = 987654 WHERE eventType = 75",
            ],
            id="domain name by id",
        ),
        pytest.param(
            [f"ALTER TABLE {table} RENAME COLUMN {name} TO {name.lower()}" for table, name in ((CALLS, "globalTid"),)],
            id="another spelling",
        ),
        pytest.param(
            [f"CREATE TABLE other AS SELECT * FROM {KERNELS}", f"DROP TABLE {KERNELS}", f"ALTER TABLE other RENAME TO {KERNELS}"],
            id="columns without types",
        ),
    ],
)
def test_the_same_truth_in_other_layouts(statements: list[str], tmp_path: Path) -> None:
    trace = examined(read_nsys(altered(tmp_path / "a.sqlite", statements)), Expected(ranges=("decode", "decode_step")))
    assert trace.problems == ()
    assert kernel_ns(trace) == 4_651_439
    steps = step_of_work(trace, project(trace))[trace.work.kind == WorkKind.KERNEL]
    assert np.unique(steps, return_counts=True)[1].tolist() == [191] * 8


def test_without_demangled_names_the_short_ones_stand(tmp_path: Path) -> None:
    trace = read_nsys(altered(tmp_path / "a.sqlite", [f"ALTER TABLE {KERNELS} DROP COLUMN demangledName"]))
    assert trace.name_of(trace.work.name[0]) == "indexSelectSmallIndex"


def test_a_run_without_a_gpu_has_ranges_only(tmp_path: Path) -> None:
    tables = [KERNELS, CALLS, "CUPTI_ACTIVITY_KIND_MEMSET", "TARGET_INFO_GPU"]
    trace = examined(read_nsys(altered(tmp_path / "a.sqlite", [f"DROP TABLE {table}" for table in tables])))
    assert trace.complete
    assert len(trace.work) == len(trace.calls) == 0
    assert len(trace.ranges) == 9


def test_copies_are_named_as_the_tool_names_them(tmp_path: Path) -> None:
    trace = read_nsys(cut_small(tmp_path / "a.sqlite"))
    copies = trace.work.rows(trace.work.kind == WorkKind.MEMCPY)
    assert [trace.name_of(name) for name in copies.name] == ["[CUDA memcpy HtoD]"]
    assert copies.size_bytes.tolist() == [4096]


def test_graph_nodes_and_free_ranges(tmp_path: Path) -> None:
    statements = [
        f"UPDATE {KERNELS} SET graphNodeId = 4294967297 WHERE correlationId = 373",
        "UPDATE NVTX_EVENTS SET eventType = 60 WHERE start = 8089479",
        "UPDATE NVTX_EVENTS SET domainId = 0 WHERE start = 8089479",
    ]
    trace = read_nsys(altered(tmp_path / "a.sqlite", statements))
    assert trace.work.graph_node[0] == 4294967297
    free = trace.ranges.rows(trace.ranges.kind == RangeKind.START_END)
    assert (free.start_ns.tolist(), free.domain.tolist()) == ([8089479], [-1])


# --- what is wrong with rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "id", "fatal"),
    [
        (f"UPDATE {KERNELS} SET end = start - 5 WHERE rowid = 3", "negative_duration", True),
        (f"UPDATE {CALLS} SET end = start - 5 WHERE rowid = 3", "negative_duration", False),
        (f"UPDATE {KERNELS} SET start = 9223372036854775807, end = 9223372036854775807 WHERE rowid = 3", "absurd_value", True),
        (f"UPDATE {KERNELS} SET start = -9223372036854775808 WHERE rowid = 3", "absurd_value", True),
        (f"UPDATE {KERNELS} SET deviceId = 5000000000 WHERE rowid = 3", "absurd_value", True),
        (f"UPDATE {KERNELS} SET gridX = 9223372036854775807, gridY = 9223372036854775807 WHERE rowid = 3", "absurd_value", False),
        (f"UPDATE {KERNELS} SET start = 0, end = 0 WHERE rowid = 3", "untimed", False),
        (f"UPDATE {KERNELS} SET start = 0, end = 0 WHERE rowid < 300", "untimed", True),
        (f"UPDATE {KERNELS} SET start = 'soon' WHERE rowid = 3", "bad_rows", True),
        (f"UPDATE {KERNELS} SET start = 1.5 WHERE rowid = 3", "bad_rows", True),
        (f"UPDATE {KERNELS} SET start = x'00ff' WHERE rowid = 3", "bad_rows", True),
        (f"UPDATE {KERNELS} SET demangledName = 123456 WHERE rowid = 3", "unnamed", False),
        ("UPDATE StringIds SET value = CAST(x'41ff42' AS TEXT) WHERE id = 238", "invalid_text", False),
        ("UPDATE NVTX_EVENTS SET end = NULL WHERE start = 8089479", "open_ranges", False),
        ("UPDATE NVTX_EVENTS SET textId = NULL WHERE start = 8089479", "unnamed", False),
        ("UPDATE NVTX_EVENTS SET text = CASE WHEN start <> 8089479 THEN 'x' END, textId = 5 WHERE end > 0", "unnamed", False),
        (f"UPDATE {CALLS} SET returnValue = 700 WHERE correlationId = 373", "failed_launches", False),
    ],
)
def test_a_wrong_row_is_named(statement: str, id: str, fatal: bool, tmp_path: Path) -> None:
    assert problems(read_nsys(altered(tmp_path / "a.sqlite", [statement]))) == {id: fatal}


def test_the_importers_own_words_are_heard(tmp_path: Path) -> None:
    statements = [
        "CREATE TABLE ENUM_DIAGNOSTIC_SEVERITY_LEVEL (id INTEGER, name TEXT, label TEXT)",
        "INSERT INTO ENUM_DIAGNOSTIC_SEVERITY_LEVEL VALUES (1, 'Info', 'Info'), (2, 'Warning', 'Warning'), (3, 'Error', 'Error')",
        "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)",
        "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 1, 'CUDA profiling started'), (2, 2, 'CPU sampling is not available'), "
        "(3, 3, 'Unknown runtime API function index: 471'), (4, NULL, NULL)",
    ]
    trace = read_nsys(altered(tmp_path / "a.sqlite", statements))
    assert problems(trace) == {"importer_gave_up": True, "tool_warning": False}


def test_graphs_recorded_as_one_piece_cannot_be_summed(tmp_path: Path) -> None:
    statements = [
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1000, 3000000)",
    ]
    trace = read_nsys(altered(tmp_path / "a.sqlite", statements))
    assert problems(trace) == {"graphs_not_expanded": True}
    assert "--cuda-graph-trace=node" in trace.problems[0].remedy


# --- what is wrong with files ---------------------------------------------------------------------------------------------


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_files_that_are_something_else(tmp_path: Path) -> None:
    whole = gzip.decompress(DECODE.read_bytes())
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    cases = {
        "is empty": written(tmp_path / "a", b""),
        "not a SQLite file": written(tmp_path / "b", b"==PROF== hello"),
        "is truncated": written(tmp_path / "c", whole[: len(whole) // 2]),
        "has 50 of": written(tmp_path / "d", whole[:50]),
        "not an export of Nsight Systems. Its tables: recipes": tmp_path / "other.sqlite",
        "damaged or truncated gzip": written(tmp_path / "e", DECODE.read_bytes()[:5000]),
        "is not exported": tmp_path / "run.nsys-rep",
        "No such file": tmp_path / "absent.sqlite",
        "cannot be read": written(tmp_path / "f", whole[:4096] + b"\xff" * (len(whole) - 4096)),
    }
    for fact, path in cases.items():
        with pytest.raises(ParseError, match=fact):
            read_nsys(path)
    with pytest.raises(ParseError, match="directory"):
        read_nsys(tmp_path)


def test_an_export_that_is_still_being_written(tmp_path: Path) -> None:
    path = altered(tmp_path / "a.sqlite")
    written(tmp_path / "a.sqlite-journal", b"\xd9\xd5\x05\xf9 half of a transaction")
    with pytest.raises(ParseError, match="not written completely"):
        read_nsys(path)


def test_a_column_that_is_needed_and_not_there(tmp_path: Path) -> None:
    path = altered(tmp_path / "a.sqlite", [f"ALTER TABLE {KERNELS} RENAME COLUMN start TO began"])
    with pytest.raises(ParseError, match="CUPTI_ACTIVITY_KIND_KERNEL has no column start"):
        read_nsys(path)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proportion, "RATIO_COUNTS_FROM_BYTES", 2**20)
    bomb = written(tmp_path / "bomb.sqlite.gz", gzip.compress(b"SQLite format 3\x00" + bytes(2**26)))
    assert bomb.stat().st_size < 2**17
    with pytest.raises(ParseError, match="unpacks to more than 200 times its size"):
        read_nsys(bomb)


def test_a_view_in_a_tables_place_is_not_run(tmp_path: Path) -> None:
    counting = "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n"
    endless = f"CREATE VIEW {KERNELS} AS {counting}"
    trace = read_nsys(altered(tmp_path / "a.sqlite", [f"DROP TABLE {KERNELS}", endless]))
    assert not (trace.work.kind == WorkKind.KERNEL).any()
    assert problems(examined(trace))["no_kernels"]


def test_the_file_is_not_touched_and_odd_paths_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a ?b#c%20d"
    folder.mkdir()
    path = altered(folder / "ü&mode=rw.sqlite")
    before = path.read_bytes()
    folder.chmod(0o500)
    try:
        assert kernel_ns(read_nsys(path)) == 4_651_439
    finally:
        folder.chmod(0o700)
    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == [path.name]


# --- devices of several processes -----------------------------------------------------------------------------------------


def two_processes(to: Path, gpu_of_second: int) -> Path:
    """Assign the last half of the kernels to a second process, which also numbers its GPU 0. The table of the mapping has the
    layout of 2024 and later; the recorded report is older."""
    second, pid = PROCESS + (1 << 24), (PROCESS >> 24) & 0xFFFFFF
    return altered(
        to,
        [
            f"UPDATE {KERNELS} SET globalPid = {second} WHERE rowid > 764",
            f"UPDATE {CALLS} SET globalTid = globalTid + {1 << 24} WHERE correlationId IN "
            f"(SELECT correlationId FROM {KERNELS} WHERE globalPid = {second})",
            "CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL, uuid TEXT, "
            "numMultiprocessors INTEGER)",
            f"INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, {pid}, 'a', 132), ({gpu_of_second}, 0, {pid + 1}, 'b', 132)",
            "INSERT INTO TARGET_INFO_GPU (vmId, id, name, cuDevice) VALUES (1, 1, 'NVIDIA H100', 0)",
        ],
    )


def test_one_number_for_two_gpus_is_told_apart(tmp_path: Path) -> None:
    trace = read_nsys(two_processes(tmp_path / "two.sqlite", gpu_of_second=1))
    kernels = trace.work.rows(trace.work.kind == WorkKind.KERNEL)
    assert np.unique(kernels.device, return_counts=True)[1].tolist() == [764, 764]
    assert len(np.unique(kernels.process[kernels.device == 1])) == 1
    assert (trace.facts["device.0"], trace.facts["device.1"]) == ("NVIDIA H200", "NVIDIA H100")


def test_two_processes_on_one_gpu_stay_on_it(tmp_path: Path) -> None:
    trace = read_nsys(two_processes(tmp_path / "one.sqlite", gpu_of_second=0))
    assert np.unique(trace.work.device).tolist() == [0]
