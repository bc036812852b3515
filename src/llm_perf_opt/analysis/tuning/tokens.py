"""Whether a change leaves the tokens as they were. What cannot be compared does not pass."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.tuning.logits import LogitCheck, Tokens, check_logits, unlike_measured
from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.units import percentage
from llm_perf_opt.core.weight_records import TokenAgreement

RULES = ("same", "exact", "any")
"""Of --tokens: equal up to rounding, equal, not compared."""
_SHORT_DTYPES = ("bf16", "fp16")
_ROUNDING = "; in 16 bits, other kernels round differently, which may decide between two tokens (--tokens any accepts this)"
_NO_LOGITS = Missing("the run did not record logits")
_NOT_RECORDED = Missing("the run did not record its tokens")


@dataclass(frozen=True)
class Tried:
    """A run of one configuration."""

    path: str
    """Its folder."""
    analysis: RunAnalysis
    tokens: Maybe[Tokens] = _NOT_RECORDED
    logits: Maybe[Logits] = _NO_LOGITS

    @property
    def timings(self) -> Maybe[CleanTimings]:
        """Its unprofiled times; Missing without a repeat."""
        found = self.analysis.timings
        return found if isinstance(found, Missing) or found.iterations else Missing("no iteration was measured")


@dataclass(frozen=True)
class TokenCheck:
    """The tokens of a run compared with those of the reference."""

    same: bool | None
    """None: they cannot be compared."""
    why: str
    """Why they are not the same, or cannot be compared; empty if they are the same."""
    agreement: Maybe[TokenAgreement]
    logits: Maybe[LogitCheck] = _NO_LOGITS
    """The logits with the tokens of the base fed."""
    ties: bool = False
    """Whether the tokens differ, but by rounding only: what differs are ties."""

    def refused(self, rule: str) -> str:
        """Return why a change that does not alter the precision is refused; empty if it is not."""
        passes = self.same is True or rule == "any" or (rule == "same" and self.ties)
        return "" if passes else self.why


def check_tokens(reference: Tried, tried: Tried, base: Tried | None = None) -> TokenCheck:
    """Compare the greedy tokens of two runs of the same requests, and their logits.

    `reference`: the run whose tokens are wanted. `base`: the run whose tokens were fed when logits were recorded; None: the
    reference itself.
    """
    base = base or reference
    found = _check(reference, tried)
    if found.same is None:
        return replace(found, logits=Missing(found.why))
    logits = check_logits(base.logits, reference.logits, tried.logits)
    if varying := _varying(reference, tried):
        return _by_logits(varying, found.agreement, logits)
    if found.same:
        return replace(found, logits=logits)
    flaw = _flaw(base, reference, tried, logits)
    if not flaw:
        return replace(found, logits=logits, ties=True, why=f"{found.why}; the difference is within rounding (--tokens same)")
    unknown = isinstance(logits, Missing) or logits.error is None
    rounding = _ROUNDING if unknown and _in_16_bits(tried) else ""
    return replace(found, logits=logits, why=f"{found.why}{rounding}; {flaw}")


def _varying(reference: Tried, tried: Tried) -> str:
    """Return which of the runs has repeats with different tokens; empty if none has."""
    for name, run in (("base", reference), ("trial", tried)):
        if not isinstance(run.timings, Missing) and not run.timings.tokens_repeat:
            return f"the repeats of the {name} produced different tokens"
    return ""


def _by_logits(varying: str, agreement: Maybe[TokenAgreement], logits: Maybe[LogitCheck]) -> TokenCheck:
    """Return what logits alone say: kernels whose order of additions varies choose another token at a tie, repeat by repeat."""
    flaw = logits.why if isinstance(logits, Missing) else logits.flaw
    if flaw:
        return TokenCheck(None, f"{varying}; {flaw}", agreement, logits)
    return TokenCheck(False, f"{varying}; the differences are within rounding (--tokens same)", agreement, logits, ties=True)


def _in_16_bits(tried: Tried) -> bool:
    timings = tried.timings
    return not isinstance(timings, Missing) and timings.model.dtype in _SHORT_DTYPES


def _flaw(base: Tried, reference: Tried, tried: Tried, logits: Maybe[LogitCheck]) -> str:
    """Return why different tokens are more than rounding, or why that is not known."""
    if isinstance(logits, Missing):
        return logits.why
    parts = base.logits, tried.logits, tried.tokens, reference.tokens
    missing = next((part for part in parts if isinstance(part, Missing)), None)
    if missing is not None:
        return missing.why
    return logits.flaw or unlike_measured(*parts)  # type: ignore[arg-type] # none is missing


def _check(reference: Tried, tried: Tried) -> TokenCheck:
    before, after = reference.timings, tried.timings
    if isinstance(before, Missing) or isinstance(after, Missing):
        missing = before if isinstance(before, Missing) else after
        return _incomparable(missing.why if isinstance(missing, Missing) else "")
    if before.workload != after.workload:
        return _incomparable("the runs have different requests, so their tokens cannot be compared")
    for name, timings in (("base", before), ("trial", after)):
        if not timings.tokens_sha256:
            return _incomparable(f"the {name} did not record a checksum of its tokens")
    found = agreement(reference.tokens, tried.tokens)
    if before.tokens_sha256 == after.tokens_sha256:
        return TokenCheck(True, "", found)
    many = "" if isinstance(found, Missing) else f": {agreement_words(found)}"
    return TokenCheck(False, f"the tokens differ from those of the base{many}", found)


def _incomparable(why: str) -> TokenCheck:
    return TokenCheck(None, why, Missing(why))


def agreement(reference: Maybe[Tokens], tokens: Maybe[Tokens]) -> Maybe[TokenAgreement]:
    """Return how many tokens agree, position by position."""
    if isinstance(reference, Missing) or isinstance(tokens, Missing):
        return reference if isinstance(reference, Missing) else Missing(tokens.why if isinstance(tokens, Missing) else "")
    if [len(row) for row in reference] != [len(row) for row in tokens]:
        return Missing("the runs have different numbers of tokens")
    pairs = [
        (position, one == other)
        for before, after in zip(reference, tokens, strict=True)
        for position, (one, other) in enumerate(zip(before, after, strict=True))
    ]
    differing = [position for position, same in pairs if not same]
    return TokenAgreement(len(pairs), len(pairs) - len(differing), min(differing, default=None))


def agreement_words(found: TokenAgreement) -> str:
    """Return the agreement as a clause."""
    if found.first_difference is None:
        return f"all {found.compared:,} tokens are equal"
    share = percentage(found.equal / found.compared, 1)
    many = f"{found.equal:,} of {found.compared:,} tokens ({share}) are equal"
    return f"{many}, the first difference is at position {found.first_difference}"
