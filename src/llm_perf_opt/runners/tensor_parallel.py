"""Split a transformers model over ranks by the plan of its family, so that every rank computes a share of each layer.

Random weights are drawn whole on every rank, with the same seed as on one, and then cut: the ranks together hold exactly the
weights of a run with one rank.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.host import available_memory_bytes
from llm_perf_opt.runners.rank_group import RankGroup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_CUT = ("colwise", "rowwise")
"""A style of a plan whose name contains one of these divides the weight among the ranks."""
_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles that divide the weight by columns and return the whole output."""


def check_heads(text: Mapping[str, Any], ranks: int) -> None:
    """Raise a ConfigError if the attention heads cannot be divided among the ranks."""
    heads = text.get("num_attention_heads")
    groups = text.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    if heads % ranks or groups % ranks:
        fitting = [str(size) for size in range(1, heads + 1) if heads % size == 0 and groups % size == 0]
        raise ConfigError(
            f"runtime.tensor_parallel={ranks} does not divide the {heads} attention heads and {groups} key-value heads.",
            f"It fits: {', '.join(fitting)}.",
        )


def plan_of(model: "PreTrainedModel") -> dict[str, str]:
    """Return the tensor-parallel plan of the model's family, or raise a ConfigError."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise ConfigError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}.",
            "Use runtime.tensor_parallel=1, or a model such as Llama, Qwen2, Qwen3, Mistral or Mixtral.",
        )
    return plan


def split_bytes(model: "PreTrainedModel", ranks: int) -> int:
    """Return the bytes of the weights and buffers that one rank holds."""
    plan, total = plan_of(model), 0
    for name, tensor in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = plan.get(_pattern(name)) or plan.get(_pattern(module), "")
        cut = any(word in style for word in _CUT) and not (kind == "bias" and "row" in style)
        total += tensor.element_size() * (-(-tensor.numel() // ranks) if cut else tensor.numel())
    buffers: int = sum(tensor.numel() * tensor.element_size() for tensor in model.buffers())
    return total + buffers


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def split_model(
    build: Callable[["torch.device"], "PreTrainedModel"], whole_bytes: int, device: "torch.device", group: RankGroup
) -> "PreTrainedModel":
    """Return this rank's part of a model that `build` returns whole.

    Ranks build one after the other if several whole models do not fit, on the host if not even one fits on the device.
    """
    import torch

    together = group.size if group.shared_device or device.type == "cpu" else 1
    place, at_once = device, whole_bytes * together <= _free(device)
    if device.type == "cuda" and whole_bytes > _free(device):
        place, at_once = torch.device("cpu"), whole_bytes * group.size <= available_memory_bytes()
    at_once = all(found == b"true" for found in group.gather(at_once, "the choice how to build the model"))
    if at_once:
        return _cut(build(place), device, group)
    model: PreTrainedModel | None = None
    for turn in range(group.size):
        if turn == group.rank:
            model = _cut(build(place), device, group)
        group.wait_for_all(f"rank {turn} builds the model")
    assert model is not None  # noqa: S101 - every rank has a turn
    return model


def _free(device: "torch.device") -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory_bytes()


def _cut(model: "PreTrainedModel", device: "torch.device", group: RankGroup) -> "PreTrainedModel":
    """Cut the weights of a whole model in place; tied weights stay tied."""
    from torch.distributed.device_mesh import DeviceMesh

    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ResourceError(
            "The installed transformers cannot split a model that is already built.", "Install transformers 5.17 or later."
        ) from error
    plan, gathering = _with_own_gather(model, group) if group.backend == "gloo" else (plan_of(model), [])
    tied = _tied(model)
    kind = next(model.parameters()).device.type
    mesh = DeviceMesh(kind, list(range(group.size)), mesh_dim_names=("tp",))
    split: Any = model
    argument = signature(apply_tensor_parallelism).parameters.get("tp_plan")
    if argument is None or argument.default is None:  # transformers before 5.23: patterns, which 5.17 reads from the model alone
        split.tp_plan = plan
        split = apply_tensor_parallelism(split, mesh)
    else:
        _untie(model, tied)
        split = apply_tensor_parallelism(split, mesh, _by_name(model, plan))
    for name in gathering:
        _gather_output(split.get_submodule(name), group.size)
    for first, *others in tied:
        for other in others:
            _tie(split, first, other)
    placed: PreTrainedModel = split.to(device) if kind != device.type else split
    return placed


def _by_name(model: "PreTrainedModel", plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of every parameter and module that a plan of patterns covers, parameters before their module."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = plan.get(_pattern(name))
        for part, _ in module.named_parameters(recurse=False):
            full = f"{name}.{part}" if name else part
            if own := plan.get(_pattern(full), style):
                found[full] = own
        if style:
            found[name] = style
    return found


def _with_own_gather(model: "PreTrainedModel", group: RankGroup) -> tuple[dict[str, str], list[str]]:
    """Return the plan and the modules whose output is gathered here: DTensor's gather of CUDA tensors crashes with gloo."""
    plan, found = plan_of(model), []
    for name, module in model.named_modules():
        width = getattr(module, "out_features", None)
        if plan.get(_pattern(name)) in _GATHERED and isinstance(width, int) and width % group.size == 0:
            found.append(name)
    own = {_pattern(name) for name in found}
    return {name: "colwise" if name in own else style for name, style in plan.items()}, found


def _gather_output(module: Any, size: int) -> None:
    """Make a module return the outputs of all ranks, one after the other."""
    import torch
    import torch.distributed as dist

    forward = module.forward

    def gathered(*args: Any, **kwargs: Any) -> "torch.Tensor":
        own = forward(*args, **kwargs).contiguous()
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)

    module.forward = gathered


def _tied(model: "PreTrainedModel") -> list[list[str]]:
    """Return the names of parameters that are the same tensor."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(tensor), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _untie(model: "PreTrainedModel", tied: list[list[str]]) -> None:
    """Make each name a parameter of its own, with the same values: transformers 5.23 cuts parameters by name."""
    import torch

    for first, *others in tied:
        for other in others:
            module, _, name = other.rpartition(".")
            values = model.get_parameter(first)
            setattr(model.get_submodule(module), name, torch.nn.Parameter(values.detach(), requires_grad=values.requires_grad))


def _tie(model: "PreTrainedModel", first: str, other: str) -> None:
    """Make two parameters one, if they are cut alike."""
    one, two = model.get_parameter(first), model.get_parameter(other)
    if getattr(one, "placements", None) != getattr(two, "placements", None):
        return
    module, _, name = other.rpartition(".")
    setattr(model.get_submodule(module), name, one)


def held_bytes(model: "PreTrainedModel") -> int:
    """Return the bytes of the weights that this rank holds."""
    total = 0
    for tensor in model.parameters():
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total


def loads_shards(device: "torch.device", backend: str) -> bool:
    """Return whether transformers can read only this rank's part of stored weights.

    It uses the accelerator of the machine, and DTensor's gather of the logits, which crashes on CUDA with gloo.
    """
    import torch

    if device.type == "cuda" and backend == "gloo":
        return False
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (found.type if found else "cpu") == device.type
