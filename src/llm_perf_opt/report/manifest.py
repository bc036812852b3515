"""Metric sets for the terminal, and docs/metrics-manifest.md.

python -m llm_perf_opt.report.manifest > docs/metrics-manifest.md
"""

import sys
from collections.abc import Iterable
from textwrap import indent

from llm_perf_opt.counters.catalog import DEFAULT_CHIP, LISTED_BY, Kind, base_names, chips, roles
from llm_perf_opt.counters.manifest import ResolvedMetrics, old_names, resolve, translate
from llm_perf_opt.counters.set_file import MetricSet, shipped_sets
from llm_perf_opt.report.markdown import table


def resolved_text(found: ResolvedMetrics) -> str:
    """Return a resolved request as text for the terminal."""
    lines = [f"{' + '.join(found.sets)} on {found.chip}", "", f"Nsight Compute, {len(found.metrics)} counters:"]
    width = max((len(metric.name) for metric in found.metrics), default=0)
    for metric in found.metrics:
        lines.append(f"  {metric.name:<{width}}  {', '.join(metric.sources)}")
        if metric.note:
            lines.append(indent(metric.note, " " * 6))
    lines += ["", f"sections       {', '.join(found.sections) or 'none'}"]
    lines += [f"trace modules  {', '.join(found.trace_modules)}", f"GPU metrics    {'sampled' if found.gpu_metrics else 'off'}"]
    lines += [f"torch preset   {found.torch_preset}"]
    if found.dropped:
        lines += ["", f"Not on {found.chip}:"]
        lines += [f"  {metric.name} ({', '.join(metric.sources)}): {metric.why}" for metric in found.dropped]
    if found.origins or found.notes:
        lines += ["", *found.origins, *found.notes]
    return "\n".join(lines)


def manifest_page() -> str:
    """Return the page: every set with its counters, the counters by meaning, the old names."""
    return "\n".join(
        [
            "# Metric sets",
            "",
            "Generated: `python -m llm_perf_opt.report.manifest > docs/metrics-manifest.md`. Do not edit.",
            "",
            "A set lists what the profilers record. Every request starts with `base`, followed by the requested sets in their "
            "order",
            "and by counters added by name; counters to remove are applied last. A counter requested twice is recorded once, "
            "with both",
            "sources.",
            "Names are checked against the chip before any process starts. For an unknown name, the error suggests the nearest",
            "existing names. An old name is translated. Counters of a set that the chip does not have are listed with the "
            "reason.",
            "",
            "On the command line: `llm-perf metrics list`, `llm-perf metrics show roofline --chip gh100`,",
            "`llm-perf metrics check NAME...`. `ch9` means `ch09`. Your own sets are files: see",
            "[nsight.md](nsight.md#your-own-metric-sets).",
            "",
            "## Chips",
            "",
            f"The names are those of {LISTED_BY}. Older versions do not have all of them; `--installed` checks the installed "
            "version.",
            "",
            table(["chip", "products", "counters"], _chip_rows(), "llr"),
            "The suffixes depend on the kind of name:",
            "",
            table(["name", "suffixes"], [[kind.value, _suffixes(kind)] for kind in Kind]),
            "## Sets",
            "",
            f"The tables show the contents of each set on {DEFAULT_CHIP}. Every set also includes `base`.",
            "",
            *(_set_text(metric_set) for metric_set in shipped_sets().values()),
            "## Counters by meaning",
            "",
            _role_text(),
            "## Old names",
            "",
            f"The table shows their replacements on {DEFAULT_CHIP}. The old value is the sum of factor × counter.",
            "",
            table(["old name", "counters", "note"], [_old_row(name) for name in old_names()]),
        ]
    )


def _chip_rows() -> list[list[str]]:
    return [[f"`{chip}`", products, f"{len(base_names(chip)):,}"] for chip, products in chips().items()]


def _suffixes(kind: Kind) -> str:
    if kind is Kind.COUNTER:
        first = [suffix for suffix in kind.suffixes if "." not in suffix]
        rest = [suffix.removeprefix(f"{first[0]}.") for suffix in kind.suffixes if suffix.startswith(f"{first[0]}.")]
        return f"{_dotted(first)}, alone or followed by one of {_dotted(rest)}"
    return _dotted(kind.suffixes) or "none"


def _dotted(suffixes: Iterable[str]) -> str:
    return " ".join(f"`.{suffix}`" for suffix in suffixes)


def _set_text(metric_set: MetricSet) -> str:
    found = resolve([metric_set.name], chip=DEFAULT_CHIP)
    own = [f"`{metric.name}`" for metric in found.metrics if metric_set.name in metric.sources]
    sampled = ["GPU metrics sampled"] if metric_set.gpu_metrics else []
    facts = [
        ["Nsight Compute", "<br>".join(own)],
        ["sections", ", ".join(f"`{section}`" for section in found.sections)],
        ["Nsight Systems", "; ".join([f"`{','.join(metric_set.trace)}`", *sampled] if metric_set.trace else sampled)],
        ["torch.profiler", f"`{metric_set.torch}`" if metric_set.torch else ""],
        ["not available", ", ".join(_unavailable(metric_set.name))],
    ]
    rows = [fact for fact in facts if fact[1]]
    notes = "".join(f"- {note}\n" for note in found.notes)
    parts = [f"### {metric_set.name}\n", f"{metric_set.description}\n", table(["", ""], rows) if rows else "", notes]
    return "\n".join(part for part in parts if part)


def _unavailable(name: str) -> list[str]:
    dropped = {chip: resolve([name], chip=chip).dropped for chip in chips()}
    return [f"{len(entries)} of these on {chip}" for chip, entries in dropped.items() if entries]


def _role_text() -> str:
    parts = []
    for chip in chips():
        of = roles(chip)
        rows = [["time (ns)", of.time_ns], ["SM throughput", of.sm_pct], ["DRAM throughput", of.dram_pct]]
        rows += [["occupancy", of.occupancy_pct], ["DRAM bytes read", of.dram_read_bytes]]
        rows += [["DRAM bytes written", of.dram_write_bytes], ["L2 bytes", of.l2_bytes]]
        rows += [["tensor cores busy", of.tensor_pct]] if of.tensor_pct else []
        named = [[meaning, f"`{name}`", ""] for meaning, name in rows]
        kinds = {"tensor FLOPs": of.tensor_flops, "vector FLOPs": of.vector_flops, "packed half FLOPs, at most": of.half_flops}
        for meaning, counters in kinds.items():
            named += [[meaning, f"`{name}`", str(factor)] for name, factor in counters.items()]
        named += [["tensor integer operations", f"`{name}`", str(factor)] for name, factor in of.tensor_int_ops.items()]
        parts.append(f"### {chip}\n\n{of.note}\n\n{table(['meaning', 'counter', 'per count'], named, 'llr')}")
    return "\n".join(parts)


def _old_row(name: str) -> list[str]:
    translation = translate(DEFAULT_CHIP, name)
    if translation is None:
        return [f"`{name}`", f"none on {DEFAULT_CHIP}", ""]
    counters = [f"{f'{part.factor} × ' if part.factor != 1 else ''}`{part.name}`" for part in translation.parts]
    return [f"`{name}`", "<br>".join(counters), translation.note]


if __name__ == "__main__":
    sys.stdout.write(manifest_page())
