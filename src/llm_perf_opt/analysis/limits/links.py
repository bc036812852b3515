"""Links between GPUs: NVLink and PCIe within a node, InfiniBand between nodes, with the source of every figure.

Rates are per GPU and direction. Datasheets give NVLink and PCIe as the sum of both directions, so the table has half of that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from llm_perf_opt.analysis.cost_model.communication import Collective, GroupName
from llm_perf_opt.analysis.cost_model.sharding import Plan
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.stats import positive_number, whole_number
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import Missing

NODE_GPUS = 8
"""GPUs of a node unless NVLink connects more: HGX and DGX boards have eight."""


@dataclass(frozen=True)
class Link:
    """One kind of link."""

    key: str
    name: str
    bytes_per_s: float
    """Per GPU and direction."""
    source: str
    gpus: int = NODE_GPUS
    """The largest number of GPUs that it connects with each other; bridges connect two or four, PCIe all of a node."""


def _both_ways(key: str, name: str, gbs: float, source: str, gpus: int = NODE_GPUS) -> Link:
    return Link(key, name, gbs * 1e9 / 2, f"{source}: {gbs:g} GB/s in both directions together", gpus)


def _nvlink(gbs: float, source: str, gpus: int = NODE_GPUS) -> Link:
    return _both_ways("nvlink", "NVLink", gbs, source, gpus)


def _pcie(generation: int, source: str) -> Link:
    return _both_ways("pcie", f"PCIe {generation}.0 x16", {3: 32, 4: 64, 5: 128}[generation], source)


_GA102 = "NVIDIA Ampere GA102 whitepaper"

LINKS: Mapping[str, tuple[Link, ...]] = MappingProxyType(
    {
        "b200": (
            _nvlink(1800, "NVIDIA HGX B200 datasheet"),
            _pcie(5, "PCIe 5.0 specification, as the processors of DGX B200 have it"),
        ),
        "gb200": (_nvlink(1800, "NVIDIA GB200 NVL72 datasheet", 72),),
        "h200": (_nvlink(900, "NVIDIA H200 datasheet (SXM)"), _pcie(5, "NVIDIA H200 datasheet (SXM)")),
        "h200_nvl": (_nvlink(900, "NVIDIA H200 datasheet (NVL, bridge)", 4), _pcie(5, "NVIDIA H200 datasheet (NVL)")),
        "gh200": (_pcie(5, "NVIDIA GH200 datasheet"),),
        "h100_sxm": (_nvlink(900, "NVIDIA H100 datasheet (SXM)"), _pcie(5, "NVIDIA H100 datasheet (SXM)")),
        "h100_nvl": (_nvlink(600, "NVIDIA H100 datasheet (NVL, bridge)", 2), _pcie(5, "NVIDIA H100 datasheet (NVL)")),
        "h100_pcie": (_nvlink(600, "NVIDIA H100 datasheet (PCIe, bridge)", 2), _pcie(5, "NVIDIA H100 datasheet (PCIe)")),
        "a100_sxm_80gb": (_nvlink(600, "NVIDIA A100 datasheet (SXM)"), _pcie(4, "NVIDIA A100 datasheet (SXM)")),
        "a100_sxm_40gb": (_nvlink(600, "NVIDIA A100 datasheet (SXM)"), _pcie(4, "NVIDIA A100 datasheet (SXM)")),
        "a100_pcie_80gb": (_nvlink(600, "NVIDIA A100 datasheet (PCIe, bridge)", 2), _pcie(4, "NVIDIA A100 datasheet (PCIe)")),
        "a100_pcie_40gb": (_nvlink(600, "NVIDIA A100 datasheet (PCIe, bridge)", 2), _pcie(4, "NVIDIA A100 datasheet (PCIe)")),
        "a30": (_nvlink(200, "NVIDIA A30 datasheet (bridge)", 2), _pcie(4, "NVIDIA A30 datasheet")),
        "a40": (_nvlink(112.5, "NVIDIA A40 datasheet (bridge)", 2), _pcie(4, "PCIe 4.0 specification")),
        "a10": (_pcie(4, "NVIDIA A10 datasheet"),),
        "rtx_a6000": (_nvlink(112.5, f"{_GA102} (bridge)", 2), _pcie(4, "PCIe 4.0 specification")),
        "l4": (_pcie(4, "NVIDIA L4 datasheet"),),
        "l40s": (_pcie(4, "NVIDIA L40S datasheet"),),
        "rtx_6000_ada": (_pcie(4, "PCIe 4.0 specification"),),
        "rtx_3090": (_nvlink(112.5, f"{_GA102} (bridge)", 2), _pcie(4, "PCIe 4.0 specification")),
        "rtx_4090": (_pcie(4, "PCIe 4.0 specification"),),
        "rtx_5090": (_pcie(5, "PCIe 5.0 specification"),),
        "v100_sxm2_16gb": (_nvlink(300, "NVIDIA V100 datasheet (SXM2)"), _pcie(3, "NVIDIA V100 datasheet")),
        "v100_sxm2_32gb": (_nvlink(300, "NVIDIA V100 datasheet (SXM2)"), _pcie(3, "NVIDIA V100 datasheet")),
        "v100_pcie_16gb": (_pcie(3, "NVIDIA V100 datasheet"),),
        "v100_pcie_32gb": (_pcie(3, "NVIDIA V100 datasheet"),),
        "v100s_pcie_32gb": (_pcie(3, "NVIDIA V100 datasheet"),),
        "t4": (_pcie(3, "NVIDIA T4 product brief"),),
    }
)
"""The links of each product within a node, the fastest first."""


def _infiniband(key: str, name: str, gbit: int, source: str) -> Link:
    return Link(key, f"InfiniBand {name}", gbit * 1e9 / 8, f"{source}: {gbit} Gb/s per port and direction, one port per GPU")


NETWORKS: Mapping[str, Link] = MappingProxyType(
    {
        link.key: link
        for link in (
            _infiniband("xdr", "XDR", 800, "NVIDIA ConnectX-8 datasheet"),
            _infiniband("ndr", "NDR", 400, "NVIDIA ConnectX-7 datasheet, as in DGX H100, H200 and B200"),
            _infiniband("hdr", "HDR", 200, "NVIDIA ConnectX-6 datasheet, as in DGX A100"),
            _infiniband("edr", "EDR", 100, "NVIDIA ConnectX-5 datasheet"),
        )
    }
)
"""Links between nodes."""


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster of identical nodes."""

    links: tuple[Link, ...]
    """Within a node, the fastest first."""
    network: Link
    node_gpus: int
    latency_s: float = 0.0
    """Of every collective and send."""

    def within(self, members: Sequence[int]) -> Link:
        """Return the fastest link that connects all these GPUs of a node, or the slowest one; bridges connect neighbors."""
        places = [rank % self.node_gpus for rank in members]
        return next((link for link in self.links if len({place // link.gpus for place in places}) == 1), self.links[-1])


@dataclass(frozen=True)
class GroupLink:
    """The path that the devices of a group communicate over."""

    group: GroupName
    ranks: int
    nodes: int
    inside: Link
    network: Link
    node_ranks: int
    """The fewest devices of the group in one of its nodes."""
    latency_s: float = 0.0

    def seconds(self, collective: Collective) -> float:
        """Return the time of all calls: their latency, and what a device sends over the bandwidth of the link that limits it."""
        return collective.count * self.latency_s + max(self._transfer_s(collective))

    def link_of(self, collective: Collective) -> Link:
        """Return the link that this communication waits for."""
        inside_s, network_s = self._transfer_s(collective)
        return self.network if network_s > inside_s else self.inside

    def _transfer_s(self, collective: Collective) -> tuple[float, float]:
        """Return the time on the link within a node and on the network, which work at the same time."""
        sent = collective.sent_bytes
        if self.nodes == 1:
            return sent / self.inside.bytes_per_s, 0.0
        if collective.kind == "send":
            return 0.0, sent / self.network.bytes_per_s
        if collective.kind == "all_to_all":  # each device uses its own port for what leaves the node
            leaving = (self.ranks - self.node_ranks) / (self.ranks - 1)
            return sent * (1 - leaving) / self.inside.bytes_per_s, sent * leaving / self.network.bytes_per_s
        # A ring leaves a node through the ports of all its devices there.
        return sent / self.inside.bytes_per_s, sent / (self.network.bytes_per_s * self.node_ranks)


def fabric_of(
    hardware: Hardware,
    link: str | None = None,
    network: str | None = None,
    node_gpus: int | None = None,
    latency_us: float = 0.0,
    measured: Link | None = None,
) -> Fabric:
    """Return the links of a product, or those that the user names, measured or gives in GB/s per GPU and direction."""
    known = LINKS.get(hardware.key, ())
    first = measured if link is None else _chosen("--link", link, {one.key: one for one in known})
    links = known if first is None else _before(first, known)
    if not links:
        raise ConfigError(f"No link between several {hardware.name} is known.", "Give --link in GB/s per GPU and direction.")
    if node_gpus is not None:
        whole_number("--node-gpus", node_gpus, at_least=1)
    if not 0 <= latency_us < math.inf:
        raise ConfigError(f"--collective-us {latency_us:g} is not a time.", "Give microseconds, 0 or more.")
    chosen = NETWORKS["ndr"] if network is None else _chosen("--network", network, NETWORKS)
    return Fabric(links, chosen, node_gpus or max(NODE_GPUS, *(one.gpus for one in links)), latency_us * 1e-6)


def _before(link: Link, known: Sequence[Link]) -> tuple[Link, ...]:
    """Return a link and, behind it, the product's slower ones that connect more GPUs.

    A given or measured rate is taken as that of the slowest of the product's links that can reach it.
    """
    if link not in known and known:
        carrier = next((one for one in reversed(known) if one.bytes_per_s >= link.bytes_per_s), known[0])
        link = replace(link, gpus=max(link.gpus, carrier.gpus))
    return (link, *(one for one in known if one.gpus > link.gpus and one.bytes_per_s < link.bytes_per_s))


def measured_link(ceilings: Ceilings) -> Link | None:
    """Return the measured bandwidth between GPUs: the bus bandwidth of an all-reduce, or that of a copy; None without one."""
    for key, what in (("all_reduce", "all-reduce"), ("peer_copy", "copy to another GPU")):
        row = ceilings.row(key)
        if row is not None and not isinstance(row.value, Missing):
            source = f"measured {what} on {ceilings.device_name}, {ceilings.taken}: {row.how}"
            return Link("measured", f"measured {what}", row.value.median, source, row.gpus)
    return None


def _chosen(option: str, word: str, known: Mapping[str, Link]) -> Link:
    found = known.get(word.strip().lower())
    if found is not None:
        return found
    try:
        gbs = float(word)
    except ValueError:
        choices = ", ".join(known) or "none is known for this product"
        raise ConfigError(
            f"{option} {word} is not known.{nearest(word.lower(), known)}",
            f"Known: {choices}; or a number of GB/s per GPU and direction.",
        ) from None
    return Link("given", f"{gbs:g} GB/s", positive_number(option, gbs) * 1e9, f"given with {option}", gpus=1)


def group_link(fabric: Fabric, plan: Plan, group: GroupName, stage: int) -> GroupLink:
    """Return how the devices of a group communicate; of all groups of this kind in a pipeline stage, the slowest one.

    That is the one on most nodes, then with the fewest devices in one of them, then with the slowest link inside.

    Devices are numbered as in the engine that `sharding` follows: those of a tensor-parallel group follow each other, then come
    the stages, then the replicas.
    """
    found = [_by_node(members, fabric.node_gpus) for members in _groups(plan, group, stage)]
    nodes = max(found, key=lambda nodes: (len(nodes), -_fewest(nodes), -_slowest(fabric, nodes).bytes_per_s))
    inside = _slowest(fabric, nodes)
    ranks = sum(len(members) for members in nodes)
    return GroupLink(group, ranks, len(nodes), inside, fabric.network, _fewest(nodes), fabric.latency_s)


def _groups(plan: Plan, group: GroupName, stage: int) -> list[tuple[int, ...]]:
    """Return the devices of every group of this kind in a pipeline stage."""
    replicas = [
        tuple((replica * plan.pp + stage) * plan.tp + rank for rank in range(plan.tp)) for replica in range(plan.replicas)
    ]
    if group == "tp":
        return replicas
    if group == "dp":
        return list(zip(*replicas, strict=True))
    everyone = tuple(rank for members in replicas for rank in members)
    # In a pipeline, each device sends to its counterpart in the next stage.
    return [everyone] if group == "ep" else [(rank, rank + plan.tp) for rank in everyone]


def _by_node(members: Sequence[int], node_gpus: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in members:
        nodes.setdefault(rank // node_gpus, []).append(rank)
    return list(nodes.values())


def _slowest(fabric: Fabric, nodes: Sequence[Sequence[int]]) -> Link:
    return min((fabric.within(members) for members in nodes), key=lambda link: link.bytes_per_s)


def _fewest(nodes: Sequence[Sequence[int]]) -> int:
    return min(len(members) for members in nodes)
