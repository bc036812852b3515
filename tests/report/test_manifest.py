"""The page of metric sets, and that it is not stale."""

from pathlib import Path

from llm_perf_opt.counters.catalog import chips
from llm_perf_opt.counters.manifest import old_names
from llm_perf_opt.counters.set_file import shipped_sets
from llm_perf_opt.report.manifest import manifest_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics-manifest.md"


def test_the_page_of_metric_sets_is_what_the_code_says() -> None:
    assert PAGE.read_text() == manifest_page(), "stale: python -m llm_perf_opt.report.manifest > docs/metrics-manifest.md"


def test_the_page_holds_every_set_chip_and_old_name() -> None:
    page = manifest_page()
    assert all(f"### {name}\n" in page for name in (*shipped_sets(), *chips()))
    assert all(f"`{name}`" in page for name in old_names())
