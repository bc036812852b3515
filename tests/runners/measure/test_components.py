"""Time by component of the model: the rules on names, and attribution on a hand-made timeline."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure.components import OTHER, Range, Timeline, host_times, kernel_times, labeled_parts, part_of
from llm_perf_opt.runners.measure.torch_profiler import DeviceEvent, part_times, stage_activity


@pytest.mark.parametrize(
    ("path", "multiplies", "part"),
    [
        ("model.embed_tokens", True, "embedding"),
        ("model.layers.0.self_attn", False, "attention_core"),
        ("model.layers.0.self_attn.q_proj", True, "attention_projections"),
        ("model.layers.0.self_attn.q_norm", False, "norms"),
        ("transformer.h.3.attn.c_proj", True, "attention_projections"),
        ("transformer.h.3.attn.attn_dropout", False, None),
        ("model.layers.9.mlp", False, "mlp"),
        ("model.layers.9.mlp.gate", True, "router"),
        ("model.layers.9.mlp.gate_proj", True, None),
        ("model.layers.9.mlp.experts", False, "experts"),
        ("model.layers.9.mlp.shared_experts", False, "shared_experts"),
        ("model.norm", False, "norms"),
        ("transformer.ln_f", False, "norms"),
        ("lm_head", True, "lm_head"),
        ("model.layers.0", False, None),
        ("", False, None),
    ],
)
def test_a_module_belongs_to_the_part_its_name_says(path: str, multiplies: bool, part: str | None) -> None:
    assert part_of(path, multiplies) == part


def test_the_innermost_range_holds_at_any_moment() -> None:
    timeline = Timeline([Range(10, 50, "outer"), Range(20, 30, "inner"), Range(30, 40, "next")])
    moments = {5: "", 10: "outer", 19: "outer", 20: "inner", 29: "inner", 30: "next", 40: "outer", 49: "outer", 50: "", 99: ""}
    assert {moment: timeline.at(moment) for moment in moments} == moments


STAGES = [Range(0, 100, "prefill"), Range(100, 300, "decode")]
PARTS = [Range(10, 60, "part:attention_core"), Range(20, 30, "part:norms"), Range(110, 190, "part:mlp")]


def test_kernels_belong_to_the_part_that_launched_them() -> None:
    # (when launched, how long it ran): two in attention around the norm inside it, one in no part, one in decode, one nowhere
    work = [(15, 7), (25, 3), (40, 5), (80, 2), (150, 11), (400, 99)]
    found = {(entry.stage, entry.part): (entry.pieces, entry.time_ns) for entry in kernel_times(STAGES, PARTS, work)}
    assert found == {
        ("prefill", "attention_core"): (2, 12),
        ("prefill", "norms"): (1, 3),
        ("prefill", OTHER): (1, 2),
        ("decode", "mlp"): (1, 11),
    }


def test_host_time_of_the_parts_fills_the_stage_exactly() -> None:
    found = {(entry.stage, entry.part): entry.time_ns for entry in host_times(STAGES, PARTS)}
    assert found == {
        ("prefill", "attention_core"): 40,
        ("prefill", "norms"): 10,
        ("prefill", OTHER): 50,
        ("decode", "mlp"): 80,
        ("decode", OTHER): 120,
    }


def event(name: str, start: int, duration: int, correlation: int = 0, on_device: bool = False) -> DeviceEvent:
    return DeviceEvent(name, on_device, start, duration, correlation)


def test_device_work_goes_to_the_stage_of_its_launch_however_late_it_ran() -> None:
    events = [
        event("prefill", 0, 100),
        event("decode", 100, 100),
        event("part:mlp", 0, 90),
        event("cudaLaunchKernel", 10, 1, 1),
        event("cudaGraphLaunch", 150, 1, 2),
        event("kernel_a", 180, 30, 1, on_device=True),  # launched in prefill, run during decode
        event("kernel_b", 210, 20, 2, on_device=True),
        event("kernel_c", 230, 20, 2, on_device=True),  # of the same graph
        event("prefill", 180, 30, 1, on_device=True),  # the range's own shadow on the device is no kernel
        event("kernel_lost", 300, 50, 9, on_device=True),  # its launch lies outside
    ]
    assert {(entry.stage, entry.launches, entry.kernels, entry.kernel_ns) for entry in stage_activity(events)} == {
        ("prefill", 1, 1, 30),
        ("decode", 1, 2, 40),
    }
    parts = part_times(events, cuda=True)
    assert not isinstance(parts, Missing)
    assert {(entry.stage, entry.part, entry.time_ns) for entry in parts} == {("prefill", "mlp", 30), ("decode", OTHER, 40)}
    assert isinstance(part_times([entry for entry in events if entry.name != "part:mlp"], cuda=True), Missing)


def test_labels_do_not_change_what_a_model_computes_and_leave_no_hook() -> None:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(6).unsqueeze(0)
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        with labeled_parts(model), torch.profiler.profile() as profiler:
            labeled = model(input_ids=ids).logits
    assert torch.equal(plain, labeled)
    seen = {row.key: row.count for row in profiler.key_averages() if row.key.startswith("part:")}
    assert seen == {
        "part:embedding": 1,
        "part:norms": 3, "part:attention_core": 1, "part:attention_projections": 4, "part:mlp": 1, "part:lm_head": 1,
    }  # fmt: skip
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
