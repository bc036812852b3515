"""The architecture of any model: by formulas where its model_type has some, otherwise as its operators are counted."""

from collections.abc import Mapping
from dataclasses import replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture
from llm_perf_opt.analysis.cost_model.families import architecture_of, known_model_types
from llm_perf_opt.analysis.cost_model.vision_families import FAMILIES
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import ModelFacts
from llm_perf_opt.cost.counted import CountedModel
from llm_perf_opt.cost.models import count_model


def architecture_described(config: object, *, decoder_only: bool = False) -> Architecture:
    """Return the architecture of a configuration; it is counted now if its model_type has no formulas."""
    if not isinstance(config, Mapping) or has_formulas(config):
        return architecture_of(config, decoder_only=decoder_only)
    inner = config.get("text_config")
    if inner is None:
        return CountedArchitecture.of(count_model(config))
    if not isinstance(inner, Mapping) or not decoder_only or has_formulas(inner):
        return architecture_of(config, decoder_only=decoder_only)
    return replace(CountedArchitecture.of(count_model(inner)), part_of=str(config["model_type"]))


def architecture_that_ran(model: ModelFacts, *, decoder_only: bool = False) -> Architecture:
    """Return the architecture of the model of a run: as counted there, or as its configuration describes it."""
    if isinstance(model.counted, str):
        raise ConfigError(model.counted)
    if model.counted is not None:
        return CountedArchitecture.of(CountedModel.from_json(model.counted))
    return architecture_of(model.architecture, decoder_only=decoder_only)


def has_formulas(config: Mapping[str, object]) -> bool:
    """Return whether the cost of a configuration is computed by formulas, or rejected by them for its fields."""
    model_type = config.get("model_type")
    return not isinstance(model_type, str) or model_type in (*known_model_types(), *FAMILIES)
