"""The process of an engine's server: resolves its arguments as a run does, then runs the server's own module.

`llm-perf serve` starts it with the run's config.yaml and ends it with its process group.
"""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llm_perf_opt.config.code_settings import Stored, code_settings
from llm_perf_opt.config.composition import config_from_mapping
from llm_perf_opt.config.registry import Declared, load
from llm_perf_opt.config.runtimes import runtime_named
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.config.serving import ServerCommand
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.core.secrets import hidden_argv, shown_command
from llm_perf_opt.core.user_files import read_text
from llm_perf_opt.core.yaml_text import load_yaml
from llm_perf_opt.runners.base import ServerRequest
from llm_perf_opt.runners.child import die_with_parent, enable_interrupts, framework_error, report_errors, send
from llm_perf_opt.runners.cpus import prepare_threads, set_threads
from llm_perf_opt.runners.measure.gpu import gpu_size

_BF16_CAPABILITY = (8, 0)


def server_command(config: RunConfig, places: argparse.Namespace) -> ServerCommand:
    """Return the command of the engine's server, with model, device and dtype resolved as in a run."""
    runtime = runtime_named(config.runtime.type)
    if runtime.server is None:
        raise ConfigError(f"runtime={runtime.name} has no server.", "Start one yourself and attach to it with --url.")
    prepare_threads(config.hardware.cpus, config.hardware.threads)
    import transformers

    from llm_perf_opt.runners import models

    transformers.logging.set_verbosity_error()
    set_threads(config.hardware.cpus, config.hardware.threads)
    device = models.choose_device(config.hardware)
    architecture = models.load_config(config.model)
    models.check_positions(architecture, config.runtime.prompt_tokens, config.runtime.num_new_tokens)
    command = load(Declared(runtime.name, runtime.server.target, runtime.provided_by), "runtime", runtime.install)
    made: ServerCommand = command(
        ServerRequest(
            config=config,
            architecture=architecture,
            device=device,
            dtype=models.choose_dtype(_dtype(config) if device.type == "cuda" else config.model.dtype, device),
            folder=places.folder,
            port=places.port,
            trace_dir=places.traces,
            spans_url=places.spans or "",
        )
    )
    return made


def _dtype(config: RunConfig) -> str:
    """Return the dtype for a GPU without torch, which would use the GPU in the server's front end, too."""
    size = gpu_size(config.hardware.device_index)
    if config.model.dtype != "auto" or isinstance(size, Missing):
        return config.model.dtype
    return "bf16" if size.capability >= _BF16_CAPABILITY else "fp32"


def _read_config(path: Path, code: Sequence[str]) -> RunConfig:
    """Return the settings of the run; those of its loads are not the server's. `code`: those that can run code, as typed."""
    values = load_yaml(read_text(path))
    config = config_from_mapping({key: value for key, value in values.items() if key != "serving"})
    Stored(path, f"python -m llm_perf_opt.runners.server --config {path}", tuple(code)).allowed(code_settings(asdict(config)))
    return config


def _translate(error: Exception) -> LlmPerfError:
    return framework_error(
        error,
        memory="Use a smaller model or dtype, or lower the engine's memory arguments (runtime.engine.*).",
        disk="Free some space, or choose another disk with hydra.run.dir=DIR.",
        otherwise="The full error is in the server's log.txt.",
    )


def main() -> None:
    """Command line of the server's process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("code", nargs="*", help="settings of the configuration that can run code")
    parser.add_argument("--config", type=Path, required=True, help="a resolved config.yaml")
    parser.add_argument("--folder", type=Path, required=True, help="for the folder of a model with random weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--traces", type=Path, help="folder for traces of the server's profiler; without it, it has none")
    parser.add_argument("--spans", help="URL that receives OpenTelemetry spans")
    arguments = parser.parse_intermixed_args()
    with report_errors(_translate):
        die_with_parent()
        enable_interrupts()
        command = server_command(_read_config(arguments.config, arguments.code), arguments)
    for name, value in command.variables.items():
        os.environ.setdefault(name, value)
    argv = module_argv(command.module, *command.arguments)
    send(
        "server",
        argv=hidden_argv(argv),
        model=command.model,
        tokenizer=command.tokenizer,
        version=command.version,
        notes=list(command.notes),
        random_ids=command.random_ids,
    )
    print(shown_command(argv), flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [command.module, *command.arguments]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
