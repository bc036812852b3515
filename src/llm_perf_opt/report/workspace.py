"""The README of a dataset, and the lines of `llm-perf model`."""

from collections.abc import Sequence

from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.markdown import escape, table
from llm_perf_opt.report.text import count, known, memory_size, then, words
from llm_perf_opt.workspace.data.inventory import DatasetMetadata
from llm_perf_opt.workspace.data.model_tree import ModelCheck

_MOST_NAMES = 100


def dataset_readme(metadata: DatasetMetadata, first_level: Sequence[str]) -> str:
    """Return the README of a dataset."""
    facts = [
        ["version", _given(metadata.version)],
        ["source", escape(metadata.source)],
        ["license", _given(metadata.license)],
        ["format", f"{metadata.format}, text in the field {escape(metadata.text_field)}"],
        ["size", f"{metadata.size.records} records, {metadata.size.files} files, {metadata.size.bytes} bytes"],
        ["content sha256", metadata.content_sha256],
        ["added", metadata.added],
    ]
    splits = table(["split", "records"], [[name, str(records)] for name, records in metadata.splits.items()], "lr")
    notes = f"\n{escape(metadata.notes)}\n" if metadata.notes else ""
    return f"""# {escape(metadata.name)}
{notes}
{table(["", ""], facts)}
{splits}
## Source

`source-data` links to the original data, which is never modified. `llm-perf dataset check {metadata.name}` reports whether it
changed.

```
source-data/
{_tree(first_level)}
```

## Use

```
llm-perf run dataset={metadata.name}
llm-perf dataset prepare {metadata.name} --variant subset-1k --num-samples 1000 --seed 0
llm-perf run dataset={metadata.name} dataset.variant=subset-1k
```

Each variant is in its own folder next to this file; its metadata.yaml records what it was made from and how.
`llm-perf dataset list` shows all variants.
"""


def _given(value: str | float | None) -> str:
    return "not given" if value is None else escape(str(value))


def _tree(names: Sequence[str]) -> str:
    shown = [one_line(name) for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        shown.append(f"… and {len(names) - _MOST_NAMES} more")
    return "\n".join(f"{'└──' if index == len(shown) - 1 else '├──'} {name}" for index, name in enumerate(shown))


# --- models -----------------------------------------------------------------------------------------------------------


def model_lines(found: ModelCheck) -> list[str]:
    """Return name and target of a model, its type and size, and every problem."""
    parameters = words(found.parameters, lambda number: f"{count(number)} parameters")
    dtypes = ", ".join(f"{name} {memory_size(size)}" for name, size in found.dtypes.items()) or "no weights"
    tokenizer = known(then(found.tokenizer, lambda kind: f"tokenizer {kind}"), "no tokenizer")
    lines = [f"{found.name} → {found.target}"]
    if not isinstance(found.model_type, Missing) or found.dtypes:
        lines.append(f"  {found.model_type}, {parameters}, {dtypes} in {found.files} files, {tokenizer}")
    lines += [f"  problem: {problem}" for problem in found.problems]
    return lines + [f"  note: {note}" for note in found.notes]
