"""A dataset is added completely or not at all, with its description."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import HOSTILE_NAMES
from dataset_builders import RECORDS, added, everything_below, small_source, write_jsonl
from git_repositories import git
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.workspace.data import preparing as adding
from llm_perf_opt.workspace.data.checking import check_dataset
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare
from llm_perf_opt.workspace.data.prompts import open_entry


def test_a_file_of_a_cache_is_added_under_its_given_name(tmp_path: Path) -> None:
    blob = tmp_path / "cache" / "blobs" / "0a1b2c"
    write_jsonl(blob, RECORDS)
    named = tmp_path / "cache" / "train.jsonl"
    named.symlink_to(blob)
    folder, metadata = added(tmp_path, named)
    assert (list(metadata.files), metadata.splits, metadata.source) == (["train.jsonl"], {"train": 50}, str(named))
    assert len(list(open_entry(str(folder.path), None, "text").texts())) == 50
    assert check_dataset(folder, tmp_path / "conf") == []
    prepare(folder, Preparation("sub", num_samples=5))


@pytest.mark.parametrize("pages", [None, '[{"page_info": {"image_path": "a.png"}}]'])
def test_for_a_folder_of_images_the_dataset_that_reads_it_is_named(tmp_path: Path, pages: str | None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.png").write_bytes(b"")
    if pages:
        (source / "pages.json").write_text(pages)
    with pytest.raises((ConfigError, ResourceError)) as caught:
        added(tmp_path, source)
    assert f"dataset=image_folder dataset.path={source}" in caught.value.remedy


def test_link_metadata_readme_and_option_are_there(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    folder, metadata = added(tmp_path, source, version="1.0", license="CC0-1.0", origin="https://example.org/data", notes="ours")
    assert folder.source.readlink() == source
    assert metadata.splits == {"test": 5, "train": 45}
    assert metadata.size.files == 3
    assert (metadata.version, metadata.license, metadata.source) == ("1.0", "CC0-1.0", "https://example.org/data")
    page = folder.readme_file.read_text()
    for said in ("CC0-1.0", "├── LICENSE.txt", "└── train.jsonl", "ours", "llm-perf run dataset=mine"):
        assert said in page
    option = yaml.safe_load((tmp_path / "conf" / "dataset" / "mine.yaml").read_text())
    assert (option["root"], option["variant"], option["kind"]) == ("datasets/mine", None, "prompts")


def test_data_stay_out_of_version_control(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    git(tmp_path, "init", "--quiet")
    data = ["source-data", "v/data/a.jsonl", "v/a.jsonl.gz", "v/train.bin", "v/train.idx", "v/en/a.parquet", "v/notes.txt"]
    mine = ["metadata.yaml", "README.md", "v/metadata.yaml", "v/README.txt", "analysis/statistics.json", "scripts/make.py"]
    for name in (*data[1:], *mine):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).touch()
    git(tmp_path, "add", "datasets")
    kept = git(tmp_path, "ls-files", "datasets").split()
    assert kept == sorted(["datasets/.gitignore", *(f"datasets/mine/{name}" for name in mine)])


def test_what_is_not_told_is_not_made_up(tmp_path: Path) -> None:
    folder, metadata = added(tmp_path, small_source(tmp_path / "source"))
    assert (metadata.version, metadata.license) == (None, None)
    assert metadata.source == str(tmp_path / "source")
    assert "| license | not given |" in folder.readme_file.read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    added(tmp_path, source)
    before = everything_below(tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        added(tmp_path, source)
    own = tmp_path / "conf" / "dataset" / "other.yaml"
    own.write_text("mine: true\n")
    with pytest.raises(ConfigError, match=r"other\.yaml already exists"):
        added(tmp_path, source, "other")
    own.unlink()
    (tmp_path / "datasets" / "third").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="already exists"):
        added(tmp_path, source, "third")
    (tmp_path / "datasets" / "third").unlink()
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("name", ["synthetic", "sample_prompts"])
def test_a_packaged_options_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is a packaged option"):
        added(tmp_path, small_source(tmp_path / "source"), name)


@pytest.mark.parametrize("step", ["write_metadata", "write_whole", "first_level"])
def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    source = small_source(tmp_path / "source")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(adding, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        added(tmp_path, source)
    left = {path.name for path in tmp_path.rglob("*") if "source" not in path.parts[len(tmp_path.parts)]}
    assert left <= {"datasets", ".gitignore"}
    monkeypatch.undo()
    added(tmp_path, source)


def test_an_option_left_by_a_killed_add_is_our_own(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    folder, _ = added(tmp_path, source)
    for path in (folder.source, folder.metadata_file, folder.readme_file):
        path.unlink()
    folder.path.rmdir()
    added(tmp_path, source)


def test_names_and_remarks_cannot_become_markup(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    (source / "```\n# heading").write_text("")
    for number, hostile in enumerate(name for name in HOSTILE_NAMES if name and "\0" not in name):
        folder, _ = added(tmp_path, source, f"d{number}", license=hostile, notes=hostile, origin=hostile)
        page = folder.readme_file.read_text()
        assert "<script>" not in page
        assert "\n# heading" not in page
        assert yaml.safe_load(folder.metadata_file.read_text())["license"] == hostile


def test_the_text_field_is_checked(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "a.jsonl", [{"body": "x", "id": 1}])
    with pytest.raises(ConfigError, match=r"no text in the field 'text' \(it has: body, id\)") as caught:
        added(tmp_path, tmp_path / "s")
    assert "--text-field" in caught.value.remedy
    assert not (tmp_path / "datasets").exists()
    _, metadata = added(tmp_path, tmp_path / "s", text_field="body")
    assert metadata.text_field == "body"


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, ResourceError, "has no data files"),
        ({"a.csv": "x"}, ResourceError, "has no data files"),
        ({"a.jsonl": ""}, ResourceError, "has no records"),
        ({"a.jsonl": "\n \n"}, ResourceError, "has no records"),
        ({"a.jsonl": '{"text": "a"}', "b.parquet": ""}, ConfigError, "several formats: jsonl, parquet"),
        ({"data.arrow": "x"}, ResourceError, r"no state\.json"),
        ({"data.arrow": "x", "state.json": "{}"}, Exception, "does not list"),
        ({"state.json": '{"_data_files": [{"filename": "../x.arrow"}]}', "a.arrow": ""}, ResourceError, "does not exist"),
        ({"a.bin": "x"}, ConfigError, "token ids"),
    ],
    ids=str,
)
def test_a_source_without_records_is_said_so(tmp_path: Path, files: dict[str, str], error: type[Exception], said: str) -> None:
    (tmp_path / "s").mkdir()
    for name, content in files.items():
        (tmp_path / "s" / name).write_text(content)
    with pytest.raises(error, match=said):
        added(tmp_path, tmp_path / "s")
    assert not (tmp_path / "datasets").exists()


def test_the_format_may_be_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "a.jsonl", RECORDS)
    (tmp_path / "s" / "b.txt").write_text("one\n\ntwo\n")
    assert added(tmp_path, tmp_path / "s")[1].size.records == 50
    assert added(tmp_path, tmp_path / "s", "texts", format="txt")[1].size.records == 2


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"), ("data/train-00000-of-00002.jsonl", "train"), ("c4_validation.jsonl", "validation"),
        ("dev/part.jsonl", "validation"), ("en.val.jsonl", "validation"), ("test1.jsonl", "test"), ("trained.jsonl", "all"),
        ("latest.jsonl", "all"), ("part-1.jsonl", "all"),
    ],
)  # fmt: skip
def test_the_split_is_read_off_the_name(tmp_path: Path, name: str, split: str) -> None:
    write_jsonl(tmp_path / "s" / name, RECORDS)
    assert added(tmp_path, tmp_path / "s")[1].splits == {split: 50}


def test_a_folder_is_not_added_to_itself(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=r"contains .* itself"):
        added(tmp_path, tmp_path)


def test_data_of_which_nothing_can_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.jsonl").write_bytes(b"[1]\nnot json\n\xff\n")
    with pytest.raises(ParseError, match=r"None of the 3 records can be read; a\.jsonl, line 1: not a JSON object"):
        added(tmp_path, tmp_path / "s")
    assert not (tmp_path / "datasets" / "mine").exists()


def test_a_field_that_holds_no_text_says_what_it_holds(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s" / "a.jsonl", [{"text": 3, "txt": "y"}])
    with pytest.raises(ConfigError, match=r"in the field 'text', but a number\. Did you mean 'txt'\?"):
        added(tmp_path, tmp_path / "s")
