"""What a sweep comes to, in sentences: what ran on what, what is wrong with which point, and which points are best."""

from collections.abc import Callable, Iterable, Sequence

from llm_perf_opt.analysis.sweep_ran import Ran, mixed_models, mixed_software
from llm_perf_opt.analysis.sweep_rows import SweepRow, by_workload, not_told_apart, swept_keys
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.text import count, milliseconds, significant

_MOST_NAMED = 6

_RAN: tuple[tuple[str, Callable[[Ran], str]], ...] = (
    ("Device:", lambda ran: ran.device if ran.host in ("", ran.device) else f"{ran.device}, beside {ran.host}"),
    ("Model:", lambda ran: f"{ran.model} ({count(ran.parameters)} parameters, {ran.dtype})"),
    ("Request:", lambda ran: f"{ran.prompt_tokens} prompt tokens, {ran.new_tokens} new tokens"),
    ("Runtime:", lambda ran: ran.how),
    ("Software:", lambda ran: ", ".join(f"{name} {version}" for name, version in ran.software.items()) or "not recorded"),
)


def what_points_ran(rows: Sequence[SweepRow]) -> list[tuple[str, str]]:
    """What ran on what: said once where it is the same in all points, else with the points that it is of."""
    known = [(row.number, row.ran) for row in rows if not isinstance(row.ran, Missing)]
    found = []
    for head, words in _RAN:
        of: dict[str, list[int]] = {}
        for number, ran in known:
            of.setdefault(words(ran), []).append(number)
        if len(of) == 1:
            found.append((head, f"{next(iter(of))}."))
        elif of:
            found.append((head, "; ".join(f"{text} ({_points(numbers)})" for text, numbers in of.items()) + "."))
    return found


def troubles(rows: Sequence[SweepRow]) -> list[tuple[str, str]]:
    """What is wrong with which point, and with all of them together; empty where all is well."""
    found = [
        (f"Point {row.number} ({row.label}) is {_status(row)}:", row.why or "no reason is known")
        for row in rows
        if row.status != "complete" or not row.ranked
    ]
    ran = [row.ran for row in rows if row.ranked and not isinstance(row.ran, Missing)]
    models = mixed_models(ran, swept_keys(rows))
    if models:
        found.append(("The points did not run one model, and none was swept over:", f"{'; '.join(models)}."))
    mixed = mixed_software(ran)
    if mixed:
        found.append(("The points did not run with one software:", f"{'; '.join(mixed)}. Part of a difference may be of that."))
    return found


def _status(row: SweepRow) -> str:
    shown = f"of {row.status}" if row.status == "other hardware" else row.status
    return shown if row.ranked else f"{shown} and not ranked"


def headline(rows: Sequence[SweepRow]) -> list[str]:
    """How many points are complete, and the best of those that are ranked, for each workload of several points by itself."""
    complete = sum(row.status == "complete" for row in rows)
    found = [f"{complete} of {len(rows)} points are complete."]
    workloads = by_workload(rows)
    compared = {workload: members for workload, members in workloads.items() if len(members) > 1 or len(workloads) == 1}
    if len(workloads) > 1 and not compared:
        found.append("No two points share a workload: none is better than another.")
    for workload, members in compared.items():
        found += _best_of(members, f"Of {workload}: the" if len(workloads) > 1 else "The")
    return found


def _best_of(rows: Sequence[SweepRow], the: str) -> list[str]:
    """The best points of one workload. A token of a larger batch takes longer: its time is compared at each batch by itself."""
    batches: dict[str, list[SweepRow]] = {}
    for row in rows:
        batches.setdefault("n/a" if isinstance(row.batch, Missing) else f"{row.batch:,}", []).append(row)
    apart = len(batches) > 1 and any(len(members) > 1 for members in batches.values())
    found = []
    for batch, members in batches.items() if apart else [("", rows)]:
        shortest = not_told_apart(members, "tpot")
        if shortest:
            over = f" at batch {batch}" if apart else f" over batch sizes {', '.join(batches)}" if len(batches) > 1 else ""
            found.append(_best(f"{the} shortest TPOT{over}", shortest, lambda row: milliseconds(row.median("tpot"))))
    most = not_told_apart(rows, "decode_rate", most=True)
    if most:
        found.append(_best(f"{the} most decode throughput", most, _rate_words))
    return found


def _best(what: str, rows: Sequence[SweepRow], words: Callable[[SweepRow], str]) -> str:
    """The best point; where others may be as good, all of them: which is the best is then not known."""
    if len(rows) == 1:
        return f"{what} is {words(rows[0])}, at {rows[0].label}."
    named = [f"{row.label} ({words(row)})" for row in rows[:_MOST_NAMED]]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{what} is one of {len(rows)} points that are not told apart: {', '.join(named)}{more}."


def _rate_words(row: SweepRow) -> str:
    rate = row.median("decode_rate")
    return "" if isinstance(rate, Missing) else f"{significant(rate)} tokens/s"


def _points(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    return f"point{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
