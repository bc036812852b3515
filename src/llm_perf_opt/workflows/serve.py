"""Put load on a server and write what it did as a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llm_perf_opt.config.composition import Composed
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.user_files import FOLDER_NAME
from llm_perf_opt.profiling.passes import Listener
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.serving.capture import capture_serving
from llm_perf_opt.profiling.serving.request import Prepared, ServingRequest, prepare


@dataclass(frozen=True)
class ServeResult:
    """A serving run."""

    folder: RunFolder
    error: LlmPerfError | None
    """Why it ended early, or why a load is not complete."""


def check_serving(request: ServingRequest) -> Prepared:
    """Raise for a request that cannot work, before anything is started."""
    if request.config.dataset.kind != "synthetic":
        raise ConfigError(
            f"dataset={request.config.dataset.name} has no effect: load generators make their own prompts.",
            "Set their length with runtime.prompt_tokens.",
        )
    if request.url is None:
        refuse_early([request.config])
    return prepare(request)


def serve(prepared: Prepared, place: Path, command: Sequence[str], listener: Listener) -> ServeResult:
    """Fill a new run folder at `place`."""
    folder = RunFolder.create(place)
    return ServeResult(folder, capture_serving(prepared, folder, command, listener))


def place_of(prepared: Prepared, composed: Composed, out: Path | None) -> Path:
    """Return where the run goes: an attached server's model is named by the server, not by the settings."""
    if out is not None or prepared.runtime is not None:
        return out or composed.checked_run_dir()
    name = prepared.facts.model.rstrip("/").rpartition("/")[2]
    name = name if FOLDER_NAME.fullmatch(name) else "server"
    return Path("runs") / "serve" / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
