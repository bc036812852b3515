"""Opens plain PyTorch: the model on its device, refused beforehand where it does not fit."""

from dataclasses import replace

from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner

PICTURES = "the cost model counts the text decoder alone, and this model's time holds its vision tower and projector too"


def open_pytorch(request: RunnerRequest) -> PyTorchRunner:
    """A runner of the request's model."""
    config = request.config
    model = models.build_model(request.architecture, config.model, config.runtime, request.device, request.dtype)
    runner = PyTorchRunner(model, config.model.name, config.runtime.num_new_tokens, config.runtime.cache, config.runtime.compile)
    if request.prompts.pixels:
        runner.runtime = replace(runner.runtime, uncosted=PICTURES)
    return runner
