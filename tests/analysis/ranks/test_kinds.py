"""Kinds of collectives by name, and their traffic."""

import pytest

from llm_perf_opt.analysis.ranks.kinds import bus_factor, kind_of, moved_bytes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "send_recv"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("alltoallv_base", "all_to_all"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("barrier", "barrier"),
        ("recv", "recv"),
        ("wait", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_traffic_is_counted_as_in_nccl_tests() -> None:
    assert [bus_factor(kind, 4) for kind in ("all_reduce", "all_gather", "broadcast", "barrier")] == [1.5, 0.75, None, None]
    assert bus_factor("all_reduce", 1) is None
    assert moved_bytes("all_gather", 10, 40, 4) == 40
    assert moved_bytes("all_gather", 10, -1, 4) == 40
    assert moved_bytes("reduce_scatter", 40, -1, 4) == 40
    assert moved_bytes("all_gather", 10, -1, 0) == -1
    assert moved_bytes("all_reduce", -1, -1, 2) == -1
