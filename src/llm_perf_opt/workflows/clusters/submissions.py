"""What was submitted to a cluster: one record per submission in jobs/ of the sweep, written before the jobs exist.

A record names its jobs before they are submitted, so that jobs whose submitter was killed are found again. Two commands that
submit at the same time cannot create the same record; the second one sees the first and submits nothing twice.
"""

import os
import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.inside import remove, share
from llm_perf_opt.core.processes import is_running, process_start
from llm_perf_opt.core.records import SCHEMA
from llm_perf_opt.core.run_folder import encoded, read_record
from llm_perf_opt.workflows.sweep_folder import SweepFolder, resume_command

Say = Callable[[str], None]
"""Prints a line about the progress."""
_STILL_SUBMITTING = timedelta(minutes=2)
"""How long a submission from another machine may take; a process of this machine is looked up instead."""


@dataclass(frozen=True)
class Submission:
    """Points that were given to a cluster together."""

    schema: int
    launcher: Literal["slurm", "ray"]
    name: str
    """The name of its jobs, which no others have."""
    created: str
    host: str
    pid: int
    started: float
    """When the submitting process started: another one may get its pid."""
    points: tuple[int, ...]
    job: str = ""
    """The number of the job; empty until the cluster has answered."""

    @property
    def may_be_submitting(self) -> bool:
        """Whether the process that wrote the record may be about to submit."""
        if self.job:
            return False
        if self.host == platform.node():
            return is_running(self.pid, self.started) and self.pid != os.getpid()
        return datetime.now(timezone.utc) - datetime.fromisoformat(self.created) < _STILL_SUBMITTING


class Submissions:
    """The submissions of a sweep."""

    def __init__(self, sweep: SweepFolder) -> None:
        self._sweep = sweep

    def read(self) -> list[Submission]:
        """Return all submissions, oldest first. Raise ParseError if a record is damaged."""
        return [read_record(file, Submission) for file in self._files()]

    def _files(self) -> list[Path]:
        return sorted(self._sweep.jobs_folder.glob("[0-9][0-9][0-9].json"))

    def add(self, launcher: Literal["slurm", "ray"], points: Sequence[int], known: int) -> tuple[Submission, Path]:
        """Record that these points are about to be submitted; return the record and the folder for its files.

        `known` is the number of records that the caller has seen. Raise ConfigError if there are more by now.
        """
        name = f"llm-perf-{secrets.token_hex(6)}"
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        pid = os.getpid()
        made = Submission(SCHEMA, launcher, name, created, platform.node(), pid, process_start(pid), tuple(points))
        place = self._sweep.jobs_folder / f"{known + 1:03d}"
        draft = place.with_name(f".{name}.json")
        self._sweep.write(draft, encoded(made))
        try:
            share(self._sweep.path, draft, place.with_suffix(".json"))  # fails if the name is taken, on NFS too
        except FileExistsError:
            raise ConfigError(
                f"Another command is submitting points of {self._sweep.path}.",
                f"Rerun `{resume_command(self._sweep)}` when it has finished: it submits only points that are not queued.",
            ) from None
        finally:
            remove(self._sweep.path, draft)
        return made, place

    def set_job(self, submission: Submission, job: str) -> Submission:
        """Record the number that the cluster gave to the job."""
        found = replace(submission, job=job)
        for file in self._files():
            if read_record(file, Submission).name == submission.name:
                self._sweep.write_record(file, found)
        return found
