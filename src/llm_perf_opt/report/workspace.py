"""The README of a dataset, and the lines of `llm-perf model`."""

from collections.abc import Sequence

from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.markdown import escape, table
from llm_perf_opt.report.text import count, known, memory_size, then, words
from llm_perf_opt.workspace.data.inventory import DatasetMetadata, VariantMetadata
from llm_perf_opt.workspace.data.marked_text import README_MARKS, with_block
from llm_perf_opt.workspace.data.model_tree import ModelCheck

_MOST_NAMES = 100


def dataset_readme(metadata: DatasetMetadata, first_level: Sequence[str]) -> str:
    """Return the README of a new dataset."""
    notes = f"\n{escape(metadata.notes)}\n" if metadata.notes else ""
    block = dataset_block(metadata, first_level, ())
    return with_block(f"# {escape(metadata.name)}\n{notes}", block, README_MARKS, "README.md")


def dataset_block(metadata: DatasetMetadata, first_level: Sequence[str], variants: Sequence[VariantMetadata]) -> str:
    """Return the part of the README that is regenerated: facts, splits, the first level of the source, variants, use."""
    facts = [
        ["version", _given(metadata.version)],
        ["source", escape(metadata.source)],
        ["license", _given(metadata.license)],
        ["format", f"{metadata.format}, text in the field {escape(metadata.text_field)}"],
        ["size", f"{_records(metadata.size.records)}, {metadata.size.files} files, {metadata.size.bytes} bytes"],
        ["content sha256", metadata.content_sha256 or "not recorded"],
        ["added", metadata.added or "not recorded"],
    ]
    if metadata.filled:
        facts.append(["found in the data, not stated", ", ".join(metadata.filled)])
    splits = table(["split", "records"], [[name, str(records)] for name, records in metadata.splits.items()], "lr")
    splits = splits if metadata.splits else ""
    return f"""{table(["", ""], facts)}
{splits}
## Source

`source-data` links to the original data, which is never modified. `llm-perf dataset check {metadata.name}` reports whether it
changed.

```
source-data/
{_tree(first_level)}
```

## Variants

{_variants(variants)}
## Use

```
llm-perf run dataset={metadata.name}
llm-perf dataset prepare {metadata.name} --variant subset-1k
llm-perf run dataset={metadata.name} dataset.variant=subset-1k
```

Each variant is in its own folder next to this file; its metadata.yaml records what it was made from and how.
"""


def _variants(variants: Sequence[VariantMetadata]) -> str:
    if not variants:
        return "None yet.\n"
    rows = [
        [
            escape(variant.name),
            escape(one_line(variant.transform or "not recorded")),
            escape(one_line(variant.parent or "not recorded")),
            _records(variant.size.records),
            variant.format,
            escape(one_line(variant.created or "not recorded")),
            ", ".join(variant.filled) or "–",
        ]
        for variant in variants
    ]
    return table(["variant", "made by", "from", "size", "format", "created", "found in the data, not stated"], rows)


def _records(number: int | None) -> str:
    return "records not counted" if number is None else f"{number} records"


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
