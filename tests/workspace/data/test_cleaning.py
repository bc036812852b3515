"""Cleaned texts: one form, nothing empty, nothing twice, everything else unchanged."""

import json
from pathlib import Path

import pytest

from dataset_builders import added, read_jsonl, write_jsonl
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.workspace.data import cleaning
from llm_perf_opt.workspace.data.checking import check_dataset
from llm_perf_opt.workspace.data.cleaning import Seen, clean_text
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("e\u0301", "é"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x00b\x1b[31mc\ufeff\x85", "ab[31mc"),
        ("  a \t\n b  \n", "a\n b"),
        ("a\n\n\n\nb", "a\n\nb"),
        ("a\tb", "a\tb"),
        (" \n\t ", ""),
        (f"a{' ' * 300_000}b", f"a{' ' * 300_000}b"),
        ("\u200bمرحبا", "\u200bمرحبا"),
    ],
)
def test_the_rules(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned
    assert clean_text(cleaned) == cleaned


def test_records_keep_their_fields_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    records = [{"id": 1, "text": "a "}, {"id": 2, "text": "a"}, {"id": 3, "text": " "}, {"id": 4, "text": "b", "tags": ["x"]}]
    write_jsonl(tmp_path / "s" / "train.jsonl", records)
    write_jsonl(tmp_path / "s" / "test.jsonl", [{"id": 5, "text": "c"}, {"id": 6}])
    folder, _ = added(tmp_path, tmp_path / "s")
    made = prepare(folder, Preparation("cleaned", skip_bad=True))
    data = folder.variant("cleaned").data
    assert read_jsonl(data / "train.jsonl") == [{"id": 1, "text": "a"}, {"id": 4, "text": "b", "tags": ["x"]}]
    assert read_jsonl(data / "test.jsonl") == [{"id": 5, "text": "c"}]
    assert (made.transform, made.splits, made.size.records) == ("cleaned", {"train": 2, "test": 1}, 3)
    assert made.left_out == {"empty": 1, "duplicate": 1}
    assert made.skipped.count == 1
    assert made.arguments["text_field"] == "text"
    assert made.arguments["rules"]


def test_lines_of_text_are_cleaned_as_lines(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.txt").write_bytes(b"one \none\ntwo\x07\n")
    folder, _ = added(tmp_path, tmp_path / "s")
    assert prepare(folder, Preparation("cleaned")).format == "txt"
    assert (folder.variant("cleaned").data / "a.txt").read_bytes() == b"one\ntwo\n"


def test_a_record_of_a_text_file_stays_one_record(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.txt").write_bytes(b"one\rtwo\r\rthree\r\none two three\n")
    folder, _ = added(tmp_path, tmp_path / "s")
    made = prepare(folder, Preparation("cleaned"))
    assert (folder.variant("cleaned").data / "a.txt").read_bytes() == b"one two three\n"
    assert (made.size.records, made.left_out) == (1, {"empty": 0, "duplicate": 1})
    assert check_dataset(folder, tmp_path / "conf") == []


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": " "}])
    folder, _ = added(tmp_path, tmp_path / "s")
    with pytest.raises(ResourceError, match="1 were left out"):
        prepare(folder, Preparation("cleaned"))


def test_a_text_is_known_again_after_any_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "_HELD", 7)
    seen = Seen()
    assert all(seen.add(str(number)) for number in range(100))
    assert not any(seen.add(str(number)) for number in range(100))
    assert seen.add("new")


def test_rows_of_a_table_become_lines(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": "a ", "n": 1.5}, {"text": "a", "n": None}])
    folder, _ = added(tmp_path, tmp_path / "s")
    prepare(folder, Preparation("parquet"))
    prepare(folder, Preparation("cleaned", parent="parquet"))
    assert (folder.variant("cleaned").data / "a.jsonl").read_text() == json.dumps(
        {"text": "a", "n": 1.5}, separators=(",", ":")
    ) + "\n"
