"""What of a request is found wrong before a process is started for it: data, a model or engine arguments that are not there."""

from collections.abc import Iterable

from llm_perf_opt.config import RunConfig
from llm_perf_opt.data.model_tree import model_folder
from llm_perf_opt.data.prompts import check_first_text
from llm_perf_opt.runners.engine_arguments import known_arguments, refuse_arguments


def refuse_early(configs: Iterable[RunConfig]) -> None:
    """Refuse the first of the requests that cannot be met. What several of them share is looked at once."""
    asked = list(configs)
    for path in {config.model.path for config in asked if config.model.source == "pretrained"}:
        model_folder(path or "")
    for dataset in {config.dataset for config in asked if config.dataset.kind != "synthetic"}:
        check_first_text(dataset)
    runtimes = [config.runtime for config in asked if config.runtime.engine]
    known = {name: known_arguments(name) for name in {runtime.type for runtime in runtimes}}
    for runtime in runtimes:
        refuse_arguments(runtime, known[runtime.type])
