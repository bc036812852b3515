"""Tensor parallelism in a run's configuration: the ranks that it needs, and settings that contradict it."""

from dataclasses import replace

from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError

_SIZE = "runtime.tensor_parallel"


def ranks_of(config: RunConfig) -> int:
    """Return the number of processes that llm-perf starts for the model: its ranks, or 1 if an engine starts its own workers."""
    return config.runtime.tensor_parallel if traits_of(config.runtime.type).ranks else 1


def devices_used(config: RunConfig) -> int:
    """Return the number of devices that the ranks or workers are placed on; on a CPU, 1."""
    if config.hardware.device == "cpu":
        return 1
    engine = traits_of(config.runtime.type).tensor_parallel
    return config.hardware.devices or (config.runtime.tensor_parallel if engine else 1)


def device_of_rank(config: RunConfig, rank: int) -> int:
    """Return the index of the GPU of a rank: ranks are placed on the GPUs in turn."""
    return config.hardware.device_index + rank % (config.hardware.devices or 1)


def ranks_on_device(config: RunConfig) -> int:
    """Return the largest number of ranks that share a device."""
    return -(-ranks_of(config) // devices_used(config))


def with_engine_argument(config: RunConfig) -> RunConfig:
    """Return the configuration with `runtime.tensor_parallel` as the argument of the engine that takes it."""
    runtime, name = config.runtime, traits_of(config.runtime.type).tensor_parallel
    if not name or (runtime.tensor_parallel == 1 and config.hardware.devices is None):
        return config
    return replace(config, runtime=replace(runtime, engine={name: runtime.tensor_parallel, **runtime.engine}))


def check_parallel(config: RunConfig) -> None:
    """Raise a ConfigError for ranks that the runtime or the devices do not support, and for settings that ranks exclude."""
    runtime, traits = config.runtime, traits_of(config.runtime.type)
    size = runtime.tensor_parallel
    given = runtime.engine.get(traits.tensor_parallel, size) if traits.tensor_parallel else size
    if given != size and (size > 1 or config.hardware.devices is not None):
        raise ConfigError(
            f"{_SIZE}={size} and runtime.engine.{traits.tensor_parallel}={given} contradict each other.", f"Give {_SIZE} alone."
        )
    if size > 1 and not traits.ranks and not traits.tensor_parallel:
        raise ConfigError(f"runtime={runtime.type} does not split a model over ranks ({_SIZE}={size}).", "Use runtime=pytorch.")
    _check_devices(config, own_ranks=traits.ranks, engine=traits.engine)
    if size > 1 and traits.ranks:
        _check_ranks(config)


def _check_devices(config: RunConfig, *, own_ranks: bool, engine: bool) -> None:
    hardware, size = config.hardware, config.runtime.tensor_parallel
    if hardware.devices is None:
        return
    if hardware.device == "cpu":
        raise ConfigError(f"hardware.devices={hardware.devices} has no effect on a CPU.", f"Ranks on a CPU: {_SIZE}=N alone.")
    if hardware.devices > size and (own_ranks or not engine):
        raise ConfigError(
            f"hardware.devices={hardware.devices} has no effect beyond {_SIZE}={size}: each GPU needs a rank.",
            f"Set {_SIZE}={hardware.devices}, or leave out hardware.devices.",
        )
    if own_ranks and size % hardware.devices:
        raise ConfigError(
            f"{size} ranks ({_SIZE}) cannot be placed evenly on hardware.devices={hardware.devices} GPUs.",
            f"Set {_SIZE} to a multiple of hardware.devices.",
        )


def _check_ranks(config: RunConfig) -> None:
    """Reject what ranks do not support."""
    runtime, profiling = config.runtime, config.profiling
    excluded = {
        f"runtime.compile={runtime.compile}": (runtime.compile != "none", "Use runtime.compile=none."),
        f"runtime.quantization={runtime.quantization}": (runtime.quantization != "none", "Use runtime.quantization=none."),
        "runtime.fuse_projections=true": (runtime.fuse_projections, "Use runtime.fuse_projections=false."),
        "profiling.ncu": (
            profiling.ncu.enable,
            "ncu repeats kernels, which collectives do not allow. Use profiling=nsys or minimal.",
        ),
    }
    for setting, (given, remedy) in excluded.items():
        if given:
            raise ConfigError(f"{setting} cannot be combined with {_SIZE}={runtime.tensor_parallel}.", remedy)
