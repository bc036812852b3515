"""Tensor parallelism in a configuration: how many processes and devices it means, and what it excludes."""

import pytest

from builders import default_config, with_value
from llm_perf_opt.config.checks import check
from llm_perf_opt.config.composition import compose, config_from_mapping, config_to_yaml
from llm_perf_opt.config.parallel import device_of_rank, devices_used, ranks_of, ranks_on_device
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError


def configured(**changes: object) -> RunConfig:
    config = default_config()
    for key, value in changes.items():
        config = with_value(config, key.replace("__", "."), value)
    return config


def test_one_rank_is_the_default() -> None:
    config = compose([]).config
    assert (ranks_of(config), devices_used(config), ranks_on_device(config)) == (1, 1, 1)
    assert config.hardware.devices is None


def test_the_group_of_several_gpus_gives_each_rank_its_own() -> None:
    config = compose(["hardware=multi_gpu", "hardware.device_index=2", "runtime.tensor_parallel=4"]).config
    assert (config.hardware.device, config.hardware.devices) == ("cuda", 4)
    assert (ranks_of(config), devices_used(config), ranks_on_device(config)) == (4, 4, 1)
    assert [device_of_rank(config, rank) for rank in range(4)] == [2, 3, 4, 5]


def test_ranks_take_turns_on_fewer_devices() -> None:
    shared = configured(hardware__device="cuda", hardware__devices=2, runtime__tensor_parallel=4)
    assert [device_of_rank(shared, rank) for rank in range(4)] == [0, 1, 0, 1]
    assert (devices_used(shared), ranks_on_device(shared)) == (2, 2)
    on_one = compose(["hardware=single_gpu", "runtime.tensor_parallel=2"]).config
    assert (devices_used(on_one), ranks_on_device(on_one)) == (1, 2)
    on_cpu = compose(["hardware=cpu", "runtime.tensor_parallel=2"]).config
    assert (ranks_of(on_cpu), devices_used(on_cpu), ranks_on_device(on_cpu)) == (2, 1, 2)


def test_an_engine_gets_the_size_as_its_own_argument_and_starts_its_own_workers() -> None:
    config = compose(["hardware=multi_gpu", "runtime=vllm", "runtime.tensor_parallel=2"]).config
    assert config.runtime.engine == {"tensor_parallel_size": 2}
    assert (ranks_of(config), devices_used(config)) == (1, 2)
    one = compose(["hardware=multi_gpu", "hardware.devices=1", "runtime=vllm", "runtime.tensor_parallel=1"]).config
    assert one.runtime.engine == {"tensor_parallel_size": 1}
    assert compose(["hardware=single_gpu", "runtime=vllm"]).config.runtime.engine == {}


def test_a_resolved_configuration_is_read_back_as_it_was() -> None:
    import yaml

    config = compose(["hardware=multi_gpu", "runtime=vllm", "runtime.tensor_parallel=2"]).config
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


@pytest.mark.parametrize(
    ("overrides", "fact", "remedy"),
    [
        (["hardware=cpu", "hardware.devices=2", "runtime.tensor_parallel=2"], "no effect on a CPU", "runtime.tensor_parallel"),
        (["hardware=multi_gpu", "hardware.devices=2"], "no effect beyond runtime.tensor_parallel=1", "runtime.tensor_parallel=2"),
        (["hardware=multi_gpu", "hardware.devices=2", "runtime.tensor_parallel=3"], "evenly", "multiple"),
        (["hardware=cpu", "runtime.tensor_parallel=2", "runtime.compile=default"], "runtime.compile", "compile=none"),
        (["hardware=cpu", "runtime.tensor_parallel=2", "runtime.quantization=int8"], "runtime.quantization", "none"),
        (["hardware=single_gpu", "runtime.tensor_parallel=2", "profiling=ncu"], "profiling.ncu", "profiling=nsys"),
        (["runtime=llamacpp", "runtime.tensor_parallel=2"], "does not split", "pytorch"),
        (["runtime=vllm", "runtime.tensor_parallel=2", "runtime.engine.tensor_parallel_size=4"], "contradict", "alone"),
        (["runtime.tensor_parallel=0"], "out of range", ""),
    ],
)
def test_what_ranks_exclude_is_refused(overrides: list[str], fact: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert fact in caught.value.fact
    assert remedy in caught.value.remedy


def test_an_engine_may_use_more_devices_than_share_a_step() -> None:
    staged = configured(hardware__device="cuda", hardware__devices=4, runtime__type="vllm", runtime__tensor_parallel=2)
    assert check(with_value(staged, "runtime.engine", {"pipeline_parallel_size": 2})).hardware.devices == 4
