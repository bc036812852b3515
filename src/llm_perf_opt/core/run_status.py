"""The statuses of runs and sweeps in lists."""

from typing import Final, Literal

from llm_perf_opt.core.errors import ConfigError, ParseError

DAMAGED: Final = "damaged"
UNREADABLE: Final = "not readable"
"""The status of a run that this user may not read."""
PLANNED: Final = "planned"
"""The status of a sweep none of whose points has started."""
RUN_STATUSES = ("complete", "partial", "failed", DAMAGED, UNREADABLE)
"""Of a run: what run.json has (`RunStatus`), or why it or the times cannot be read."""
LISTED_STATUSES = (*RUN_STATUSES, PLANNED)
"""Of a run or a sweep."""


def is_denied(error: ParseError) -> bool:
    """Return whether a file could not be read because of its permissions."""
    return isinstance(error.__cause__, PermissionError)


def status_of(error: ParseError) -> Literal["damaged", "not readable"]:
    """Return the status of a run with a file that cannot be read."""
    return UNREADABLE if is_denied(error) else DAMAGED


def check_status(status: str | None, *, sweeps: bool) -> None:
    """Raise a ConfigError unless a list can be filtered by this status. `sweeps`: whether it shows sweeps."""
    known = LISTED_STATUSES if sweeps else RUN_STATUSES
    if not status or status in known:
        return
    if status == PLANNED:
        raise ConfigError(
            f"--status {status} is a status of sweeps, which these views do not show.",
            f"Known here: {', '.join(known)}. To list planned sweeps, combine it with --model and --experiment only.",
        )
    raise ConfigError(f"--status {status}: unknown status.", f"Known: {', '.join(known)}.")
