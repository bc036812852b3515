"""A checked model as lines for the terminal."""

from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.text import count, gibibytes, known, then, words
from llm_perf_opt.workspace.data.model_tree import ModelCheck


def model_lines(found: ModelCheck) -> list[str]:
    """Return name and target, what it is, and every problem."""
    parameters = words(found.parameters, lambda number: f"{count(number)} parameters")
    dtypes = ", ".join(f"{name} {gibibytes(size)}" for name, size in found.dtypes.items()) or "no weights"
    tokenizer = known(then(found.tokenizer, lambda kind: f"tokenizer {kind}"), "no tokenizer")
    lines = [f"{found.name} → {found.target}"]
    if not isinstance(found.model_type, Missing) or found.dtypes:
        lines.append(f"  {found.model_type}, {parameters}, {dtypes} in {found.files} files, {tokenizer}")
    lines += [f"  problem: {problem}" for problem in found.problems]
    return lines + [f"  note: {note}" for note in found.notes]
