"""The report of a comparison of runs under load."""

from functools import partial

from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.serving import SLICES, ComparedLoad, ServingComparison
from llm_perf_opt.report.compare import LEVEL_WORDS, gate_line, interval_words, needed_words
from llm_perf_opt.report.compare_document import changes_table
from llm_perf_opt.report.document import Block, Column, Document, Paragraph, Section, Table, bullets
from llm_perf_opt.report.serving_text import knee_sentence, load_words
from llm_perf_opt.report.text import known, signed_percent, then, words

_METHOD = (
    "Latencies compare the medians over the requests of each load; the repeats are requests. Output tokens/s compares the median "
    f"over {SLICES - 1} equal parts of the time in which requests were sent. Intervals: {LEVEL_WORDS}, by bootstrap, widened if "
    "neighboring requests are correlated, and by the spread between runs. With fewer than three runs per side, this spread is "
    "assumed only for servers on a GPU (1 %) or with --process-spread; otherwise there is no verdict."
)


def serving_comparison_document(found: ServingComparison) -> Document:
    """Return the whole report."""
    failed = [gate_line(result) for result in found.gates if result.outcome == "regression"]
    sides = f"base: {', '.join(found.base_runs)}; new: {', '.join(found.new_runs)}"
    sections = [
        Section("verdict", "Verdict", _verdict(found)),
        Section("loads", "Each load", [_table(load) for load in found.loads]),
        Section("left-out", "Not compared", [bullets(_left_out(found) or ["Nothing."])]),
        Section("method", "How to read it", [Paragraph(_METHOD)]),
    ]
    return Document("Comparison of runs under load", sides, "; ".join(failed), sections)


def _table(load: ComparedLoad) -> Table:
    table = changes_table(f"load-{load.asked:g}", load.rows)
    table.caption = f"At {load_words(load.asked, load.kind)}"
    return table


def _verdict(found: ServingComparison) -> list[Block]:
    knees = [f"{name}: {words(knee, knee_sentence)}" for name, knee in zip(("Base", "New"), found.knees, strict=True)]
    blocks: list[Block] = [bullets([*_sentences(found), *knees])]
    if found.gates:
        table = Table("gates", "Gates", [Column("gate"), Column("outcome"), Column("why"), Column("to decide")])
        for result in found.gates:
            table.add(result.gate.asked, result.outcome, result.why, needed_words(result))
        blocks.append(table)
    blocks += [Paragraph("Cautions", "heading"), bullets(found.cautions)] if found.cautions else []
    return blocks


def _sentences(found: ServingComparison) -> list[str]:
    """Return a sentence per load: what changed for certain."""
    sentences = []
    for load in found.loads:
        changes = [known(then(row.effect, partial(_change, row.label)), "") for row in load.rows]
        certain = [change for change in changes if change]
        sentences.append(
            f"At {load_words(load.asked, load.kind)}: {', '.join(certain) if certain else 'nothing is distinguishable'}."
        )
    return sentences


def _change(label: str, effect: Effect) -> str:
    if effect.verdict == "not distinguishable":
        return ""
    return f"{label} {signed_percent(effect.change, 1)} ({interval_words(effect)}), new is {effect.verdict}"


def _left_out(found: ServingComparison) -> list[str]:
    kind = found.loads[0].kind
    named = (("base", found.only_base), ("new", found.only_new))
    return [f"Only in {name}: {', '.join(load_words(load, kind) for load in loads)}." for name, loads in named if loads]
