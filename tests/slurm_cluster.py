"""A real Slurm on this machine, for tests: munged, slurmctld and two slurmds, with all their files in one temporary folder."""

import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from command import HANG_S

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "squeue", "srun", "scancel", "scontrol")
_SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
KillWait=30
InactiveLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=60 State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


class SlurmCluster:
    """A running cluster of two nodes with one CPU each."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self._place = place
        self._begun: list[subprocess.Popen[bytes]] = []
        self.environment = {**environment, "PATH": _path(), "SLURM_CONF": str(place / "slurm.conf")}
        """With it, the commands of Slurm talk to this cluster."""

    def __enter__(self) -> "SlurmCluster":
        place = self._place
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (place / name).mkdir(mode=0o700)
        ports = _free_ports(3)
        facts = {"host": platform.node(), "user": pwd.getpwuid(os.getuid()).pw_name, "place": place}
        settings = _SETTINGS.format(**facts, controller=ports[0], first=ports[1], second=ports[2])
        (place / "slurm.conf").write_text(settings)
        try:
            key, munge = place / "munge" / "key", place / "munge"
            self._ask("mungekey", "--create", "--keyfile", str(key))
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 'socket'}", "--num-threads=1",
                f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}",
            )  # fmt: skip
            self._await(lambda: (munge / "socket").exists(), "munged")
            self._start("slurmctld", "-D", "-c")
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node)
            self._await(lambda: self.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"], "slurmd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._begun):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def ask(self, *argv: str) -> str:
        """Return the output of a command of Slurm; empty if it fails."""
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, check=False, timeout=HANG_S
        ).stdout.strip()

    def _ask(self, *argv: str) -> None:
        subprocess.run(argv, env=self.environment, check=True, timeout=HANG_S)

    def _start(self, *argv: str) -> None:
        with (self._place / f"{argv[0]}-{len(self._begun)}.out").open("wb") as out:
            self._begun.append(subprocess.Popen(argv, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL))

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not ready():
            ended = [process for process in self._begun if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"{file.name}: {file.read_text(errors='replace')[-600:]}" for file in self._place.glob("*.out"))
                raise RuntimeError(f"{what} does not start:\n{logs}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found
