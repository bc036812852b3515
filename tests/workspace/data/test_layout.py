"""Valid and invalid names in the trees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import HOSTILE_NAMES
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.data.layout import DatasetTree, checked_name

HOSTILE = [
    *HOSTILE_NAMES,
    "../x", "..", ".", "/etc", "a/b", ".hidden", "a\0b", "a\nb", "ü", "x" * 101, "-rf", " a", "a ", "a.part", "a\\b", "~", "a:b",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_name_is_refused(name: str, tmp_path: Path) -> None:
    for place in (lambda: DatasetTree(tmp_path).new_dataset(name), lambda: checked_name(name, "variant")):
        with pytest.raises(ConfigError, match="cannot name a") as caught:
            place()
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["1", "1000", "1e5", "1_000", "null", "TRUE", "nan", "Inf", "1.5", "1e-5", "1.5E-07"])
def test_a_name_the_command_line_would_take_for_a_value_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="would be read as a value"):
        checked_name(name, "variant")


@pytest.mark.parametrize("name", ["openwebtext", "subset-1k", "1k", "v1.0", "C4_en", "a"])
def test_usual_names_are_taken(name: str) -> None:
    assert checked_name(name, "dataset") == name


@given(st.text(max_size=20))
def test_a_name_that_is_taken_stays_inside_its_folder(name: str) -> None:
    try:
        checked_name(name, "dataset")
    except ConfigError:
        return
    assert (Path("/root/of/tree") / name).resolve().parent == Path("/root/of/tree")


def test_what_is_not_there_is_answered_with_what_is(tmp_path: Path) -> None:
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    (folder / "metadata.yaml").write_text("")
    with pytest.raises(ConfigError, match="Did you mean 'openwebtext'") as caught:
        DatasetTree(tmp_path).dataset("openwebtxt")
    assert "llm-perf dataset add" in caught.value.remedy
    with pytest.raises(ConfigError, match="no variant 'x'") as caught:
        DatasetTree(tmp_path).dataset("openwebtext").variant("x")
    assert "none yet" in caught.value.remedy


@pytest.mark.parametrize("name", ["source-data", "metadata.yaml", "README.md", "data"])
def test_the_datasets_own_files_are_no_variants(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the dataset uses this name"):
        DatasetTree(tmp_path).new_dataset("a").new_variant(name)
