"""Count a model that a Hugging Face configuration describes, once per configuration."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core import inside
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, nearest, words_of
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.cost.counted import CountedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYOUT = 2
"""Of the files in the cache: raised when what is counted changes."""
_LARGEST_FILE = 16 << 20


def count_model(fields: Mapping[str, Any]) -> CountedModel:
    """Return the operators of the model with this configuration; what was counted before is read from the user's cache."""
    cache = user_cache_folder("counted")
    if isinstance(cache, Missing):
        return _counted(fields)
    made = json.dumps([_LAYOUT, version("transformers"), version("torch"), fields], sort_keys=True, default=str)
    file = cache / f"{hashlib.sha256(made.encode()).hexdigest()[:32]}.json"
    try:
        if file.stat().st_size <= _LARGEST_FILE:
            return CountedModel.from_json(json.loads(file.read_bytes()))
    except (OSError, ValueError, ConfigError):
        pass  # absent, or of an interrupted write: it is counted again
    found = _counted(fields)
    try:
        inside.make_folder(cache.parent, cache)
        inside.write(cache, file, json.dumps(found.to_json()).encode())
    except (OSError, LlmPerfError):
        pass  # a cache that cannot be written makes the next call slower, nothing else
    return found


def _counted(fields: Mapping[str, Any]) -> CountedModel:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    rest = dict(fields)
    model_type = rest.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        own = " Its own code, which the configuration names, is not run." if "auto_map" in fields else ""
        near = nearest(str(model_type), CONFIG_MAPPING_NAMES)
        raise ConfigError(
            f"model_type {model_type!r} is unknown to transformers {version('transformers')}.{near}{own}",
            "FLOPs and bytes are counted by running the model of transformers without weights.",
        )
    try:
        config = AutoConfig.for_model(model_type, **rest)
    except Exception as error:  # each model's class checks its fields in its own way
        words = " ".join(words_of(error).split())
        raise ConfigError(
            f"The configuration of '{model_type}' is rejected by transformers: {words}", "Check its fields."
        ) from error
    return count_config(config)


def count_config(config: "PretrainedConfig") -> CountedModel:
    """Return the operators of the model that transformers builds from a configuration."""
    import torch
    from transformers.utils import logging

    from llm_perf_opt.cost.counting import Program, count_steps, meta_model
    from llm_perf_opt.cost.structure import UnequalLayersError, model_of

    name, level = str(config.model_type), logging.get_verbosity()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"'{name}' has an encoder and a decoder; only models that are a decoder are counted.")
    logging.set_verbosity_error()  # it warns of kernels that are not installed, of which none would run
    try:
        with torch.inference_mode(False):  # a run is in it, and then views reach the recorder as other operators
            program = Program(meta_model(config))
            try:
                return model_of(name, program, count_steps(program))
            except UnequalLayersError:  # it depends on more than its modules and their settings: run every layer
                program.trusts = False
                program.follow()
                return model_of(name, program, count_steps(program))
    except LlmPerfError as error:
        raise ConfigError(f"'{name}' cannot be counted: {error.fact}", error.remedy) from error
    except Exception as error:  # the model's own code, which may reject its configuration in any way
        words = words_of(error)
        raise ConfigError(
            f"'{name}' cannot be run without weights: {type(error).__name__}: {words}", "Check its configuration."
        ) from error
    finally:
        logging.set_verbosity(level)
