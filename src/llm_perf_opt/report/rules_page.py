"""The table of rules in docs/findings.md, made from the rules themselves.

python -m llm_perf_opt.report.rules_page
"""

import inspect

from llm_perf_opt.analysis.findings.registry import RULES
from llm_perf_opt.report.markdown import table


def rules_table() -> str:
    """Every rule: its id, its family and what it finds, in the words of the code."""
    rows = []
    for rule in RULES:
        family = rule.__module__.rsplit(".", 1)[-1]
        first = (inspect.getdoc(rule) or "").split("\n", 1)[0]
        rows.append([f"`{rule.__name__}`", family, first])
    return table(["id", "family", "what it finds"], rows)


if __name__ == "__main__":
    print(rules_table(), end="")
