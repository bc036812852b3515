"""Variants: their content, reproducibility, and an untouched source."""

import gzip
import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builders import RECORDS, added, everything_below, read_jsonl, small_source, write_jsonl
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.workspace.data import lines as lines_module
from llm_perf_opt.workspace.data import parquet_files, record_streams
from llm_perf_opt.workspace.data.inventory import VariantMetadata
from llm_perf_opt.workspace.data.layout import DatasetFolder
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare
from llm_perf_opt.workspace.data.prompts import open_entry

SAVED_BY_DATASETS = Path(__file__).parents[2] / "fixtures" / "datasets" / "hf_saved"


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    return added(tmp_path, small_source(tmp_path / "source"))[0]


def made(folder: DatasetFolder, **asked: Any) -> tuple[Path, VariantMetadata]:
    asked.setdefault("variant", "v")
    metadata = prepare(folder, Preparation(**asked))
    return folder.variant(asked["variant"]).data, metadata


# --- subsets ----------------------------------------------------------------------------------------------------------


def test_a_subset_holds_lines_of_the_source_as_they_stand_in_their_order(folder: DatasetFolder) -> None:
    data, metadata = made(folder, num_samples=20, seed=3)
    lines = (data / "samples.jsonl").read_bytes().splitlines()
    source = b"".join((folder.source / name).read_bytes() for name in ("test.jsonl", "train.jsonl")).splitlines()
    assert len(lines) == 20
    places = [source.index(line) for line in lines]
    assert places == sorted(set(places))
    assert (metadata.transform, metadata.parent, metadata.size.records) == ("subset", "source-data", 20)
    assert metadata.arguments == {"num_samples": 20, "seed": 3, "split": None, "skip_bad": False}


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(folder: DatasetFolder) -> None:
    first, one = made(folder, num_samples=20, seed=3, variant="a")
    again, two = made(folder, num_samples=20, seed=3, variant="b")
    other, three = made(folder, num_samples=20, seed=4, variant="c")
    assert everything_below(first) == everything_below(again)
    assert one.content_sha256 == two.content_sha256 != three.content_sha256
    assert everything_below(first) != everything_below(other)


def test_every_format_gives_the_same_sample(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", RECORDS).parent)
    for target in ("parquet", "txt"):
        made(folder, variant=target, to=target)
    chosen = [record["text"] for record in read_jsonl(made(folder, num_samples=9)[0] / "samples.jsonl")]
    of_rows = read_jsonl(made(folder, num_samples=9, parent="parquet", variant="p")[0] / "samples.jsonl")
    of_texts = (made(folder, num_samples=9, parent="txt", variant="t")[0] / "samples.txt").read_text().splitlines()
    assert chosen == [record["text"] for record in of_rows] == of_texts


def test_one_split_alone(folder: DatasetFolder) -> None:
    data, _ = made(folder, num_samples=5, split="test")
    assert read_jsonl(data / "samples.jsonl") == RECORDS[-5:]
    with pytest.raises(ConfigError, match=r"no split 'tset'\. Did you mean 'test'"):
        made(folder, num_samples=5, split="tset", variant="w")


def test_more_samples_than_records_are_refused_with_how_many_there_are(folder: DatasetFolder) -> None:
    with pytest.raises(ResourceError, match="51 samples were requested, but there are 50") as caught:
        made(folder, num_samples=51)
    assert "--num-samples 50" in caught.value.remedy
    assert folder.variants() == ()


# --- token ids --------------------------------------------------------------------------------------------------------


def test_bytes_are_ids_and_the_index_says_where_each_text_begins(folder: DatasetFolder) -> None:
    data, metadata = made(folder, tokenizer="bytes")
    assert sorted(path.name for path in data.iterdir()) == ["test.bin", "test.idx", "train.bin", "train.idx"]
    ids, index = np.fromfile(data / "train.bin", "<u2"), np.fromfile(data / "train.idx", "<u8")
    texts = [bytes(ids[start:end].tolist()).decode() for start, end in itertools.pairwise(index)]
    assert texts == [record["text"] for record in RECORDS[:-5]]
    assert (metadata.arguments["vocabulary"], metadata.arguments["id_bytes"]) == (256, 2)
    entry = open_entry(str(folder.path), "v", "text")
    assert [bytes(sequence).decode() for sequence in entry.sequences()][:5] == [record["text"] for record in RECORDS[-5:]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer, with a token before every text and a truncation that must not apply here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    trained: Any = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([str(record["text"]) for record in RECORDS], trainer)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_from_a_folder_gives_what_it_gives_alone(folder: DatasetFolder, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    data, metadata = made(folder, tokenizer=str(tokenizer), split="test")
    alone: Any = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    alone.no_truncation()
    alone.no_padding()
    ids, index = np.fromfile(data / "test.bin", "<u2"), np.fromfile(data / "test.idx", "<u8")
    for number, record in enumerate(RECORDS[-5:]):
        assert ids[index[number] : index[number + 1]].tolist() == alone.encode(record["text"]).ids
    assert metadata.arguments["tokenizer_sha256"]
    assert "tokenizers" in metadata.tool


def test_blank_lines_are_no_records_and_change_no_sample(tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in RECORDS]
    chosen = []
    for name, gap in (("plain", "\n"), ("blank", "\n\n")):
        source = tmp_path / name / "s" / "a.jsonl"
        source.parent.mkdir(parents=True)
        source.write_text(gap.join(lines) + "\n")
        folder, _ = added(tmp_path / name, source.parent)
        chosen.append(read_jsonl(made(folder, num_samples=9)[0] / "samples.jsonl"))
        made(folder, to="parquet", variant="rows")
        chosen.append(read_jsonl(made(folder, parent="rows", num_samples=9, variant="p")[0] / "samples.jsonl"))
    assert chosen[1:] == chosen[:1] * 3


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\ud83d and more"])
def test_half_of_a_surrogate_pair_is_called_that(tmp_path: Path, half: str) -> None:
    source = tmp_path / "s" / "a.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "a' + half + '"}\n')
    folder, _ = added(tmp_path, source.parent)
    with pytest.raises(ParseError, match=r"line 2: not a JSON object \(it contains an unpaired surrogate"):
        made(folder, num_samples=1)


def test_a_field_given_twice_is_said_so_where_it_cannot_be_a_column(tmp_path: Path) -> None:
    source = tmp_path / "s" / "a.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "first", "text": "second"}\n')
    folder, _ = added(tmp_path, source.parent)
    with pytest.raises(ParseError, match='duplicate key "text"') as caught:
        made(folder, to="parquet")
    assert "--skip-bad does not help" in caught.value.remedy
    assert "damaged" not in caught.value.remedy


def test_only_ends_of_lines_are_joined(tmp_path: Path) -> None:
    texts = ["a\u2028b\x0cc\x85d\x1ce", "one\r\ntwo\nthree\n", "end\r", "mid\rdle"]
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": text} for text in texts]).parent)
    data, _ = made(folder, to="txt", join_lines=True)
    read = (data / "a.txt").read_bytes().decode().split("\n")
    assert read == [texts[0], "one two three", "end", "mid\rdle", ""]


def gapped(folder: Path, vocabulary: dict[str, int], added: int | None = None) -> Path:
    """A tokenizer of words; `added`: the id of a token its template puts first, which the vocabulary does not have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if added is not None:
        words.post_processor = processors.TemplateProcessing(single="[X] $A", special_tokens=[("[X]", added)])
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_are_as_wide_as_the_highest_however_few_there_are(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": "a b"}, {"text": "b"}]).parent)
    words = gapped(tmp_path / "words", {"[UNK]": 0, "a": 1, "b": 70001})
    data, metadata = made(folder, tokenizer=str(words))
    assert np.fromfile(data / "all.bin", "<u4").tolist() == [1, 70001, 70001]
    assert metadata.arguments["vocabulary"] == 70002


def test_an_id_beyond_the_vocabulary_is_refused_and_never_cut(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": "a"}]).parent)
    with pytest.raises(ParseError, match="the id 70001, but its vocabulary ends at 1"):
        made(folder, tokenizer=str(gapped(tmp_path / "words", {"[UNK]": 0, "a": 1}, added=70001)))


def test_what_is_no_tokenizer_is_said_so(folder: DatasetFolder, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"there is no tokenizer\.json"):
        made(folder, tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ParseError, match="is not a tokenizer"):
        made(folder, tokenizer=str(tmp_path))
    made(folder, tokenizer="bytes")
    with pytest.raises(ConfigError, match="token ids"):
        made(folder, parent="v", num_samples=1, variant="w")


def test_an_index_that_disagrees_is_called_that(folder: DatasetFolder) -> None:
    data, _ = made(folder, tokenizer="bytes")
    os.truncate(data / "test.bin", 10)
    with pytest.raises(ParseError, match="disagree"):
        list(open_entry(str(folder.path), "v", "text").sequences())


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_there_and_back_again(folder: DatasetFolder) -> None:
    parquet, metadata = made(folder, to="parquet", variant="p")
    assert metadata.splits == {"test": 5, "train": 45}
    assert parquet_files.columns_of(parquet / "train.parquet") == {"text": "VARCHAR", "id": "BIGINT", "tags": "VARCHAR[]"}
    back, _ = made(folder, to="jsonl", parent="p", variant="j")
    for name in ("train.jsonl", "test.jsonl"):
        assert read_jsonl(back / name) == read_jsonl(folder.source / name)
    text, _ = made(folder, to="txt", parent="p", variant="t")
    assert (text / "test.txt").read_text().splitlines() == [record["text"] for record in RECORDS[-5:]]
    rows, _ = made(folder, to="parquet", parent="t", variant="tp")
    assert parquet_files.columns_of(rows / "test.parquet") == {"text": "VARCHAR"}
    lines, _ = made(folder, to="jsonl", parent="t", variant="tj")
    assert read_jsonl(lines / "test.jsonl") == [{"text": record["text"]} for record in RECORDS[-5:]]


@pytest.mark.parametrize("asked", [{"to": "parquet"}, {"to": "txt"}, {"tokenizer": "bytes"}])
def test_every_transform_gives_the_same_bytes_again(folder: DatasetFolder, asked: dict[str, Any]) -> None:
    first, _ = made(folder, variant="a", **asked)
    again, _ = made(folder, variant="b", **asked)
    assert everything_below(first) == everything_below(again)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=6))
def test_any_records_keep_their_values_in_parquet(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    project = tmp_path_factory.mktemp("any")
    records = [{**record, "text": "t"} for record in records]
    write_jsonl(project / "s" / "a.jsonl", records)
    folder, _ = added(project, project / "s")
    try:
        made(folder, to="parquet", variant="p")
    except ConfigError as refused:
        if "has the fields" not in refused.fact:
            raise
        return  # two names that are one column to a database
    back, _ = made(folder, to="jsonl", parent="p", variant="j")
    for before, after in zip(records, read_jsonl(back / "a.jsonl"), strict=True):
        assert without_nulls(after) == without_nulls(before)


def without_nulls(value: Any) -> Any:
    """A field that is missing and one that is null are one in a table."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def test_texts_are_not_taken_for_something_else(tmp_path: Path) -> None:
    odd = [
        "2024-01-01",
        "2024-01-01T00:00:00Z",
        "6F9619FF-8B86-D011-B42D-00CF4FC964FF",
        "1",
        "true",
        "null",
        "{}",
        "",
        "01:02:03",
    ]
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": text} for text in odd]).parent)
    made(folder, to="parquet", variant="p")
    back, _ = made(folder, to="jsonl", parent="p", variant="j")
    assert [record["text"] for record in read_jsonl(back / "a.jsonl")] == odd


def test_what_json_cannot_hold_becomes_null(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    duckdb.sql(f"COPY (SELECT 'a' AS text, 'nan'::DOUBLE AS score) TO '{tmp_path}/s/a.parquet'")
    folder, _ = added(tmp_path, tmp_path / "s")
    data, _ = made(folder, to="jsonl")
    assert read_jsonl(data / "a.jsonl") == [{"text": "a", "score": None}]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"", "is truncated"), (b"\0" * 12, "is truncated"), (np.array([1, 3, 5], "<u8").tobytes(), "starts at 1"),
        (np.array([0, 4, 2, 5], "<u8").tobytes(), "decreases"), (np.array([0, 4], "<u8").tobytes(), "disagree"),
    ],
)  # fmt: skip
def test_an_index_that_is_damaged_is_called_that(tmp_path: Path, index: bytes, words: str) -> None:
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": "abc"}, {"text": "de"}]).parent)
    data, _ = made(folder, tokenizer="bytes")
    entry = open_entry(str(folder.path), "v", "text")
    assert [len(ids) for ids in entry.sequences()] == [3, 2]
    (data / "all.idx").write_bytes(index)
    with pytest.raises(ParseError, match=words):
        list(entry.sequences())


NESTED = """
    SELECT 'a' AS text, [1.0::DOUBLE, 'nan', NULL] AS scores,
        {'x': '-inf'::FLOAT, 'y y': [{'z': 'nan'::DOUBLE, 'k': 2}, NULL]} AS deep,
        MAP {'m': 'inf'::DOUBLE, 'n': 2.5} AS named,
        [[['nan'::DOUBLE], NULL, [0.5]]] AS lists, [1, 2] AS whole, 1.5::DOUBLE AS plain
    UNION ALL SELECT 'b', NULL, NULL, NULL, NULL, NULL, NULL
    UNION ALL SELECT 'c', [], {'x': NULL, 'y y': []}, MAP {}, [NULL], [], 0
"""
NESTED_AS_JSON = [
    {
        "text": "a", "scores": [1.0, None, None], "deep": {"x": None, "y y": [{"z": None, "k": 2}, None]},
        "named": {"m": None, "n": 2.5}, "lists": [[[None], None, [0.5]]], "whole": [1, 2], "plain": 1.5,
    },
    {"text": "b", "scores": None, "deep": None, "named": None, "lists": None, "whole": None, "plain": None},
    {"text": "c", "scores": [], "deep": {"x": None, "y y": []}, "named": {}, "lists": [None], "whole": [], "plain": 0.0},
]  # fmt: skip


@pytest.mark.parametrize(("asked", "name"), [({"to": "jsonl"}, "a.jsonl"), ({"num_samples": 3}, "samples.jsonl")])
def test_what_json_cannot_hold_becomes_null_however_deep_it_lies(tmp_path: Path, asked: dict[str, Any], name: str) -> None:
    (tmp_path / "s").mkdir()
    duckdb.sql(f"COPY ({NESTED}) TO '{tmp_path}/s/a.parquet'")
    folder, _ = added(tmp_path, tmp_path / "s")
    data, _ = made(folder, **asked)
    assert [msgspec.json.decode(line) for line in (data / name).read_bytes().splitlines()] == NESTED_AS_JSON


def test_a_row_that_makes_no_good_line_is_refused_with_a_way_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    rows = "SELECT * FROM (VALUES ('short'), (repeat('long', 100)), ('last')) AS t(text)"
    duckdb.sql(f"COPY ({rows}) TO '{tmp_path}/s/a.parquet'")
    folder, _ = added(tmp_path, tmp_path / "s")
    for module in (lines_module, record_streams):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 64)
    with pytest.raises(ParseError, match="line 2: longer than") as of_subset:
        made(folder, num_samples=3)
    assert "--to jsonl --skip-bad" in of_subset.value.remedy
    assert "--from" in of_subset.value.remedy
    with pytest.raises(ParseError, match="line 2: longer than") as of_conversion:
        made(folder, to="jsonl")
    assert "--skip-bad" in of_conversion.value.remedy
    data, metadata = made(folder, to="jsonl", skip_bad=True, variant="good")
    assert read_jsonl(data / "a.jsonl") == [{"text": "short"}, {"text": "last"}]
    assert sorted(path.name for path in data.iterdir()) == ["a.jsonl"]
    assert (metadata.size.records, metadata.skipped.count) == (2, 1)
    assert made(folder, num_samples=2, parent="good")[1].size.records == 2


def test_several_lines_in_a_text_are_joined_only_when_asked(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": "one\ntwo\r\nthree"}]).parent)
    with pytest.raises(ConfigError, match="record 1 has several lines") as caught:
        made(folder, to="txt")
    assert "--join-lines" in caught.value.remedy
    assert (made(folder, to="txt", join_lines=True)[0] / "a.txt").read_text() == "one two three\n"


def test_a_conversion_to_the_same_format_or_the_same_name_is_refused(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", RECORDS).parent)
    with pytest.raises(ConfigError, match="already jsonl"):
        made(folder, to="jsonl")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    write_jsonl(tmp_path / "t" / "a.jsonl", RECORDS)
    other, _ = added(tmp_path, tmp_path / "t", "other")
    with pytest.raises(ConfigError, match=r"would both become a\.parquet"):
        made(other, to="parquet")


def test_a_gzipped_source_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain))
    folder, metadata = added(tmp_path, tmp_path / "s")
    assert metadata.size.records == 50
    data, _ = made(folder, to="jsonl")
    assert read_jsonl(data / "a.jsonl") == RECORDS
    rows, _ = made(folder, to="parquet", variant="p")
    assert parquet_files.count_rows(rows / "a.parquet") == 50


@pytest.mark.slow
def test_records_longer_than_the_databases_usual_memory_are_converted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(1)
    long = [
        {"text": draw.randbytes(1_000_000).hex()} for _ in range(60)
    ]  # several copies of 120 MB, against 256 MB for short records
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", long).parent)
    rows, _ = made(folder, to="parquet", variant="p")
    assert parquet_files.count_rows(rows / "a.parquet") == 60
    back, _ = made(folder, to="jsonl", parent="p", variant="j")
    assert read_jsonl(back / "a.jsonl") == long
    assert capfd.readouterr() == ("", ""), "the database prints nothing of its own"


# --- what Hugging Face datasets saved ---------------------------------------------------------------------------------


def test_a_folder_saved_by_datasets_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder, metadata = added(tmp_path, SAVED_BY_DATASETS)
    assert (metadata.format, metadata.splits) == ("arrow", {"test": 2, "train": 7})
    data, _ = made(folder, num_samples=9)
    expected = [{"text": "one", "id": 0}, {"text": "two\nlines", "id": 1}]
    assert read_jsonl(data / "samples.jsonl") == expected + [{"text": f"text number {n} – ü", "id": n} for n in range(7)]
    rows, _ = made(folder, to="parquet", variant="p")
    assert [path.relative_to(rows).as_posix() for path in sorted(rows.rglob("*.parquet"))] == [
        "test/data-00000-of-00001.parquet",
        "train/data-00000-of-00001.parquet",
    ]
    assert next(open_entry(str(folder.path), None, "text").texts()) == "one"
    with pytest.raises(ConfigError, match=r"no column 'txt'\. Did you mean 'text'"):
        made(folder, tokenizer="bytes", text_field="txt", variant="t")


@pytest.mark.parametrize("way", [{"num_samples": 3}, {"to": "parquet"}, {"to": "jsonl"}])
def test_a_text_field_that_is_not_there_is_never_written_into_metadata(folder: DatasetFolder, way: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no text in the field 'nope'"):
        made(folder, text_field="nope", **way)
    assert folder.variants() == ()


def test_a_run_reads_the_field_its_variant_was_made_with_unless_another_is_named(tmp_path: Path) -> None:
    records = [{"text": f"question {n}", "answer": f"answer {n}", "id": str(n)} for n in range(5)]
    folder, _ = added(tmp_path, write_jsonl(tmp_path / "s" / "a.jsonl", records).parent)
    made(folder, num_samples=5, text_field="answer")
    assert next(open_entry(str(folder.path), "v", "text").texts()) == "answer 0"
    assert next(open_entry(str(folder.path), "v", "id").texts()) == "0"
    assert next(open_entry(str(folder.path), None, "text").texts()) == "question 0"


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ResourceError, match="needs pyarrow, which is not installed") as caught:
        added(tmp_path, SAVED_BY_DATASETS)
    assert "llm-perf-opt[datasets]" in caught.value.remedy


# --- bad records ------------------------------------------------------------------------------------------------------

BAD_LINES = {
    "no JSON": b"hello",
    "no object": b"[1]",
    "cut short": b'{"text": "a',
    "no UTF-8": b'{"text": "\xff"}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "nested without end": b'{"text":' + b"[" * 100_000,
    "not a number": b'{"text": NaN}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
@pytest.mark.parametrize("asked", [{"num_samples": 2}, {"tokenizer": "bytes"}, {"to": "parquet"}, {"to": "txt"}], ids=str)
def test_a_bad_line_is_an_error_with_its_number_or_counted(tmp_path: Path, line: bytes, asked: dict[str, Any]) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    folder, _ = added(tmp_path, tmp_path / "s")
    with pytest.raises(ParseError, match=r"a\.jsonl, line 3: not ") as caught:
        made(folder, **asked)
    assert "--skip-bad" in caught.value.remedy
    assert folder.variants() == ()
    _, metadata = made(folder, skip_bad=True, **asked)
    assert metadata.size.records == 2
    assert metadata.skipped.count == 1
    assert metadata.skipped.first[0].startswith("a.jsonl, line 3: not ")


def test_a_line_too_long_and_a_record_without_text_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"x" * 60 + b'"}\n{"id": 1}\n')
    folder, _ = added(tmp_path, tmp_path / "s")
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 7)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 40)
    _, metadata = made(folder, skip_bad=True, tokenizer="bytes")
    assert (metadata.size.records, metadata.skipped.count) == (1, 2)
    assert "line 2: longer than" in metadata.skipped.first[0]
    assert "line 3: no text in the field 'text' (it has: id)" in metadata.skipped.first[1]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt.gz"])
@pytest.mark.slow
def test_any_damaged_file_gives_a_variant_or_an_error_of_ours(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(5)
    write_jsonl(tmp_path / "s.jsonl", RECORDS)
    duckdb.sql(f"COPY (FROM '{tmp_path}/s.jsonl') TO '{tmp_path}/s.parquet'")
    (tmp_path / "s.txt.gz").write_bytes(gzip.compress((tmp_path / "s.jsonl").read_bytes()))
    good = (tmp_path / f"s.{suffix}").read_bytes()
    for number in range(25):
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(damaged))
            damaged[place : place + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 5))
        source = tmp_path / f"d{number}"
        source.mkdir()
        (source / f"a.{suffix}").write_bytes(damaged)
        try:
            folder, _ = added(tmp_path, source, f"d{number}")
            made(folder, tokenizer="bytes", skip_bad=True)
        except LlmPerfError:
            assert not (tmp_path / "datasets" / f"d{number}" / "v").exists()


# --- the source, and what happens when it ends early ------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    source = small_source(tmp_path / "source")
    for path in (source / "train.jsonl", source / "test.jsonl", source / "LICENSE.txt", source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield source
    source.chmod(0o755)


def test_the_source_is_never_written(tmp_path: Path, read_only: Path) -> None:
    before = everything_below(read_only), {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    folder, _ = added(tmp_path, read_only)
    every: list[dict[str, Any]] = [{"num_samples": 3}, {"tokenizer": "bytes"}, {"to": "parquet"}, {"to": "txt"}]
    for number, asked in enumerate(every):
        made(folder, variant=f"v{number}", **asked)
    assert before == (everything_below(read_only), {path: path.stat().st_mtime_ns for path in read_only.rglob("*")})


@pytest.mark.parametrize("asked", [{"num_samples": 2}, {"tokenizer": "bytes"}, {"to": "parquet"}], ids=str)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupt_at_any_moment_leaves_nothing(folder: DatasetFolder, asked: dict[str, Any], after: int) -> None:
    calls = 0

    def phases(name: str, total: int) -> Any:
        def advance(_: int) -> None:
            nonlocal calls
            calls += 1
            if calls == after * 2:
                raise KeyboardInterrupt

        return advance

    before = sorted(path.name for path in folder.path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, Preparation("v", **asked), phases)
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_a_changed_source_is_not_passed_off_as_the_old_one(folder: DatasetFolder) -> None:
    path = folder.source / "train.jsonl"
    path.write_bytes(path.read_bytes().replace(b"text 1 ", b"text 9 "))
    with pytest.raises(ResourceError, match="has changed since") as caught:
        made(folder, num_samples=2)
    assert "dataset check mine" in caught.value.remedy


def test_nothing_is_overwritten(folder: DatasetFolder) -> None:
    data, _ = made(folder, num_samples=2)
    before = everything_below(data)
    with pytest.raises(ConfigError, match="already exists"):
        made(folder, num_samples=3)
    assert everything_below(data) == before


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "no transform is given"),
        ({"num_samples": 1, "to": "txt"}, "--num-samples and --to are given"),
        ({"num_samples": 0}, "must be 1 or more"),
        ({"num_samples": 1, "seed": -1}, "out of range"),
        ({"to": "parket"}, "Did you mean 'parquet'"),
        ({"to": "parquet", "join_lines": True}, "has no effect"),
        ({"num_samples": 1, "variant": "../x"}, "cannot name a variant"),
        ({"num_samples": 1, "variant": "/abs"}, "cannot name a variant"),
    ],
)
def test_a_wrong_request_is_refused(folder: DatasetFolder, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(folder, **asked)
    assert said in caught.value.fact
    assert folder.variants() == ()


def test_the_metadata_say_everything_needed_to_repeat_it(folder: DatasetFolder) -> None:
    made(folder, num_samples=2, seed=8)
    written = yaml.safe_load((folder.path / "v" / "metadata.yaml").read_text())
    dataset = yaml.safe_load(folder.metadata_file.read_text())
    assert written["parent_sha256"] == dataset["content_sha256"]
    assert written["tool"]["llm-perf-opt"]
    assert written["files"]["samples.jsonl"]["bytes"] == (folder.path / "v" / "data" / "samples.jsonl").stat().st_size
    assert msgspec.convert(written, VariantMetadata).arguments["seed"] == 8


@pytest.mark.parametrize("way", [{"num_samples": 1}, {"to": "txt"}, {"tokenizer": "bytes"}])
def test_a_variant_of_nothing_is_refused(tmp_path: Path, way: dict[str, Any]) -> None:
    write_jsonl(tmp_path / "s" / "train.jsonl", [{"text": "x"}])
    write_jsonl(tmp_path / "s" / "test.jsonl", [[1], "no object"])
    folder, _ = added(tmp_path, tmp_path / "s")
    with pytest.raises(ResourceError, match=r"No records are left for a variant: 2 were|There are no records to sample"):
        made(folder, split="test", skip_bad=True, **way)
    assert folder.variants() == ()


@pytest.mark.parametrize(
    ("free_mb", "held_mb", "limit_mb"), [(10**6, 0, 256), (10**6, 100, 1856), (1000, 100, 800), (0, 100, 256)]
)
def test_the_database_gets_what_long_records_need_and_no_more_than_is_free(
    monkeypatch: pytest.MonkeyPatch, free_mb: int, held_mb: int, limit_mb: int
) -> None:
    monkeypatch.setattr(parquet_files, "available_memory_bytes", lambda: free_mb * 10**6)
    with parquet_files.database(held_bytes=held_mb * 1e6) as connection:
        (said,) = connection.execute("SELECT current_setting('memory_limit')").fetchone() or ("",)
    number, unit = said.split()
    found = float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]
    assert found == pytest.approx(limit_mb * 1e6, rel=0.06), said
