"""Run the points of a sweep as tasks of a Ray cluster that is already running."""

import hashlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llm_perf_opt.config.launchers import memory_bytes
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ResourceError, interrupted
from llm_perf_opt.core.inside import make_folder
from llm_perf_opt.core.processes import STOPS, uninterrupted
from llm_perf_opt.core.units import counted
from llm_perf_opt.workflows.clusters.job import Lease, run_point
from llm_perf_opt.workflows.clusters.submissions import Say, Submissions
from llm_perf_opt.workflows.sweep import waiting_points
from llm_perf_opt.workflows.sweep_folder import SweepFolder, resume_command

_NAMESPACE = "llm-perf"
_END_S = 40.0
"""How long points may take to end after an interrupt: longer than the passes take."""
_LOOK_S = 0.5
_INSTALL = "Install it with `pip install 'llm-perf-opt[ray]'`, in the version of the cluster."


def run_on_ray(
    folder: SweepFolder, launcher: LauncherConfig, gpus: Mapping[int, int], say: Say, code: Sequence[str] = ()
) -> LlmPerfError | None:
    """Run the points that are not complete and return the error that the command ends with.

    `gpus`: how many each point needs. `code`: settings that can run code, as typed. The tasks of Ray end with this command:
    an interrupt ends the points that are running.
    """
    ray = _ray()
    with _connected(ray, launcher.address), _lease(ray, folder):
        waiting = waiting_points(folder)
        if not waiting:
            return None
        submissions = Submissions(folder)
        made, place = submissions.add("ray", waiting, len(submissions.read()))
        make_folder(folder.path, place)
        submissions.set_job(made, "tasks")
        tasks = _Tasks(ray, folder, launcher, str(place), code)
        say(f"Running {counted(len(waiting), 'point')} on Ray; the output of each is in {place}.")
        for line in filter(None, [too_large(ray.nodes(), launcher, max(gpus[number] for number in waiting))]):
            say(line)
        try:
            broken = tasks.run([(number, gpus[number]) for number in waiting], say)
        except (KeyboardInterrupt, Interrupted) as stopped:
            fact = stopped.fact if isinstance(stopped, Interrupted) else interrupted(stopped, "").fact
            with uninterrupted():
                ended = tasks.cancel()
            return Interrupted(
                f"{fact} {'The points that were running have ended.' if ended else 'Points that were running may still end.'}",
                f"`{resume_command(folder)}` runs the points that are not complete.",
            )
    left = waiting_points(folder)
    if not left:
        return None
    why = f" {broken[0]}" if broken else ""
    return CaptureError(
        f"{len(left)} of {len(folder.read().points)} points of the sweep did not complete: {', '.join(map(str, left))}.{why}",
        f"See {folder.page_file} for the reasons; the output of the points is in {place}. "
        f"`{resume_command(folder)}` runs them again.",
    )


def too_large(nodes: Sequence[Mapping[str, Any]], launcher: LauncherConfig, gpus: int) -> str:
    """Return a warning if no node of the cluster is large enough for a point: Ray waits for one without end. Else empty."""
    needs = {"CPU": launcher.cpus or 1, "GPU": gpus, "memory": memory_bytes(launcher) or 0}
    alive = [node.get("Resources", {}) for node in nodes if node.get("Alive")]
    if any(all(found.get(name, 0) >= need for name, need in needs.items()) for found in alive):
        return ""
    memory = f" and {launcher.memory} of memory" if launcher.memory else ""
    return (
        f"No node of the Ray cluster has the {needs['CPU']} CPUs, {gpus} GPUs{memory} of a point: points wait until such a node "
        "joins. Ctrl-C ends the command."
    )


class _Tasks:
    """The tasks of one command."""

    def __init__(self, ray: Any, folder: SweepFolder, launcher: LauncherConfig, place: str, code: Sequence[str]) -> None:
        self._ray = ray
        self._folder = folder
        self._launcher = launcher
        self._place = place
        self._code = tuple(code)
        self._running: dict[Any, int] = {}

    def run(self, points: Sequence[tuple[int, int]], say: Say) -> list[str]:
        """Run points, each with its number of GPUs; return why tasks of the cluster broke off."""
        waiting, broken = list(points), list[str]()
        most = self._launcher.parallel or len(waiting)
        while waiting or self._running:
            while waiting and len(self._running) < most:
                number, gpus = waiting.pop(0)
                self._running[self._start(number, gpus)] = number
            ended, _ = self._ray.wait(list(self._running), num_returns=1)
            for task in ended:
                number = self._running.pop(task)
                broken += self._end(task, number, say)
        return broken

    def _start(self, number: int, gpus: int) -> Any:
        memory = memory_bytes(self._launcher)
        options = {
            "name": f"llm-perf point {number}",
            "num_cpus": self._launcher.cpus or 1,
            "num_gpus": gpus,
            "max_retries": 0,  # a second run of a point is asked for with --resume
            **({"memory": memory} if memory else {}),
            **self._launcher.extra,
        }
        task = self._ray.remote(run_point).options(**options)
        log, project = f"{self._place}/point-{number:03d}.log", self._folder.read().project
        return task.remote(str(self._folder.path), number, log, self._code, project or str(self._folder.path))

    def _end(self, task: Any, number: int, say: Say) -> list[str]:
        try:
            code = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            reason = f"Point {number}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
            say(reason)
            return [reason]
        say(f"point {number}: {'done' if code == 0 else f'exit code {code}'}")
        return []

    def cancel(self) -> bool:
        """End all tasks; return whether all points have ended: for Ray, a task has ended while its point still closes its run."""
        for task in self._running:
            self._ray.cancel(task)
        deadline = time.monotonic() + _END_S
        while any(self._folder.goes_on(number) for number in self._running.values()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True


def require_ray() -> None:
    """Raise ResourceError if ray is not installed."""
    _ray()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ResourceError("launcher=ray needs the package ray, which is not installed.", _INSTALL) from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    handlers = {number: handler for number in STOPS if (handler := signal.getsignal(number)) is not None}
    try:
        ray.init(address=address or "auto", namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"No Ray cluster can be used at {address or 'this machine'}: {next(iter(str(error).splitlines()), '')[:300]}",
            "Start one with `ray start --head`, or give launcher.address=HOST:PORT of one that runs the same version of Ray.",
        ) from error
    finally:
        for number, handler in handlers.items():  # Ray replaces that of SIGTERM, which would end this command at once
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _lease(ray: Any, folder: SweepFolder) -> Iterator[None]:
    """Hold an actor with the name of the sweep, which ends with this command. Raise ConfigError if another command holds it."""
    name = f"sweep-{hashlib.sha256(str(folder.path).encode()).hexdigest()[:16]}"
    try:
        held = ray.remote(Lease).options(name=name, num_cpus=0).remote()
    except ValueError as error:  # the name is taken
        raise ConfigError(
            f"Another command runs the points of {folder.path} on this Ray cluster.",
            f"Wait until it ends, or stop it; then `{resume_command(folder)}`.",
        ) from error
    try:
        yield
    finally:
        ray.kill(held)
