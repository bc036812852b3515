"""The ranks of a run: who was slowest, who shares a device, and what the cost model expects of one."""

from dataclasses import replace
from typing import Any

from builders import clean_timings, default_config, in_a_row, model_facts, workload
from builders import rank_facts as rank
from llm_perf_opt.analysis.rank_run import RankRun, rank_run
from llm_perf_opt.analysis.ranks.document import CollectiveLine, RanksAnalysis, RankStepLine
from llm_perf_opt.core.rank_records import RankFacts, sharing
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.report.document import Table
from llm_perf_opt.report.run_ranks import rank_sections

NO_TRACES = Missing("no traces")
TINY = model_facts(architecture=dict(default_config().model.architecture))


def of_ranks(*ranks: RankFacts) -> CleanTimings:
    work = workload(batch_size=1, prompt_tokens=(16,), padded_tokens=16, new_tokens=4)
    return clean_timings(in_a_row(2), model=TINY, workload=work, ranks=ranks)


def found(timings: CleanTimings, traces: Any = NO_TRACES) -> RankRun:
    run = rank_run(timings, traces)
    assert run is not None
    return run


def test_a_run_with_one_process_has_no_ranks() -> None:
    assert rank_run(clean_timings(), NO_TRACES) is None
    assert rank_run(NO_TRACES, NO_TRACES) is None
    assert rank_sections(None) == []


def test_the_slowest_rank_of_each_repeat_is_counted() -> None:
    run = found(of_ranks(rank(0, request_ns=(10, 30)), rank(1, request_ns=(20, 20)), rank(2, request_ns=(15, 10))))
    assert run.slowest == (1, 1, 0)


def test_ranks_on_one_device_are_said_to_share_it() -> None:
    together = found(of_ranks(rank(0), rank(1)))
    assert sharing(together.ranks) == {"cuda:0": 2}
    assert "2 ranks on cuda:0" in together.shared
    assert "MFU" in together.shared
    assert found(of_ranks(rank(0), rank(1, "cuda:1"))).shared == ""


def test_the_cost_model_gives_the_share_of_one_rank() -> None:
    """Qwen2 with 4 layers of 256, an MLP of 704, a vocabulary of 8192, in fp32, on two ranks."""
    cost = found(of_ranks(rank(0), rank(1))).cost
    assert not isinstance(cost, Missing)
    layer = 256 * 256 * 2 + 2 * 256 * 64 + 3 * 256 * 704 + 256 + 2 * 64
    assert cost.weight_bytes == 4 * ((8192 * 256 + 4 * layer) // 2 + 9 * 256)
    assert cost.kv_cache_bytes == 4 * 4 * 2 * 32 * (16 + 3)  # fp32, layers, keys and values, half of the heads, tokens
    by = {(line.stage, line.kind): line for line in cost.collectives}
    assert {key: line.expected for key, line in by.items()} == {
        ("prefill", "all_reduce"): 9, ("prefill", "all_gather"): 1,
        ("decode_step", "all_reduce"): 9, ("decode_step", "all_gather"): 1,
    }  # fmt: skip
    assert by["decode_step", "all_reduce"].sent_bytes == 9 * 256 * 4  # 2(n-1)/n = 1 of each hidden state
    assert by["decode_step", "all_gather"].sent_bytes == 8192 * 4 // 2
    assert isinstance(by["prefill", "all_reduce"].counted, Missing)


def test_the_share_of_one_rank_needs_their_number_only() -> None:
    assert found(of_ranks(rank(0, size=2))).cost == found(of_ranks(rank(0), rank(1))).cost, "an interrupted run"
    assert isinstance(found(of_ranks(rank(0))).cost, Missing), "of an older version"


def collective(step: str, kind: str) -> CollectiveLine:
    return CollectiveLine(
        0, kind, 1024, [0, 1], 0, None, 5, "", 2, 0, None, step,
        cause="", cause_ns=None, cause_on="", missing=[], mismatched=False,
    )  # fmt: skip


def test_counted_collectives_stand_next_to_the_expected_ones() -> None:
    lines = [collective(f"decode_step {number}", "all_reduce") for number in (0, 0, 1, 1)]
    steps = [RankStepLine(f"decode_step {number}", 2, 5, 5, 0, None, None, "") for number in (0, 1)]
    traces = RanksAnalysis("x", True, [], 2, [], [], [*lines, collective("", "all_reduce")], [], steps, [])
    run = found(of_ranks(rank(0), rank(1)), traces)
    assert not isinstance(run.cost, Missing)
    counted = {(line.stage, line.kind): line.counted for line in run.cost.collectives}
    assert counted["decode_step", "all_reduce"] == 2
    assert counted["decode_step", "all_gather"] == 0
    assert counted["prefill", "all_reduce"] == Missing("the traces have no prefill")
    tables = [block.id for section in rank_sections(run) for block in section.blocks if isinstance(block, Table)]
    assert tables[:3] == ["rank-times", "rank-share", "rank-collectives"]


def test_an_unknown_architecture_has_no_cost() -> None:
    unknown = replace(of_ranks(rank(0), rank(1)), model=model_facts(architecture={"model_type": "mystery"}))
    assert isinstance(found(unknown).cost, Missing)
