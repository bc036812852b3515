"""The page of findings is not stale."""

from pathlib import Path

from llm_perf_opt.analysis.findings.registry import RULES
from llm_perf_opt.report.definitions import rules_table

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_the_table_of_rules_is_what_the_code_says() -> None:
    assert rules_table() in PAGE.read_text(), "stale: python -m llm_perf_opt.report.definitions findings, into docs/findings.md"


def test_every_rule_is_in_it_once_and_documented() -> None:
    names = [rule.__name__ for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(f"`{name}`" in rules_table() for name in names)
    assert all(len(line.split("|")[3].strip()) > 10 for line in rules_table().splitlines()[2:])
