"""Exact functions of the sequences in a step: how often a row is processed, how many FLOPs a product has.

An operator's figures depend on the new tokens q and the cached tokens p of each sequence: a projection on q, attention on
q · (p + q), a final norm on nothing. `fitted` finds such a function from a few counted steps and checks it at those that are
left over; it never approximates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Literal, get_args

from llm_perf_opt.core.errors import LlmPerfError

Term = Literal[
    "step", "longest", "sequence", "new", "cached", "new²", "new×cached", "whole", "rest", "rest²", "longest context"
]  # fmt: skip
TERMS: tuple[Term, ...] = get_args(Term)
"""What a figure may grow with: nothing, the largest q, the sequences, sums over them of q, p, q² and q · p, of the tokens in whole
blocks, of those that are left and of their squares, and the largest p + q."""

Sequences = tuple[tuple[int, int], ...]
"""New and cached tokens of each sequence of a step."""


class NoForm(LlmPerfError):
    """Counted figures do not follow any of the known functions."""


def term_values(sequences: Sequences, block: int = 1) -> dict[Term, int]:
    """Return the value of each term; with a block, new tokens count in whole blocks, as chunked scans process them."""
    padded = [(-(-new // block) * block, cached) for new, cached in sequences]
    return {
        "step": 1,
        "longest": max((new for new, _ in padded), default=0),
        "sequence": len(padded),
        "new": sum(new for new, _ in padded),
        "cached": sum(cached for _, cached in padded),
        "new²": sum(new * new for new, _ in padded),
        "new×cached": sum(new * cached for new, cached in padded),
        "whole": sum(new // block * block for new, _ in sequences),
        "rest": sum(new % block for new, _ in sequences),
        "rest²": sum((new % block) ** 2 for new, _ in sequences),
        "longest context": max((new + cached for new, cached in sequences), default=0),
    }


@dataclass(frozen=True)
class Form:
    """A sum of terms with whole or fractional coefficients."""

    coefficients: tuple[tuple[Term, Fraction], ...] = ()
    block: int = 1
    """New tokens are padded to a multiple of this."""
    chunk: "Form | None" = None
    """For sequences with several new tokens on cached ones, if it is another form: some modules run other code there."""
    decode: "Form | None" = None
    """For sequences with one new token on cached ones, if `chunk` is another form as well."""

    @staticmethod
    def of(block: int = 1, **coefficients: int | Fraction) -> "Form":
        """Return a form of terms that are plain words."""
        return Form(tuple((term, Fraction(coefficients[term])) for term in TERMS if coefficients.get(term)), block)

    def __call__(self, sequences: Sequences) -> int:
        """Return the figure of a step."""
        if self.chunk is not None and self.decode is not None:
            pieces = zip((replace(self, chunk=None, decode=None), self.chunk, self.decode), _pieces(sequences), strict=True)
            return sum(form(own) for form, own in pieces if own)
        values = term_values(sequences, self.block)
        found = sum((coefficient * values[term] for term, coefficient in self.coefficients), Fraction(0))
        return int(found) if found.denominator == 1 else round(found)

    def times(self, factor: int | Fraction) -> "Form":
        """Return the form with all coefficients multiplied."""
        scaled = tuple((term, coefficient * factor) for term, coefficient in self.coefficients)
        return Form(scaled, self.block, self.chunk and self.chunk.times(factor), self.decode and self.decode.times(factor))

    @cached_property
    def terms(self) -> Mapping[Term, Fraction]:
        """The coefficients by term."""
        return dict(self.coefficients)

    def to_json(self) -> dict[str, object]:
        """Return plain values; a coefficient is a number, or a text such as "1/3"."""
        plain: dict[str, object] = {
            term: int(value) if value.denominator == 1 else str(value) for term, value in self.coefficients
        }
        if self.block > 1:
            plain["block"] = self.block
        if self.chunk is not None and self.decode is not None:
            plain |= {"chunk": self.chunk.to_json(), "decode": self.decode.to_json()}
        return plain

    @staticmethod
    def from_json(values: Mapping[str, object]) -> "Form":
        """Return the form that `to_json` described."""
        found = tuple((term, Fraction(str(values[term]))) for term in TERMS if term in values)
        pieces = [
            Form.from_json(piece) if isinstance(piece := values.get(name), Mapping) else None for name in ("chunk", "decode")
        ]
        return Form(found, int(str(values.get("block", 1))), *pieces)


NOTHING = Form()
PER_TOKEN = Form.of(new=1)
PER_SEQUENCE = Form.of(sequence=1)
PER_STEP = Form.of(step=1)
PER_CONTEXT = Form.of(new=1, cached=1)
_SIMPLE = (
    PER_TOKEN, PER_SEQUENCE, PER_STEP, Form.of(longest=1), PER_CONTEXT, Form.of(**{"longest context": 1}),
    Form.of(**{"new²": 1, "new×cached": 1}), Form.of(cached=1),
)  # fmt: skip
"""Tried first: nearly every operator of a model has one of them."""
_MOST_TERMS = 4
_BLOCKS = (1, 16, 32, 64, 128, 256)
"""Tokens in a chunk of a scan, as the libraries have them."""


def fitted(points: Sequence[tuple[Sequences, int]]) -> Form:
    """Return the function that all counted figures follow exactly; raise NoForm if there is none."""
    return _fitted(tuple(points))


@lru_cache(maxsize=4096)
def _fitted(points: tuple[tuple[Sequences, int], ...]) -> Form:
    whole = _one(points)
    if whole is not None:
        return whole
    starting, *others = _grouped(points)
    first = _one(starting)
    blocks = sorted(_BLOCKS, key=lambda block: first is None or block != first.block)  # few chunks are counted: several may fit
    chunk, decode = (_one(own, blocks) for own in others)
    if first is not None and chunk is not None and decode is not None:
        return replace(first, chunk=chunk, decode=decode)
    counted = ", ".join(f"{figure:,} at {_words(sequences)}" for sequences, figure in points)
    raise NoForm(f"The counted figures follow no known function of the tokens: {counted}.")


def _pieces(sequences: Sequences) -> tuple[Sequences, Sequences, Sequences]:
    """Return the sequences that start, those with several new tokens on cached ones, and those with one."""
    starting = tuple(sequence for sequence in sequences if not sequence[1])
    chunk = tuple(sequence for sequence in sequences if sequence[1] and sequence[0] > 1)
    return starting, chunk, tuple(sequence for sequence in sequences if sequence[1] and sequence[0] == 1)


def _grouped(points: Sequence[tuple[Sequences, int]]) -> list[list[tuple[Sequences, int]]]:
    return [[point for point in points if _pieces(point[0])[piece]] for piece in range(3)]


def _one(points: Sequence[tuple[Sequences, int]], sizes: Sequence[int] = _BLOCKS) -> Form | None:
    """Return one form that fits all points."""
    if not any(figure for _, figure in points):
        return NOTHING
    simple = (found for form in _SIMPLE if (found := _scaled(form, points)) is not None)
    blocks = [block for block in sizes if _solved(points, TERMS, block, least=0) is not None]  # the others fit no choice of terms
    chosen = ((terms, block) for size in range(1, _MOST_TERMS + 1) for block in blocks for terms in combinations(TERMS, size))
    solved = (found for terms, block in chosen if (found := _solved(points, terms, block)) is not None)
    return next(simple, None) or next(solved, None)


def _words(sequences: Sequences) -> str:
    new, cached = sequences[0]
    return f"{len(sequences)} × {new} + {cached}"


def _scaled(form: Form, points: Sequence[tuple[Sequences, int]]) -> Form | None:
    """Return a multiple of one form that fits all points."""
    ratios = set()
    for sequences, figure in points:
        value = form(sequences)
        if not value:
            if figure:
                return None
            continue
        ratios.add(Fraction(figure, value))
        if len(ratios) > 1:
            return None
    return form.times(ratios.pop()) if ratios else None


def _solved(points: Sequence[tuple[Sequences, int]], terms: tuple[Term, ...], block: int, least: int = 1) -> Form | None:
    """Return the combination of these terms that fits, by exact elimination; every point beyond the terms is a check."""
    values = [term_values(sequences, block) for sequences, _ in points]
    rows = [[*(Fraction(one[term]) for term in terms), Fraction(figure)] for one, (_, figure) in zip(values, points, strict=True)]
    pivots: list[int] = []
    for column in range(len(terms)):
        pivot = next((index for index in range(len(pivots), len(rows)) if rows[index][column]), None)
        if pivot is None:
            continue  # these steps do not tell it from the terms before it
        top = len(pivots)
        rows[top], rows[pivot] = rows[pivot], rows[top]
        rows[top] = [value / rows[top][column] for value in rows[top]]
        for index, row in enumerate(rows):
            if index != top and row[column]:
                rows[index] = [value - row[column] * kept for value, kept in zip(row, rows[top], strict=True)]
        pivots.append(column)
    if len(rows) - len(pivots) < least or any(row[-1] for row in rows[len(pivots) :]):
        return None  # nothing is left to check, or the check fails
    found = tuple((terms[column], rows[index][-1]) for index, column in enumerate(pivots) if rows[index][-1])
    return Form(found, block)
