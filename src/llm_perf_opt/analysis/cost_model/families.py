"""From a Hugging Face configuration to an Architecture.

Sizes must be given; anything else that is left out has the default that transformers gives that model_type.
A model_type that is not listed is refused: its FLOPs would be a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Fields
from llm_perf_opt.analysis.cost_model.dense_families import DENSE_FAMILIES
from llm_perf_opt.analysis.cost_model.moe_families import MOE_FAMILIES
from llm_perf_opt.analysis.stats import shown
from llm_perf_opt.core.errors import ConfigError, nearest

_BUILDERS = {**DENSE_FAMILIES, **MOE_FAMILIES}


def architecture_of(config: object, *, decoder_only: bool = False) -> Architecture:
    """The architecture a config describes. One with a text decoder inside is refused: what feeds the decoder is not counted.

    `decoder_only` is said by who knows that nothing else runs, such as a request of text alone: then the decoder is the model.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"A model configuration must be a mapping of fields, not {type(config).__name__}.")
    model_type = _model_type(config, "")
    inner = config.get("text_config")
    if model_type in _BUILDERS or inner is None:
        return _builder(model_type)(Fields(config, model_type))
    if not isinstance(inner, Mapping):
        raise ConfigError(f"text_config must be a mapping of fields, not {type(inner).__name__}.")
    if not decoder_only:
        raise ConfigError(
            f"model_type '{model_type}' is a text decoder (text_config) with an encoder of pictures or sound before it, "
            "and the cost model has no such part.",
            "Add --decoder-only to count the text decoder alone, as it runs on a prompt of text.",
        )
    # The decoder's own word on tying comes first; some files have it only outside.
    fields = {key: config[key] for key in ("tie_word_embeddings",) if key in config} | dict(inner)
    if model_type == "gemma3":
        fields.setdefault("model_type", "gemma3_text")
    inner_type = _model_type(fields, "text_config.")
    return replace(_builder(inner_type)(Fields(fields, inner_type, "text_config.")), part_of=model_type)


def known_model_types() -> tuple[str, ...]:
    """Every model_type that can be costed."""
    return tuple(sorted(_BUILDERS))


def _model_type(config: Mapping[str, object], prefix: str) -> str:
    value = config.get("model_type")
    if value is None:
        raise ConfigError(f"{prefix}model_type is missing.", _known())
    if not isinstance(value, str):
        raise ConfigError(f"{prefix}model_type must be a name, not {shown(value)}.", _known())
    return value


def _builder(model_type: str) -> Callable[[Fields], Architecture]:
    if model_type not in _BUILDERS:
        hint = nearest(model_type, _BUILDERS)
        raise ConfigError(f"model_type '{model_type}' is not a known architecture.{hint}", _known())
    return _BUILDERS[model_type]


def _known() -> str:
    return f"Known: {', '.join(known_model_types())}."
