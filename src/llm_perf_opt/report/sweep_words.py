"""What a sweep comes to, in sentences: what ran on what, what is wrong with which point, and which points are best."""

from collections.abc import Callable, Iterable, Sequence

from llm_perf_opt.analysis.sweep_ran import Ran, mixed_models, mixed_software
from llm_perf_opt.analysis.sweep_rows import SweepRow, by_workload, not_told_apart, swept_keys
from llm_perf_opt.report.document import Item
from llm_perf_opt.report.text import count, known, milliseconds, present, significant, then, words

_MOST_NAMED = 6

_RAN: tuple[tuple[str, Callable[[Ran], str]], ...] = (
    ("Device:", lambda ran: ran.device if ran.host in ("", ran.device) else f"{ran.device}, host {ran.host}"),
    ("Model:", lambda ran: f"{ran.model} ({count(ran.parameters)} parameters, {ran.dtype})"),
    ("Request:", lambda ran: f"{ran.prompt_tokens} prompt tokens, {ran.new_tokens} new tokens"),
    ("Runtime:", lambda ran: ran.how),
    ("Software:", lambda ran: ", ".join(f"{name} {version}" for name, version in ran.software.items()) or "not recorded"),
)


def what_points_ran(rows: Sequence[SweepRow]) -> list[Item]:
    """Return what ran on what: once where all points agree, else with the points it applies to."""
    runs = [(row.number, ran) for row in rows for ran in present([row.ran])]
    found = []
    for head, show in _RAN:
        of: dict[str, list[int]] = {}
        for number, ran in runs:
            of.setdefault(show(ran), []).append(number)
        if len(of) == 1:
            found.append(Item(head, f"{next(iter(of))}."))
        elif of:
            found.append(Item(head, "; ".join(f"{text} ({_points(numbers)})" for text, numbers in of.items()) + "."))
    return found


def troubles(rows: Sequence[SweepRow]) -> list[Item]:
    """Return what is wrong with which point, and with all of them together; nothing where all is well."""
    found = [
        Item(f"Point {row.number} ({row.label}) is {_status(row)}:", row.why or "no reason is known")
        for row in rows
        if row.status != "complete" or not row.ranked
    ]
    ran = present(row.ran for row in rows if row.ranked)
    models = mixed_models(ran, swept_keys(rows))
    if models:
        found.append(Item("The points did not run one model, and none was swept over:", f"{'; '.join(models)}."))
    mixed = mixed_software(ran)
    if mixed:
        found.append(
            Item("The points ran with different software:", f"{'; '.join(mixed)}. A difference may be due to that in part.")
        )
    return found


def _status(row: SweepRow) -> str:
    shown = f"of {row.status}" if row.status == "other hardware" else row.status
    return shown if row.ranked else f"{shown} and not ranked"


def headline(rows: Sequence[SweepRow]) -> list[str]:
    """Return how many points are complete, and the best ranked points of each workload."""
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
    """Return the best points of one workload. A token of a larger batch takes longer: times are compared per batch size."""
    batches: dict[str, list[SweepRow]] = {}
    for row in rows:
        batches.setdefault(known(then(row.batch, lambda batch: f"{batch:,}"), "n/a"), []).append(row)
    apart = len(batches) > 1 and any(len(members) > 1 for members in batches.values())
    found = []
    for batch, members in batches.items() if apart else [("", rows)]:
        shortest = not_told_apart(members, "tpot")
        if shortest:
            over = f" at batch {batch}" if apart else f" over batch sizes {', '.join(batches)}" if len(batches) > 1 else ""
            found.append(_best(f"{the} shortest TPOT{over}", shortest, lambda row: words(row.median("tpot"), milliseconds)))
    most = not_told_apart(rows, "decode_rate", most=True)
    if most:
        found.append(_best(f"{the} most decode throughput", most, _rate_words))
    return found


def _best(what: str, rows: Sequence[SweepRow], show: Callable[[SweepRow], str]) -> str:
    """Return the best point, or all that may be as good."""
    if len(rows) == 1:
        return f"{what} is {show(rows[0])}, at {rows[0].label}."
    named = [f"{row.label} ({show(row)})" for row in rows[:_MOST_NAMED]]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{what} is one of {len(rows)} points that are not told apart: {', '.join(named)}{more}."


def _rate_words(row: SweepRow) -> str:
    return known(then(row.median("decode_rate"), lambda rate: f"{significant(rate)} tokens/s"), "")


def _points(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    return f"point{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
