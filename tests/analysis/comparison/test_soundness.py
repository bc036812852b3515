"""Runs that cannot be compared: copies, unknown records, implausible figures."""

from dataclasses import replace
from typing import Any

import pytest

from builders import clean_timings, in_a_row, manifest, run_analysis, workload
from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare, gate_names
from llm_perf_opt.analysis.comparison.differences import check_distinct, check_one_side
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.gates import exit_code, parse_gates
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError, ImplausibleError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.compare_document import comparison_text
from rendered import comparison_html, comparison_page

TEN = tuple(in_a_row(10))


def measured(at: int = 0, **changes: Any) -> RunAnalysis:
    """A run that began at this moment of the machine's clock."""
    repeats = [replace(one, started_ns=one.started_ns + at) for one in TEN]
    return run_analysis(timings=clean_timings(repeats), run=f"runs/{at}", **changes)


def test_a_copy_of_a_run_is_known_by_what_was_measured() -> None:
    check_distinct([measured(0), measured(1), measured(2)])
    for copy in (
        replace(measured(1), run="elsewhere"),
        replace(measured(1), run="elsewhere", manifest=manifest(created="later")),
    ):
        with pytest.raises(ConfigError, match="runs/1 and elsewhere are one run") as caught:
            check_distinct([measured(0), measured(1), copy])
        assert "not a repeat" in caught.value.remedy
    shortened = run_analysis(timings=clean_timings(TEN[:6]), run="shortened")
    with pytest.raises(ConfigError, match="are one run"):
        check_distinct([measured(0), shortened])


def held(base: RunAnalysis, new: RunAnalysis, **more: Any) -> Comparison:
    gates = parse_gates(["tpot=3%", "memory.process=50%"], gate_names())
    return compare(Side((base,)), Side((new,)), gates=gates, judgement=Judgement(process_spread=0.01), **more)


IMPOSSIBLE = ImplausibleError("MBU of decode is 1107.8%.", "Check the device.")


@pytest.mark.parametrize(
    ("doubtful", "said"),
    [
        (
            measured(
                1, impossible=IMPOSSIBLE, warnings=(RunWarning(WarningId.IMPLAUSIBLE, f"{IMPOSSIBLE.fact} {IMPOSSIBLE.remedy}"),)
            ),
            "a figure of runs/1 is implausible: MBU of decode is 1107.8%. Check the device",
        ),
        (
            measured(1, manifest=manifest(passes=(PassRecord("clean", "failed", why="killed"),))),
            "the unprofiled pass of runs/1 failed: killed",
        ),
        (measured(1, manifest=manifest(passes=(PassRecord("clean", "started"),))), "the unprofiled pass of runs/1 is started"),
    ],
)
def test_no_verdict_is_based_on_an_invalid_run(doubtful: RunAnalysis, said: str) -> None:
    for sides in ((measured(), doubtful), (doubtful, measured())):
        found = held(*sides)
        assert exit_code(found.gates) == 2
        assert {result.outcome for result in found.gates} == {"cannot tell"}
        effects = [*(row.effect for row in (*found.metrics, *found.stages)), *(row.effect for row in found.memory)]
        assert {effect.verdict for effect in effects if not isinstance(effect, Missing)} == {"not judged"}
        assert comparison_text(found).startswith(f"No verdict: {said}")
        markdown = comparison_page(found).replace("\\", "")
        assert markdown.index(f"**No verdict: {said}") < markdown.index("## Verdict")
        for page in (comparison_text(found), markdown):
            assert not any(word in page for word in ("new is faster", "new is slower", "not distinguishable ("))
            assert page.count(said.rpartition(": ")[2]) == 1, "once, at the top"
        html = comparison_html(found)
        assert html.count(said) == 1
        assert html.count(IMPOSSIBLE.fact) == (IMPOSSIBLE.fact in said)
        assert all(result.why == "not judged; the reason is at the top" for result in found.gates)
    assert exit_code(held(measured(), measured(1)).gates) == 0, "the same without doubt is judged"
    assert held(measured(), measured(1)).unjudged == ""


def test_other_prompts_are_another_workload() -> None:
    """Under one name and path: the file was edited in between."""
    other = measured(1, prompts_sha256="b" * 64)
    with pytest.raises(ConfigError, match="differ in their workload: prompts is sha256 aaaaaaaaaaaa on one side") as caught:
        held(measured(), other)
    assert "--allow workload" in caught.value.remedy
    assert [fact.key for fact in held(measured(), other, allow=["workload"]).facts] == ["prompts"]
    with pytest.raises(ConfigError, match="differ in their workload: prompts is sha256"):
        check_one_side("the base side", [measured(), other])


def test_other_prompts_that_a_setting_explains_name_the_setting() -> None:
    base, new = (
        measured(at, config={"dataset": {"path": path}}, prompts_sha256=str(at) * 64) for at, path in enumerate(("a", "b"))
    )
    with pytest.raises(ConfigError) as caught:
        held(base, new)
    assert "--experiment dataset.path" in caught.value.remedy
    assert held(base, new, experiment=["dataset.path"]).facts


def test_unknown_prompts_are_a_caution() -> None:
    unknown = measured(1, prompts_sha256=Missing("it has no prompt record"))
    found = held(measured(), unknown)
    assert found.facts == ()
    assert "The prompts of runs/1 are unknown and may differ: it has no prompt record." in found.cautions
    other = replace(unknown, timings=replace(clean_timings(), tokens_sha256="1" * 64))
    assert "The two sides produced different tokens." in held(measured(), other).cautions
    known = replace(other, prompts_sha256="a" * 64)
    assert "The two sides produced different tokens from the same prompts." in held(measured(), known).cautions


@pytest.mark.parametrize("env", [{}, {"host": "node1"}])
def test_unknown_hardware_does_not_pass_for_equal(env: dict[str, Any]) -> None:
    for sides in ((measured(), measured(1, env=env)), (measured(0, env=env), measured(1, env=env))):
        with pytest.raises(ConfigError, match=r"The hardware of runs/\d is unknown") as caught:
            held(*sides)
        assert "--allow hardware" in caught.value.remedy
    found = held(measured(), measured(1, env=env), allow=["hardware"])
    assert any(text.startswith("The hardware of runs/1 is unknown") for text in found.cautions)
    assert not any("(not there)" in row.new and not env for row in found.environment)


def test_unknown_settings_are_one_caution_and_not_repeats() -> None:
    unknown = measured(1, config={})
    found = held(measured(), unknown)
    assert found.settings == ()
    assert sum("settings of runs/1 are unknown" in text for text in found.cautions) == 1
    with pytest.raises(ConfigError, match="It is unknown whether the runs of the base side are repeats of each other"):
        check_one_side("the base side", [measured(), unknown])


def test_a_setting_that_is_null_is_no_difference_from_none() -> None:
    """A version with an additional setting writes null if it is not set: that is not a difference."""
    base = measured(0, config={"dataset": {"root": None, "path": "a"}, "runtime": {"prompt_tokens": 8}})
    new = measured(1, config={"dataset": {"path": "a"}, "runtime": {"prompt_tokens": 16}})
    longer = clean_timings(
        [replace(one, started_ns=one.started_ns + 1) for one in TEN], workload=workload(prompt_tokens=(16, 16), padded_tokens=16)
    )
    new = replace(new, timings=longer, prompts_sha256="b" * 64)
    for sides in ((base, new), (new, base)):
        found = held(*sides, experiment=["runtime.prompt_tokens"])
        assert [row.key for row in found.settings] == ["runtime.prompt_tokens"]
        assert not any("In addition to the experiment" in text for text in found.cautions)
    assert check_one_side("the base side", [base, measured(2, config={**base.config, "dataset": {"path": "a"}})])
    given = replace(new, config={**new.config, "dataset": {"root": "x", "path": "a"}})
    with pytest.raises(ConfigError, match="differ in their workload"):
        held(base, given, experiment=["runtime.prompt_tokens"])


def test_an_empty_group_of_settings_is_no_difference_from_none() -> None:
    base, new = measured(0, config={"runtime": {"type": "a", "engine": {}}}), measured(1, config={"runtime": {"type": "a"}})
    assert held(base, new).settings == ()
    filled = measured(1, config={"runtime": {"type": "a", "engine": {"seed": 1}}})
    assert [(row.key, row.base, row.new) for row in held(base, filled).settings] == [("runtime.engine.seed", "(not there)", "1")]
