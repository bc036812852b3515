"""Run the points of a sweep as a Slurm job array, through submitit."""

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_perf_opt.config.composition import MOST_POINTS
from llm_perf_opt.config.launchers import minutes
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ResourceError, interrupted
from llm_perf_opt.core.processes import answer, uninterrupted
from llm_perf_opt.core.units import counted
from llm_perf_opt.workflows.clusters.job import become_point
from llm_perf_opt.workflows.clusters.submissions import Say, Submission, Submissions
from llm_perf_opt.workflows.sweep import waiting_points
from llm_perf_opt.workflows.sweep_folder import SweepFolder, resume_command

_WARNING_S, _SHORT_MIN = 60, 5
"""SIGUSR2 is sent this long before the time limit, except for limits so short that it would come at once."""
_POLL_S = (1.0, 30.0)
"""The first and the longest pause between two looks at the queue."""
_ANSWER_S = 30.0
_MOST_SILENT = 20
"""How often in a row the queue may not answer while this command waits: the controller may be restarting."""
_INSTALL = "Install it with `pip install 'llm-perf-opt[slurm]'`."


@dataclass(frozen=True)
class Queued:
    """A point that is queued or running."""

    point: int
    job: str
    state: str


def run_on_slurm(
    folder: SweepFolder, launcher: LauncherConfig, gpus: Mapping[int, int], say: Say, code: Sequence[str] = ()
) -> LlmPerfError | None:
    """Submit the points that are neither complete nor queued, and wait for all of them.

    `gpus`: how many each point needs. `code`: settings that can run code, as typed. Return the error that the command ends with.
    """
    waiting, queued = _what_is_left(folder)
    todo = [number for number in waiting if number not in queued]
    if queued:
        jobs = sorted({one.job for one in queued.values()})
        say(f"{_points(queued)} still queued or running (job {', '.join(jobs)}), not submitted again.")
    try:
        for count in sorted({gpus[number] for number in todo}):
            _submit(folder, launcher, [number for number in todo if gpus[number] == count], count, say, code)
        if not launcher.wait:
            say(f"Not waiting. To wait for the jobs and write the page: {resume_command(folder)} launcher.wait=true")
            return None
        _wait(folder, say)
    except (KeyboardInterrupt, Interrupted) as stopped:
        return _left_running(folder, stopped)
    left = waiting_points(folder)
    if not left:
        return None
    return CaptureError(
        f"{len(left)} of {len(folder.read().points)} points of the sweep did not complete: {', '.join(map(str, left))}.",
        f"See {folder.page_file} for the reasons; the output of the jobs is in {folder.jobs_folder}. "
        f"`{resume_command(folder)}` queues them again.",
    )


def _what_is_left(folder: SweepFolder) -> tuple[list[int], dict[int, Queued]]:
    """Return the points that are not complete, and those of them that are in the queue."""
    queued = queued_points(folder)
    waiting = waiting_points(folder)  # after the queue: a point that ends in between is complete
    return waiting, {number: one for number, one in queued.items() if number in waiting}


def _points(numbers: Sequence[int] | Mapping[int, Any]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"Point {listed} is" if len(numbers) == 1 else f"Points {listed} are"


# --- submitting -------------------------------------------------------------------------------------------------------


def _submit(
    folder: SweepFolder, launcher: LauncherConfig, points: Sequence[int], gpus: int, say: Say, code: Sequence[str]
) -> None:
    submissions = Submissions(folder)
    executor_kind, failures = _submitit()
    with uninterrupted():  # no signal comes between the submission and its record
        made, place = submissions.add("slurm", points, len(submissions.read()))
        executor = executor_kind(place)
        executor.update_parameters(**_parameters(launcher, made.name, gpus))
        try:
            more = [[tuple(code)] * len(points)] if code else []
            jobs = executor.map_array(become_point, [str(folder.path)] * len(points), list(points), *more)
        except failures as error:
            found = queued_points(folder)
            if not any(number in found for number in points):
                raise ResourceError(f"Slurm did not accept the jobs: {_reason(error)}", f"See the script in {place}.") from error
            jobs = []
        job = str(jobs[0].job_id).partition("_")[0] if jobs else ""
        submissions.set_job(made, job or "?")
    say(f"Submitted {counted(len(points), 'point')} as job {job or 'of unknown number'} ({made.name}).")


def require_slurm() -> None:
    """Raise ResourceError if jobs cannot be submitted from this machine."""
    _submitit()


def _submitit() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the executor of submitit, and the errors of a submission that failed."""
    try:
        from submitit.core.utils import FailedJobError, FailedSubmissionError
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        raise ResourceError("launcher=slurm needs the package submitit, which is not installed.", _INSTALL) from error

    if SlurmExecutor.affinity() < 0:
        raise ResourceError("There is no srun on this machine.", "Start the sweep on a login node of the cluster.")
    return SlurmExecutor, (FailedJobError, FailedSubmissionError, OSError)


def _parameters(launcher: LauncherConfig, name: str, gpus: int) -> dict[str, Any]:
    """Return the parameters of submitit's executor."""
    limit = minutes(launcher)
    more: dict[str, Any] = {key.replace("_", "-"): value for key, value in launcher.extra.items()}
    more |= {"mem": launcher.memory} if launcher.memory else {}
    more |= {"exclusive": True} if launcher.exclusive else {}
    found: dict[str, Any] = {
        "job_name": name,
        "time": limit,  # without a value, submitit would set 5 minutes
        "wckey": None,
        "cpus_per_task": launcher.cpus or 1,
        "array_parallelism": launcher.parallel or MOST_POINTS,
        "signal_delay_s": _WARNING_S if limit is None or limit > _SHORT_MIN else 0,
        "additional_parameters": more,
    }
    found |= {"partition": launcher.partition} if launcher.partition else {}
    return found | ({"gpus_per_node": gpus} if gpus else {})


def _reason(error: Exception) -> str:
    """Return the last line of what sbatch said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("sbatch:")]
    return (said or lines or [type(error).__name__])[-1]


# --- the queue --------------------------------------------------------------------------------------------------------


def queued_points(folder: SweepFolder) -> dict[int, Queued]:
    """Return the points that are queued or running. Raise ResourceError if that cannot be found out."""
    made = [one for one in Submissions(folder).read() if one.launcher == "slurm"]
    if not made:
        return {}
    found = _queue(made)
    for one in made:
        if one.may_be_submitting and not any(one.name == name for name, *_ in found):
            raise ConfigError(
                f"Process {one.pid} on {one.host} is submitting points of this sweep.",
                f"Rerun `{resume_command(folder)}` when it has finished.",
            )
    points = {one.name: one.points for one in made}
    entries = [Queued(points[name][index], job, state) for name, job, index, state in found if index < len(points[name])]
    return {entry.point: entry for entry in entries}


def _queue(submissions: Sequence[Submission]) -> list[tuple[str, str, int, str]]:
    """Return name, job, index in the array and state of each job that has not ended."""
    names = ",".join(one.name for one in submissions)
    argv = ["squeue", "--noheader", "--array", "--format=%j|%F|%K|%T", f"--name={names}"]
    told = answer(argv, folder=Path("/"), environment=os.environ, timeout_s=_ANSWER_S)
    if told.exit_code != 0:
        raise ResourceError(
            f"squeue does not answer, so it is unknown which points are queued: {told.errors.strip()[:300] or 'no output'}.",
            "Try again when the controller of Slurm answers: `scontrol ping`.",
        )
    rows = re.findall(r"^(llm-perf-\w+)\|(\d+)\|(\d+|N/A)\|(\w+)$", told.output.decode(errors="replace"), re.MULTILINE)
    return [(name, job, int(index) if index.isdecimal() else 0, state) for name, job, index, state in rows]


def _wait(folder: SweepFolder, say: Say) -> None:
    """Return when no job of the sweep is queued or running."""
    told, pause, silent = "", _POLL_S[0], 0
    while True:
        try:
            _, queued = _what_is_left(folder)
            silent = 0
        except ResourceError as error:
            silent += 1
            if silent > _MOST_SILENT:
                raise
            say(f"{error.fact} Waiting.")
        else:
            if not queued:
                return
            states = Counter(one.state.lower() for one in queued.values())
            words = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            if words != told:
                say(f"points: {words}")
            told = words
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def _left_running(folder: SweepFolder, stopped: KeyboardInterrupt | Interrupted) -> Interrupted:
    """Return the error after an interrupt, which stops this command but not the jobs."""
    fact = stopped.fact if isinstance(stopped, Interrupted) else interrupted(stopped, "").fact
    with uninterrupted():
        jobs = sorted({one.job for one in Submissions(folder).read() if one.job not in ("", "?")}, key=int)
        try:
            queued = queued_points(folder)
            jobs = sorted({one.job for one in queued.values()}, key=int)
            what = f"{_points(sorted(queued))} still queued or running in Slurm." if queued else "No job of the sweep is queued."
        except LlmPerfError:
            what = "Its jobs may still be queued or running in Slurm."
    cancel = f"; `scancel {' '.join(jobs)}` cancels them" if jobs else ""
    return Interrupted(f"{fact} {what}", f"`{resume_command(folder)}` waits for what is left and writes the page{cancel}.")
