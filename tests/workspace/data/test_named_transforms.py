"""The name of a variant says what to make, unless an option does."""

from pathlib import Path

import pytest

from dataset_builders import RECORDS, added, read_jsonl, small_source, write_jsonl
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.data.named_transforms import Preparation, completed
from llm_perf_opt.workspace.data.preparing import prepare

SPLITS = ["train", "validation"]


def meant(name: str, **given: object) -> dict[str, object]:
    """What the name adds to the request."""
    before = Preparation(name, **given)  # type: ignore[arg-type]
    after = completed(before, SPLITS, ["en", "de"], Path("nowhere"))
    return {key: value for key, value in vars(after).items() if vars(before)[key] != value}


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "subset-1k": {"num_samples": 1000},
        "subset-10K": {"num_samples": 10_000},
        "subset-2m": {"num_samples": 2_000_000},
        "subset-500": {"num_samples": 500},
        "dev-split": {"num_samples": 1000, "at_most": True, "split": "validation"},
        "tokenized-bytes": {"tokenizer": "bytes"},
        "parquet": {"to": "parquet"},
        "jsonl": {"to": "jsonl"},
        "cleaned": {"clean": True},
        "validation": {"split": "validation"},
        "split-train": {"split": "train"},
        "en-validation": {"split": "validation", "within": "en"},
        "de-val": {"split": "validation", "within": "de"},
        "test-split": {"split": "test"},
    }.items(),
)
def test_a_name_that_says_it(name: str, expected: dict[str, object]) -> None:
    assert meant(name) == expected


@pytest.mark.parametrize("given", [{"num_samples": 5}, {"tokenizer": "bytes"}, {"to": "txt"}, {"clean": True}])
def test_an_option_decides(given: dict[str, object]) -> None:
    assert meant("subset-1k", **given) == {}


def test_a_split_alone_is_a_variant() -> None:
    assert meant("mine", split="train") == {}
    assert meant("subset-1k", split="train") == {"num_samples": 1000}


@pytest.mark.parametrize("name", ["mine", "subset-", "subset-1g", "subset-01234567890", "analysis"])
def test_any_other_name_is_answered_with_those_that_say_it(name: str) -> None:
    with pytest.raises(ConfigError, match="no transform is given") as caught:
        meant(name)
    assert "subset-1k" in caught.value.remedy


def test_a_folder_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'fr'") as caught:
        meant("fr-validation")
    assert ("en, de" in caught.value.remedy, "--split validation" in caught.value.remedy) == (True, True)
    assert meant("fr-validation", split="validation") == {}
    whole = completed(Preparation("mine-validation"), SPLITS, [], Path("nowhere"))
    assert (whole.split, whole.within) == ("validation", None), "data without folders"


@pytest.mark.parametrize("name", ["tfrecord", "csv"])
def test_a_format_that_is_not_written_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"not written as {name}") as caught:
        meant(name)
    assert "jsonl, parquet, txt" in caught.value.remedy


def test_a_tokenizer_is_that_of_the_model_of_this_name(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="gpt2") as caught:
        completed(Preparation("tokenized-gpt2"), SPLITS, [], tmp_path)
    assert "llm-perf model link gpt2" in caught.value.remedy
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer.json").touch()
    found = completed(Preparation("tokenized-gpt2"), SPLITS, [], tmp_path)
    assert found.tokenizer == str(tmp_path / "gpt2")


def test_a_sample_named_by_its_size_is_that_of_the_option(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    named = prepare(folder, Preparation("subset-20"))
    given = prepare(folder, Preparation("v", num_samples=20))
    assert (named.content_sha256, named.arguments) == (given.content_sha256, given.arguments)
    with pytest.raises(ResourceError, match="1000 samples were requested, but there are 50"):
        prepare(folder, Preparation("subset-1k"))


def test_a_dev_split_is_at_most_a_thousand_records_of_the_validation_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "train.jsonl", RECORDS)
    write_jsonl(tmp_path / "s" / "val.jsonl", RECORDS[:7])
    folder, _ = added(tmp_path, tmp_path / "s")
    made = prepare(folder, Preparation("dev-split"))
    assert (made.size.records, made.arguments["split"], made.arguments["at_most"]) == (7, "validation", True)
    assert read_jsonl(folder.variant("dev-split").data / "samples.jsonl") == RECORDS[:7]


def test_a_split_of_one_language(tmp_path: Path) -> None:
    for language in ("en", "de"):
        write_jsonl(tmp_path / "s" / language / "c4-validation.00000-of-00001.json", [{"text": language}])
        write_jsonl(tmp_path / "s" / language / "c4-train.00000-of-00001.json", RECORDS)
    folder, _ = added(tmp_path, tmp_path / "s", "c4_small")
    made = prepare(folder, Preparation("en-validation"))
    assert (made.transform, made.splits) == ("split", {"validation": 1})
    assert (made.arguments["split"], made.arguments["within"]) == ("validation", "en")
    assert read_jsonl(folder.variant("en-validation").data / "en" / "c4-validation.00000-of-00001.jsonl") == [{"text": "en"}]
    with pytest.raises(ConfigError, match="'fr'"):
        prepare(folder, Preparation("fr-validation"))
    with pytest.raises(ConfigError, match="--within fr") as caught:
        prepare(folder, Preparation("x", within="fr"))
    assert "de, en" in caught.value.remedy


def test_lines_of_a_split_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    odd = b'{"text":   "a",  "x": 1.0}\n{"x":2,"text":"b"}\n'
    (tmp_path / "s" / "train.jsonl").write_bytes(odd)
    folder, _ = added(tmp_path, tmp_path / "s")
    prepare(folder, Preparation("split-train"))
    assert (folder.variant("split-train").data / "train.jsonl").read_bytes() == odd
