"""Why values are missing, told once per page."""

from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.text import escape


class Reasons:
    """Why values are missing, said once below the tables: a cell shows n/a with a letter."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def cell(self, value: Maybe[str]) -> str:
        """The value, or n/a with its reason's letter."""
        if not isinstance(value, Missing):
            return value
        if value.why not in self._known:
            self._known.append(value.why)
        return f"n/a ({_letter(self._known.index(value.why))})"

    def lines(self) -> list[str]:
        """Every reason given so far."""
        return [f"- n/a ({_letter(index)}): {escape(why)}" for index, why in enumerate(self._known)]


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else str(index)
