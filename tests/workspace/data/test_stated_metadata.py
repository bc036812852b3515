"""Datasets and variants made by hand or by a script: what their metadata do not state is found in the data, and marked."""

import json
from pathlib import Path

import numpy as np
import pytest

from builders import default_config, with_value
from dataset_builders import RECORDS, write_jsonl
from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.report.workspace import dataset_block
from llm_perf_opt.workspace.data.checking import check_dataset, listed, unrecorded
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare
from llm_perf_opt.workspace.data.prompts import text_prompts
from llm_perf_opt.workspace.data.refreshing import refresh
from llm_perf_opt.workspace.data.stated_metadata import dataset_metadata, variant_metadata

STATED = """# by hand
name: openwebtext
version: "1.0"
source: https://huggingface.co/datasets/openwebtext
splits: { train: 50 }
notes: "Downloaded with HF datasets; source-data is read-only."
"""
VARIANT = """parent: source-data
created: 2024-01-20
transform: "Random sample of 1000 examples from training set"
size:
  samples: 3
  disk_mb: 47.5
"""


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """A dataset as the guides describe it, without any command."""
    write_jsonl(tmp_path / "data" / "openwebtext" / "part.jsonl", RECORDS)
    made = DatasetFolder(tmp_path / "datasets" / "openwebtext")
    made.path.mkdir(parents=True)
    made.source.symlink_to(tmp_path / "data" / "openwebtext")
    made.metadata_file.write_text(STATED)
    made.readme_file.write_text("# OpenWebText\n\nMy own words.\n")
    option = tmp_path / "conf" / "dataset" / "openwebtext.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("name: openwebtext\nroot: datasets/openwebtext\nvariant: null\n")
    return made


def own_variant(folder: DatasetFolder, name: str = "mine", metadata: str = VARIANT, inside: str = "data") -> None:
    write_jsonl(folder.path / name / inside / "samples.jsonl", RECORDS[:3])
    if metadata:
        (folder.path / name / "metadata.yaml").write_text(metadata)


def in_a_run(folder: DatasetFolder, variant: str | None = None) -> DatasetConfig:
    config = with_value(with_value(default_config(), "dataset.kind", "prompts"), "dataset.root", str(folder.path))
    return with_value(config, "dataset.variant", variant).dataset


def test_facts_that_are_not_stated_are_found_and_marked(folder: DatasetFolder) -> None:
    found = dataset_metadata(folder)
    assert (found.version, found.splits, found.size.records) == ("1.0", {"train": 50}, 50)
    assert (found.format, found.text_field, found.size.files, found.content_sha256) == ("jsonl", "text", 1, None)
    assert found.filled == ["format", "text_field", "size"]
    assert listed(folder).filled == ("format", "text_field", "size")
    assert unrecorded(folder) == ["source-data"]
    assert check_dataset(folder, folder.path.parents[1] / "conf") == []


def test_a_number_that_is_not_true_is_a_difference(folder: DatasetFolder) -> None:
    folder.metadata_file.write_text(STATED.replace("50", "8013769"))
    (found,) = check_dataset(folder, folder.path.parents[1] / "conf")
    assert (found.part, "8013769" in found.what, "50" in found.what) == ("source-data", True, True)


@pytest.mark.parametrize("inside", ["data", "."])
@pytest.mark.parametrize("metadata", ["", VARIANT, "{}\n"])
def test_a_variant_of_a_script_is_used(folder: DatasetFolder, metadata: str, inside: str) -> None:
    own_variant(folder, metadata=metadata, inside=inside)
    (variant,) = folder.variants()
    found = variant_metadata(folder, variant)
    stated = metadata == VARIANT
    assert (found.parent, found.created) == (("source-data", "2024-01-20") if stated else (None, None))
    assert found.size.records == (3 if stated else None)
    assert {"format", "size", "splits"} <= set(found.filled)
    prompts = text_prompts(in_a_run(folder, "mine"), 2, 4, 300, None)
    assert prompts.ids == tuple(tuple(record["text"].encode()[:4]) for record in RECORDS[:2])  # type: ignore[attr-defined]
    assert prompts.texts is not None
    assert (prompts.texts.cut, prompts.texts.unused) == (2, 1 if stated else None)
    assert "not stated" in listed(folder).variants["mine"]
    assert check_dataset(folder, folder.path.parents[1] / "conf") == []


def test_results_of_an_analysis_are_no_variant(folder: DatasetFolder) -> None:
    (folder.path / "analysis").mkdir()
    (folder.path / "analysis" / "statistics.json").write_text("{}")
    (folder.path / "empty").mkdir()
    for name in ("plots/loss.png", "scripts/make.py", "info/dataset_info.json"):
        (folder.path / name).parent.mkdir()
        (folder.path / name).touch()
    assert folder.variants() == ()
    (folder.path / "plots" / "metadata.yaml").write_text("{}\n")
    with pytest.raises(LlmPerfError, match="plots has no data files"):
        variant_metadata(folder, folder.variant("plots"))


def test_variants_are_made_from_a_handmade_source(folder: DatasetFolder) -> None:
    made = prepare(folder, Preparation("subset-5"))
    assert made.parent_sha256
    own_variant(folder)
    again = prepare(folder, Preparation("subset-2", parent="mine"))
    assert (again.parent, again.size.records) == ("mine", 2)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_without_an_index_are_cut_into_prompts(folder: DatasetFolder, dtype: str) -> None:
    data = folder.path / "tokenized-gpt2" / "data"
    data.mkdir(parents=True)
    np.arange(10, dtype=dtype).tofile(data / "train.bin")
    if dtype != "uint16":
        (data.parent / "metadata.yaml").write_text(f"dtype: {dtype}\n")
    found = text_prompts(in_a_run(folder, "tokenized-gpt2"), 3, 4, 100, None)
    assert found.ids == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    assert "tokenizer gpt2" in found.source
    assert ("id_bytes" in variant_metadata(folder, folder.variant("tokenized-gpt2")).filled) == (dtype == "uint16")
    (data / "train.bin").write_bytes(b"123")
    with pytest.raises(ParseError, match="3 bytes are not ids"):
        text_prompts(in_a_run(folder, "tokenized-gpt2"), 3, 4, 100, None)


def test_refreshing_adds_what_is_missing_and_keeps_every_word(folder: DatasetFolder) -> None:
    own_variant(folder)
    own_variant(folder, "bare", metadata="")
    tree = DatasetTree(folder.path.parent)
    changed = refresh(tree, folder, dataset_block).changed
    assert {path.name for path in changed} == {"metadata.yaml", "README.md", ".gitignore"}
    assert folder.metadata_file.read_text().startswith(STATED)
    assert (folder.path / "mine" / "metadata.yaml").read_text().startswith(VARIANT)
    found = dataset_metadata(folder)
    assert (found.content_sha256 is not None, found.splits, found.filled) == (
        True,
        {"train": 50},
        ["format", "text_field", "size"],
    )
    assert variant_metadata(folder, folder.variant("bare")).size.records == 3
    assert unrecorded(folder) == []
    assert check_dataset(folder, folder.path.parents[1] / "conf") == []
    readme = folder.readme_file.read_text()
    assert readme.startswith("# OpenWebText\n\nMy own words.\n")
    assert "Random sample of 1000 examples" in readme
    assert "└── part.jsonl" in readme
    write_jsonl(folder.source / "part.jsonl", [*RECORDS, {"text": "new"}])
    assert any("part.jsonl has" in difference.what for difference in check_dataset(folder, folder.path.parents[1] / "conf"))


@pytest.mark.parametrize(
    "content",
    ["- a\n", "splits: 7\n", "text_field: [1]\n", "{{{", "name: &a [*a]\n", "\x00", "format: {a: 1}\n", ""],
)
def test_metadata_that_cannot_be_right_are_an_error_of_ours(folder: DatasetFolder, content: str) -> None:
    folder.metadata_file.write_text(content)
    with pytest.raises(LlmPerfError):
        dataset_metadata(folder)
    assert "unreadable" in listed(folder).state


@pytest.mark.parametrize(
    ("splits", "counts"),
    [
        ("[train, test]", {}),
        ("{train: {num_examples: 3, num_bytes: 9}}", {"train": 3}),
        ("{train: 3, test: null}", {"train": 3}),
        ("{train: true}", {}),
    ],
)
def test_splits_in_other_forms_are_read(folder: DatasetFolder, splits: str, counts: dict[str, int]) -> None:
    folder.metadata_file.write_text(f"splits: {splits}\n")
    assert dataset_metadata(folder).splits == counts


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("transform: [sampled, cleaned]", "sampled, cleaned"),
        ("transform: {name: sample, n: 3, of: [a, b]}", "name: sample, n: 3, of: a, b"),
        ("transform: 7", "7"),
        ("transform: []", None),
        ("created: 2024", "2024"),
        ("created: 2024-01-20", "2024-01-20"),
    ],
)
def test_what_describes_a_variant_may_have_any_form(folder: DatasetFolder, stated: str, words: str | None) -> None:
    own_variant(folder, metadata=stated)
    found = variant_metadata(folder, folder.variant("mine"))
    assert words in (found.transform, found.created)
    assert "unreadable" not in listed(folder).variants["mine"]


def test_what_describes_a_dataset_may_have_any_form(folder: DatasetFolder) -> None:
    folder.metadata_file.write_text(
        "version: 1.5\nsource: [a, b]\nlicense: {text: CC0, code: MIT}\nnotes: [One., Two.]\nadded: 2024\n"
    )
    found = dataset_metadata(folder)
    assert (found.version, found.source, found.license) == (1.5, "a, b", "text: CC0, code: MIT")
    assert (found.notes, found.added) == ("One. Two.", "2024")
    folder.metadata_file.write_text("version: [1, 2]\n")
    assert dataset_metadata(folder).version == "1, 2"


def test_a_variant_that_cannot_be_read_does_not_stop_a_refresh(folder: DatasetFolder) -> None:
    own_variant(folder, "broken", "{{{")
    own_variant(folder, "mine")
    (folder.path / "linked" / "data").mkdir(parents=True)
    write_jsonl(folder.path / "linked" / "data" / "a.jsonl", RECORDS[:1])
    (folder.path / "linked" / "metadata.yaml").symlink_to(folder.path / "mine" / "metadata.yaml")
    done = refresh(DatasetTree(folder.path.parent), folder, dataset_block)
    assert [Path(why.split(":")[0]).name for why in done.skipped] == ["broken", "linked"]
    assert "is a link" in done.skipped[1]
    assert (folder.path / "linked" / "metadata.yaml").is_symlink()
    assert (folder.path / "mine" / "metadata.yaml") in done.changed


def test_metadata_that_are_a_link_are_not_replaced(folder: DatasetFolder, tmp_path: Path) -> None:
    folder.metadata_file.rename(tmp_path / "elsewhere.yaml")
    folder.metadata_file.symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(LlmPerfError, match="is a link"):
        refresh(DatasetTree(folder.path.parent), folder, dataset_block)
    assert (tmp_path / "elsewhere.yaml").read_text() == STATED


def test_a_flow_mapping_is_not_broken(folder: DatasetFolder) -> None:
    folder.metadata_file.write_text('{"name": "openwebtext"}\n')
    with pytest.raises(LlmPerfError, match="cannot be completed"):
        refresh(DatasetTree(folder.path.parent), folder, dataset_block)
    assert json.loads(folder.metadata_file.read_text()) == {"name": "openwebtext"}


@pytest.mark.parametrize(
    ("root", "differs"),
    [
        ("${hydra:runtime.cwd}/datasets/openwebtext", False),
        ("${hydra:runtime.cwd}/datasets/other", True),
        ("${oc.env:DATA}/openwebtext", False),
        ("\\${hydra:runtime.cwd}/datasets/openwebtext", True),
        ("datasets/other", True),
    ],
)
def test_an_option_in_the_form_of_the_guides_names_its_folder(folder: DatasetFolder, root: str, differs: bool) -> None:
    conf = folder.path.parents[1] / "conf"
    (conf / "dataset" / "openwebtext.yaml").write_text(f"name: openwebtext\nroot: {root}\nvariant: null\n")
    assert [difference.part for difference in check_dataset(folder, conf)] == (["openwebtext"] if differs else [])
