"""Opens plain PyTorch: the model on its device, refused beforehand where it does not fit."""

from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner


def open_pytorch(request: RunnerRequest) -> PyTorchRunner:
    """A runner of the request's model."""
    config = request.config
    model = models.build_model(request.architecture, config.model, config.runtime, request.device, request.dtype)
    return PyTorchRunner(model, config.model.name, config.runtime.num_new_tokens, config.runtime.cache, config.runtime.compile)
