"""Records of the ranks of a run: one process each, which share every step."""

from dataclasses import dataclass

from llm_perf_opt.core.missing import Maybe


@dataclass(frozen=True)
class RankFacts:
    """One rank in the unprofiled pass."""

    rank: int
    pid: int
    device: str
    """Its torch device, such as cuda:1."""
    backend: str
    """The backend of its collectives: nccl or gloo."""
    threads: int
    cpus: Maybe[str]
    """The CPUs that it may run on."""
    load_s: float
    request_ns: tuple[int, ...]
    """Its own time of each repeat. The time of a repeat in the run is that of the slowest rank."""
    weight_bytes: int
    """What it holds of the weights."""
    allocated_bytes: Maybe[int]
    """Peak on its device, of tensors of this rank."""
    process_rss_bytes: Maybe[int]
    main_delay_ns: Maybe[int]
    """Time during the repeats in which its main thread waited for a processor."""
    size: int = 0
    """Ranks of the run; 0 in records of older versions."""


def rank_count(ranks: tuple[RankFacts, ...]) -> int:
    """Return how many ranks the run had, even if the facts of some are unknown; 0 if it had one process."""
    return max([len(ranks), *(entry.size for entry in ranks)])


def sharing(ranks: tuple[RankFacts, ...]) -> dict[str, int]:
    """Return the devices that are known to have more than one rank, and how many they have."""
    if ranks and ranks[0].device == "cpu":  # of which there is one, even if the facts of some ranks are unknown
        return {"cpu": rank_count(ranks)} if rank_count(ranks) > 1 else {}
    devices = [entry.device for entry in ranks]
    return {device: devices.count(device) for device in dict.fromkeys(devices) if devices.count(device) > 1}
