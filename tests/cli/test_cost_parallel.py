"""`llm-perf cost --tp --pp --ep`: five models against formulas written out here, and what is refused."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf
from docs_commands import commands
from llm_perf_opt.analysis.cost_model.expert_load import most_choices, most_experts
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, CeilingUnit, FoundCeilings
from writing import write_record

NVLINK = 450e9
"""An H100's NVLink: 900 GB/s in both directions together."""
NDR = 50e9


def cost(*words: str) -> subprocess.CompletedProcess[str]:
    return llm_perf("cost", *words)


def parallel(*words: str) -> list[dict[str, Any]]:
    done = cost(*words, "--hardware", "h100_sxm", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["parallel"]
    return found


def sent(found: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return count and bytes sent by kind and purpose."""
    return {(one["kind"], one["purpose"]): (one["count"], one["sent_bytes"]) for one in found["collectives"]}


def test_llama_3_70b_on_eight_h100_in_fp8() -> None:
    """Dense, key/value heads exactly one per device."""
    (row,) = parallel("model=llama3_70b", "--tp", "8", "--dtype", "fp8", "--prompt", "1024", "--context", "2048")
    hidden, inner, layers, vocabulary = 8192, 28672, 80, 128256
    per_layer = hidden * 128 * (2 * 8 + 2 * 1) + 3 * hidden * inner // 8
    weights = layers * (per_layer + 2 * hidden) + 2 * vocabulary // 8 * hidden + hidden
    assert row["devices"] == 8
    assert row["memory"]["weight_bytes"] == weights == 8_820_367_360
    assert row["memory"]["kv_cache_bytes"] == layers * 2 * 1 * 128 * 2 * 2049
    decode = layers * (2 * per_layer + 2 * 8 * 2049 * 256) + 2 * hidden * vocabulary // 8
    assert row["decode"]["flops_per_device"] == decode
    pairs = 1024 * 1025 // 2
    prefill = layers * (2 * 1024 * per_layer + 2 * 8 * pairs * 256) + 2 * hidden * vocabulary // 8
    assert row["prefill"]["flops_per_device"] == prefill
    assert row["prefill"]["model_flops"] == 8 * prefill, "nothing is padded or computed twice"
    ring = 2 * 7 / 8
    for step, tokens in (("prefill", 1024), ("decode", 1)):
        tensor = tokens * hidden * 2
        assert sent(row[step]) == {
            ("all_reduce", "embedding"): (1, ring * tensor),
            ("all_reduce", "attention output"): (layers, layers * ring * tensor),
            ("all_reduce", "MLP output"): (layers, layers * ring * tensor),
            ("all_gather", "logits"): (1, 7 / 8 * vocabulary * 2),
        }
        moved = 161 * ring * tensor + 7 / 8 * vocabulary * 2
        assert row[step]["communication_s"] == pytest.approx(moved / NVLINK, rel=1e-12)
        assert row[step]["seconds"] == pytest.approx(row[step]["roofline_s"] + row[step]["communication_s"], rel=1e-12)
        assert {one["link"] for one in row[step]["collectives"]} == {"NVLink"}
    flops = row["prefill"]["model_flops"]
    assert row["prefill"]["mfu"] == pytest.approx(flops / (row["prefill"]["seconds"] * 8 * 1979e12), rel=1e-12)
    usable = int(80 * 2**30 * 0.9)
    per_token = layers * 2 * 128 * 2
    assert row["largest_batch"] == (usable - weights) // (per_token * 2049)
    assert row["largest_context"] == (usable - weights) // per_token
    assert row["smallest"]["devices"] == 1, "70.6 GB of weights fit in 90 % of 80 GiB"


def test_qwen3_30b_a3b_copies_key_value_heads_and_divides_experts() -> None:
    """Four key/value heads on eight devices: every head is on two of them."""
    (row,) = parallel("model=qwen3_30b_a3b", "--tp", "8", "--batch", "4", "--context", "512", "--prompt", "512")
    hidden, layers, vocabulary, experts, active, inner = 2048, 48, 151936, 128, 8, 768
    attention = hidden * 128 * (4 + 4 + 1 + 1)
    expert = 3 * hidden * inner // 8
    held = layers * (attention + 2 * 128 + 2 * hidden + experts * hidden + experts * expert)
    assert row["memory"]["weight_bytes"] == 2 * (held + 2 * (vocabulary // 8) * hidden + hidden)
    assert row["memory"]["kv_cache_bytes"] == 4 * 513 * layers * 2 * 128 * 2, "an eighth would be half of that"
    flops = layers * (2 * 4 * (attention + experts * hidden + active * expert) + 2 * 4 * 4 * 513 * 256)
    assert row["decode"]["flops_per_device"] == flops + 2 * 4 * hidden * vocabulary // 8
    tensor = 4 * hidden * 2
    assert sent(row["decode"])["all_reduce", "experts output"] == (layers, layers * 2 * 7 / 8 * tensor)
    assert row["decode"]["model_flops"] < 8 * row["decode"]["flops_per_device"], (
        "keys, values and routers are computed twice or more"
    )


def test_mixtral_with_whole_experts_on_the_devices_of_a_tensor_parallel_group() -> None:
    """--ep = --tp: the same tokens are on all devices, so an all-reduce adds up what their experts computed."""
    (row,) = parallel("model=mixtral_8x7b", "--tp", "4", "--ep", "4", "--batch", "16", "--context", "1000", "--prompt", "8")
    hidden, inner, layers, vocabulary, tokens = 4096, 14336, 32, 32000, 16
    attention, expert = hidden * 128 * (2 * 8 + 2 * 2), 3 * hidden * inner
    held = layers * (attention + 2 * hidden + 8 * hidden + 2 * expert) + 2 * (vocabulary // 4) * hidden + hidden
    assert (row["devices"], row["replicas"], row["memory"]["weight_bytes"]) == (4, 1, 2 * held)
    per_token = 2 * (attention + 8 * hidden) + 2 * 8 * 1001 * 256
    share = math.ceil(2 * expert * most_choices(8, 2, 4, tokens))
    assert share > 2 * tokens * 2 * expert // 4, "more than an equal share: tokens choose experts at random"
    assert row["decode"]["flops_per_device"] == layers * (tokens * per_token + share) + 2 * tokens * hidden * vocabulary // 4
    parts = {part["name"]: part["bytes"] for part in row["stages"][0]["decode"]["parts"]}
    assert parts["experts"] == round(layers * most_experts(8, 2, 4, tokens) * expert * 2)
    assert {(one["kind"], one["group"]) for one in row["decode"]["collectives"]} == {("all_reduce", "tp"), ("all_gather", "tp")}


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_deepseek_v2_lite_with_replicas_of_its_latent_attention(exchange: str) -> None:
    """--ep 8 --tp 2: four replicas of the attention, whose tokens meet at the experts."""
    words = ("--tp", "2", "--ep", "8", "--batch", "64", "--context", "99", "--prompt", "1", "--mla", "absorb")
    (row,) = parallel("model=deepseek_v2_lite", *words, "--expert-exchange", exchange)
    hidden, vocabulary, layers, experts, active, inner, rank, heads = 2048, 102400, 27, 64, 6, 1408, 512, 8
    attention = hidden * heads * 192 + hidden * (rank + 64) + rank * heads * 256 + heads * 128 * hidden
    expert, shared = 3 * hidden * inner, 3 * hidden * 2 * inner
    dense = 3 * hidden * 10944 // 2
    held = layers * (attention + rank + 2 * hidden) + dense
    held += 26 * (experts * hidden + experts // 8 * expert + shared) + 2 * (vocabulary // 2) * hidden + hidden
    assert (row["devices"], row["replicas"], row["memory"]["weight_bytes"]) == (8, 4, 2 * held)
    assert row["memory"]["kv_cache_bytes"] == 16 * 100 * layers * (rank + 64) * 2, "the latent is on both devices of a group"
    own = 64 // 4
    flops = own * layers * (2 * attention + 2 * heads * 100 * (rank + 64 + rank)) + own * 2 * dense
    flops += (
        26 * (own // 2 * 2 * (experts * hidden + shared) + math.ceil(2 * expert * most_choices(experts, active, 8, 64)))
        + 2 * own * hidden * vocabulary // 2
    )
    assert row["decode"]["flops_per_device"] == flops
    found = sent(row["decode"])
    tensor = own * hidden * 2
    assert found["all_reduce", "attention output"] == found["all_reduce", "MLP output"] == (1, tensor)
    assert found["reduce_scatter", "attention output"] == (26, 26 * tensor / 2)
    assert found["all_gather", "tokens for the next attention"] == (25, 25 * tensor / 2)
    assert found["all_gather", "tokens and residual"] == (1, tensor)
    assert row["mla"] == "absorb"
    if exchange == "all_gather":
        assert found["all_gather", "tokens to experts"] == (26, 26 * 7 / 8 * 64 * hidden * 2)
        assert found["reduce_scatter", "experts output"] == found["all_gather", "tokens to experts"]
    else:
        elsewhere = 7 * (1 - math.comb(56, 6) / math.comb(64, 6))
        assert found["all_to_all", "tokens to experts"] == (26, pytest.approx(26 * own / 2 * elsewhere * hidden * 2, rel=1e-4))
        assert found["all_to_all", "experts output"] == found["all_to_all", "tokens to experts"]


def test_gpt2_in_two_stages_pads_its_vocabulary_and_copies_its_tied_head() -> None:
    """Biases, a learned position table, a vocabulary that is no multiple of 64, and a head tied to another stage's table."""
    (row,) = parallel("model=gpt2", "--tp", "4", "--pp", "2", "--batch", "2", "--context", "63", "--prompt", "64")
    hidden, padded = 768, 50304
    attention = (4 * hidden * hidden + 3 * hidden) // 4 + hidden
    mlp = (2 * hidden * 4 * hidden + 4 * hidden) // 4 + hidden
    layers = 6 * (attention + mlp + 4 * hidden)
    first, last = row["stages"]
    assert first["params"] == layers + padded // 4 * hidden + 1024 * hidden
    assert last["params"] == layers + padded // 4 * hidden + 2 * hidden
    core = 6 * 2 * 2 * 3 * 64 * 128
    products = 2 * 2 * 6 * (12 * hidden * hidden) // 4
    assert first["decode"]["flops"] == products + core
    assert last["decode"]["flops"] == products + core + 2 * 2 * hidden * padded // 4
    found, tensor = sent(row["decode"]), 2 * hidden * 2
    assert found["all_reduce", "attention output"][0] == found["all_reduce", "MLP output"][0] == 12
    assert found["send", "to the next stage"] == (1, tensor / 4), "each device of a group sends its quarter"
    assert found["all_gather", "parts from the previous stage"] == (1, tensor * 3 / 4)
    assert found["all_gather", "logits"] == (1, 2 * padded * 2 * 3 / 4)
    assert row["decode"]["seconds"] == pytest.approx(sum(stage["decode"]["seconds"] for stage in row["stages"]), rel=1e-12)
    assert row["decode"]["interval_s"] == max(stage["decode"]["seconds"] for stage in row["stages"])
    assert row["memory"]["weight_bytes"] == 2 * first["params"], "the fullest stage decides"


def test_the_fullest_of_uneven_stages_decides() -> None:
    (row,) = parallel("model=llama3_70b", "--pp", "3")
    assert [stage["layers"] for stage in row["stages"]] == [27, 27, 26]
    assert [stage["layers"] for stage in parallel("model=gpt2", "--pp", "5")[0]["stages"]] == [2, 2, 3, 3, 2]
    fullest = max(row["stages"], key=lambda stage: stage["weight_bytes"] + stage["kv_cache_bytes"])
    assert row["memory"]["weight_bytes"] == fullest["weight_bytes"]


def test_groups_across_nodes_wait_for_the_network() -> None:
    (row,) = parallel("model=llama3_70b", "--tp", "16", "--network", "hdr")
    reduced = next(one for one in row["prefill"]["collectives"] if one["purpose"] == "MLP output")
    assert (reduced["nodes"], reduced["link"]) == (2, "InfiniBand HDR")
    assert reduced["seconds"] == pytest.approx(reduced["sent_bytes"] / (8 * 25e9)), "all eight ports of a node carry the ring"
    (row,) = parallel("model=llama3_70b", "--tp", "8", "--pp", "2")
    by_purpose = {one["purpose"]: one for one in row["prefill"]["collectives"]}
    assert (by_purpose["MLP output"]["nodes"], by_purpose["MLP output"]["link"]) == (1, "NVLink")
    handed_on = by_purpose["to the next stage"]
    assert (handed_on["nodes"], handed_on["count"]) == (2, 2), "hidden states and residual"
    assert handed_on["seconds"] == pytest.approx(2 * 2048 * 8192 * 2 / 8 / NDR)


def test_a_measured_link_and_latency_replace_the_datasheet() -> None:
    words = ("model=llama3_8b", "--tp", "2", "--prompt", "16")
    (plain,), (slow,) = parallel(*words, "--link", "100"), parallel(*words, "--link", "100", "--collective-us", "10")
    calls = sum(one["count"] for one in plain["decode"]["collectives"])
    assert calls == 1 + 2 * 32 + 1
    assert {one["link_bytes_per_s"] for one in plain["decode"]["collectives"]} == {100e9}
    assert slow["decode"]["communication_s"] == pytest.approx(plain["decode"]["communication_s"] + calls * 10e-6)


def peaks_file(folder: Path, device: str, rows: dict[str, float], doubts: tuple[str, ...] = ()) -> str:
    """Write measured peaks as `llm-perf ceilings` caches them."""
    units: dict[str, CeilingUnit] = {"gemm": "FLOP/s"}
    measured = tuple(
        CeilingRow(key, key, units.get(key.split("_")[0], "B/s"), summarize([value] * 9), "how") for key, value in rows.items()
    )
    taken = "2026-11-16T00:00:00+00:00"
    ceilings = Ceilings("cuda", device, "GPU-0", "580", "2.11", 1, taken, 9.0, 8.0, (), measured)
    file = folder / "peaks.json"
    write_record(file, FoundCeilings(ceilings, False, str(file), doubts=doubts))
    return str(file)


def test_measured_peaks_and_links_replace_the_datasheet(tmp_path: Path) -> None:
    file = peaks_file(
        tmp_path, "NVIDIA H100 80GB HBM3", {"gemm_bf16": 700e12, "read": 3e12, "peer_copy": 390e9, "all_reduce": 360e9}
    )
    done = cost("model=llama3_8b", "--peaks", file, "--tp", "4", "--json")
    found = json.loads(done.stdout)
    assert found["hardware"]["key"] == "h100_sxm"
    assert "measured 2026-11-16" in found["hardware"]["source"]
    (row,) = found["parallel"]
    assert {(one["link"], one["link_bytes_per_s"]) for one in row["decode"]["collectives"]} == {("measured all-reduce", 360e9)}
    mlp = next(part for part in found["floors"][0]["prefill"]["parts"] if part["name"] == "mlp")
    assert mlp["seconds"] == pytest.approx(2048 * 2 * 32 * 3 * 4096 * 14336 / 700e12)
    only_copy = peaks_file(tmp_path, "NVIDIA H100 80GB HBM3", {"gemm_bf16": 700e12, "peer_copy": 390e9})
    (row,) = json.loads(cost("model=llama3_8b", "--peaks", only_copy, "--tp", "4", "--json").stdout)["parallel"]
    assert row["decode"]["collectives"][0]["link_bytes_per_s"] == 390e9
    named = cost("model=llama3_8b", "--peaks", only_copy, "--tp", "4", "--link", "nvlink", "--json")
    assert json.loads(named.stdout)["parallel"][0]["decode"]["collectives"][0]["link"] == "NVLink"
    unmeasured = json.loads(cost("model=llama3_8b", "--peaks", only_copy, "--dtype", "fp8", "--json").stdout)
    assert "no fp8 peak" in unmeasured["parallel"][0]["decode"]["seconds"]["n/a"]


@pytest.mark.parametrize(
    ("device", "doubts", "words", "fact"),
    [
        ("Some GPU", (), [], "Some GPU"),
        ("NVIDIA H100 80GB HBM3", (), ["--hardware", "h200"], "not of --hardware h200"),
        ("NVIDIA H100 80GB HBM3", ("the GPU was busy",), [], "bad conditions"),
    ],
)
def test_peaks_that_cannot_be_used_are_refused(
    tmp_path: Path, device: str, doubts: tuple[str, ...], words: list[str], fact: str
) -> None:
    done = cost("model=llama3_8b", "--peaks", peaks_file(tmp_path, device, {"read": 1e12}, doubts), *words)
    assert done.returncode == 2
    assert fact in done.stderr


def test_a_file_without_peaks_is_refused(tmp_path: Path) -> None:
    assert "no such file" in cost("model=llama3_8b", "--peaks", str(tmp_path / "none.json")).stderr
    (tmp_path / "damaged.json").write_text("{")
    done = cost("model=llama3_8b", "--peaks", str(tmp_path / "damaged.json"))
    assert done.returncode not in (0, 1)
    assert "damaged.json" in done.stderr


def test_one_device_is_the_model_as_it_is_without_a_plan() -> None:
    done = cost("model=llama3_8b", "--hardware", "h100_sxm", "--batch", "3", "--json")
    found = json.loads(done.stdout)
    (row,), floor = found["parallel"], found["floors"][0]
    assert row["decode"]["seconds"] == floor["decode"]["seconds"]
    assert row["prefill"]["flops_per_device"] == found["prefill"]["flops"]
    assert row["stages"][0]["decode"]["parts"] == found["decode"]["parts"]
    assert (row["memory"]["weight_bytes"], row["memory"]["kv_cache_bytes"]) == (floor["weight_bytes"], floor["kv_cache_bytes"])
    assert row["decode"]["collectives"] == []


def test_what_does_not_fit_says_so_and_the_smallest_plan_is_named() -> None:
    (row,) = parallel("model=llama3_70b", "--memory-share", "0.9")
    assert row["memory"]["fits"] is False
    assert row["largest_batch"] == row["largest_context"] == {"n/a": "the weights alone do not fit"}
    assert row["smallest"] == {"devices": 2, "tp": 2, "pp": 1, "ep": 1, "replicas": 1}
    text = cost("model=llama3_70b", "--hardware", "h100_sxm").stdout
    assert "2 (--tp 2)" in text


@pytest.mark.parametrize(("share", "fitting"), [(None, [True, True, False]), ("0.8", [True, False, False])])
def test_both_tables_agree_on_what_fits(share: str | None, fitting: list[bool]) -> None:
    """228 sequences fit in 90 % of the memory of an H100, 240 only in all of it."""
    words = ["--batch", "32,228,240", "--prompt", "2048", *(["--memory-share", share] if share else [])]
    found = json.loads(cost("model=llama3_8b", "--hardware", "h100_sxm", *words, "--json").stdout)
    assert [row["fits"] for row in found["floors"]] == fitting
    assert [row["memory"]["fits"] for row in found["parallel"]] == fitting
    text = cost("model=llama3_8b", "--hardware", "h100_sxm", *words).stdout
    assert f"fits: weights and KV cache in {80 if share else 90} % of the nominal memory" in text


@pytest.mark.parametrize(
    ("words", "fact", "remedy"),
    [
        (["model=llama3_70b", "--tp", "6"], "64 attention heads", "1, 2, 4, 8, 16, 32, 64"),
        (["model=qwen2_5_7b", "--tp", "7"], "4 key/value heads", "1, 2, 4"),
        (["model=gpt2", "--pp", "13"], "12", "1 to 12"),
        (["model=llama3_8b", "--ep", "2"], "has no experts", "Omit it"),
        (["model=mixtral_8x7b", "--tp", "4", "--ep", "6"], "not a multiple of --tp 4", "it fits: 4, 8."),
        (["model=mixtral_8x7b", "--ep", "16"], "8 experts", "2, 3, 4, 5, 6, 7, 8."),
        (["model=mixtral_8x7b", "--tp", "16", "--ep", "32"], "8 experts", "Give a --tp up to 8, or omit --ep"),
        (["model=qwen3_30b_a3b", "--tp", "2", "--ep", "5"], "not a multiple of --tp 2", "multiples of 2 up to 128"),
        (["model=qwen3_30b_a3b", "--tp", "3", "--ep", "6"], "32 attention heads", "with --ep 6: 1, 2."),
        (["model=mixtral_8x7b", "--tp", "2", "--ep", "8", "--expert-exchange", "all_to_all"], "not modeled", "all_gather"),
        (["model=llama3_8b", "--link", "100"], "--link has no effect on one device", "--tp"),
        (["model=llama3_8b", "--network", "hdr"], "--network has no effect on one device", "--tp"),
        (["model=llama3_8b", "--collective-us", "5"], "--collective-us has no effect on one device", "--tp"),
        (["model=llama3_8b", "--tp", "0"], "--tp", ""),
        (["model=llama3_8b", "--tp", "2", "--expert-exchange", "all_to_all"], "no effect", "--ep"),
        (["model=mixtral_8x7b", "--ep", "8", "--expert-exchange", "pigeon"], "pigeon", "all_gather, all_to_all"),
        (["model=llama3_8b", "--tp", "2", "--link", "token-ring"], "token-ring", "nvlink, pcie"),
        (["model=llama3_8b", "--tp", "2", "--link", "nan"], "--link", ""),
        (["model=llama3_8b", "--tp", "2", "--network", "-1"], "--network", ""),
        (["model=llama3_8b", "--tp", "2", "--memory-share", "1.5"], "--memory-share", "up to 1"),
        (["model=llama3_8b", "--tp", "2", "--collective-us", "-1"], "--collective-us", "0 or more"),
        (["model=llama3_8b", "--tp", "2", "--node-gpus", "0"], "--node-gpus", ""),
        (["model=tiny_vlm", "--tp", "2"], "text models only", "--decoder-only"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_what_fits(words: list[str], fact: str, remedy: str) -> None:
    done = cost(*words, "--hardware", "h100_sxm")
    assert done.returncode == 2
    assert fact in done.stderr
    assert remedy in done.stderr


def test_a_plan_needs_hardware() -> None:
    done = cost("model=llama3_8b", "--tp", "2")
    assert done.returncode == 2
    assert "--hardware" in done.stderr


def test_whole_experts_cost_more_than_divided_ones_at_batch_1() -> None:
    (divided,), (whole,) = (parallel("model=mixtral_8x7b", "--tp", "8", *more) for more in ((), ("--ep", "8")))
    assert whole["decode"]["seconds"] > 3.37e-3, "some device reads one of the experts of every layer"
    assert divided["decode"]["seconds"] < 1e-3


def test_the_page_and_json_show_the_same_bytes_sent() -> None:
    """The first stage sends, and the last one takes longest."""
    words = ("model=llama3_8b", "--pp", "2", "--prompt", "2048", "--batch", "1")
    (row,) = parallel(*words)
    sent_bytes = 2 * 2048 * 4096 * 2
    assert row["prefill"]["sent_bytes_per_device"] == sent_bytes
    text = cost(*words, "--hardware", "h100_sxm").stdout
    (line,) = (line for line in text.splitlines() if " prefill " in line and "bf16" in line)
    assert "33.55 MB" in line
    assert "roofline, all stages" in text


def test_every_row_of_stages_has_its_interval() -> None:
    words = ("model=llama3_8b", "--hardware", "h100_sxm", "--pp", "2", "--batch", "1,64")
    rows = json.loads(cost(*words, "--json").stdout)["parallel"]
    lines = [line for line in cost(*words).stdout.splitlines() if " decode " in line]
    for row, line in zip(rows, lines, strict=True):
        assert f"{row['decode']['interval_s'] * 1e3:.3f}"[:5] in line


def test_the_implementation_of_latent_attention_is_shown() -> None:
    words = ("model=deepseek_v2_lite", "--hardware", "h200", "--tp", "2")
    assert "latent attention reexpand" in cost(*words).stdout
    assert json.loads(cost(*words, "--mla", "absorb", "--json").stdout)["parallel"][0]["mla"] == "absorb"
    assert "mla" not in parallel("model=llama3_8b", "--tp", "2")[0]


def test_a_node_larger_than_its_fastest_link_is_noted() -> None:
    words = ("model=llama3_70b", "--hardware", "h100_sxm", "--node-gpus", "16", "--batch", "1,2")
    assert "NVLink connects 8 GPUs" in cost(*words, "--tp", "16").stdout
    assert "NVLink connects" not in cost(*words, "--tp", "8").stdout


def test_the_page_answers_in_one_command() -> None:
    done = cost("model=llama3_70b", "--hardware", "h100_sxm", "--tp", "8", "--dtype", "fp8")
    assert done.returncode == 0
    for word in (
        "llama3_70b on 8 × NVIDIA H100 80GB HBM3: tensor parallel 8",
        "8.21 GiB",
        "largest batch",
        "fewest GPUs",
        "all-reduce",
        "450.0 GB/s",
    ):
        assert word in done.stdout
    several = cost(
        "model=llama3_70b", "--hardware", "h100_sxm", "--tp", "8", "--pp", "2", "--dtype", "bf16,fp8", "--batch", "1,8"
    )
    assert several.stdout.count(" yes ") == 4


def test_the_commands_of_the_page_run() -> None:
    shown = [words for words in commands("cost.md") if "--tp" in words]
    assert len(shown) >= 3
    for words in shown:
        done = llm_perf(*words)
        assert done.returncode == 0, done.stderr
        assert "fewest GPUs" in done.stdout
