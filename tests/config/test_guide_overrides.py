"""Overrides as the profiling guides write them."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.guide_overrides import Translated, from_guides
from llm_perf_opt.core.errors import ConfigError, LlmPerfError


@pytest.mark.parametrize(
    ("override", "settings"),
    [
        ("repeats=1", ["runtime.max_repeats=1"]),
        ("device=cuda:1", ["hardware.device=cuda", "hardware.device_index=1"]),
        ("device=cuda", ["hardware.device=cuda", "hardware.device_index=0"]),
        ("device=cpu", ["hardware.device=cpu"]),
        ("+run.mode=deep", ["profiling=stage2"]),
        ("run.mode=light", ["profiling=minimal"]),
        ("run.mode=deep,light", ["profiling=stage2,minimal"]),
        ("run.top_n_kernels=30", ["profiling.ncu.top=30"]),
        ("artifacts.stage2_dir=tmp/stage2/a", ["hydra.run.dir=tmp/stage2/a"]),
        ("artifacts.stage2_dir='tmp/a b'", ['hydra.run.dir="tmp/a b"']),
        ("repeats='1'", ["runtime.max_repeats=1"]),
        ("profiling=@profiling/torch/torch-profiler.min", ["profiling=minimal"]),
        ("/profiling/torch@profiling=torch-profiler.max", ["profiling=minimal", "profiling.torch.preset=max"]),
        ("runtime.torch_profiler.enabled=true", ["profiling.torch.enable=true"]),
        ("hydra.job.chdir=true", []),
        ("hydra.output_subdir=null", []),
        ("profiling.activities=[cpu,cuda]", []),
        ("profiling.outputs.write_ops_csv=true", []),
        ("runtime.torch_profiler.steps=1", []),
        ("runtime.torch_profiler.warmup=3", []),
    ],
)
def test_an_override_with_a_meaning_is_translated_and_said(override: str, settings: list[str]) -> None:
    found = from_guides([override])
    assert found.overrides == settings
    (note,) = found.notes
    assert override.lstrip("+/").partition("=")[0].partition("@")[0] in note
    if "," not in override or not settings:
        compose(found.overrides)


@pytest.mark.parametrize(
    "override", ["model=tiny", "hydra.run.dir=/x", "profiling=full", "tiny", "~model", "runtime.batch_size=1,2"]
)
def test_other_overrides_stay_as_they_are(override: str) -> None:
    assert from_guides([override]).overrides == [override]
    assert from_guides([override]).notes == ()


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("artifacts.nsys_dir=x", "hydra.run.dir=DIR"),
        ("artifacts.run_dir=x", "hydra.run.dir=DIR"),
        ("hydra.job.name=x", "experiment=NAME"),
        ("hydra.sweep.dir=x", "hydra.run.dir=DIR"),
        ("hydra.mode=MULTIRUN", "-m"),
        ("run.kernels=3", "profiling.ncu.top"),
        ("run.mode=deeep", "deep"),
        ("inputs.files=[a]", "inputs.manifest=FILE"),
        ("device=tpu", "device=cpu"),
        ("profiling.activities=[xpu]", "cuda"),
        ("profiling.outputs.dir=x", "docs/run-folder.md"),
        ("runtime.torch_profiler.steps=4", "profiling.torch.decode_steps"),
        ("profiling=@profiling/torch/torch-profiler.huge", "profiling.torch.preset"),
        ("+inputs.manifest=/abs/path/inputs.yaml", "inputs.yaml of a run"),
    ],
)
def test_an_override_without_a_meaning_is_answered_with_its_place(override: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_guides([override])
    assert place in caught.value.remedy


def test_the_passes_are_those_of_the_last_word() -> None:
    deep = from_guides(["profiling=@profiling/torch/torch-profiler.min", "+run.mode=deep"])
    assert compose(deep.overrides).config.profiling.ncu.enable
    light = from_guides(["run.mode=deep", "profiling=minimal"])
    assert not compose(light.overrides).config.profiling.ncu.enable
    assert "no effect" in light.notes[0]
    assert "no effect" in from_guides(["run.mode=deep", "+profiling=minimal"]).notes[0]


def write_inputs(path: Path, ids: list[list[int]], **more: object) -> Path:
    sha = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    path.write_text(yaml.safe_dump({"source": "x", "sha256": sha, "lengths": [2], "new_tokens": 7, "ids": ids, **more}))
    return path


def test_a_quoted_value_with_a_comma_is_one_value() -> None:
    found = from_guides(["artifacts.stage2_dir='tmp/a,b'", "run.top_n_kernels=3,4"]).overrides
    assert found == ['hydra.run.dir="tmp/a,b"', "profiling.ncu.top=3,4"]
    assert compose(found[:1]).run_dir == Path("tmp/a,b")


@pytest.mark.parametrize(("name", "quote"), [("inputs.yaml", ""), ("a,b.yaml", '"'), ("a,b.yaml", "")])
def test_a_manifest_of_inputs_repeats_the_prompts_of_a_run(tmp_path: Path, name: str, quote: str) -> None:
    file = write_inputs(tmp_path / name, [[1, 2, 3], [4, 5]])
    config = compose(from_guides([f"+inputs.manifest={quote}{file}{quote}"]).overrides).config
    assert (config.dataset.kind, config.dataset.path) == ("recorded", str(file))
    assert (config.runtime.batch_size, config.runtime.prompt_tokens, config.runtime.num_new_tokens) == (2, 3, 7)
    given = from_guides([f"+inputs.manifest={file}", "runtime.num_new_tokens=4"]).overrides
    assert compose(given).config.runtime.num_new_tokens == 4


@pytest.mark.parametrize(
    "content", ["- a.txt\n- b.txt\n", "ids: [[1]]\n", "ids: [[]]\nnew_tokens: 1\nsha256: x\n", "{", "ids: &a [*a]"]
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "inputs.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"inputs\.yaml"):
        from_guides([f"inputs.manifest={file}"])


KEYS = st.sampled_from(
    ["run.mode", "device", "profiling", "artifacts.stage2_dir", "repeats", "inputs.manifest", "hydra.job.x", "x"]
)


@given(st.lists(st.tuples(st.sampled_from(["", "+", "++", "/"]), KEYS, st.text(max_size=12)), max_size=4))
def test_any_words_are_translated_or_refused(words: list[tuple[str, str, str]]) -> None:
    with suppress(LlmPerfError):
        found = from_guides([f"{plus}{key}={value}" for plus, key, value in words])
        assert from_guides(found.overrides) == Translated(found.overrides), "nothing is left to translate"
