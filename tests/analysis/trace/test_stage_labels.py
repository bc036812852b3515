"""Labels of the engines, as in their sources."""

import pytest

from llm_perf_opt.analysis.trace.labels import dialects


def read(label: str) -> list[tuple[str, str]]:
    """(dialect, stage) of every dialect that knows the label."""
    return [(dialect.name, stage) for dialect in dialects() if (stage := dialect.stage_of(label))]


@pytest.mark.parametrize(
    ("label", "dialect", "stage"),
    [
        ("decode_step", "labels", "decode_step"),
        ("execute_context_1(512)_generation_0(0)", "vllm", "prefill"),
        ("execute_context_0(0)_generation_64(64)", "vllm", "decode_step"),
        ("execute_context_2(300)_generation_6(6)", "vllm", "mixed_step"),
        ("execute_context_0(0)_generation_0(0)", "vllm", "step"),
        ("execute_17_context_3(sq128sk256sqsq1sqsk1)_generation_2(sq1sk300sqsq1sqsk1)", "vllm", "mixed_step"),
        ("execute_new_1_cached_0", "vllm", "prefill"),
        ("execute_new_0_cached_7", "vllm", "decode_step"),
        ("gpu_model_runner: forward", "vllm", "step"),
        ("v2_gpu_model_runner: forward", "vllm", "step"),
        ("step[EXTEND bs=2 toks=4096]", "sglang", "prefill"),
        ("step[EXTEND bs=2 toks=12 c_sqsq=80 c_sqsk=120 c_sk=20]", "sglang", "prefill"),
        ("step[DECODE bs=16]", "sglang", "decode_step"),
        ("step[decode bs=16]", "sglang", "decode_step"),
        ("step[prefill bs=1 toks=9]", "sglang", "prefill"),
        ("step[MIXED bs=2]", "sglang", "mixed_step"),
        ("step[TARGET_VERIFY bs=4]", "sglang", "decode_step"),
        ("step[DRAFT_LOOP raw_bs=1 bs=1 topk=1]", "sglang", "step"),
        ("step[idle]", "sglang", "step"),
        ("[Executor] _forward_step: 1 ctx reqs, 0 gen reqs", "tensorrt_llm", "prefill"),
        ("[Executor] _forward_step 60000: 0 ctx reqs, 0 ctx tokens, 32 gen reqs", "tensorrt_llm", "decode_step"),
        ("[Executor] _forward_step 8: 1 ctx reqs, 3 gen reqs", "tensorrt_llm", "mixed_step"),
        ("prefill[bs=2 tok=16384]", "atom", "prefill"),
        ("decode[bs=16 tok=16]", "atom", "decode_step"),
        ("ProfilerStep#12", "profiler_step", "step"),
    ],
)
def test_only_its_own_dialect_reads_a_label(label: str, dialect: str, stage: str) -> None:
    assert read(label) == [(dialect, stage)]


@pytest.mark.parametrize(
    "label",
    ["", "forward", "gpu_model_runner: sample", "execute_model", "steps", "part:mlp", "decode steps", "nn.Module: Linear_0"],
)
def test_other_labels_mark_no_stage(label: str) -> None:
    assert read(label) == []
