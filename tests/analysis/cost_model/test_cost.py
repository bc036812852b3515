"""FLOPs and bytes: hand-computed figures, published figures, and properties of every step."""

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.cost_model.architecture import Architecture, LatentAttention, Mla
from llm_perf_opt.analysis.cost_model.cost import (
    BF16,
    Formats,
    StageCost,
    combined,
    kv_bytes_per_token,
    kv_cache_bytes,
    model_cost,
    step_cost,
    weight_bytes,
)
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.work import (
    Logits,
    Step,
    causal_pairs,
    decode_steps,
    expected_experts,
    full_pairs,
)
from llm_perf_opt.core.errors import ConfigError

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
GEMMA3 = TINY | {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 4, "sliding_window": 6}
SMALL_MOE = TINY | {
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
SMALL_MLA = DEEPSEEK_V3 | {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
OPT_350M = {
    "model_type": "opt",
    "vocab_size": 50,
    "hidden_size": 8,
    "ffn_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "word_embed_proj_dim": 4,
}
ALL = [architecture_of(config) for config in (TINY, GEMMA3, SMALL_MOE, SMALL_MLA, OPT_350M, MIXTRAL)]


def parts(stage: StageCost) -> dict[str, tuple[int, int]]:
    return {part.name: (part.flops, part.bytes) for part in stage.components}


# --- hand-computed figures --------------------------------------------------------------------------------------------


def test_one_step_of_a_tiny_model() -> None:
    """2 sequences × 3 new tokens on 5 cached; 3 layers, width 8, 2 heads of 4, 1 key/value head, MLP 16, 32 words."""
    stage = step_cost(architecture_of(TINY), Step(batch=2, new_tokens=3, cached_tokens=5))
    projections = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # query, key, value, output
    mlp = 3 * 8 * 16  # gate, up, down
    pairs = 6 + 7 + 8  # the first new token sees itself and five before it
    assert parts(stage) == {
        "embedding": (0, 2 * 6 * 8),  # a row of 8 for each of 6 tokens, 2 bytes an element
        "attention_projections": (3 * 2 * 6 * projections, 3 * 2 * projections),
        "attention_core": (3 * 2 * (2 * 2 * (4 + 4)) * pairs, 0),
        "kv_read": (0, 3 * 2 * 2 * 5 * (4 + 4)),
        "kv_write": (0, 3 * 2 * 2 * 3 * (4 + 4)),
        "mlp": (3 * 2 * 6 * mlp, 3 * 2 * mlp),
        "norms": (0, 2 * (3 * 2 * 8 + 8)),
        "lm_head": (2 * 2 * 8 * 32, 2 * (8 * 32 + 2 * 32)),  # 2 last positions; the weights and the logits
    }
    whole = 3 * (3 + 5)
    assert stage.flops_full_attention - stage.flops == 3 * 2 * (2 * 2 * (4 + 4)) * (whole - pairs)


def test_llama3_8b_decode_reads_everything_but_the_embedding_table() -> None:
    stage = step_cost(architecture_of(LLAMA3_8B), Step(1, 1, 2048))
    table = 128256 * 4096
    kv = 2 * 32 * 2 * 8 * 128
    assert kv_bytes_per_token(architecture_of(LLAMA3_8B)) == kv == 131072
    assert stage.bytes == 2 * (8_030_261_248 - table + 4096) + 2049 * kv + 2 * 128256


def test_tied_weights_change_memory_but_not_flops() -> None:
    apart, tied = architecture_of(TINY), architecture_of(TINY | {"tie_word_embeddings": True})
    assert apart.params - tied.params == 32 * 8
    assert step_cost(apart, Step(2, 3, 5)) == step_cost(tied, Step(2, 3, 5))


@pytest.mark.parametrize(("logits", "positions"), [("none", 0), ("last", 2), ("all", 6)])
def test_logits_are_computed_for_the_positions_asked_for(logits: Logits, positions: int) -> None:
    stage = step_cost(architecture_of(TINY), Step(2, 3, 5, logits))
    head = next(component for component in stage.components if component.name == "lm_head")
    assert head.flops == 2 * positions * 8 * 32
    assert head.bytes == (2 * (8 * 32 + positions * 32) if positions else 0)


def test_a_window_bounds_what_is_seen_read_and_kept() -> None:
    full = architecture_of(TINY | {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 1})
    slid = architecture_of(TINY | {"model_type": "mistral", "sliding_window": 4, "num_hidden_layers": 1})
    token = 2 * (4 + 4)
    for architecture, seen, read, kept in ((full, 11, 10, 11), (slid, 4, 3, 3)):
        stage = parts(step_cost(architecture, Step(1, 1, 10)))
        assert stage["attention_core"] == (2 * 2 * (4 + 4) * seen, 0)
        assert stage["kv_read"] == (0, read * token)
        assert stage["kv_write"] == (0, token)
        assert kv_cache_bytes(architecture, 1, 11) == kept * token
    assert parts(step_cost(slid, Step(1, 10)))["kv_write"] == (0, 4 * token)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_one_token_reads_its_own_experts_and_many_read_all() -> None:
    architecture = architecture_of(MIXTRAL)
    expert = 3 * 4096 * 14336 * 32
    assert parts(step_cost(architecture, Step(1, 1, 0)))["experts"] == (2 * 2 * expert, 2 * 2 * expert)
    assert parts(step_cost(architecture, Step(1, 2048)))["experts"] == (2048 * 2 * 2 * expert, 2 * 8 * expert)


def test_two_tokens_of_mixtral_use_three_and_a_half_experts() -> None:
    assert expected_experts(8, 2, 2) == pytest.approx(8 * (1 - (6 / 8) ** 2)) == pytest.approx(3.5)
    expert = 3 * 4096 * 14336 * 32
    assert parts(step_cost(architecture_of(MIXTRAL), Step(2, 1)))["experts"][1] == 7 * expert


@given(experts=st.integers(1, 512), tokens=st.integers(1, 300), data=st.data())
def test_expected_experts_is_the_closed_form(experts: int, tokens: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, experts))
    exact = experts * (1 - (1 - Fraction(active, experts)) ** tokens)
    assert expected_experts(experts, active, tokens) == pytest.approx(float(exact), rel=1e-12)


def test_shared_expert_has_its_gate() -> None:
    stage = parts(step_cost(architecture_of(SMALL_MOE), Step(1, 1, 4)))
    assert stage["shared_experts"] == (3 * 2 * (3 * 8 * 8 + 8), 3 * 2 * (3 * 8 * 8 + 8))
    assert stage["router"] == (3 * 2 * 8 * 6, 3 * 2 * 8 * 6)
    assert stage["experts"] == (3 * 2 * 2 * 3 * 8 * 4, 3 * 2 * 2 * 3 * 8 * 4)


# --- published figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "params", "active"),
    [
        (LLAMA3_8B, 8_030_261_248, 8_030_261_248),
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (DEEPSEEK_V3, 671_026_404_352, 37_552_282_624),
    ],
)
def test_parameters_are_the_published_ones(config: dict[str, Any], params: int, active: int) -> None:
    architecture = architecture_of(config)
    assert (architecture.params, architecture.active_params) == (params, active)


@pytest.mark.parametrize(
    ("mla", "gflops", "elements"),
    [(Mla.EXPAND_ONCE, 83.5, 128 * (192 + 128)), (Mla.REEXPAND, 4275, 512 + 64), (Mla.ABSORB, 108, 512 + 64)],
)
def test_deepseek_v3_decodes_three_ways(mla: Mla, gflops: float, elements: int) -> None:
    architecture, formats = architecture_of(DEEPSEEK_V3), Formats(mla=mla)
    assert step_cost(architecture, Step(1, 1, 2048), formats).flops / 1e9 == pytest.approx(gflops, rel=1e-3)
    assert kv_bytes_per_token(architecture, formats) == 2 * 61 * elements


def test_first_prefill_expands_once_either_way() -> None:
    architecture, step = architecture_of(DEEPSEEK_V3), Step(2, 100)
    once, again = (step_cost(architecture, step, Formats(mla=mla)).flops for mla in (Mla.EXPAND_ONCE, Mla.REEXPAND))
    assert once == again


# --- number formats ---------------------------------------------------------------------------------------------------


def test_weights_and_cache_have_formats_of_their_own() -> None:
    architecture, step = architecture_of(TINY), Step(2, 3, 5)
    base, small = parts(step_cost(architecture, step)), parts(step_cost(architecture, step, Formats("int4", "fp8")))
    assert 4 * small["mlp"][1] == base["mlp"][1]
    assert 2 * small["kv_read"][1] == base["kv_read"][1]
    assert small["lm_head"][1] == 8 * 32 // 2 + 2 * 2 * 32  # logits stay in 16 bits
    assert [flops for flops, _ in small.values()] == [flops for flops, _ in base.values()]
    assert weight_bytes(architecture, Formats("fp32")) == 4 * architecture.params


@pytest.mark.parametrize("spelling", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_any_usual_spelling_of_a_format(spelling: str) -> None:
    assert Formats(spelling, spelling) == BF16


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"weights": "bf17"}, "dtype 'bf17'"),
        ({"kv": "int3"}, "kv_dtype 'int3'"),
        ({"weights": 16}, "dtype"),
        ({"mla": "best"}, "mla"),
    ],
)
def test_unknown_formats_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Formats(**arguments)
    assert caught.value.fact.startswith(named)


# --- invalid requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None, [1]])
@pytest.mark.parametrize("field", ["batch", "prompt", "context"])
def test_a_request_that_is_no_number_is_named(field: str, value: Any) -> None:
    if field == "context" and value == 0 and not isinstance(value, bool):
        return  # decoding on nothing cached is a step
    request: dict[str, Any] = {"batch": 1, "prompt": 4, "context": 4} | {field: value}
    with pytest.raises(ConfigError) as caught:
        model_cost(architecture_of(TINY), **request)
    assert caught.value.fact.startswith(field)
    assert caught.value.exit_code == 2


def test_a_step_checks_itself() -> None:
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ConfigError):
            Step(*arguments)
    with pytest.raises(ConfigError, match="logits"):
        Step(1, 1, 0, "some")  # type: ignore[arg-type]


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_has_the_promised_shape() -> None:
    architecture = architecture_of(MIXTRAL)
    cost = model_cost(architecture, batch=8, prompt=1024, context=4096, formats=Formats("fp8", "bf16"))
    data = json.loads(json.dumps(cost.to_json()))
    assert data["params"] == architecture.params
    assert data["active_params"] == architecture.active_params
    assert data["kv_bytes_per_token"] == 131072
    for stage, step in (("prefill", Step(8, 1024)), ("decode", Step(8, 1, 4096))):
        expected = step_cost(architecture, step, Formats("fp8"))
        assert set(data[stage]) == {"flops", "flops_full_attention", "bytes", "parts"}
        assert data[stage]["flops"] == expected.flops == sum(part["flops"] for part in data[stage]["parts"])
        assert data[stage]["bytes"] == expected.bytes == sum(part["bytes"] for part in data[stage]["parts"])
        assert data[stage]["flops_full_attention"] == expected.flops_full_attention
        assert all(set(part) == {"name", "flops", "bytes"} for part in data[stage]["parts"])
        assert all(type(part["flops"]) is int and type(part["bytes"]) is int for part in data[stage]["parts"])
    assert data["assumptions"] == {
        "model_type": "mixtral",
        "part_of": None,
        "batch": 8,
        "prompt": 1024,
        "context": 4096,
        "dtype": "fp8",
        "kv_dtype": "bf16",
        "mla": None,
        "logits": "last",
        "caveats": [],
    }


def test_json_has_the_implementation_of_latent_attention() -> None:
    data = model_cost(architecture_of(SMALL_MLA), batch=1, prompt=4, context=4).to_json()
    assert data["assumptions"]["mla"] == "reexpand"


# --- properties of every step -----------------------------------------------------------------------------------------

sizes = st.integers(1, 40)
cached = st.integers(0, 40)
windows = st.one_of(st.none(), st.integers(1, 90))
architectures = st.sampled_from(ALL)
formats = st.builds(
    Formats, st.sampled_from(["fp32", "bf16", "fp8", "int4"]), st.sampled_from(["bf16", "int4"]), st.sampled_from(Mla)
)


@given(new=sizes, cached=cached, window=windows)
def test_pairs_are_those_of_the_mask(new: int, cached: int, window: int | None) -> None:
    """The mask itself: query i at position p + i sees keys up to its own, at most `window` of them."""
    total = cached + new
    seen = [
        sum(1 for key in range(total) if key <= query and (window is None or query - key < window))
        for query in range(cached, total)
    ]
    assert causal_pairs(new, cached, window) == sum(seen)
    held = total if window is None else min(cached, window - 1) + new
    assert full_pairs(new, cached, window) == new * held >= sum(seen)


def test_decode_steps_follow_one_another() -> None:
    assert decode_steps(2, 10, 3) == (Step(2, 1, 10), Step(2, 1, 11), Step(2, 1, 12))
    with pytest.raises(ConfigError, match="steps"):
        decode_steps(1, 3, -1)


def test_steps_together_are_their_sum() -> None:
    architecture = architecture_of(SMALL_MOE)
    steps = [step_cost(architecture, step) for step in decode_steps(2, 10, 3)]
    together = combined(steps)
    assert together.flops == sum(step.flops for step in steps)
    assert together.flops_full_attention == sum(step.flops_full_attention for step in steps)
    assert together.bytes == sum(step.bytes for step in steps)
    assert [part.name for part in together.components] == [part.name for part in steps[0].components]
    assert [part.within for part in together.components] == [part.within for part in steps[0].components]


@settings(deadline=None)
@given(architecture=architectures, batch=st.integers(1, 4), chunks=st.lists(sizes, min_size=1, max_size=6))
def test_chunked_prefill_sums_to_the_whole(architecture: Architecture, batch: int, chunks: list[int]) -> None:
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    for mla in (Mla.EXPAND_ONCE, Mla.ABSORB):
        last = len(chunks) - 1
        steps = [
            Step(batch, chunk, start, "last" if index == last else "none")
            for index, (chunk, start) in enumerate(zip(chunks, starts, strict=True))
        ]
        pieces = combined(step_cost(architecture, step, Formats(mla=mla)) for step in steps)
        whole = step_cost(architecture, Step(batch, sum(chunks)), Formats(mla=mla))
        assert {part.name: part.flops for part in pieces.components} == {part.name: part.flops for part in whole.components}
        assert pieces.bytes >= whole.bytes


@given(batch=st.integers(1, 4), chunks=st.lists(sizes, min_size=2, max_size=5))
def test_re_expansion_pays_for_every_earlier_chunk_again(batch: int, chunks: list[int]) -> None:
    architecture = architecture_of(SMALL_MLA)
    attention = architecture.layers[0].attention
    assert isinstance(attention, LatentAttention)
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    pieces = combined(
        step_cost(architecture, Step(batch, chunk, start, "all")) for chunk, start in zip(chunks, starts, strict=True)
    )
    whole = step_cost(architecture, Step(batch, sum(chunks), 0, "all"))
    again = 2 * batch * sum(starts) * attention.expansion_params * len(architecture.layers)
    assert pieces.flops == whole.flops + again


@given(step=st.builds(Step, st.integers(1, 4), sizes, cached), spare=st.integers(0, 10))
def test_a_window_no_shorter_than_the_text_is_no_window(step: Step, spare: int) -> None:
    mistral = TINY | {"model_type": "mistral"}
    window = step.cached_tokens + step.new_tokens + spare
    slid, full = (architecture_of(mistral | {"sliding_window": size}) for size in (window, None))
    assert step_cost(slid, step) == step_cost(full, step)


@settings(deadline=None)
@given(
    architecture=architectures,
    formats=formats,
    step=st.builds(Step, sizes, sizes, cached, st.sampled_from(["none", "last", "all"])),
    more=st.tuples(cached, cached, cached),
)
def test_more_never_costs_less(architecture: Architecture, formats: Formats, step: Step, more: tuple[int, int, int]) -> None:
    bigger = Step(step.batch + more[0], step.new_tokens + more[1], step.cached_tokens + more[2], step.logits)
    before, after = step_cost(architecture, step, formats), step_cost(architecture, bigger, formats)
    for small, large in zip(before.components, after.components, strict=True):
        assert small.name == large.name
        assert small.flops <= large.flops
        assert small.flops_full_attention <= large.flops_full_attention
        assert small.bytes <= large.bytes


@settings(deadline=None)
@given(architecture=architectures, formats=formats, step=st.builds(Step, sizes, sizes, cached))
def test_causal_is_never_more_than_whole_and_weights_are_moved_once(
    architecture: Architecture, formats: Formats, step: Step
) -> None:
    stage = step_cost(architecture, step, formats)
    assert 0 < stage.flops <= stage.flops_full_attention
    moved = sum(part.bytes for part in stage.components if part.name not in ("kv_read", "kv_write", "lm_head", "embedding"))
    assert moved <= weight_bytes(architecture, formats) + len(stage.components)


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights_move_their_own_bits(tied: bool) -> None:
    architecture = architecture_of({**TINY, "tie_word_embeddings": tied})
    plain = Formats("fp32", "fp32")
    parts = ("attention_projections", "mlp", "lm_head")
    quantized = Formats("fp32", "fp32", quantized=parts, quantized_bits=8.0)
    step = Step(1, 1, 4)
    before = {part.name: part.bytes for part in step_cost(architecture, step, plain).components}
    after = {part.name: part.bytes for part in step_cost(architecture, step, quantized).components}
    assert after["attention_projections"] * 4 == before["attention_projections"]
    assert after["mlp"] * 4 == before["mlp"]
    for name in ("embedding", "norms", "kv_read", "kv_write"):
        assert after[name] == before[name]
    matrices = sum(layer.params - layer.norm_params for layer in architecture.layers)
    head = architecture.head_matrix_params
    copied = 0 if tied else 3 * head  # a tied matrix stays in fp32 for the embedding
    assert weight_bytes(architecture, plain) - weight_bytes(architecture, quantized) == 3 * matrices + (copied or -head)
