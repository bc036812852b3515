"""The checks of a configuration: ranges, names, contradictions. Reads no file."""

from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import default_config, with_value
from llm_perf_opt.config.checks import check
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.stages import STAGE_NAMES

HOSTILE_FOLDER_NAMES = (
    "../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\nb", "a\n", "", " ", "a b", ".hidden", "-rf", "~",
    "$HOME", "a\0b", "é", "x" * 101,
)  # fmt: skip


def refusal(config: RunConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.exit_code == 2
    return caught.value


def test_what_is_sound_comes_back_unchanged() -> None:
    assert check(default_config()) is default_config()


def test_a_folder_of_images_is_given_as_a_path_or_in_the_tree() -> None:
    bare = with_value(with_value(default_config(), "dataset.kind", "image_folder"), "dataset.path", None)
    assert "dataset.path" in refusal(bare).fact
    for key in ("dataset.path", "dataset.root"):
        given = with_value(bare, key, "datasets/pages")
        assert check(given) is given
    assert "contradict" in refusal(with_value(with_value(bare, "dataset.root", "a"), "dataset.path", "b")).fact


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("runtime.batch_size", 0, 1),
        ("runtime.batch_size", -4, 4),
        ("runtime.prompt_tokens", 0, 1),
        ("runtime.num_new_tokens", 0, 1),
        ("runtime.max_warmup", 0, 1),
        ("runtime.ci_target", 0.0, 0.0001),
        ("runtime.ci_target", 1.01, 1.0),
        ("runtime.time_limit_s", 0.0, 0.001),
        ("hardware.device_index", -1, 0),
        ("hardware.threads", 0, 1),
        ("profiling.torch.decode_steps", 0, 1),
        ("profiling.nvml.interval_s", 0.0, 0.005),
        ("profiling.pass_timeout_s", 0.5, 1.0),
        ("profiling.max_trace_gb", 0.0, 0.01),
        ("profiling.max_trace_gb", 100_001, 100_000),
        ("model.seed", -1, 0),
        ("model.seed", 2**63, 2**63 - 1),
        ("dataset.seed", -1, 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_bounds(key: str, refused: float, accepted: float) -> None:
    error = refusal(with_value(default_config(), key, refused))
    assert error.fact.startswith(f"{key}={refused} is out of range")
    assert "between" in error.fact
    check(with_value(default_config(), key, accepted))


@pytest.mark.parametrize("key", ["runtime.min_repeats", "runtime.max_repeats"])
def test_repeats_begin_at_one(key: str) -> None:
    refusal(with_value(with_value(default_config(), "runtime.min_repeats", 1), key, 0))
    check(with_value(with_value(default_config(), "runtime.min_repeats", 1), key, 1))


@pytest.mark.parametrize(
    "key",
    [
        "runtime.ci_target",
        "runtime.time_limit_s",
        "profiling.nvml.interval_s",
        "profiling.pass_timeout_s",
        "profiling.max_trace_gb",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_number_that_is_none(key: str, value: float) -> None:
    assert key in refusal(with_value(default_config(), key, value)).fact


@pytest.mark.parametrize("key", ["hardware.threads", "profiling.torch.decode_steps"])
def test_none_means_the_frameworks_choice_and_has_no_range(key: str) -> None:
    check(with_value(default_config(), key, None))


def test_zero_new_tokens_says_what_one_and_two_would_measure() -> None:
    remedy = refusal(with_value(default_config(), "runtime.num_new_tokens", 0)).remedy
    assert "prefill" in remedy
    assert "2" in remedy


def test_fewest_repeats_above_most_is_a_contradiction() -> None:
    config = with_value(with_value(default_config(), "runtime.min_repeats", 9), "runtime.max_repeats", 8)
    assert "runtime.min_repeats=9" in refusal(config).fact
    assert "runtime.max_repeats=8" in refusal(config).fact
    check(with_value(config, "runtime.max_repeats", 9))


@pytest.mark.parametrize("key", ["experiment", "model.name"])
@pytest.mark.parametrize("name", HOSTILE_FOLDER_NAMES)
def test_a_name_that_could_leave_its_folder_is_refused(key: str, name: str) -> None:
    error = refusal(with_value(default_config(), key, name))
    assert repr(name) in error.fact, "shown escaped, so that a newline cannot forge a line of output"
    assert error.remedy


@pytest.mark.parametrize("name", ["a", "Qwen2.5-7B", "run_1", "0", "a..b", "x" * 100])
def test_ordinary_names_are_taken(name: str) -> None:
    check(with_value(with_value(default_config(), "experiment", name), "model.name", name))


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.text(max_size=120), st.text(alphabet="./\\ab-_~\n\0", max_size=6)))
@example("ab/../../x")
def test_an_accepted_name_is_one_step_down_and_never_up(name: str) -> None:
    try:
        check(with_value(default_config(), "experiment", name))
    except ConfigError:
        return
    assert PurePosixPath("runs", name).parts == ("runs", name)
    assert name not in (".", "..")
    assert name.isascii()
    assert name.isprintable()


def test_random_weights_need_an_architecture() -> None:
    error = refusal(with_value(default_config(), "model.architecture", {"hidden_size": 8}))
    assert "architecture.model_type" in error.fact


@pytest.mark.parametrize("path", [None, ""])
def test_a_model_on_disk_needs_its_path(path: str | None) -> None:
    config = with_value(with_value(default_config(), "model.source", "pretrained"), "model.path", path)
    assert "model.path is missing" in refusal(config).fact
    assert "model.path=DIR" in refusal(config).remedy
    check(with_value(with_value(config, "model.path", "/data/weights"), "model.architecture", {}))


def test_seconds_for_peaks_that_are_not_measured_are_refused() -> None:
    config = with_value(default_config(), "profiling.ceilings_s", 2.5)
    check(config)
    error = refusal(with_value(config, "profiling.ceilings", False))
    assert "profiling.ceilings_s=2.5 has no effect" in error.fact
    assert "profiling.ceilings=true" in error.remedy


def test_logits_need_the_unprofiled_pass() -> None:
    config = with_value(default_config(), "profiling.logits", True)
    check(with_value(config, "profiling.logits_reference", "runs/base"))
    assert "profiling.clean is false" in refusal(with_value(config, "profiling.clean", False)).fact
    error = refusal(with_value(default_config(), "profiling.logits_reference", "runs/base"))
    assert "profiling.logits_reference=runs/base has no effect" in error.fact
    assert "profiling.logits=true" in error.remedy


@pytest.mark.parametrize(
    ("key", "value", "group"),
    [("model.path", "/data/weights", "model=hf"), ("dataset.path", "mine.jsonl", "dataset=sample_prompts")],
)
def test_a_setting_without_effect_is_refused_with_the_choice_that_gives_it_one(key: str, value: str, group: str) -> None:
    error = refusal(with_value(default_config(), key, value))
    assert f"{key}={value} has no effect" in error.fact
    assert group in error.remedy


@pytest.mark.parametrize("name", [*STAGE_NAMES, "", "a b", "a/b", "x\n", "../x", "|"])
def test_a_substage_cannot_take_a_stages_name_nor_markup(name: str) -> None:
    error = refusal(with_value(default_config(), "model.substages", {"good": "model", name: "model.layers"}))
    assert repr(name) in error.fact
    assert all(stage in error.remedy for stage in STAGE_NAMES)


def test_substages_have_names_of_their_own() -> None:
    check(with_value(default_config(), "model.substages", {"sam": "model.sam_model", "projector": "model.projector"}))


def runtime(**values: Any) -> RunConfig:
    config = default_config()
    for key, value in values.items():
        config = with_value(config, f"runtime.{key}", value)
    return config


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_recorded_graphs_need_a_cache_that_stays_in_place(mode: str) -> None:
    error = refusal(runtime(compile=mode, cache="dynamic"))
    assert f"runtime.compile={mode}" in error.fact
    assert "runtime.cache=static" in error.remedy
    check(runtime(compile=mode, cache="static"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_plain_compilation_takes_either_cache(cache: str) -> None:
    check(runtime(compile="default", cache=cache))


def test_what_is_compiled_has_no_substages() -> None:
    config = with_value(runtime(compile="default"), "model.substages", {"mlp": "model.layers.0.mlp"})
    assert "model.substages" in refusal(config).fact
    check(with_value(config, "runtime.compile", "none"))


def test_a_run_has_at_least_one_pass() -> None:
    config = default_config()
    for key in ("clean", "torch.enable", "nsys.enable", "ncu.enable"):
        config = with_value(config, f"profiling.{key}", False)
    assert "no pass" in refusal(config).fact
    check(with_value(config, "profiling.clean", True))


def test_a_device_is_described_by_peak_and_bandwidth_together() -> None:
    alone = with_value(default_config(), "hardware.peak_tflops", 989.0)
    assert "hardware.bandwidth_gbs" in refusal(alone).fact
    both = with_value(alone, "hardware.bandwidth_gbs", 3350.0)
    check(both)
    refusal(with_value(both, "hardware.peak_tflops", None))
    refusal(with_value(both, "hardware.bandwidth_gbs", 0.0))


def test_counters_need_a_timeline_to_choose_kernels_from() -> None:
    config = with_value(with_value(runtime(), "profiling.torch.enable", False), "profiling.ncu.enable", True)
    assert "timeline" in refusal(config).fact
    check(with_value(config, "profiling.nsys.enable", True))
    check(with_value(config, "profiling.torch.enable", True))


def test_bounds_are_written_out() -> None:
    assert "between 1 and 1,000,000." in refusal(with_value(default_config(), "runtime.max_repeats", 0)).fact
    assert "between 0.0001 and 1." in refusal(with_value(default_config(), "runtime.ci_target", 0.0)).fact


@pytest.mark.parametrize("cpus", ["0", "0-3", "0-3,8", " 1 , 2 "])
def test_a_list_of_cpus_is_taken(cpus: str) -> None:
    check(with_value(default_config(), "hardware.cpus", cpus))


@pytest.mark.parametrize("cpus", ["", "a", "3-1", "0-", "-1", "0,,1", "0-99999", "0 1"])
def test_what_is_no_list_of_cpus_is_refused(cpus: str) -> None:
    error = refusal(with_value(default_config(), "hardware.cpus", cpus))
    assert error.fact.startswith(f"hardware.cpus={cpus}:")
    assert "0-3,8" in error.remedy


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantization_is_for_a_runtime_without_an_engine(kind: str) -> None:
    config = with_value(default_config(), "runtime.quantization", kind)
    check(config)
    check(with_value(config, "hardware.device", "cuda"))
    assert "no effect" in refusal(with_value(config, "runtime.type", "vllm")).fact


def test_int4_on_a_gpu_needs_bf16() -> None:
    config = with_value(default_config(), "runtime.quantization", "int4")
    config = with_value(config, "model.dtype", "fp16")
    check(with_value(config, "hardware.device", "cpu"))
    assert "fp16 on a GPU" in refusal(with_value(config, "hardware.device", "cuda")).fact
    check(with_value(with_value(config, "hardware.device", "cuda"), "model.dtype", "bf16"))


@pytest.mark.parametrize("name", ["coordinate_descent_tuning", "row_kernel"])
def test_settings_of_triton_kernels_need_a_compiled_step_on_a_gpu(name: str) -> None:
    config = with_value(default_config(), f"runtime.{name}", True)
    assert "runtime.compile=none" in refusal(config).fact
    plain = with_value(with_value(config, "runtime.compile", "default"), "hardware.device", "cuda")
    if name == "row_kernel":
        assert "CUDA graphs" in refusal(plain).fact
    else:
        check(plain)
    config = with_value(with_value(config, "runtime.compile", "reduce-overhead"), "runtime.cache", "static")
    check(with_value(config, "hardware.device", "cuda"))
    assert "GPU" in refusal(with_value(config, "hardware.device", "cpu")).fact
