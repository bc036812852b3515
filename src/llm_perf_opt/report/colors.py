"""The colors of charts, and names as text in an SVG. It loads nothing else."""

from html import escape as _markup

from llm_perf_opt.core.terminal import one_line

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GRAY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#D8CB1E",
    "#8C8C8C",
)
_MORE = ("#AA4499", "#44AA99", "#999933", "#6699CC")
SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GRAY, *_MORE)
"""The colors, in the order in which they are assigned: Okabe and Ito's, then four of Paul Tol's muted scheme."""
STAGE_COLORS = {"prefill": ORANGE, "decode": BLUE}


def color_of(number: int) -> str:
    """Return the color of the n-th series."""
    return SERIES[number % len(SERIES)]


def plain(text: str) -> str:
    """Return a name as text for an SVG, with markup and characters that XML forbids escaped."""
    return _markup(one_line(text))
