"""The components of a run of an engine whose decode step is one CUDA graph."""

import shutil
from pathlib import Path

import pytest

from builders import clean_timings, model_facts, torch_pass
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader
from whole_runs import whole_run
from writing import write_record

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_full_graph_decode_has_the_time_and_the_mbu_of_each_component(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    facts = model_facts(device="cuda:0", device_name="NVIDIA H200", dtype="bf16", architecture=QWEN3_8B)
    write_record(folder.clean_file, clean_timings(model=facts))
    unlabeled = Missing("the modules of an engine are not labeled")
    write_record(folder.torch_file, torch_pass(decode_steps=1, parts=unlabeled))
    shutil.copy(ENGINES / "sglang_Qwen3-8B_decode.json.gz", folder.torch_trace_file)
    found = analyze(RunReader.open(folder.path))
    assert not isinstance(found.efficiency, Missing)
    decode = next(stage for stage in found.efficiency.stages if stage.stage == "decode")
    assert not isinstance(decode.components, Missing)
    times = {part.name: part.time_ns for part in decode.components if not isinstance(part.time_ns, Missing)}
    assert times["mlp"] == 4_203_933
    assert times["lm_head"] == 396_832
    mlp = next(part for part in decode.components if part.name == "mlp")
    assert mlp.roofline is not None
    assert mlp.roofline.bytes == 36 * 3 * 4096 * 12288 * 2
    assert isinstance(mlp.mbu, float)
    rate = mlp.roofline.bytes / 4_203_933e-9
    bandwidths = [peaks.bandwidth_bytes_per_s for peaks in found.efficiency.peak_sets]
    assert any(mlp.mbu == pytest.approx(rate / value) for value in bandwidths if isinstance(value, float))
    assert any("decode: 36 layers" in note and "prefill: n/a" in note for note in found.efficiency.notes)
