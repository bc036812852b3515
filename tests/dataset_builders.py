"""Small datasets for tests, added to a tree of their own."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llm_perf_opt.report.workspace import dataset_readme
from llm_perf_opt.workspace.data.inventory import DatasetMetadata
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree
from llm_perf_opt.workspace.data.preparing import Description, add_dataset

RECORDS = [{"text": f"text {number} – ü", "id": number, "tags": ["a", "b"][: number % 3]} for number in range(50)]


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def small_source(folder: Path, records: Sequence[Any] = RECORDS) -> Path:
    """Two splits of JSON lines and a license beside them."""
    write_jsonl(folder / "train.jsonl", records[:-5])
    write_jsonl(folder / "test.jsonl", records[-5:])
    (folder / "LICENSE.txt").write_text("free\n")
    return folder


def added(project: Path, source: Path, name: str = "mine", **said: Any) -> tuple[DatasetFolder, DatasetMetadata]:
    """A dataset in the tree of `project`."""
    tree = DatasetTree(project / "datasets")
    return add_dataset(tree, project / "conf", name, source, Description(**said), dataset_readme)


def everything_below(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
