"""Reading files of metric sets, and refusing invalid ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.counters.set_file import Section, known_sets, read_sets, shipped_sets

BASE = "base: {description: everything}\n"


def test_a_set_as_written() -> None:
    found = read_sets(
        BASE + "mine:\n  description: a\n  ncu: [lts__t_bytes.sum, role:time_ns]\n"
        "  sections: [Occupancy, {section: Nvlink, needs: x.sum}]\n"
        "  trace: [cuda]\n  gpu_metrics: true\n  torch: max\n  notes: [b]\n",
        "mine.yaml",
    )["mine"]
    assert found.ncu == ("lts__t_bytes.sum", "role:time_ns")
    assert found.sections == (Section("Occupancy"), Section("Nvlink", "x.sum"))
    assert (found.trace, found.gpu_metrics, found.torch, found.notes) == (("cuda",), True, "max", ("b",))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[", "is not YAML"),
        ("", "no set called base"),
        ("[]", "no set called base"),
        ("other: {description: a}", "no set called base"),
        (BASE + "mine: []", "mine is not a mapping"),
        (BASE + "3: {description: a}", "not a valid name for a set"),
        (BASE + "a b: {description: a}", "not a valid name for a set"),
        (BASE + "mine: {}", "description is missing"),
        (BASE + "mine: {description: a, sectoins: []}", "Did you mean 'sections'"),
        (BASE + "mine: {description: a, ncu: lts__t_bytes.sum}", "ncu is not a list"),
        (BASE + "mine: {description: a, ncu: [3]}", "not text"),
        (BASE + "mine: {description: a, ncu: [role:time]}", "Did you mean 'time_ns'"),
        (BASE + "mine: {description: a, sections: [{section: a}]}", "sections contains"),
        (BASE + "mine: {description: a, trace: [nvlink]}", "not a trace module of Nsight Systems"),
        (BASE + "mine: {description: a, trace: [cudn]}", "no trace module"),
        (BASE + "mine: {description: a, gpu_metrics: 1}", "gpu_metrics is 1"),
        (BASE + "mine: {description: a, torch: most}", "not a preset"),
        ("base: !!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_what_is_not_understood_is_refused(body: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sets(body, "mine.yaml")
    assert said in caught.value.fact
    assert "mine.yaml" in caught.value.fact
    assert caught.value.remedy


@settings(deadline=None)
@given(st.text())
def test_any_text_is_sets_or_an_error(text: str) -> None:
    try:
        read_sets(text, "mine.yaml")
    except ConfigError:
        return
    raise AssertionError("no text that hypothesis makes up describes sets")


def test_the_shipped_sets_are_the_promised_ones() -> None:
    promised = ["base", "roofline", "tensor", "memory", "occupancy", "shared_memory", "divergence", "nvlink"]
    assert list(shipped_sets()) == [*promised, *(f"ch{number:02}" for number in range(1, 21))]


def test_a_users_set_stands_next_to_the_packaged_ones() -> None:
    found = known_sets({"mine": {"ncu": ["lts__t_bytes.sum"], "file": "conf/metrics/mine.yaml"}})
    assert list(found)[:-1] == list(shipped_sets())
    assert (found["mine"].ncu, found["mine"].file) == (("lts__t_bytes.sum",), "conf/metrics/mine.yaml")
    assert "conf/metrics/mine.yaml" in found["mine"].origin
    assert found["mine"].collected_by == {"ncu"}


def test_a_users_set_replaces_a_packaged_one_and_says_so_but_never_base() -> None:
    found = known_sets({"roofline": {"ncu": ["lts__t_bytes.sum"], "file": "r.yaml"}})["roofline"]
    assert found.ncu == ("lts__t_bytes.sum",)
    assert "not the packaged one" in found.origin
    with pytest.raises(ConfigError, match="base cannot be replaced"):
        known_sets({"base": {"ncu": []}})


@pytest.mark.parametrize("body", [{"ncus": []}, {"ncu": "x"}, {"torch": "most"}, {"trace": ["nvlink"]}, [], None])
def test_a_users_set_is_checked_like_a_packaged_one(body: object) -> None:
    with pytest.raises(ConfigError, match=r"conf/metrics/mine|defined\.mine"):
        known_sets({"mine": {**body, "file": "conf/metrics/mine.yaml"} if isinstance(body, dict) else body})


def test_what_collects_a_set() -> None:
    sets = shipped_sets()
    assert sets["ch02"].collected_by == frozenset()
    assert sets["ch04"].collected_by == {"ncu", "nsys"}
    assert sets["ch13"].collected_by == {"nsys", "torch"}
