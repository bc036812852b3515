"""Arrows are recognized by comparison with a decoded one, whatever their digits are."""

import json

import numpy as np
import pytest

from llm_perf_opt.traces.torch_lines.arrows import Arrows
from llm_perf_opt.traces.torch_lines.text_words import TextWords

ARROW = '{\n    "ph": "s", "id": 41521, "pid": 607, "tid": 608, "ts": 3904425331755.097,\n    "cat": "ac2g", "name": "ac2g"\n  }'


def known(arrows: Arrows, events: list[str]) -> list[bool]:
    texts = [event.encode() for event in events]
    sizes = np.array([len(text) for text in texts])
    end = 10 + np.cumsum(sizes + 5) - 5
    text = TextWords(b" " * 10 + b",\n   ".join(texts) + b" " * 64)
    found: list[bool] = arrows.known(text, end - sizes, end).tolist()
    return found


def test_digits_make_no_difference() -> None:
    others = [
        ARROW.replace("41521", "10000").replace("607", "999"),
        ARROW.replace("755.097", "000.000"),
        ARROW.replace("41521", "7"),
    ]
    arrows = Arrows()
    assert known(arrows, [ARROW, *others]) == [True] * 4
    assert known(arrows, others) == [True] * 3


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("41521", "01521"), ("607", "007"), ("41521", "4 521"), ("41521", "4x521"), ("3904425331755", "0904425331755"),
        ("755.097", "755.0 7"), ("755.097", "755,097"), ('"id"', '"ie"'), ('"ph": "s"', '"ph": "X"'), ("\n  }", "\n  ]"),
        ('"name": "ac2g"', '"name": "ac2g'), (', "tid"', '  "tid"'), ('"ac2g"\n', '"ac2g",'),
    ],
)  # fmt: skip
def test_anything_else_does(good: str, bad: str) -> None:
    spoilt = ARROW.replace(good, bad, 1)
    assert spoilt != ARROW
    arrows = Arrows()
    assert known(arrows, [spoilt, ARROW, spoilt]) == [False, True, False]
    assert known(arrows, [spoilt, ARROW]) == [False, True]
    assert known(Arrows(), [ARROW, spoilt]) == [True, False]


def test_what_varies_too_much_is_left_to_others() -> None:
    events = [ARROW.replace('"ac2g"\n', f'"{"a" * number}"\n') for number in range(1, 100)]
    arrows = Arrows()
    assert sum(known(arrows, events)) == sum(known(arrows, events)) == 40


def test_what_is_no_arrow_is_not_tried_for_ever() -> None:
    bad = ARROW.replace('"id"', '"ie"')
    assert known(Arrows(), [bad] * 7 + [ARROW]) == [False] * 7 + [True]
    assert known(Arrows(), [bad] * 8 + [ARROW]) == [False] * 9


def test_digits_of_an_escape_are_none() -> None:
    assert known(Arrows(), [ARROW.replace('"name": "ac2g"', '"name": "\\u0031"')]) == [False]


def test_more_keys_are_no_arrow() -> None:
    more = json.dumps({**json.loads(ARROW), "args": {"a": 1}})
    assert known(Arrows(), [more, ARROW]) == [False, True]
    assert known(Arrows(), []) == []


def test_a_long_one_is_left_to_others() -> None:
    """Its blocks would take many times its length."""
    arrows = Arrows()
    long = ARROW.replace('"name": "ac2g"', f'"name": "{"a" * 50_000}"')
    assert known(arrows, [long, ARROW]) == [False, True]
