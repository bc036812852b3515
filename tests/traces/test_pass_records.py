"""Impossible times are refused by the reader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import MS, clean_timings, iteration, manifest, model_facts
from llm_perf_opt.analysis.metrics import metrics
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.engine_records import EngineMemory
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import CleanTimings, Missing, RuntimeFacts
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.traces.pass_records import read_timings
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader
from writing import write_record


def stored(path: Path, place: tuple[Any, ...], value: Any) -> Path:
    """Write valid timings with one value replaced."""
    write_record(path, clean_timings())
    whole = json.loads(path.read_text())
    spot = whole
    for step in place[:-1]:
        spot = spot[step]
    spot[place[-1]] = value
    path.write_text(json.dumps(whole))
    return path


SEEN = {
    "images": 2,
    "pixel_shapes": {"pixel_values": [2, 3, 8, 8]},
    "grids": [[1, 2, 2], [1, 2, 2]],
    "image_tokens": [4, 4],
    "source": "",
}


def test_a_record_with_images_is_read(tmp_path: Path) -> None:
    vision = read_timings(stored(tmp_path / "timings.json", ("workload", "vision"), SEEN)).workload.vision
    assert vision is not None
    assert (vision.patches, vision.pixel_shapes) == (8, {"pixel_values": (2, 3, 8, 8)})


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("workload", "vision"), {**SEEN, "images": 0}, "the images have impossible sizes"),
        (("workload", "vision"), {**SEEN, "grids": [[1, -2, -2]]}, "the images have impossible sizes"),
        (("workload", "vision"), {**SEEN, "pixel_shapes": {"pixel_values": [2**40, 2**40]}}, "the images have impossible sizes"),
        (("workload", "vision"), {**SEEN, "image_tokens": [4]}, "the image tokens do not fit the prompts"),
        (("workload", "vision"), {**SEEN, "image_tokens": [4, 7]}, "the image tokens do not fit the prompts"),
        (("iterations", 3, "steps_ns"), [10, 20], "repeat 4 has 2 decode steps, but the request has 3"),
        (("iterations", 0, "steps_ns"), [], "repeat 1 has 0 decode steps"),
        (("warmup", 1, "steps_ns"), [10], "warm-up 2 has 1 decode steps"),
        (("iterations", 0, "steps_ns", 1), 0, "repeat 1 has a decode step, 1, of 0 ns"),
        (("iterations", 0, "steps_ns", 2), -5, "of -5 ns"),
        (("iterations", 0, "steps_ns", 2), 10**400, "a number beyond 64 bits"),
        (("iterations", 9, "prefill_ns"), 0, "repeat 10 has a prefill of 0 ns"),
        (("iterations", 9, "wall_ns"), -1, "repeat 10 took -1 ns"),
        (("iterations", 9, "started_ns"), 2**63, "began at a number of 64 bits ns"),
        (("workload", "batch_size"), 0, "the batch is 0"),
        (("workload", "batch_size"), 3, "the lengths of 2 prompts, but a batch of 3"),
        (("workload", "prompt_tokens"), [], "the lengths of 0 prompts"),
        (("workload", "prompt_tokens"), [10, 11], "a prompt is not between 1 and 10 tokens long"),
        (("workload", "padded_tokens"), -1, "the prompt is -1"),
        (("workload", "new_tokens"), 0, "the number of new tokens is 0"),
        (("model", "weight_bytes"), -1, "the model has -1 bytes of weights"),
        (("workload", "prompt_tokens"), [10, 0], "a prompt is not between 1 and 10 tokens long"),
        (("iterations", 0, "prefill_ns"), -5, "repeat 1 has a prefill of -5 ns"),
        (("model", "parameters"), -1, "the model has -1 parameters"),
        (("load_s",), -0.5, "loaded in -0.5 s"),
        (("memory", "process_rss_bytes"), -5, "the memory of the process is -5 bytes"),
        (("memory", "allocated_bytes"), 10**18, "the memory of tensors is 1000000000000000000 bytes"),
        (("memory", "reserved_bytes"), 2**50 + 1, "the memory of the allocator is 1125899906842625 bytes"),
        (("memory", "device_used_bytes"), -1, "the memory of the device is -1 bytes"),
        (("iterations", 2, "prefill_ns"), 200 * MS, "took 160000000 ns, but its prefill and decode steps take 260000000 ns"),
        (("warmup", 0, "wall_ns"), 5 * MS, "warm-up 1 took 5000000 ns, but its prefill and decode steps take 960000000 ns"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, place: tuple[Any, ...], value: Any, words: str) -> None:
    path = stored(tmp_path / "timings.json", place, value)
    with pytest.raises(ParseError) as caught:
        read_timings(path)
    assert str(path) in caught.value.fact
    assert words in caught.value.fact


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_bytes": 2**50 + 1}, "a size of the engine's memory is 1125899906842625"),
        ({"needed_tokens": -1}, "a size of the engine's memory is -1"),
        ({"share": 1.5}, "the engine may use 1.5 of the device's memory"),
    ],
)
def test_an_engine_cannot_reserve_what_no_device_has(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path, memory = tmp_path / "timings.json", EngineMemory(0.92, 1000, 2**30, 10, 2**20)
    for reserved in (memory, replace(memory, **change)):
        write_record(path, clean_timings(runtime=RuntimeFacts("vllm", "0.32", "by step", memory=reserved)))
        if reserved is memory:
            assert read_timings(path).runtime == RuntimeFacts("vllm", "0.32", "by step", memory=memory)
    with pytest.raises(ParseError) as caught:
        read_timings(path)
    assert words in caught.value.fact


def test_sound_timings_are_read_as_they_are(tmp_path: Path) -> None:
    for number, timings in enumerate((clean_timings(), clean_timings([]), clean_timings([iteration(steps_ns=())], warmup=()))):
        path = tmp_path / f"{number}.json"
        write_record(path, timings)
        assert read_timings(path) == timings


def test_parts_may_exceed_the_whole_by_what_two_clocks_differ_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    for length, sound in ((100 * MS, True), (100 * MS + 1_590_000, True), (102 * MS, False), (100_000 * MS, False)):
        write_record(path, clean_timings([iteration(length, wall_ns=160 * MS)] * 6))
        if sound:
            assert read_timings(path).iterations[0].prefill_ns == length
        else:
            with pytest.raises(ParseError, match="its prefill and decode steps take"):
                read_timings(path)
    write_record(path, clean_timings([iteration(2_000, (500, 500, 500), wall_ns=1_000)] * 6))
    assert read_timings(path).iterations[0].total_ns == 3_500, "events are told to half a microsecond"


def test_memory_up_to_a_pebibyte_is_read(tmp_path: Path) -> None:
    for value in (0, 2**50):
        read_timings(stored(tmp_path / "timings.json", ("memory", "device_used_bytes"), value))


def test_an_engine_may_hand_out_two_tokens_at_one_moment(tmp_path: Path) -> None:
    def with_steps(runtime: str, steps: tuple[int, ...]) -> Path:
        facts = RuntimeFacts(runtime, "1", "counted")
        path = tmp_path / "timings.json"
        write_record(path, replace(clean_timings([iteration(steps_ns=steps)] * 6), runtime=facts))
        return path

    assert read_timings(with_steps("vllm", (0, 10, 10))).iterations[0].steps_ns == (0, 10, 10)
    with pytest.raises(ParseError, match="take no time"):
        read_timings(with_steps("vllm", (0, 0, 0)))
    with pytest.raises(ParseError, match="a decode step, 0, of 0 ns"):
        read_timings(with_steps(PYTORCH, (0, 10, 10)))


@given(st.integers(0, 9), st.lists(st.integers(-(10**20), 10**20) | st.just(10**400), max_size=5))
def test_whatever_is_read_has_figures(tmp_path_factory: pytest.TempPathFactory, repeat: int, steps: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    write_record(path, clean_timings())
    whole = json.loads(path.read_text())
    whole["iterations"][repeat]["steps_ns"] = steps
    path.write_text(json.dumps(whole))
    try:
        timings: CleanTimings = read_timings(path)
    except ParseError:
        return
    found = {metric.key: metric.value for metric in metrics(timings)}
    assert not any(isinstance(found[key], Missing) for key in ("ttft", "tpot", "decode_rate"))


def test_a_run_with_such_timings_has_none_and_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(manifest())
    write_record(folder.clean_file, clean_timings([*[iteration()] * 5, iteration(steps_ns=(1,))], model=model_facts()))
    found = analyze(RunReader(folder))
    assert isinstance(found.timings, Missing)
    assert "repeat 6 has 1 decode steps" in found.timings.why
    assert RunWarning(WarningId.TIMES_UNREADABLE, f"There are no times: {found.timings.why}") in found.warnings
