"""Who is told how a capture goes."""

from typing import Any, Protocol

from llm_perf_opt.records import PassRecord

TICK: dict[str, Any] = {"event": "tick"}
"""The message that says only that time passes, once a second."""


class Listener(Protocol):
    """Whoever wants to know how a capture goes."""

    def pass_started(self, name: str, label: str) -> None:
        """A pass begins."""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """The measured process says where it stands, or nothing (TICK)."""

    def pass_ended(self, entry: PassRecord) -> None:
        """A pass is over."""
