"""Every difference from the metadata is found and named, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset_builders import added, small_source
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.workspace.data.checking import check_dataset, listed, unfinished
from llm_perf_opt.workspace.data.inventory import DatasetMetadata, read_metadata
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    made = added(tmp_path, small_source(tmp_path / "source"))[0]
    prepare(made, Preparation("sub", num_samples=5))
    prepare(made, Preparation("tok", parent="sub", tokenizer="bytes"))
    return made


def found(folder: DatasetFolder, quick: bool = False) -> list[tuple[str, str]]:
    conf = folder.path.parent.parent / "conf"
    return [(difference.part, difference.what) for difference in check_dataset(folder, conf, quick)]


def test_nothing_changed_is_nothing_found(folder: DatasetFolder) -> None:
    assert found(folder) == []
    assert found(folder, quick=True) == []
    shown = listed(folder)
    assert (shown.state, shown.records, list(shown.variants)) == ("ok", 50, ["sub", "tok"])
    assert shown.variants["tok"] == "tokenized, 5 records, tokens, from sub"


def rewrite(name: str, content: bytes) -> Callable[[DatasetFolder], None]:
    def change(folder: DatasetFolder) -> None:
        path = folder.path / name
        path.write_bytes(path.read_bytes() + content)

    return change


def reword(name: str, before: str, after: str) -> Callable[[DatasetFolder], None]:
    def change(folder: DatasetFolder) -> None:
        path = folder.path / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after, 1))

    return change


def flip(folder: DatasetFolder) -> None:
    path = folder.path / "sub" / "data" / "samples.jsonl"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def dangle(folder: DatasetFolder) -> None:
    folder.source.resolve().rename(folder.path.parent / "moved")


DRIFTS: dict[str, tuple[Callable[[DatasetFolder], object], str, str]] = {
    "the source grew": (rewrite("source-data/train.jsonl", b"x"), "source-data", "train.jsonl has "),
    "a byte of a variant": (flip, "sub", "samples.jsonl has the same size but different contents"),
    "a variant's index": (rewrite("tok/data/all.idx", b"x"), "tok", "all.idx has "),
    "a hash in the metadata": (
        reword("sub/metadata.yaml", "\ncontent_sha256: ", "\ncontent_sha256: x"),
        "sub",
        "content_sha256 in its metadata does not match",
    ),
    "a number of records": (reword("metadata.yaml", "records: 50", "records: 51"), "source-data", "give 51 records but list 50"),
    "records of a split": (
        lambda folder: [
            reword("metadata.yaml", before, after)(folder)
            for before, after in (("train: 45", "train: 46"), ("records: 50", "records: 51"))
        ],
        "source-data",
        "give 46 records in the split train, but there are 45",
    ),
    "records of a tokenized one": (
        lambda folder: [reword("tok/metadata.yaml", f"{name}: 5", f"{name}: 6")(folder) for name in ("all", "records")],
        "tok",
        "give 6 records in the split all, but there are 5",
    ),
    "a dangling link": (dangle, "source-data", "a dangling link: "),
    "no link": (lambda folder: folder.source.unlink(), "source-data", "is missing"),
    "a new file": (lambda folder: (folder.source / "new").touch(), "source-data", "new is new"),
    "a lost file": (lambda folder: (folder.source / "LICENSE.txt").unlink(), "source-data", "LICENSE.txt is missing"),
    "no data": (lambda folder: shutil.rmtree(folder.path / "sub" / "data"), "sub", "no such file or folder"),
    "metadata of a variant": (rewrite("sub/metadata.yaml", b"{"), "sub", "metadata.yaml cannot be read"),
    "metadata": (rewrite("metadata.yaml", b"\n- x"), "mine", "metadata.yaml cannot be read"),
    "a parent that is gone": (lambda folder: shutil.rmtree(folder.path / "sub"), "tok", "its parent sub no longer exists"),
    "an unfinished variant": (lambda folder: (folder.path / ".x.part").mkdir(), ".x.part", "unfinished"),
    "no option": (lambda folder: (folder.path.parent.parent / "conf/dataset/mine.yaml").unlink(), "mine", "is missing: dataset="),
}


@pytest.mark.parametrize(("drift", "part", "said"), DRIFTS.values(), ids=DRIFTS.keys())
def test_a_drift_is_named(folder: DatasetFolder, drift: Callable[[DatasetFolder], object], part: str, said: str) -> None:
    drift(folder)
    differences = found(folder)
    assert any(where == part and said in what for where, what in differences), differences
    assert len(differences) <= 2


def test_a_quick_look_sees_sizes_alone(folder: DatasetFolder) -> None:
    flip(folder)
    assert found(folder, quick=True) == []
    rewrite("source-data/train.jsonl", b"x")(folder)
    assert [part for part, _ in found(folder, quick=True)] == ["source-data"]


def test_a_variant_of_an_older_source_is_told(folder: DatasetFolder, tmp_path: Path) -> None:
    rewrite("source-data/train.jsonl", b'{"text": "new"}\n')(folder)
    other, _ = added(tmp_path, tmp_path / "source", "other")
    folder.metadata_file.write_text(other.metadata_file.read_text().replace("name: other", "name: mine"))
    assert found(folder) == [("sub", "it was made from a different version of source-data")]


def test_many_changed_files_are_counted(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    for number in range(30):
        (source / f"note{number}").touch()
    folder, _ = added(tmp_path, source)
    for number in range(30):
        (source / f"note{number}").unlink()
    differences = found(folder)
    assert len(differences) == 21
    assert differences[-1] == ("source-data", "… and 10 more files differ")


def test_what_a_killed_add_left_is_named(tmp_path: Path) -> None:
    (tmp_path / ".x.part").mkdir()
    assert [difference.dataset for difference in unfinished(DatasetTree(tmp_path))] == [".x.part"]
    assert unfinished(DatasetTree(tmp_path / "nowhere")) == []


def test_data_whose_metadata_are_gone_are_named(folder: DatasetFolder) -> None:
    tree = DatasetTree(folder.path.parent)
    assert unfinished(tree) == []
    folder.metadata_file.unlink()
    (told,) = unfinished(tree)
    assert told.dataset == folder.name
    assert f"{folder.metadata_file} is missing" in told.what


def test_metadata_of_a_later_version_are_refused(folder: DatasetFolder) -> None:
    folder.metadata_file.write_text(folder.metadata_file.read_text().replace("schema: 1", "schema: 99"))
    with pytest.raises(ParseError, match="newer version"):
        read_metadata(folder.metadata_file, DatasetMetadata)
    assert "newer version" in listed(folder).state, "the list goes on with the others"
