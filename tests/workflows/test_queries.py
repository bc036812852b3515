"""SQL over a trace: right rows, one clear line for what is wrong, and no way out of the tables."""

import shutil
from pathlib import Path

import duckdb
import pytest

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workflows.queries import Limits, Queries
from synthetic_traces import Recipe, Truth, write_trace

REAL = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    return path, write_trace(path, Recipe(steps=3, kernels_per_step=5, copies=True))


def test_sums_of_the_real_trace(tmp_path: Path) -> None:
    source = tmp_path / "trace.json.gz"
    shutil.copy(REAL, source)
    answer = Queries(source).ask("select count(*) as n, sum(dur_ns) as ns from kernels where kind = 'kernel'")
    assert answer.columns == ("n", "ns")
    assert answer.rows == [(1711, 5_521_227)]
    labels = Queries(source).ask("select name, count(*) from ranges group by all order by 1").rows
    assert labels == [("decode", 1), ("decode_step", 8), ("prefill", 1), ("profile", 1)]


def test_kernels_join_their_launches(generated: tuple[Path, Truth]) -> None:
    source, truth = generated
    sql = """select count(*), min(k.start_ns - c.start_ns) from kernels k join calls c using (process, correlation)"""
    ((count, least),) = Queries(source).ask(sql).rows
    assert count == len(truth.work)
    assert least == min(start - launched for start, _, launched in truth.work)


def test_tables_are_listed(generated: tuple[Path, Truth]) -> None:
    source, truth = generated
    tables = {table.name: table for table in Queries(source).tables()}
    assert list(tables) == ["kernels", "calls", "ranges", "operators", "collectives", "gpu_metrics"]
    assert tables["kernels"].rows == len(truth.work)
    assert ("dur_ns", "BIGINT") in tables["kernels"].columns


def test_sql_lists_them_as_well(generated: tuple[Path, Truth]) -> None:
    queries = Queries(generated[0])
    assert {row[0] for row in queries.ask("show tables").rows} == {table.name for table in queries.tables()}


def test_the_limit_and_what_lies_beyond(generated: tuple[Path, Truth]) -> None:
    source, truth = generated
    limited = Queries(source).ask("select name from kernels", 3)
    assert (len(limited.rows), limited.more) == (3, True)
    whole = Queries(source).ask("select name from kernels", len(truth.work))
    assert (len(whole.rows), whole.more) == (len(truth.work), False)
    assert len(Queries(source).ask("select name from kernels").rows) == len(truth.work)


def test_columns_of_one_name_are_told_apart(generated: tuple[Path, Truth]) -> None:
    columns = Queries(generated[0]).ask("select 1 as a, 2 as a, 3 as a").columns
    assert len(set(columns)) == 3


@pytest.mark.parametrize(
    "sql",
    [
        "from KERNELS select count(*)",
        "with k as (select * from kernels) select count(*) from k",
        "describe kernels",
        "summarize calls",
        "explain select * from operators",
        "select count(*) from kernels -- with a remark",
        "values (1)",
    ],
)
def test_all_ways_of_asking(generated: tuple[Path, Truth], sql: str) -> None:
    assert Queries(generated[0]).ask(sql).rows


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "select * from read_blob('/etc/passwd')",
        "select * from read_parquet('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from glob('/etc/*')",
        "select * from sniff_csv('/etc/passwd')",
        "select * from read_csv('https://example.org/x.csv')",
        "select * from query('copy kernels to ''stolen.csv''')",
        "select * from sqlite_scan('/etc/passwd', 'x')",
        "copy kernels to 'stolen.csv'",
        "copy (select 1) to 'stolen.csv'",
        "explain analyze copy (select 1) to 'stolen.csv'",
        "export database 'stolen'",
        "import database 'stolen'",
        "attach 'stolen.db' as stolen",
        "install httpfs",
        "load httpfs",
        "pragma database_list",
        "pragma threads=1",
        "call pragma_version()",
        "set enable_external_access = true",
        "reset lock_configuration",
        "create table mine as select 1",
        "create secret (type s3)",
        "insert into kernels select * from kernels",
        "update kernels set name = ''",
        "delete from kernels",
        "drop table kernels",
        "alter table kernels drop name",
        "begin",
        "checkpoint",
        "prepare p as select 1",
        "use memory",
        "select 1; drop table kernels",
        "select * from generated",
        "select * from sql",
    ],
)
def test_nothing_but_the_tables_is_within_reach(
    generated: tuple[Path, Truth], sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Queries(generated[0]).ask(sql)
    assert "\n" not in caught.value.fact
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_the_lock_holds_after_a_query(generated: tuple[Path, Truth]) -> None:
    """Also where the check of statements would be passed by."""
    with Queries(generated[0]).isolated(["kernels"]) as connection:
        assert connection.execute("select count(*) from kernels").fetchall()
        for sql in ("set enable_external_access = true", "select * from read_csv('/etc/passwd')", "copy kernels to 'x'"):
            with pytest.raises(duckdb.Error):
                connection.execute(sql)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("selec 1", "syntax error"),
        ("select nope from kernels", "nope"),
        ("select * from kernel", "kernel"),
        ("select sum(name) from kernels", "sum"),
        ("", "found 0"),
        ("-- nothing", "found 0"),
        ("select 1; select 2", "found 2"),
        ("select 1 / 'x'", "x"),
    ],
)
def test_mistakes_are_told_in_one_line(generated: tuple[Path, Truth], sql: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Queries(generated[0]).ask(sql)
    assert words in caught.value.fact
    assert "\n" not in caught.value.fact
    assert caught.value.exit_code == 2


def test_sources_that_hold_no_trace(tmp_path: Path) -> None:
    for source, words, code in ((tmp_path / "none", "No such file", 2), (tmp_path, "not a run", 5)):
        with pytest.raises(LlmPerfError, match=words) as refused:
            Queries(source)
        assert refused.value.exit_code == code
    (tmp_path / "x.nsys-rep").write_bytes(b"x")
    with pytest.raises(ParseError, match="only nsys reads") as caught:
        Queries(tmp_path / "x.nsys-rep")
    assert "nsys export" in caught.value.remedy


def test_a_place_where_nothing_can_be_kept(generated: tuple[Path, Truth], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    source = generated[0].with_name("other.json")
    shutil.copy(generated[0], source)
    monkeypatch.setattr("llm_perf_opt.traces.trace_cache.write_tables", full)
    queries = Queries(source)
    assert isinstance(queries.opened.tables, Missing)
    assert "Read-only" in queries.opened.tables.why
    assert queries.ask("select count(*) from kernels").rows == [(len(generated[1].work),)]


def test_an_export_of_nsight_systems_is_asked_the_same_way(tmp_path: Path) -> None:
    pytest.importorskip("llm_perf_opt.traces.nsys_sqlite")
    source = tmp_path / "run.sqlite.gz"
    shutil.copy(REAL.with_name("nsys_decode.sqlite.gz"), source)
    queries = Queries(source)
    assert queries.ask("select count(*), sum(dur_ns) from kernels where kind = 'kernel'").rows == [(1528, 4_651_439)]
    assert queries.ask("select domain, name, count(*) from ranges group by all order by 3").rows == [
        ("LLM", "decode", 1),
        ("LLM", "decode_step", 8),
    ]


def test_tables_that_are_gone_meanwhile_are_asked_of_the_trace_itself(generated: tuple[Path, Truth]) -> None:
    queries = Queries(generated[0])
    assert not isinstance(queries.opened.tables, Missing)
    before = queries.ask("select count(*) from kernels").rows
    shutil.rmtree(queries.opened.tables)
    assert queries.ask("select count(*) from kernels").rows == before


ENDLESS = "select count(*) from kernels a, kernels b, kernels c, kernels d, kernels e, kernels f, kernels g, kernels h, kernels i"


@pytest.mark.parametrize(
    ("sql", "limits", "option"),
    [
        (ENDLESS, Limits(timeout_s=0.3), "--timeout"),
        ("select a.* from kernels a, kernels b, kernels c, kernels d", Limits(timeout_s=0.3), "--timeout"),
        ("select list(a.name) from kernels a, kernels b, kernels c, kernels d, kernels e", Limits(60, 100 * 10**6), "--memory"),
        ("select a.name, b.name from kernels a, kernels b, kernels c, kernels d", Limits(60, 20 * 10**6), "--memory"),
        ("select repeat(name, 1000000) from kernels", Limits(60, 50 * 10**6), "--memory"),
        ("select * from kernels", Limits(60, 1000), "--memory"),
    ],
)
def test_a_query_beyond_its_limits_is_stopped(sql: str, limits: Limits, option: str, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", Recipe(steps=10, kernels_per_step=20))
    with pytest.raises(ResourceError) as stopped:
        Queries(tmp_path / "trace.json").ask(sql, limits=limits)
    assert option in stopped.value.remedy
    assert "\n" not in str(stopped.value.fact)


def test_rows_are_fetched_in_pieces_of_a_bounded_size(generated: tuple[Path, Truth]) -> None:
    answer = Queries(generated[0]).ask("select repeat('x', 1000000) from range(30)", limits=Limits(60, 200 * 10**6))
    assert [len(row[0]) for row in answer.rows] == [1_000_000] * 30
    assert len(Queries(generated[0]).ask("select * from range(100000)").rows) == 100_000
