"""Bandwidth of collectives next to that of the link between the devices."""

from collections.abc import Sequence

from llm_perf_opt.analysis.limits.hardware import hardware_of_device
from llm_perf_opt.analysis.limits.links import LINKS, NODE_GPUS
from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.kinds import bus_factor
from llm_perf_opt.analysis.ranks.matching import GroupMatch
from llm_perf_opt.analysis.ranks.rank_trace import RankTrace
from llm_perf_opt.core.records import Maybe, Missing


def bus_bandwidth(kind: str, size_bytes: int, transfer_ns: Maybe[float], match: GroupMatch) -> Maybe[float]:
    """Return the bytes per second that cross the busiest link, as nccl-tests counts them."""
    if not match.group.size:
        return Missing("the trace does not state the process group")
    if match.group.size < 2:
        return Missing("the group has one rank")
    factor = bus_factor(kind, match.group.size)
    if factor is None:
        return Missing(f"no bus bandwidth is defined for {kind}")
    if size_bytes < 0:
        return Missing("the trace does not state the size")
    if isinstance(transfer_ns, Missing):
        return transfer_ns
    if not size_bytes or transfer_ns <= 0:
        return Missing("nothing was transferred")
    return size_bytes * factor / transfer_ns * 1e9


def link_peak(ranks: Sequence[RankTrace], match: GroupMatch, clocks: Clocks) -> Maybe[float]:
    """Return the datasheet peak of the link between the ranks of a group, in bytes per second and direction."""
    mine = [ranks[index] for index in match.ranks.tolist() if len(ranks[index].collectives)]
    if not all(trace.on_device for trace in mine):
        return Missing("the collectives run on the CPU")
    hosts = {trace.host for trace in mine}
    if "" in hosts:
        return Missing("the traces do not state their hosts")
    if len(hosts) > 1:
        return Missing("the ranks are on several hosts, and the network between them is not known")
    if clocks.apart:
        return Missing("the clocks of ranks with the same host name differ: they may be on several hosts")
    devices = {trace.device for trace in mine}
    hardware = [hardware_of_device(name) for name in sorted(devices)]
    peaks = {_switched(entry.key) for entry in hardware if not isinstance(entry, Missing)}
    if len(hardware) != 1 or len(peaks) != 1 or (peak := peaks.pop()) is None:
        names = ", ".join(sorted(name for name in devices if name))
        return Missing(f"the link of {names} is not known" if names else "the traces do not name the device")
    return peak


def _switched(product: str) -> float | None:
    """Return the rate of the NVLink that connects all GPUs of a node; a bridge need not be there."""
    return next((link.bytes_per_s for link in LINKS.get(product, ()) if link.key == "nvlink" and link.gpus >= NODE_GPUS), None)
