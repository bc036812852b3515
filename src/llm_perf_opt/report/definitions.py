"""docs/metrics.md and the table of docs/findings.md, generated from the definitions in the code.

python -m llm_perf_opt.report.definitions > docs/metrics.md
python -m llm_perf_opt.report.definitions findings
"""

import inspect
import sys

from llm_perf_opt.analysis.findings.registry import RULES
from llm_perf_opt.analysis.limits.binding import EFFICIENCY_METRICS, EVIDENCE, VERDICTS, shown_verdict
from llm_perf_opt.analysis.limits.hardware import HARDWARE, RATES
from llm_perf_opt.analysis.limits.links import LINKS, NETWORKS
from llm_perf_opt.analysis.limits.peaks import MEASURED_MARGIN
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.analysis.stats import CONFIDENCE, LEAST_BEYOND, PERCENTILE_METHOD
from llm_perf_opt.report.markdown import table
from llm_perf_opt.report.text import percent, significant


def metrics_page() -> str:
    """Return the page: every metric with its definition, and the hardware table."""
    latency = [[f"`{metric.key}`", metric.label, metric.unit, metric.definition] for metric in METRICS]
    limits = [[metric.label, metric.unit, f"`{metric.formula}`", metric.definition] for metric in EFFICIENCY_METRICS]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Generated: `python -m llm_perf_opt.report.definitions > docs/metrics.md`. Do not edit.",
            "",
            "## Latency and throughput",
            "",
            "These metrics come from the unprofiled pass: one value per repeat, then the distribution over the repeats. A "
            "throughput and its interval are computed from the median of its time and the ends of that time's interval.",
            "",
            table(["key", "metric", "unit", "definition"], latency),
            f"The interval is the {percent(CONFIDENCE, 0)} interval of the median, from order statistics. Percentiles are "
            f"computed by {PERCENTILE_METHOD}, and shown only if at least {LEAST_BEYOND} values are expected beyond them.",
            "",
            "## Distance from the roofline",
            "",
            table(["metric", "unit", "formula", "definition"], limits),
            "The verdict on a stage is one of these:",
            "",
            *[f"- {shown_verdict(word)}: {meaning}" for word, meaning in VERDICTS],
            "",
            f"{EVIDENCE} A utilization above 100 % of a datasheet peak, or above {percent(MEASURED_MARGIN, 0)} of a measured "
            "one, is reported as an error that lists what to check.",
            "",
            "## Hardware",
            "",
            "Dense peaks in TFLOP/s, accumulated in fp32 (int8: in int32). A device that is not listed has no datasheet peaks: "
            "its measured peaks are used, or `hardware.peak_tflops=` and `hardware.bandwidth_gbs=`.",
            "",
            _hardware(),
            "",
            "## Links",
            "",
            "Bandwidth per GPU and direction, within a node and between nodes. `llm-perf cost` uses it "
            "([cost.md](cost.md#several-gpus)).",
            "",
            _links(),
        ]
    )


def _hardware() -> str:
    rows = []
    for key, row in HARDWARE.items():
        peaks = [significant(row.peaks[dtype].flops_per_s / 1e12) if dtype in row.peaks else "" for dtype in RATES]
        rows.append([f"`{key}`", row.name, *peaks, significant(row.bandwidth_bytes_per_s / 1e9), row.source])
    return table(["key", "device", *RATES, "GB/s", "source"], rows, "ll" + "r" * (len(RATES) + 1) + "l")


def _links() -> str:
    named = [(f"`{key}`", link, f"{link.gpus}") for key, links in LINKS.items() for link in links]
    named += [(f"`--network {key}`", link, "any") for key, link in NETWORKS.items()]
    rows = [[key, link.name, significant(link.bytes_per_s / 1e9), gpus, link.source] for key, link, gpus in named]
    return table(["key", "link", "GB/s", "GPUs connected", "source"], rows, "llrrl")


def rules_table() -> str:
    """Return the table of rules: id, family, and the first line of the docstring."""
    rows = []
    for rule in RULES:
        family = rule.__module__.rsplit(".", 1)[-1]
        first = (inspect.getdoc(rule) or "").split("\n", 1)[0]
        rows.append([f"`{rule.__name__}`", family, first])
    return table(["id", "family", "what it finds"], rows)


if __name__ == "__main__":
    sys.stdout.write(rules_table() if sys.argv[1:] == ["findings"] else metrics_page())
