"""The colours of every chart: Okabe and Ito's, which readers with any kind of colour vision can tell apart."""

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#D8CB1E",
    "#8C8C8C",
)
SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GREY)
"""In the order they are given out."""
STAGE_COLOURS = {"prefill": ORANGE, "decode": BLUE}


def colour_of(number: int) -> str:
    """The colour of the n-th series."""
    return SERIES[number % len(SERIES)]
