"""A rank's view of its group: how ranks meet, wait for each other and exchange values, apart from the model's collectives.

Ranks meet at a store on the loopback interface that rank 0 serves. What they exchange is JSON and goes through the store, which a
profiler does not see: a trace has the collectives of the model only.
"""

import os
import socket
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from llm_perf_opt.config.parallel import device_of_rank, ranks_of, ranks_on_device
from llm_perf_opt.config.schema import HardwareConfig, RunConfig
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.host import allowed_cpus, cpu_list, parse_cpu_list
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.runners.child import send

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_PORT_FILE = "port"
_POLL_S = 0.02
_SLICE_S = 2.0
RAISE_LIMIT = "If the ranks only need longer, raise runtime.rank_timeout_s."


class LostRankError(CaptureError):
    """Another rank did not answer: it has ended, it hangs, or it is too slow. Its own error takes precedence over this one."""

    def __init__(self, fact: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(fact, RAISE_LIMIT)
        self.missing = missing
        """The ranks that did not answer; empty if unknown."""


@dataclass
class RankGroup:
    """The ranks of a run, seen from one of them."""

    rank: int
    size: int
    timeout_s: float
    shared_device: bool
    """Whether several ranks use this rank's device."""
    store: Any
    backend: str = ""
    """Of the collectives: nccl or gloo; empty until `join`."""
    _turn: int = field(default=0, init=False)

    def join(self, device: "torch.device") -> None:
        """Create the process group of the model's collectives. GPUs with one rank each use NCCL, everything else gloo."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        self.wait_for_all("the start of the ranks")
        self.backend = "nccl" if device.type == "cuda" and not self.shared_device else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            self.backend,
            store=PrefixStore("collectives", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=device if self.backend == "nccl" else None,
        )

    def gather(self, value: Any, what: str) -> list[bytes]:
        """Return the values of all ranks as JSON; raise a LostRankError that names the ranks that did not give theirs."""
        self._turn += 1
        keys = [f"{self._turn}/{rank}" for rank in range(self.size)]
        until = time.monotonic() + self.timeout_s
        try:
            self.store.set(keys[self.rank], msgspec.json.encode(value))
            self._wait(keys, until)
            return [self.store.get(key) for key in keys]
        except RuntimeError as error:
            raise self._lost(keys, what, late=time.monotonic() >= until) from error

    def _wait(self, keys: list[str], until: float) -> None:
        """Wait for keys in short calls: a signal is handled only between them."""
        while True:
            try:
                self.store.wait(keys, timedelta(seconds=max(0.01, min(_SLICE_S, until - time.monotonic()))))
                return
            except RuntimeError:
                if time.monotonic() >= until:
                    raise
                self.store.check(keys[:1])  # raises if the store is gone

    def _lost(self, keys: list[str], what: str, *, late: bool) -> LostRankError:
        try:
            missing = tuple(int(key.rpartition("/")[2]) for key in keys if not self.store.check([key]))
        except RuntimeError:  # rank 0 serves the store
            missing = (0,)
        who = ", ".join(map(str, missing)) or "unknown"
        how = f"did not answer within {self.timeout_s:g} s" if late else "has ended"
        return LostRankError(f"Rank {who} {how} ({what}).", missing)

    def gather_as(self, value: T, kind: type[T], what: str) -> list[T]:
        """Return the records of all ranks."""
        return [msgspec.json.decode(entry, type=kind) for entry in self.gather(value, what)]

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank has called this."""
        self.gather(None, what)

    def leave(self) -> None:
        """Call this last: rank 0 serves the store until all others need it no more."""
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        try:
            if self.rank == 0:
                self._wait(keys, time.monotonic() + self.timeout_s)
            else:
                self.store.set(keys[self.rank - 1], "")
        except RuntimeError as error:
            raise self._lost(keys, "the end of the pass", late=True) from error

    def agree(self, value: T, kind: type[T]) -> T:
        """Return the value of rank 0, so that all ranks decide alike."""
        return self.gather_as(value, kind, "a common decision")[0]


def open_group(config: RunConfig, rank: int, meeting: Path) -> RankGroup:
    """Return the group of a rank; `meeting` is an empty folder that all ranks of the run know."""
    from torch._C._distributed_c10d import TCPStore

    limit = config.runtime.rank_timeout_s
    send("phase", text=f"rank {rank} waits for the others")
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        write_whole(meeting, meeting / _PORT_FILE, str(port).encode())
    else:
        port = _port(meeting / _PORT_FILE, limit)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    return RankGroup(rank, ranks_of(config), limit, ranks_on_device(config) > 1, store)


def _port(file: Path, limit_s: float) -> int:
    until = time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() >= until:
            raise LostRankError(f"Rank 0 did not start within {limit_s:g} s.", (0,))
        time.sleep(_POLL_S)
    return int(file.read_text())


def of_rank(config: RunConfig, rank: int) -> RunConfig:
    """Return the configuration with the device, the CPUs and the threads of one rank: ranks share the CPUs of the run."""
    return replace(config, hardware=_hardware(config, rank))


def _hardware(config: RunConfig, rank: int) -> HardwareConfig:
    hardware, size = config.hardware, ranks_of(config)
    index = device_of_rank(config, rank) if hardware.device != "cpu" else hardware.device_index
    allowed = parse_cpu_list(hardware.cpus) if hardware.cpus else allowed_cpus()
    count = (os.cpu_count() or 1) if isinstance(allowed, Missing) else len(allowed)
    threads = hardware.threads or max(1, count // size)
    if not hardware.cpus or isinstance(allowed, Missing) or count < size:
        return replace(hardware, device_index=index, threads=threads)
    each, ordered = count // size, sorted(allowed)
    return replace(hardware, device_index=index, threads=threads, cpus=cpu_list(ordered[rank * each : (rank + 1) * each]))
