"""Links between GPUs: their data, and which one a group of devices uses."""

from dataclasses import replace

import pytest

from llm_perf_opt.analysis.cost_model.communication import Collective
from llm_perf_opt.analysis.cost_model.sharding import Plan
from llm_perf_opt.analysis.limits.hardware import HARDWARE, hardware_named
from llm_perf_opt.analysis.limits.links import LINKS, NETWORKS, Fabric, fabric_of, group_link, measured_link
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings

RING = Collective("all_gather", "tp", "logits", 8, 1, 2**20)


def fabric(key: str, node_gpus: int | None = None) -> Fabric:
    return fabric_of(hardware_named(key), node_gpus=node_gpus)


def test_every_product_has_links_with_sources_the_fastest_first() -> None:
    assert set(LINKS) == set(HARDWARE)
    for links in LINKS.values():
        rates = [link.bytes_per_s for link in links]
        assert rates == sorted(rates, reverse=True)
        assert all("GB/s in both directions" in link.source for link in links)
    assert all("Gb/s per port" in link.source for link in NETWORKS.values())


@pytest.mark.parametrize(
    ("key", "gbs"),
    [("h100_sxm", 450), ("h200", 450), ("b200", 900), ("a100_sxm_80gb", 300), ("h100_pcie", 300), ("l40s", 32), ("t4", 16)],
)
def test_rates_are_per_direction(key: str, gbs: float) -> None:
    assert LINKS[key][0].bytes_per_s == gbs * 1e9
    assert NETWORKS["ndr"].bytes_per_s == 50e9


def test_a_bridge_connects_neighbors_only() -> None:
    bridged = fabric("h100_pcie")
    assert group_link(bridged, Plan(2), "tp", 0).inside.key == "nvlink"
    assert group_link(bridged, Plan(4), "tp", 0).inside.key == "pcie"
    assert group_link(bridged, Plan(2, 2), "pp", 0).inside.key == "pcie", "device 0 sends to device 2"
    assert group_link(bridged, Plan(1, 2), "pp", 0).inside.key == "nvlink"
    assert group_link(fabric("h200_nvl"), Plan(4), "tp", 0).inside.key == "nvlink"


@pytest.mark.parametrize("link", ["nvlink", "250"])
def test_a_named_or_given_bridge_connects_no_more(link: str) -> None:
    bridged = fabric_of(hardware_named("h100_nvl"), link)
    assert group_link(bridged, Plan(2), "tp", 0).inside.key == ("nvlink" if link == "nvlink" else "given")
    assert group_link(bridged, Plan(8), "tp", 0).inside.key == "pcie"
    assert [one.key for one in fabric_of(hardware_named("h100_nvl"), "pcie").links] == ["pcie"]
    assert [one.key for one in fabric_of(hardware_named("h100_nvl"), "40").links] == ["given"], "no more than PCIe reaches"


@pytest.mark.parametrize("key", sorted(LINKS))
def test_a_link_given_with_the_rate_of_the_datasheet_changes_nothing(key: str) -> None:
    usual = fabric(key)
    given = fabric_of(hardware_named(key), f"{usual.links[0].bytes_per_s / 1e9:g}")
    assert given.node_gpus == usual.node_gpus
    for tp in (2, 4, 16):
        rates = [group_link(one, Plan(tp), "tp", 0).seconds(replace(RING, ranks=tp)) for one in (usual, given)]
        assert rates[0] == rates[1]


def ceilings(gpus: int, gbs: float) -> Ceilings:
    row = CeilingRow("all_reduce", "all-reduce", "B/s", summarize([gbs * 1e9] * 9), "how", gpus=gpus)
    return Ceilings("cuda", "a GPU", "GPU-0", "580", "2.11", 1, "2026-11-16T00:00:00+00:00", 9.0, 8.0, (), (row,))


def test_a_measured_link_connects_as_many_gpus_as_were_measured() -> None:
    def links(key: str, gpus: int, gbs: float) -> list[tuple[str, int]]:
        found = fabric_of(hardware_named(key), measured=measured_link(ceilings(gpus, gbs)))
        return [(one.key, one.gpus) for one in found.links]

    assert links("h100_nvl", 2, 270) == [("measured", 2), ("pcie", 8)]
    assert links("h100_nvl", 8, 35) == [("measured", 8)]
    assert links("h100_sxm", 16, 360) == [("measured", 16)]
    assert links("h100_sxm", 2, 360) == [("measured", 8)], "NVSwitch connects the other six as well"
    assert links("gb200", 4, 800) == [("measured", 72)]


def test_of_several_groups_the_slowest_link_counts() -> None:
    """Two replicas of three stages: devices 0 and 1 share a bridge, devices 3 and 4 do not."""
    assert group_link(fabric("h100_nvl"), Plan(1, 3, 2), "pp", 0).inside.key == "pcie"


def test_counterparts_of_replicas_are_a_group() -> None:
    """Two replicas of four devices: 0 and 4, 1 and 5, …"""
    found = group_link(fabric("h100_nvl"), Plan(4, 1, 8), "dp", 0)
    assert (found.ranks, found.nodes, found.inside.key) == (2, 1, "pcie")


def test_a_rack_is_one_node() -> None:
    found = group_link(fabric("gb200"), Plan(64), "tp", 0)
    assert (found.nodes, found.link_of(RING).key) == (1, "nvlink")


def test_stages_come_before_replicas() -> None:
    """Two replicas of two stages of four devices: the second replica is on the second node."""
    plan = Plan(4, 2, 8)
    assert plan.devices == 16
    assert group_link(fabric("h100_sxm"), plan, "tp", 1).nodes == 1
    assert group_link(fabric("h100_sxm"), plan, "pp", 0).nodes == 1
    experts = group_link(fabric("h100_sxm"), plan, "ep", 0)
    assert (experts.ranks, experts.nodes, experts.node_ranks) == (8, 2, 4)
    assert experts.seconds(RING) == pytest.approx(RING.sent_bytes / (4 * 50e9)), "four ports leave each node"


def test_an_all_to_all_over_nodes_waits_for_each_port() -> None:
    found = group_link(fabric("h100_sxm"), Plan(1, 1, 16), "ep", 0)
    call = Collective("all_to_all", "ep", "tokens to experts", 16, 3, 1_500_000)
    assert found.seconds(call) == pytest.approx(3 * 1_500_000 * 8 / 15 / 50e9), "8 of the other 15 devices are on the other node"
    assert found.link_of(call).key == "ndr"


def test_a_group_that_fills_no_node_evenly_is_limited_by_its_smallest_part() -> None:
    found = group_link(fabric("h100_sxm", node_gpus=6), Plan(8), "tp", 0)
    assert (found.nodes, found.node_ranks) == (2, 2)
    assert found.seconds(RING) == pytest.approx(RING.sent_bytes / (2 * 50e9))
    slow = replace(found, inside=LINKS["t4"][0])
    assert slow.link_of(RING).key == "pcie", "the two ports together are faster than PCIe"
