"""Components of traces of engines that others recorded, exact to the nanosecond, and of a run."""

from pathlib import Path

import pytest

from builders import model_facts, torch_pass
from llm_perf_opt.analysis.trace.document import ComponentTable
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.analysis.trace.step_components import component_table, find_components, with_components
from llm_perf_opt.core.records import Missing, TorchPass
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.open_trace import read_trace
from trace_builders import HEAD, PACKED, TAIL, Builder

ENGINES = Path(__file__).parents[2] / "fixtures" / "engines"
DENSE = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


def table(trace: Trace) -> ComponentTable:
    found = component_table(trace, find_stages(trace))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "total_ns", "expected"),
    [
        (
            "vllm_decode_full_graph",
            10_674_517,
            {
                "experts": (96, 7_294_145), "attention_core": (107, 1_302_886), "attention_projections": (48, 753_226),
                "router": (120, 695_597), "norms": (49, 332_030), "lm_head": (1, 276_678), "other": (4, 19_955),
            },
        ),
        (
            "sglang_Qwen3-8B_decode",
            9_765_437,
            {
                "mlp": (108, 4_203_933), "attention_core": (216, 2_843_877), "attention_projections": (72, 1_505_859),
                "norms": (145, 683_953), "lm_head": (1, 396_832), "other": (13, 130_983),
            },
        ),
    ],
)  # fmt: skip
def test_a_decode_step_that_is_one_graph(name: str, total_ns: int, expected: dict[str, tuple[int, int]]) -> None:
    found = table(read_trace(ENGINES / f"{name}.json.gz"))
    assert {row.name: (row.kernels, row.kernel_ns) for row in found.rows} == expected
    assert sum(row.kernel_ns for row in found.rows) == total_ns
    assert found.coverage["decode_step"] == pytest.approx(1 - expected["other"][1] / total_ns)
    assert found.why == {}


def steps(layers: int = 3, kernels: list[str] | None = None, devices: int = 1, side: bool = False) -> Trace:
    """Build a decode of two steps, each one graph launch; every kernel takes 10 ns."""
    made = Builder()
    names = kernels or [name for name, _ in (*HEAD, *PACKED * layers, *TAIL)]
    made.range(0, 20_000, "decode")
    for number in range(2):
        begin = 10_000 * number
        made.range(begin + 1, begin + 9_000, "decode_step")
        for device in range(devices):
            made.call(begin + 10 + device, begin + 11 + device, "cudaGraphLaunch", correlation=10 * number + device + 1)
            for place, name in enumerate(names):
                at = begin + 100 + 20 * place
                made.kernel(at, at + 10, name, correlation=10 * number + device + 1, device=device)
        if side:
            made.kernel(begin + 105 + 20 * 12, begin + 110 + 20 * 12, "elementwise", correlation=10 * number + 1, stream=9)
    return made.trace()


def test_work_on_another_stream_is_outside_the_layers() -> None:
    without, beside = table(steps()), table(steps(side=True))
    mine, others = ({row.name: row.kernels for row in found.rows} for found in (without, beside))
    assert others == {**mine, "other": mine["other"] + 2}


def test_every_device_has_its_own_layers() -> None:
    one, two = ({row.name: row.kernels for row in table(steps(devices=count)).rows} for count in (1, 2))
    assert two == {name: 2 * count for name, count in one.items()}


def test_a_graph_whose_structure_is_unknown_says_why() -> None:
    found = table(steps(kernels=["gemm", "elementwise_kernel"] * 5))
    assert found.rows == []
    assert found.evidence == {}
    assert "attention" in found.why["decode_step"]


def test_without_graphs_nothing_is_said_about_what_is_unknown() -> None:
    made = Builder()
    made.range(0, 100, "decode_step")
    made.launch(10, 20, 30, "gemm")
    trace = made.trace()
    assert component_table(trace, find_stages(trace)) is None
    assert find_components(trace, find_stages(trace)).component.tolist() == [-1]


def parts(torch: TorchPass) -> dict[tuple[str, str], int]:
    assert not isinstance(torch.parts, Missing)
    return {(part.stage, part.part): part.time_ns for part in torch.parts}


def test_a_run_gets_the_time_of_each_component() -> None:
    unlabeled = torch_pass(parts=Missing("no labels"))
    torch, how = with_components(unlabeled, steps(), model_facts(architecture=DENSE))
    found = parts(torch)
    assert found["decode", "mlp"] == 2 * 3 * 3 * 10
    assert found["decode", "lm_head"] == 2 * 10
    assert sum(found.values()) == 2 * 10 * len([*HEAD, *PACKED * 3, *TAIL])
    assert "decode: 3 layers" in how
    assert "prefill: n/a" in how


@pytest.mark.parametrize(
    ("trace", "word"),
    [
        (steps(layers=4), "4 layers, but the model has 3"),
        (steps(kernels=["gemm"] * 5), "no layers"),
        (steps(devices=2), "several devices"),
    ],
)
def test_a_structure_that_is_not_the_models_gives_no_times(trace: Trace, word: str) -> None:
    torch, how = with_components(torch_pass(parts=Missing("no labels")), trace, model_facts(architecture=DENSE))
    assert isinstance(torch.parts, Missing)
    assert word in torch.parts.why
    assert how == ""


def test_experts_in_a_model_without_any_give_no_times() -> None:
    trace = read_trace(ENGINES / "vllm_decode_full_graph.json.gz")
    torch, _ = with_components(
        torch_pass(parts=Missing("no labels")), trace, model_facts(architecture={**DENSE, "num_hidden_layers": 24})
    )
    assert isinstance(torch.parts, Missing)
    assert "experts, router, which the model does not have" in torch.parts.why


def test_an_unknown_architecture_leaves_the_pass_as_it_is() -> None:
    unlabeled = torch_pass(parts=Missing("no labels"))
    assert with_components(unlabeled, steps(), model_facts(architecture={"model_type": "unheard_of"})) == (unlabeled, "")
