"""Compose command-line words and YAML files into a checked configuration, or an actionable error."""

import contextlib
import copy
import dataclasses
import math
import re
import string
import types
import typing
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from builders import default_config, with_value
from llm_perf_opt.config import checks, hydra_composition
from llm_perf_opt.config.choices import CONF_MODULE, GROUPS, group_options
from llm_perf_opt.config.composition import Composed, compose, config_from_mapping, config_to_yaml, expand_sweep, with_overrides
from llm_perf_opt.config.schema import LauncherConfig, ModelConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.host import cpu_list
from llm_perf_opt.core.secrets import credentials_in

OWN_MODEL = """\
defaults:
  - random
  - _self_
name: mine
architecture: {model_type: gpt2, n_layer: 3}
"""


def refusal(*overrides: str, config_dir: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    assert caught.value.exit_code == 2
    assert "Traceback" not in str(caught.value)
    return caught.value


def own(folder: Path, content: str | bytes, name: str = "model/mine.yaml") -> Path:
    """A user's folder of options with one file in it."""
    file = folder / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


# --- what composes ----------------------------------------------------------------------------------------------------


def test_the_defaults_compose_into_plain_typed_values() -> None:
    config = compose([]).config
    assert isinstance(config, RunConfig)
    assert config.model.name == "tiny"
    assert type(config.model.architecture) is dict
    assert type(config.runtime.time_limit_s) is float, "600 in the file, a number of seconds here"
    _assert_plain(dataclasses.asdict(config))


def _assert_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str
            _assert_plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _assert_plain(item)
    else:
        assert type(value) in (str, int, float, bool, type(None))


OPTIONS = group_options()
TOGETHER = [
    [f"{group}={names[turn % len(names)]}" for group, names in OPTIONS.items()] for turn in range(max(map(len, OPTIONS.values())))
]
"""Every option of every group, one of each at a time: Hydra takes a tenth of a second for each."""


@pytest.mark.parametrize("chosen", TOGETHER, ids=" ".join)
def test_every_packaged_option_composes(chosen: list[str]) -> None:
    more = {
        "model=hf": ["model.path=/data/weights/hf"],
        "dataset=recorded": ["dataset.path=inputs.yaml"],
        "dataset=image_folder": ["dataset.path=/data/images"],
    }
    composed = compose([*chosen, *(word for option, words in more.items() if option in chosen for word in words)])
    assert composed.run_dir.parts[2] == composed.config.model.name
    assert f"model={composed.config.model.name}" in chosen
    assert config_from_mapping(yaml.safe_load(config_to_yaml(composed.config))) == composed.config


def test_every_file_of_the_package_is_an_option() -> None:
    offered = group_options()
    for group in GROUPS:
        stems = {
            entry.name.removesuffix(".yaml") for entry in files(CONF_MODULE).joinpath(group).iterdir() if ".yaml" in entry.name
        }
        if group == "hydra":
            assert group not in offered, "where a run lies is not a choice of the user's groups"
        else:
            bases = {"model": {"random"}, "profiling": {"base"}, "runtime": {"engine"}}
            assert stems - set(offered[group]) == bases.get(group, set()), "bases are no choices"


def test_the_models_promised_are_there() -> None:
    promised = {"tiny", "hf", "gpt2", "qwen2_5_0_5b", "qwen2_5_1_5b", "qwen2_5_7b", "qwen3_0_6b", "qwen3_30b_a3b", "llama3_8b"}
    promised |= {"llama3_70b", "mixtral_8x7b", "gemma3_4b", "deepseek_v2_lite"}
    assert promised <= set(group_options()["model"])


def test_overrides_reach_their_fields() -> None:
    composed = compose(["runtime.batch_size=4", "runtime.ci_target=1", "profiling.torch.decode_steps=null", "model.dtype=bf16"])
    assert composed.config.runtime.batch_size == 4
    assert composed.config.runtime.ci_target == 1.0
    assert composed.config.profiling.torch.decode_steps is None
    assert composed.config.model.dtype == "bf16"


@pytest.mark.parametrize(
    ("override", "cpus"),
    [("0-3,8", "0-3,8"), ("0", "0"), ("0,1", "0,1"), ("[0,1]", "0,1"), ("'0-1'", "0-1"), ("null", None)],
)
def test_a_list_of_cpus_is_one_value_not_a_sweep(override: str, cpus: str | None) -> None:
    assert compose([f"hardware.cpus={override}"]).config.hardware.cpus == cpus


def test_cpus_can_be_swept() -> None:
    points = expand_sweep(["hardware.cpus=0,'0,1'"])
    assert [compose(point).config.hardware.cpus for point in points] == ["0", "0,1"]


def test_the_former_name_of_the_threads_is_accepted(tmp_path: Path) -> None:
    assert compose(["hardware.cpu_threads=3"]).config.hardware.threads == 3
    assert [compose(point).config.hardware.threads for point in expand_sweep(["hardware.cpu_threads=1,2"])] == [1, 2]
    own(tmp_path, "device: cpu\ndevice_index: 0\ncpu_threads: 4\npeak_tflops: null\nbandwidth_gbs: null\n", "hardware/mine.yaml")
    assert compose(["hardware=mine"], tmp_path).config.hardware.threads == 4
    chosen = compose(["hardware=mine", "hardware.cpus=0", "hardware.wait_policy=passive"], tmp_path).config.hardware
    assert (chosen.cpus, chosen.wait_policy) == ("0", "passive")


def test_a_configuration_of_an_older_version_gets_what_it_did_not_have() -> None:
    values = dataclasses.asdict(default_config())
    for name in ("threads", "cpus", "wait_policy"):
        del values["hardware"][name]
    del values["runtime"]["quantization"]
    values["hardware"]["cpu_threads"] = 5
    found = config_from_mapping(values)
    assert (found.hardware.threads, found.hardware.cpus, found.hardware.wait_policy) == (5, None, "auto")
    assert found.runtime.quantization == "none"
    changed = with_overrides(values, ["hardware.cpu_threads=2", "hardware.cpus=1", "runtime.quantization=int8"])
    assert (changed.hardware.threads, changed.hardware.cpus, changed.runtime.quantization) == (2, "1", "int8")


@pytest.mark.parametrize("plus", ["+", "++"])
def test_a_plus_before_a_known_key_is_accepted(plus: str) -> None:
    words = ["model=gpt2", "runtime.batch_size=4", "experiment=e", "hydra.run.dir=here", "hardware.cpu_threads=1"]
    assert compose([f"{plus}{word}" for word in words]) == compose(words)
    with pytest.raises(ConfigError, match=r"runtime\.batchsize"):
        compose([f"{plus}runtime.batchsize=4"])


def test_the_last_of_two_overrides_counts() -> None:
    assert compose(["runtime.batch_size=4", "runtime.batch_size=8"]).config.runtime.batch_size == 8


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp32", ["fp32", "FP32", "float32", "torch.float32", "float"]),
        ("bf16", ["bf16", "BF16", "bfloat16", "torch.bfloat16"]),
        ("fp16", ["fp16", "float16", "half", "torch.float16", "torch.half"]),
    ],
)
def test_a_dtype_is_one_thing_in_every_spelling(name: str, spellings: list[str]) -> None:
    for spelling in spellings:
        composed = compose([f"model.dtype={spelling}"])
        assert composed.config.model.dtype == name
        assert yaml.safe_load(config_to_yaml(composed.config))["model"]["dtype"] == name
    error = refusal("model.dtype=float64")
    assert error.remedy == "Known: auto, bf16, fp16, fp32."


@pytest.mark.parametrize("runtime", ["pytorch", "vllm", "tensorrtllm", "engine runtime.type=x"])
def test_the_fewest_repeats_follow_the_most_down(runtime: str) -> None:
    chosen = f"runtime={runtime}".split()
    for most, fewest in ((3, 3), (10, 10), (60, 10)):
        found = compose([*chosen, f"runtime.max_repeats={most}"]).config.runtime
        assert (found.min_repeats, found.max_repeats) == (fewest, most)


def test_the_fewest_repeats_follow_a_file_of_ones_own_too(tmp_path: Path) -> None:
    text = "defaults:\n  - pytorch\n  - _self_\nmax_repeats: 4\n"
    folder = own(tmp_path, text, "runtime/quick.yaml")
    assert compose(["runtime=quick"], folder).config.runtime.min_repeats == 4
    (folder / "runtime" / "quick.yaml").write_text(text + "min_repeats: 5\n")
    assert "runtime.min_repeats=5" in refusal("runtime=quick", config_dir=folder).fact


def test_repeats_that_contradict_each_other_are_refused_where_both_are_given() -> None:
    error = refusal("runtime.min_repeats=10", "runtime.max_repeats=3")
    assert "runtime.min_repeats=10" in error.fact
    assert "runtime.max_repeats=3" in error.fact
    assert refusal("runtime.max_repeats=0").fact.startswith("runtime.max_repeats=0")
    assert refusal("runtime.max_repeats=many").fact.startswith("runtime.max_repeats")


def test_nothing_of_hydra_is_left_behind() -> None:
    hydra_composition._packaged.cache_clear()
    compose([])
    assert not GlobalHydra.instance().is_initialized()
    assert "Could not override" in refusal("model@here=gpt2").fact, "Hydra itself refuses it"
    assert not GlobalHydra.instance().is_initialized()


def test_what_was_composed_before_changes_nothing() -> None:
    """Packaged options are selected by Hydra once per process."""
    runs = [
        ["model=gpt2", "runtime.batch_size=4"],
        ["model=gpt2", "~model.architecture.n_layer", "model.substages={a: lm_head}"],
        ["experiment=e", "model=gpt2", "model.architecture.n_layer=2", "experiment=f", "profiling=minimal"],
        ["model=gpt2", "hardware=cpu", "model.architecture.n_head=4", "runtime.prompt_tokens=${runtime.batch_size}"],
        ["hardware=cpu", "model=gpt2", "runtime.batch_size=2", "runtime.batch_size=3"],
        ["model=gpt2"],
    ]
    alone = []
    for words in runs:
        hydra_composition._packaged.cache_clear()
        alone.append(compose(words).config)
    assert (alone[2].experiment, alone[4].runtime.batch_size) == ("f", 3)
    for _ in range(2):
        assert [compose(words).config for words in runs] == alone


def test_the_folder_in_which_a_run_is_composed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert compose(["hydra.run.dir=${hydra:runtime.cwd}/run"]).run_dir == folder / "run"


# --- the run's folder -------------------------------------------------------------------------------------------------


def test_a_run_lies_under_its_experiment_and_model_at_its_time() -> None:
    before = datetime.now().replace(microsecond=0)
    runs, experiment, model, moment = compose(["experiment=sweep1", "model=gpt2"]).run_dir.parts
    assert (runs, experiment, model) == ("runs", "sweep1", "gpt2")
    assert before <= datetime.strptime(moment, "%Y-%m-%d_%H-%M-%S_random") <= datetime.now()


def test_a_local_models_folder_names_its_run() -> None:
    assert compose(["model=hf", "model.path=/data/weights/my-model/"]).run_dir.parts[2] == "my-model"
    assert compose(["model=hf", "model.path=/data/weights/my-model", "model.name=other"]).run_dir.parts[2] == "other"


def test_the_folder_may_be_chosen() -> None:
    assert compose(["hydra.run.dir=/data/x/${model.name}"]).run_dir == Path("/data/x/tiny")


@pytest.mark.parametrize("folder", ["", ".", "..", "/", "'a\0b'", "???", "${nope}", "[a]"])
def test_a_folder_that_is_none_is_refused(folder: str) -> None:
    refusal(f"hydra.run.dir={folder}")


@pytest.mark.parametrize("key", ["experiment", "model.name"])
@pytest.mark.parametrize("name", ["../x", "'a\nb'", ""])
def test_hostile_names_are_refused(key: str, name: str) -> None:
    assert f"{key}=" in refusal(f"{key}={name}").fact


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "fact", "meant", "choices"),
    [
        # a key
        ("runtime.batchsize=4", "no key 'runtime.batchsize'", "batch_size", "prompt_tokens"),
        ("runtim.batch_size=4", "'runtim' is not known at the top", "runtime.batch_size=4", "profiling"),
        ("batch_size=4", "no key 'batch_size'", "runtime.batch_size=4", "runtime"),
        ("batchsize=4", "no key 'batchsize'", "runtime.batch_size=4", "runtime"),
        ("model.batch_size=4", "no key 'model.batch_size'", "runtime.batch_size=4", "dtype"),
        ("runtime.dtype=bf16", "no key 'runtime.dtype'", "model.dtype=bf16", "batch_size"),
        # no key at all
        ("tiny", "'tiny' is not an override", "model=tiny", "KEY=VALUE"),
        ("full", "'full' is not an override", "profiling=full", "KEY=VALUE"),
        ("qwen2.5-1.5b", "'qwen2.5-1.5b' is not an override", "model=qwen2_5_1_5b", "KEY=VALUE"),
        ("Qwen/Qwen2.5-1.5B", "is not an override", "model=qwen2_5_1_5b", "KEY=VALUE"),
        ("cuda", "'cuda' is not an override", "hardware=single_gpu", "KEY=VALUE"),
        ("gpu=0", "no key 'gpu'", "hardware.device_index=0", "hardware"),
        ("hardware=h100", "hardware=h100 is not known", "", "llm-perf cost --hardware"),
        ("batch_size", "'batch_size' is not an override", "runtime.batch_size=VALUE", "KEY=VALUE"),
        ("experimnt=x", "'experimnt' is not known at the top", "experiment", "model"),
        ("+runtime.batchsize=4", "no key 'runtime.batchsize'", "batch_size", "prompt_tokens"),
        ("++runtime.batchsize=4", "no key 'runtime.batchsize'", "batch_size", "prompt_tokens"),
        ("~runtime.batchsize", "no key 'runtime.batchsize'", "batch_size", "prompt_tokens"),
        ("profiling.torch.preset_=max", "'preset_' is not known in profiling.torch", "preset", "decode_steps"),
        # a group's option
        ("model=quen2_5_7b", "model=quen2_5_7b is not known", "qwen2_5_7b", "llama3_8b"),
        ("profiling=minimum", "profiling=minimum is not known", "minimal", "full"),
        ("hardware=gpu", "hardware=gpu is not known", "single_gpu", "auto"),
        ("hardware=cuda", "hardware=cuda is not known", "single_gpu", "auto"),
        ("model=qwen2.5-1.5b", "model=qwen2.5-1.5b is not known", "qwen2_5_1_5b", "tiny"),
        ("runtime=vlm", "runtime=vlm is not known", "vllm", "pytorch"),
        ("model=null", "is not known", "", "tiny"),
        ("model=3", "model=3 is not known", "", "tiny"),
        ("model", "'model' is not an override", "model=NAME", "KEY=VALUE"),
        ("runtime", "'runtime' is not an override", "runtime=NAME", "KEY=VALUE"),
        ("./weights", "'./weights' is not an override", "model=hf model.path=./weights", "KEY=VALUE"),
        # a value
        ("model.dtype=bf32", "model.dtype=bf32 is not known", "fp32", "auto"),
        ("runtime.cache=statik", "runtime.cache=statik is not known", "static", "dynamic"),
        ("runtime.compile=reduce_overhead", "is not known", "reduce-overhead", "max-autotune"),
        ("profiling.torch.preset=maximal", "is not known", "", "minimal"),
    ],
)
def test_a_wrong_word_is_answered_with_the_fact_the_choices_and_the_nearest(
    override: str, fact: str, meant: str, choices: str
) -> None:
    error = refusal(override)
    assert fact in error.fact
    assert choices in error.remedy
    if meant:
        assert f"Did you mean '{meant}'?" in error.fact


def test_a_name_on_the_hub_is_answered_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = refusal("model=Qwen/Qwen2.5-1.5B").remedy
    assert "hf download Qwen/Qwen2.5-1.5B" in remedy
    assert "model=qwen2_5_1_5b" in remedy
    assert "tiny" in refusal("model=nobody/zzzzzz").remedy, "nothing is like it: all are named"
    assert "model=qwen2_5_7b" in refusal("model.path=Qwen/Qwen2.5-7B").remedy
    assert "model=hf" in refusal("model.path=/data/mine").remedy
    (tmp_path / "weights" / "mine").mkdir(parents=True)
    assert "model=hf model.path=weights/mine" in refusal("model=weights/mine").remedy
    assert "Hub" not in str(refusal("model.path=weights/mine")), "it is a folder"
    assert "model=hf" in refusal("model.path=weights/mine").remedy
    assert "model=hf model.path=/data/mine" in refusal("model=/data/mine").remedy


def test_an_unknown_runtime_is_answered_with_what_there_is_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.config.runtimes.find_spec", lambda _: None)
    remedy = refusal("runtime=nonsense").remedy
    assert "pytorch, vllm (not installed: pip install 'llm-perf-opt[vllm]')" in remedy
    assert "engine" not in remedy


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("runtime.batch_size=four", "an integer"),
        ("model.trust_remote_code=1", "true or false"),
        ("experiment=[a]", "text"),
        ("model.substages=null", "a mapping"),
        ("model.substages.vision=3", "text"),
    ],
)
def test_a_wrong_type_is_answered_with_what_was_expected(override: str, expected: str) -> None:
    error = refusal(override)
    assert f"expected {expected}" in error.fact
    assert error.fact.startswith(override.split("=")[0])


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("runtime", "batch_size", 1.5),
        ("runtime", "batch_size", True),
        ("runtime", "batch_size", None),
        ("runtime", "batch_size", [1]),
        ("runtime", "batch_size", "1"),
        ("runtime", "batch_size", {"a": 1}),
        ("hardware", "threads", "many"),
        ("runtime", "ci_target", False),
        ("runtime", "ci_target", "0.02"),
        ("runtime", "compile", True),
        ("runtime", "compile", ["none"]),
        ("model", "trust_remote_code", "true"),
        ("model", "path", 3),
        ("model", "substages", ["a"]),
        ("model", "substages", {"vision": {"deeper": "model"}}),
        ("model", "architecture", "llama"),
        ("profiling", "torch", None),
        ("profiling", "torch", True),
    ],
)
def test_values_of_a_saved_configuration_are_not_bent_into_shape(group: str, field: str, value: Any) -> None:
    values = dataclasses.asdict(default_config())
    values[group][field] = value
    with pytest.raises(ConfigError, match=rf"^{group}\.{field}") as caught:
        config_from_mapping(values)
    assert re.search("expected|is not known", caught.value.fact)


@pytest.mark.parametrize(
    "override",
    [
        "runtime.num_new_tokens=0",
        "runtime.batch_size=-1",
        "runtime.time_limit_s=1e99",
        f"runtime.time_limit_s={'9' * 400}",
        "model.seed=-1",
    ],
)
def test_a_value_out_of_range_is_refused(override: str) -> None:
    assert "out of range" in refusal(override).fact


@pytest.mark.parametrize(
    "override",
    [
        *("", "=", "=3", "model", "tiny", "--model=tiny", "model tiny", "a=b=c", "runtime.=3", "runtime..batch_size=3"),
        *("experiment='open", "experiment=[", "experiment=${", "model=tiny\nexperiment=x"),
        *("experiment=" + "[" * 1000, "experiment=" + "1" * 5000),
    ],
)
def test_what_is_no_override_is_called_that(override: str) -> None:
    refusal(override)


@pytest.mark.parametrize("override", ["experiment.x=1", "runtime.batch_size.x=1"])
def test_a_single_value_has_no_keys(override: str) -> None:
    assert "is a single value" in refusal(override).fact


def test_a_group_of_values_is_set_one_by_one() -> None:
    error = refusal("profiling.torch={enable: false}")
    assert "profiling.torch.enable" in error.remedy


@pytest.mark.parametrize(
    "override",
    [
        *("model=tiny,gpt2", "runtime.batch_size=1,2,4", "runtime.batch_size=range(1,8)", "runtime.batch_size=choice(1,2)"),
        *("runtime.ci_target=interval(0,1)", "model=glob(*)"),
    ],
)
def test_several_values_are_refused(override: str) -> None:
    assert "several values" in refusal(override).fact


def test_only_the_folder_of_hydras_own_settings_has_a_meaning() -> None:
    assert "hydra.run.dir" in refusal("hydra.job.name=x").remedy
    assert "hydra.run.dir" in refusal("hydra.searchpath=[file:///]").remedy


@pytest.mark.parametrize("override", ["~runtime.batch_size", "~experiment", "~model", "~hydra.run.dir", "~model.architecture"])
def test_what_a_run_needs_cannot_be_taken_away(override: str) -> None:
    refusal(override)


def test_a_model_on_disk_without_its_path_asks_for_it() -> None:
    error = refusal("model=hf")
    assert error.fact == "model.path has no value."
    assert "model.path=" in error.remedy


@pytest.mark.parametrize("value", ["${experiment}", "${nope}", "${nope:1}", "${oc.env:NO_SUCH_VARIABLE}", "???"])
def test_an_interpolation_that_leads_nowhere_is_refused(value: str) -> None:
    refusal(f"experiment={value}")


def test_a_refused_merge_says_why() -> None:
    assert "model.substages" in refusal("model.substages=[a]").fact
    assert "merge" in refusal("model.substages=[a]").fact.lower()


# --- free mappings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_free_mapping_takes_new_keys_however_they_are_written(plus: str) -> None:
    config = compose(
        [f"{plus}model.substages.vision=model.vision", f"{plus}model.architecture.rope_scaling={{rope_type: yarn, factor: 4.0}}"]
    ).config
    assert config.model.substages == {"vision": "model.vision"}
    assert config.model.architecture["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert config.model.architecture["model_type"] == "qwen2", "the others stay"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_known_key_of_a_free_mapping_is_replaced(plus: str) -> None:
    assert compose([f"{plus}model.architecture.num_hidden_layers=2"]).config.model.architecture["num_hidden_layers"] == 2


def test_a_key_of_a_free_mapping_may_be_taken_away() -> None:
    assert "rope_theta" not in compose(["~model.architecture.rope_theta"]).config.model.architecture
    assert "model_type" in refusal("~model.architecture.model_type").fact


def test_a_whole_mapping_may_be_given() -> None:
    assert compose(["model.substages={a: model.layers, b: lm_head}"]).config.model.substages == {
        "a": "model.layers",
        "b": "lm_head",
    }


# --- a user's own folder ----------------------------------------------------------------------------------------------


def test_a_users_folder_adds_options(tmp_path: Path) -> None:
    own(tmp_path, OWN_MODEL)
    config = compose(["model=mine"], tmp_path).config
    assert config.model.name == "mine"
    assert config.model.architecture == {"model_type": "gpt2", "n_layer": 3}
    assert config.model.source == "random", "from the packaged base it names"
    assert "mine" in group_options(tmp_path)["model"]
    assert "mine" not in group_options()["model"]


def test_a_near_name_may_come_from_the_users_folder(tmp_path: Path) -> None:
    assert "Did you mean 'mine'?" in refusal("model=min", config_dir=own(tmp_path, OWN_MODEL)).fact


@pytest.mark.parametrize("name", ["a b", "a\\b", "a\\\"b'c\\", "é,[]{}=:#%20", "${x}", "~\t"])
def test_a_users_folder_may_be_called_anything(tmp_path: Path, name: str) -> None:
    assert compose(["model=mine"], own(tmp_path / name, OWN_MODEL)).config.model.name == "mine"


def test_a_relative_folder_is_found_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path / "conf", OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    assert compose(["model=mine"], Path("conf")).config.model.name == "mine"


@pytest.mark.parametrize("folder", ["nowhere", "a_file"])
def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a_file").touch()
    assert str(tmp_path / folder) in refusal(config_dir=tmp_path / folder).fact


@pytest.mark.parametrize(
    "content", ["name: [a\nb: {", "name:\n\t- x\n", "a: 1\na: 2\n", "path: !!python/object/apply:os.getcwd []\n"]
)
def test_broken_yaml_is_answered_with_its_file_and_line(tmp_path: Path, content: str) -> None:
    error = refusal("model=mine", config_dir=own(tmp_path, content))
    assert re.search(re.escape(str(tmp_path / "model" / "mine.yaml")) + r", line \d", error.fact)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("name: mine\n", "'mine' has no architecture.model_type"),
        ("", "'mine' has no architecture.model_type"),
        (OWN_MODEL + "nam: x\n", "'nam' is not known in model. Did you mean 'name'?"),
        (OWN_MODEL + "dtype: fp7\n", "model.dtype=fp7"),
        (OWN_MODEL + "seed: yes\n", "model.seed"),
        ("- a\n- b\n", "is not a mapping of settings"),
        ("hello\n", "'hello' is not known in model"),
        ("# @package _global_\nexperiment: mine\n", "'mine' has no architecture.model_type"),
    ],
)
def test_a_file_with_the_wrong_fields_is_answered_with_them(tmp_path: Path, content: str, fact: str) -> None:
    error = refusal("model=mine", config_dir=own(tmp_path, content))
    assert fact in error.fact


@pytest.mark.parametrize(
    "content",
    [
        b"name: \xff\xfe\n",
        b"name: \x00\n",
        b"defaults: 3\n",
        b"defaults: [nope]\n",
        b"defaults: [mine]\n",
        b"defaults: [{a: {b: c}}]\n",
        OWN_MODEL[:25].encode() + b"defaults: " + OWN_MODEL[25:].encode(),
        OWN_MODEL.encode() + b"substages: &a [*a]\n",
        OWN_MODEL.encode() + b"substages: " + b"[" * 1000,
        OWN_MODEL.encode() + b"seed: " + b"1" * 5000,
        OWN_MODEL.encode() + b"dtype: ${a.b}\n",
    ],
)
def test_a_file_hydra_stumbles_over_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal("model=mine", config_dir=own(tmp_path, content))


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    own(tmp_path, OWN_MODEL)
    (tmp_path / "model" / "loop.yaml").symlink_to("loop.yaml")
    refusal("model=loop", config_dir=tmp_path)


# --- plain values and back --------------------------------------------------------------------------------------------


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(alphabet=string.ascii_letters + string.digits, min_size=1, max_size=10)


def values_of(kind: Any, key: str) -> st.SearchStrategy[Any]:
    """Values a field of this type may hold, inside its range where it has one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.fixed_dictionaries({name: values_of(hint, f"{key}.{name}".lstrip(".")) for name, hint in hints.items()})
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if argument is type(None) else values_of(argument, key) for argument in arguments])
    if origin is dict:
        return st.dictionaries(NAMES, st.text() if arguments[1] is str else JSON_VALUES, max_size=3)
    if origin is tuple:
        return st.lists(values_of(arguments[0], key), max_size=3)
    low, high = checks._RANGES.get(key, (0, 1000))
    if key == "hardware.cpus":
        return st.sets(st.integers(0, 100), min_size=1).map(cpu_list)
    if kind is str:
        return NAMES if key in ("experiment", "model.name") else st.text()
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(math.ceil(low), math.floor(high)),
        float: st.floats(low, high),
    }
    return by_type[kind]


@settings(deadline=None, max_examples=25)
@given(values_of(RunConfig, ""))
@pytest.mark.slow
def test_any_configuration_goes_through_yaml_unchanged(values: dict[str, Any]) -> None:
    values["model"]["architecture"]["model_type"] = "llama"
    values["model"].update(source="random", path=None)
    values["dataset"].update(kind="prompts", variant=None)
    values["dataset"].update({"path": None} if values["dataset"]["root"] else {})  # one or the other
    values["dataset"].update(image_count=None, annotations=None, prompt=None)  # of a folder of images
    values["dataset"].update(image_height=values["dataset"]["image_width"])  # they go together
    values["profiling"].update(clean=True, ceilings=True, logits=True, passes={})  # a section is of a pass that is installed
    values["profiling"]["ncu"].update(enable=True, kernel_regex=None, substage=None)  # its sections have an effect
    values["profiling"]["nsys"].update(substage=None)  # of a pass that is enabled
    for name in ("torch", "nvml"):  # ncu needs a timeline, and an exporter is read by the telemetry
        values["profiling"][name]["enable"] = True
    values["hardware"].update(peak_tflops=values["hardware"]["bandwidth_gbs"])  # they go together
    values["launcher"] = {**dataclasses.asdict(LauncherConfig("slurm")), "gpus": values["launcher"]["gpus"], "wait": False}
    values["runtime"].update(type="mine", attn_implementation="auto", cache="dynamic", quantization="none")
    values["runtime"].update(tensor_parallel=1)
    values["hardware"].update(devices=None)
    values["runtime"].update(
        attention_backend="auto", compile_prefill=False, coordinate_descent_tuning=False, fuse_projections=False, row_kernel=False
    )  # like these, of a runtime without an engine
    values["runtime"].update(compile="none", min_repeats=1, num_new_tokens=max(2, values["runtime"]["num_new_tokens"]))
    assume(not list(credentials_in(values)))  # they are rejected
    config = config_from_mapping(values)
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


@settings(deadline=None, max_examples=50)
@given(
    st.recursive(
        JSON_VALUES, lambda inner: st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(RunConfig)]), inner)
    )
)
@example({})
@example([])
@example(None)
@example("model: tiny")
def test_any_mapping_is_a_configuration_or_a_config_error(values: Any) -> None:
    with contextlib.suppress(ConfigError):
        config_from_mapping(values)


@pytest.mark.parametrize(
    "text", ["\x85", "a\x85b", "a\u2028b", "\ufeff", "yes", "1e3", "0x10", "~", " a ", "a: b", "#", "é", "\n\n"]
)
def test_a_text_that_yaml_might_take_for_something_else_stays_itself(text: str) -> None:
    config = with_value(
        with_value(default_config(), "dataset.text_field", text), "model.architecture", {"model_type": text, text: [text]}
    )
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


def test_the_saved_configuration_can_be_read_by_people() -> None:
    assert "path: /data/modèles/é" in config_to_yaml(with_value(default_config(), "model.path", "/data/modèles/é"))


FIELDS = [
    f"{group}.{name}"
    for group, values in dataclasses.asdict(default_config()).items()
    if group != "experiment"
    for name in values
]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(FIELDS), JSON_VALUES)
def test_any_value_of_any_field_is_taken_or_refused(key: str, value: Any) -> None:
    values = dataclasses.asdict(default_config())
    group, name = key.split(".")
    values[group][name] = value
    try:
        config = config_from_mapping(values)
    except ConfigError:
        return
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    values = dataclasses.asdict(default_config())
    del values["model"][field]
    with pytest.raises(ConfigError, match=f"'{field}' is missing in model"):
        config_from_mapping(values)


# --- anything at all --------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("experiment", "model", "model.name", "model.path", "model.seed", "model.architecture", "model.architecture.x"),
        *("model.substages.a", "runtime", "runtime.batch_size", "runtime.ci_target", "runtime.time_limit_s", "profiling.torch"),
        *(
            "profiling.torch.enable",
            "hydra",
            "hydra.run.dir",
            "hydra.x",
            "model@x",
            "nope",
            "a.b.c",
            "defaults",
            "_self_",
            "",
            ".",
        ),
    ]
)
PIECES = st.sampled_from(
    [
        *(
            "tiny",
            "gpt2",
            "1",
            "-1",
            "1e5",
            "0.5",
            "true",
            "null",
            "???",
            "${experiment}",
            "${model}",
            "${oc.env:HOME}",
            "${now:%Y}",
        ),
        *("${", "}", "[", "]", "{", "a: 1", ",", "'", '"', "\\", " ", "\n", "=", "+", "~", "int(3)", "range(1,3)", "glob(*)"),
        *("é", "\0", "%", "$", "#", "@"),
    ]
)
OVERRIDES = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda sign, key, equals, value: sign + key + equals + "".join(value),
        st.sampled_from(["", "", "", "+", "++", "~"]),
        KEYS,
        st.sampled_from(["=", "=", "=", "", "=="]),
        st.lists(PIECES | st.text(max_size=5), max_size=4),
    ),
)


def composed_or_refused(overrides: Sequence[str], config_dir: Path | None = None) -> None:
    try:
        composed = compose(overrides, config_dir)
    except ConfigError:
        return
    assert isinstance(composed, Composed)


@settings(deadline=None, max_examples=50)
@given(st.lists(OVERRIDES, min_size=1, max_size=2))
@pytest.mark.slow
def test_any_words_are_a_configuration_or_a_config_error(overrides: list[str]) -> None:
    composed_or_refused(overrides)


DAMAGE = [
    b"[",
    b"{",
    b"*a",
    b"&a",
    b"${x}",
    b"${model}",
    b"???",
    b"- ",
    b": ",
    b"\n",
    b"defaults: ",
    b"!!int x",
    b"? ",
    b"|",
    b"\t",
]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, len(OWN_MODEL)), st.integers(0, 6), st.binary(max_size=4) | st.sampled_from(DAMAGE))
@pytest.mark.slow
def test_any_damage_to_a_users_file_is_a_configuration_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, inserted: bytes
) -> None:
    content = OWN_MODEL.encode()
    folder = own(tmp_path_factory.mktemp("conf"), content[:start] + inserted + content[start + length :])
    composed_or_refused(["model=mine"], folder)


@pytest.mark.parametrize(
    ("word", "args"),
    [
        ("profiling.nsys.args=\"--gpuctxsw=true --nic-metrics 'a b'\"", ("--gpuctxsw=true", "--nic-metrics", "a b")),
        ("profiling.nsys.args=[--gpuctxsw, 'true']", ("--gpuctxsw", "true")),
        ('profiling.nsys.args=""', ()),
    ],
)
def test_options_of_a_tool_are_a_list_or_one_text(word: str, args: tuple[str, ...]) -> None:
    assert compose(["profiling=nsys", word]).config.profiling.nsys.args == args


def test_a_text_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profiling\.nsys\.args"):
        compose(["profiling=nsys", 'profiling.nsys.args="it\'s"'])
    assert compose(["profiling=nsys", 'profiling.nsys.trace="cuda, nvtx"']).config.profiling.nsys.trace == ("cuda", "nvtx")


def test_roofline_only() -> None:
    found = compose(["profiling=roofline-only"]).config.profiling
    assert (found.clean, found.ceilings, found.torch.enable, found.ncu.enable) == (True, True, True, True)
    assert (found.nvml.enable, found.nsys.enable, found.metrics.sets) == (False, False, ("roofline",))
    assert found.ncu.sections == ("SpeedOfLight", "SpeedOfLight_RooflineChart")


def test_an_older_configuration_gets_the_settings_of_the_tools() -> None:
    values = yaml.safe_load(config_to_yaml(compose([]).config))
    older = copy.deepcopy(values)
    older["profiling"]["metrics"] = {"sets": ["roofline"], "add": [], "remove": []}
    for name, keys in (
        ("nsys", ("trace", "sample", "args")),
        ("ncu", ("set", "kernel_regex", "args")),
        ("nvml", ("prometheus",)),
    ):
        for key in keys:
            del older["profiling"][name][key]
    assert config_from_mapping(older) == config_from_mapping(values), "the default set that never counted is left out"
    older["profiling"]["ncu"]["enable"] = True
    assert config_from_mapping(older).profiling.metrics.sets == ("roofline",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["profiling.ncu.set=full"], "Nsight Compute is off"),
        (["profiling.ncu.sections=[Occupancy]"], "Nsight Compute is off"),
        (["profiling.metrics.add=[lts__t_bytes.sum]"], "Nsight Compute is off"),
        (["profiling.metrics.remove=[lts__t_bytes.sum]"], "Nsight Compute is off"),
        (["profiling=ncu", "profiling.ncu.kernel_regex='('"], "not a regular expression"),
        (["profiling=ncu", "profiling.ncu.launch_count=0"], "out of range"),
        (["profiling=none", "profiling.nvml.prometheus=x"], "no telemetry"),
        (["profiling.ncu.kernel_regex=gemm"], "Nsight Compute is off"),
        (["profiling.ncu.launch_skip=0"], "Nsight Compute is off"),
        (["profiling.ncu.launch_count=2"], "Nsight Compute is off"),
        (["profiling.ncu.clock_control=base"], "Nsight Compute is off"),
        (["profiling.ncu.cache_control=all"], "Nsight Compute is off"),
        (["profiling.ncu.args='--verbose'"], "Nsight Compute is off"),
        (["profiling.nsys.trace=[cuda]"], "Nsight Systems is off"),
        (["profiling.nsys.sample=process-tree"], "Nsight Systems is off"),
        (["profiling.nsys.args='--gpuctxsw=true'"], "Nsight Systems is off"),
        (["profiling.metrics.defined=x"], "defined"),
        (["profiling.metrics.defined=x", "profiling.metrics.sets=[ch09]"], "defined"),
    ],
)
def test_settings_of_the_tools_that_cannot_work_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(words)
