"""The prompts of another run, read from its inputs.yaml."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.recorded_inputs import read_inputs
from llm_perf_opt.workspace.data.recorded import recorded_prompts

IDS = [[1, 2, 3], [4, 5]]


def recorded(folder: Path, *words: str, **changed: object) -> RunConfig:
    values = {"source": "x", "sha256": hashlib.sha256(json.dumps(IDS).encode()).hexdigest(), "new_tokens": 2, "ids": IDS}
    (folder / "inputs.yaml").write_text(yaml.safe_dump({**values, **changed}))
    sizes = ("runtime.batch_size=2", "runtime.prompt_tokens=3")
    return compose(["dataset=recorded", f"dataset.path={folder / 'inputs.yaml'}", *sizes, *words]).config


def test_the_same_ids_with_the_same_hash(tmp_path: Path) -> None:
    config = recorded(tmp_path)
    prompts = recorded_prompts(config, vocabulary=6)
    assert [list(ids) for ids in prompts.ids] == IDS
    assert prompts.sha256() == yaml.safe_load((tmp_path / "inputs.yaml").read_text())["sha256"]


@pytest.mark.parametrize(
    ("words", "changed", "vocabulary", "fact"),
    [
        ((), {"ids": [[1, 2, 3], [4, 6]]}, 100, "hash"),
        (("runtime.batch_size=3",), {}, 100, "2 prompts"),
        (("runtime.prompt_tokens=2",), {}, 100, "3 tokens"),
        ((), {}, 5, "the id 5"),
    ],
)
def test_what_would_not_be_the_same_is_refused(
    tmp_path: Path, words: tuple[str, ...], changed: dict[str, object], vocabulary: int, fact: str
) -> None:
    with pytest.raises(ConfigError, match=fact):
        recorded_prompts(recorded(tmp_path, *words, **changed), vocabulary)


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "inputs.yaml").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ResourceError, match="larger than 64 MiB"):
        read_inputs(tmp_path / "inputs.yaml")


def test_aliases_cannot_multiply_the_ids(tmp_path: Path) -> None:
    file = tmp_path / "inputs.yaml"
    file.write_text(f"new_tokens: 2\nsha256: x\nids:\n- &a {[1] * 1000}\n" + "- *a\n" * 1000)
    with pytest.raises(ConfigError, match=r"more than .* values"):
        read_inputs(file)


def test_without_a_file_it_asks_for_one() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.path"):
        compose(["dataset=recorded"])
