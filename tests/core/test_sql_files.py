"""A file name in SQL refers to that file only, whatever characters it has."""

from pathlib import Path

import duckdb
import pytest

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import AS_WRITTEN, literal, parquet_rows, pattern_of

NAMES = [
    *("d[1].parquet", "d1.parquet", "d*.parquet", "dd.parquet", "d?.parquet", "[!a].parquet", "[^a].parquet", "b.parquet"),
    *("a]b.parquet", "a[b.parquet", ".h[1].parquet", "it's[.parquet", "é[1].parquet", "{a,b}.parquet", "[a-z].parquet"),
    *("[]].parquet", "a**b.parquet", "new\nline[1].parquet", "c\\d.parquet", "lang=en/d.parquet", "lang=[1]/q*/d.parquet"),
    *("lang=1/q/d.parquet", "**/d.parquet", "~/d.parquet", "~/[d].parquet"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with all these names in one folder, each with its own number."""
    found = tmp_path_factory.mktemp("names=0")
    for number, name in enumerate(NAMES):
        file = found / name
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = found.parent / "made"
        duckdb.sql(f"COPY (SELECT {number} AS number, 'de' AS lang) TO {literal(str(beside))} (FORMAT parquet)")
        beside.rename(file)
        file.with_suffix(".jsonl").write_text(f'{{"number": {number}, "lang": "de"}}\n')
    return found


@pytest.mark.parametrize("name", NAMES)
def test_one_file_is_read_and_nothing_of_its_name(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(NAMES.index(name), "de")]
    monkeypatch.chdir(folder)
    for path in (folder / name, Path(name)):
        assert duckdb.execute(f"SELECT * FROM {parquet_rows(path)}").fetchall() == expected
        footer = "SELECT file_name, num_rows FROM parquet_file_metadata(?)"
        assert duckdb.execute(footer, [pattern_of(path)]).fetchall() == [(str(folder / name), 1)]
        lines = literal(pattern_of(path.with_suffix(".jsonl")))
        assert duckdb.execute(f"SELECT number, lang FROM read_json({lines}, {AS_WRITTEN})").fetchall() == expected


def test_a_link_to_a_folder_is_followed(folder: Path) -> None:
    link = folder.parent / "link[1]"
    if not link.is_symlink():
        link.symlink_to(folder)
    assert duckdb.execute(f"SELECT number FROM {parquet_rows(link / 'dd.parquet')}").fetchall() == [(NAMES.index("dd.parquet"),)]


def test_a_name_that_no_pattern_can_spell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="backslash") as caught:
        pattern_of(tmp_path / "c\\d[1].parquet")
    assert "Rename" in caught.value.remedy
