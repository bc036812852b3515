"""The prompts of another run, token by token, from its inputs.yaml."""

from pathlib import Path

from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.recorded_inputs import read_inputs
from llm_perf_opt.workspace.data.prompts import Prompts


def recorded_prompts(config: RunConfig, vocabulary: int | None = None) -> Prompts:
    """Return the prompts that `dataset.path` records, or raise if this run would not repeat them exactly."""
    path, runtime = Path(config.dataset.path or ""), config.runtime
    recorded = read_inputs(path)
    prompts = Prompts(recorded.ids, f"the prompts recorded in {path}")
    if prompts.sha256() != recorded.sha256:
        raise ConfigError(
            f"{path}: its hash is not that of its token ids.",
            "It was edited, or the run had images, which inputs.yaml does not contain: repeat that run with its own settings.",
        )
    if len(recorded.ids) != runtime.batch_size:
        raise ConfigError(
            f"{path} has {len(recorded.ids)} prompts, but runtime.batch_size={runtime.batch_size}.",
            f"Set runtime.batch_size={len(recorded.ids)}.",
        )
    if recorded.longest > runtime.prompt_tokens:
        raise ConfigError(
            f"{path} has a prompt of {recorded.longest} tokens, but runtime.prompt_tokens={runtime.prompt_tokens}.",
            f"Set runtime.prompt_tokens={recorded.longest}; recorded prompts are not cut.",
        )
    largest = max(map(max, recorded.ids))
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"{path} contains the id {largest}, but the model's vocabulary has {vocabulary} ids.",
            "Repeat the prompts with a model of the same tokenizer.",
        )
    return prompts
