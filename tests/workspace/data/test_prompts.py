"""Token ids of prompts: reproducible, exact in length, with clear errors for a file without text."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import default_config, with_value
from dataset_builders import added, small_source
from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.records import TextUse
from llm_perf_opt.workspace.data import prompts as prompts_module
from llm_perf_opt.workspace.data.inventory import DatasetMetadata, read_metadata
from llm_perf_opt.workspace.data.prompts import Prompts, synthetic_prompts, text_prompts


def dataset(path: Path | str | None, **changes: Any) -> DatasetConfig:
    config = with_value(default_config(), "dataset.kind", "prompts")
    for key, value in {"name": "mine", "path": None if path is None else str(path), **changes}.items():
        config = with_value(config, f"dataset.{key}", value)
    return config.dataset


def letters(text: str) -> list[int]:
    """A tokenizer to the eye: a is 1, b is 2."""
    return [ord(letter) - ord("a") + 1 for letter in text if letter.isalpha()]


# --- made ids ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 1000), st.integers(0, 2**63 - 1))
def test_made_ids_have_the_shape_and_the_vocabulary_asked_for(batch: int, length: int, vocabulary: int, seed: int) -> None:
    made = synthetic_prompts(batch, length, vocabulary, seed)
    assert made.lengths == (length,) * batch
    assert all(0 <= token < vocabulary for sequence in made.ids for token in sequence)
    assert made == synthetic_prompts(batch, length, vocabulary, seed)
    assert f"seed {seed}" in made.source


def test_another_seed_gives_other_ids() -> None:
    assert synthetic_prompts(2, 64, 8192, 0).ids != synthetic_prompts(2, 64, 8192, 1).ids


def test_the_sequences_of_a_batch_differ() -> None:
    first, second = synthetic_prompts(2, 64, 8192, 0).ids
    assert first != second


def test_made_ids_are_uniform() -> None:
    counts = Counter(synthetic_prompts(1, 40_000, 4, 0).ids[0])
    # 10,000 of each expected; the standard deviation is √(40,000 · ¼ · ¾) ≈ 87, so ±500 is almost six of them
    assert all(abs(counts[token] - 10_000) < 500 for token in range(4))


def test_ids_are_known_by_their_hash() -> None:
    one = Prompts(((1, 2), (3,)), "here")
    assert one.sha256() == Prompts(((1, 2), (3,)), "there").sha256(), "where they came from does not matter"
    assert one.sha256() != Prompts(((1,), (2, 3)), "here").sha256(), "where a sequence ends does"


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_are_cut_to_the_longest_allowed(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abcdef\n\n  ab  \nabc\n")
    found = text_prompts(dataset(tmp_path / "p.txt"), 3, 4, 100, letters)
    assert found.ids == ((1, 2, 3, 4), (1, 2), (1, 2, 3)), "an empty line is no prompt"
    assert found.lengths == (4, 2, 3)


def test_only_as_many_texts_are_read_as_the_batch_holds(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot JSON\n')
    assert text_prompts(dataset(tmp_path / "p.jsonl"), 2, 10, 100, letters).ids == ((1,), (2,))


def test_too_few_texts_are_repeated_in_turn_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    found = text_prompts(dataset(tmp_path / "p.txt"), 5, 10, 100, letters)
    assert found.ids == ((1,), (2,), (1,), (2,), (1,))
    assert "2 texts repeated" in found.source
    assert "repeated" not in text_prompts(dataset(tmp_path / "p.txt"), 2, 10, 100, letters).source


def test_a_text_without_tokens_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "123"}\n{"text": ""}\n\n{"text": "a"}\n')
    assert text_prompts(dataset(tmp_path / "p.jsonl"), 1, 10, 100, letters).ids == ((1,),)


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": 7, "prompt": "ab"}\n')
    assert text_prompts(dataset(tmp_path / "p.jsonl", text_field="prompt"), 1, 10, 100, letters).ids == ((1, 2),)


def test_without_a_tokenizer_bytes_serve_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("aé", encoding="utf-8")
    found = text_prompts(dataset(tmp_path / "p.txt"), 1, 10, 100, None)
    # a is byte 97; é is 0xC3 0xA9 = 195 169 in UTF-8; modulo a vocabulary of 100
    assert found.ids == ((97, 95, 69),)
    assert "without a tokenizer" in found.source
    assert "the model's tokenizer" in text_prompts(dataset(tmp_path / "p.txt"), 1, 10, 100, letters).source


def test_the_packaged_prompts_are_there() -> None:
    found = text_prompts(dataset(None), 16, 4096, 50_000, None)
    assert len(set(found.ids)) == 16, "sixteen different texts, none repeated"
    assert "mine" in found.source
    with pytest.raises(ConfigError, match="'prompt'"):
        text_prompts(dataset(None, text_field="prompt"), 1, 10, 100, None)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_what_was_cut_and_left_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    texts = ["abcdefgh", "ab", "abcdef", "a", "ab"]
    lines = texts if suffix == ".txt" else [json.dumps({"text": text}) for text in texts]
    path = tmp_path / f"p{suffix}"
    path.write_text("\n\n".join(lines) + "\n \n")
    assert text_prompts(dataset(path), 3, 4, 100, letters).texts == TextUse(used=3, cut=2, longest=8, limit=4, unused=2)
    assert text_prompts(dataset(path), 9, 100, 100, letters).texts == TextUse(used=5, cut=0, longest=8, limit=100, unused=0)
    monkeypatch.setattr(prompts_module, "_MOST_COUNTED_BYTES", 10)
    found = text_prompts(dataset(path), 1, 4, 100, letters).texts
    assert found is not None
    assert found.unused is None
    packaged = text_prompts(dataset(None), 2, 9999, 100, None).texts
    assert packaged is not None
    assert packaged.unused == 14
    assert synthetic_prompts(1, 4, 10, 0).texts is None


def test_the_records_of_a_packed_file_are_not_counted(tmp_path: Path) -> None:
    """Its size on disk does not tell how much there is to read."""
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "ab"}\n' * 5))
    assert text_prompts(dataset(path), 2, 4, 100, letters).texts == TextUse(used=2, cut=0, longest=2, limit=4, unused=None)


def test_a_dataset_of_the_tree_knows_how_many_records_it_holds(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    records = read_metadata(folder.metadata_file, DatasetMetadata).size.records
    assert records is not None
    found = text_prompts(dataset(None, root=str(folder.path)), 1, 2, 100, None).texts
    assert found is not None
    assert (found.used, found.unused) == (1, records - 1)


# --- files that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nowhere.jsonl", "folder.jsonl", "nul\0.txt", "n" * 5000 + ".txt"])
def test_a_file_that_is_not_there_is_said_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"dataset\.path") as caught:
        text_prompts(dataset(tmp_path / name), 1, 10, 100, None)
    assert caught.value.exit_code == 2


def test_a_file_that_may_not_be_read_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("a")

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ResourceError, match="Permission denied"):
        text_prompts(dataset(tmp_path / "p.txt"), 1, 10, 100, None)


@pytest.mark.parametrize("name", ["p.csv", "p", "p.bin", "p.arrow", "p.gz"])
def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a")
    with pytest.raises(ConfigError) as caught:
        text_prompts(dataset(tmp_path / name), 1, 10, 100, None)
    assert ".jsonl" in caught.value.remedy
    assert ".txt" in caught.value.remedy


@pytest.mark.parametrize("name", ["p.json", "p.JSON", "p.json.gz", "p.jsonl.gz", "p.ndjson"])
def test_a_file_of_any_format_of_datasets_is_read(tmp_path: Path, name: str) -> None:
    records = [{"text": "abc"}, {"text": ""}, {"text": "b"}, {"text": "c"}]
    array = "json" in name.lower() and "l" not in name.lower() and "nd" not in name
    content = (json.dumps(records) if array else "\n".join(map(json.dumps, records))).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = text_prompts(dataset(tmp_path / name), 2, 2, 100, letters)
    assert found.ids == ((1, 2), (2,))
    unused = None if name.endswith("gz") else 1
    assert found.texts == TextUse(used=2, cut=1, longest=3, limit=2, unused=unused, empty=1)


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_without_text_is_said_so(tmp_path: Path, content: str, suffix: str) -> None:
    (tmp_path / f"p{suffix}").write_text(content)
    with pytest.raises(ResourceError, match=f"p{suffix} contains no text"):
        text_prompts(dataset(tmp_path / f"p{suffix}"), 1, 10, 100, None)


NOT_JSON = {
    "a word": b"hello",
    "cut short": b'{"text": "a',
    "nested without end": b"[" * 100_000,
    "a number without end": b'{"text": ' + b"1" * 5000 + b"}",
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"text": "a"}',
}


@pytest.mark.parametrize("line", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_line_that_is_no_record_is_answered_with_its_number(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ResourceError, match=r"p\.jsonl, line 3"):
        text_prompts(dataset(tmp_path / "p.jsonl"), 2, 10, 100, None)


@pytest.mark.parametrize(("name", "line"), [("p.jsonl", b'{"text": "a"}\n'), ("p.txt", b"a\n")])
def test_the_mark_some_editors_put_first_is_no_token(tmp_path: Path, name: str, line: bytes) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + line)
    assert text_prompts(dataset(tmp_path / name), 1, 10, 1000, None).ids == ((ord("a"),),)


@pytest.mark.parametrize(
    ("line", "has"), [('{"id": 1, "body": "a"}', "id, body"), ('{"text": 3}', "text"), ("[1]", "list"), ("7", "int")]
)
def test_a_record_without_the_field_is_answered_with_its_fields(tmp_path: Path, line: str, has: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=rf"line 1: no text in the field 'text' \(it has: {has}\)") as caught:
        text_prompts(dataset(tmp_path / "p.jsonl"), 1, 10, 100, None)
    assert "dataset.text_field" in caught.value.remedy


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_bytes_that_are_no_text_are_said_so(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"p{suffix}").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ResourceError, match="UTF-8"):
        text_prompts(dataset(tmp_path / f"p{suffix}"), 1, 10, 100, None)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "_MAX_RECORD_CHARS", 10)
    (tmp_path / "p.txt").write_text("123456789\n")
    with pytest.raises(ResourceError, match="longer than 10 characters"):
        text_prompts(dataset(tmp_path / "p.txt"), 1, 10, 100, None)
    (tmp_path / "p.txt").write_text("12345678\n")
    assert text_prompts(dataset(tmp_path / "p.txt"), 1, 10, 100, None).lengths == (8,)


def test_any_damaged_file_gives_prompts_or_an_error_of_ours(tmp_path: Path) -> None:
    draw = random.Random(7)
    good = "\n".join(json.dumps({"text": f"prompt {number} – ü", "id": number}) for number in range(3)).encode()
    path = tmp_path / "p.jsonl"
    outcomes: Counter[str] = Counter()
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(damaged))
            damaged[place : place + draw.randint(0, 8)] = draw.choice(
                [b"", b"\x00", b"\xff", b"\n", b'"', b"{", b"}", b"\\u", b"9" * 9]
            )
        path.write_bytes(damaged)
        try:
            found = text_prompts(dataset(path), 3, 10, 100, None)
        except LlmPerfError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["prompts"] += 1
            assert len(found.ids) == 3
    assert set(outcomes) == {"prompts", "ResourceError", "ConfigError"}, "the damage was neither harmless nor always fatal"
