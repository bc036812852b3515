"""The real vLLM engine, used as a user does. It has its own environment: `make vllm-venv`."""

import gzip
import json
import os
import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import llm_perf
from docs_commands import commands
from engine_runs import QUIET, SHORT, requests, run, save_model, timings
from llm_perf_opt.config.composition import compose, with_overrides
from vllm_offers import ARGUMENTS, every_offer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHAPE = ["runtime.batch_size=2", "runtime.prompt_tokens=12", "runtime.num_new_tokens=6", "model.dtype=fp32", "hardware=cpu"]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def by_vllm(vllm_python: Path, saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both passes."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    return run(
        vllm_python, folder, "runtime=vllm", "model=hf", f"model.path={saved_model}", *SHAPE, "runtime.engine.enforce_eager=true"
    )


@pytest.fixture(scope="module")
def by_pytorch(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pytorch") / "run"
    words = ["model=hf", f"model.path={saved_model}", *SHAPE, *SHORT, *QUIET, "profiling=none", f"hydra.run.dir={folder}"]
    done = llm_perf("run", "-q", *words, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder


def annotations(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]


def test_the_tokens_are_those_of_pytorch(by_vllm: Path, by_pytorch: Path) -> None:
    ours, theirs = timings(by_pytorch), timings(by_vllm)
    assert theirs["tokens_sha256"] == ours["tokens_sha256"]
    assert theirs["tokens_repeat"]
    for key in ("parameters", "weight_bytes", "dtype", "model_type", "model_class", "device_name"):
        assert theirs["model"][key] == ours["model"][key], key
    assert theirs["workload"] == ours["workload"]


def test_it_is_compared_with_pytorch(by_vllm: Path, by_pytorch: Path) -> None:
    done = llm_perf("compare", str(by_pytorch), str(by_vllm), cwd=by_vllm.parent)
    assert done.returncode == 0, done.stderr
    assert "setting runtime.type: pytorch → vllm" in done.stdout
    for row in ("Time to first token (TTFT)", "Time per output token (TPOT)", "prefill", "decode_step"):
        assert any(line.startswith(f"{row} ") for line in done.stdout.splitlines()), row


def test_the_engine_and_what_it_was_given_are_recorded(by_vllm: Path) -> None:
    runtime = timings(by_vllm)["runtime"]
    assert (runtime["type"], runtime["inseparable"], runtime["uncosted"]) == ("vllm", "", "")
    assert {"enforce_eager": True, "max_model_len": -1}.items() <= runtime["engine"].items()
    config = yaml.safe_load((by_vllm / "config.yaml").read_text())
    assert config["runtime"]["engine"] == {"enforce_eager": True}
    report = (by_vllm / "report.md").read_text()
    assert f"run by vllm {runtime['version']}" in report
    assert runtime["method"] in report
    assert "enforce\\_eager=True" in report or "enforce_eager=True" in report


def test_the_unprofiled_pass_has_the_engine_as_users_run_it(by_vllm: Path) -> None:
    """Its core has a process of its own, prefix caching is on, and nothing but the stated settings differs."""
    found = timings(by_vllm)
    runtime = found["runtime"]
    assert (runtime["elsewhere"], runtime["changes"]) == (True, [])
    assert set(runtime["variables"]) <= {"VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD"}
    assert {each["name"] for each in runtime["settings"]} - set(runtime["variables"]) == {
        "detokenize", "ignore_eos", "kv_cache_memory_bytes", "load_format", "max_model_len", "output_kind", "prefix cache",
        "skip_tokenizer_init", "temperature",
    }  # fmt: skip
    assert not runtime["engine"].keys() & {"enable_prefix_caching", "async_scheduling", "max_num_seqs", "max_num_batched_tokens"}
    memory = runtime["memory"]
    assert memory["cache_tokens"] * (memory["needed_bytes"] // memory["needed_tokens"]) <= memory["cache_bytes"]
    assert memory["needed_tokens"] == 2 * (12 + 6)


def test_what_the_torch_pass_changes_is_stated_with_its_cost(by_vllm: Path) -> None:
    engine = json.loads((by_vllm / "raw/torch/operators.json").read_text())["engine"]
    assert [each["name"] for each in engine["settings"]] == ["VLLM_ENABLE_V1_MULTIPROCESSING"], "a CPU has no async scheduling"
    assert (engine["repeats"], engine["decode_steps"]) == (6, 5)
    assert {stage: len(samples) for stage, samples in engine["samples_ns"].items()} == {"prefill": 6, "decode": 6}
    assert min(engine["stage_wall_ns"].values()) > 0
    report = (by_vllm / "report.md").read_text()
    assert "**What the changes for profiled passes cost**" in report
    assert "**Memory: reserved by the engine, and needed**" in report


def test_stages_are_the_whole_request(by_vllm: Path) -> None:
    found = timings(by_vllm)
    assert found["clock"] == "host clock"
    for iteration in found["iterations"]:
        assert len(iteration["steps_ns"]) == 5
        assert min(iteration["prefill_ns"], *iteration["steps_ns"]) > 0
        assert iteration["prefill_ns"] + sum(iteration["steps_ns"]) <= iteration["wall_ns"]


def test_the_engines_own_labels_stand_inside_our_stages(by_vllm: Path) -> None:
    """vLLM labels each step with what its scheduler put in it: that is what our stages are held against."""
    events = annotations(by_vllm / "raw/torch/trace.json.gz")
    inside: dict[str, list[str]] = {"prefill": [], "decode_step": []}
    stages = [event for event in events if event["name"] in inside]
    for event in events:
        if event["name"].startswith("execute_"):
            (stage,) = [it for it in stages if it["ts"] <= event["ts"] and event["ts"] + event["dur"] <= it["ts"] + it["dur"]]
            inside[stage["name"]].append(event["name"])
    assert inside == {
        "prefill": ["execute_context_2(24)_generation_0(0)"],
        "decode_step": ["execute_context_0(0)_generation_2(2)"] * 5,
    }


def test_the_torch_pass_has_operators_from_the_engines_own_profiler(by_vllm: Path) -> None:
    record = json.loads((by_vllm / "raw/torch/operators.json").read_text())
    assert record["decode_steps"] == 5
    names = [row["name"] for row in record["operators"]]
    assert any(name.startswith(("vllm::", "_C::")) for name in names)
    assert len(list((by_vllm / "raw/torch").glob("*.trace.json*"))) == 0, (
        "the trace has our name, and the one that woke it is gone"
    )
    assert "torch.profiler" in (by_vllm / "report.md").read_text()


SHOWN = [words[1:] for words in commands("runtimes.md") if "runtime=vllm" in words]
"""The page's own commands, without the verb."""


EAGER = "runtime.engine.enforce_eager=true"
TINY = ["runtime=vllm", "model=tiny", "hardware=cpu", EAGER]
FEW_BLOCKS = ["runtime.batch_size=2", "runtime.prompt_tokens=120", "runtime.engine.num_gpu_blocks_override=4"]
"""Four blocks hold both prompts, but not what they grow to: one is put out, and its prompt is computed again in decode."""
(CHUNKED,) = [words for words in SHOWN if any("max_num_batched_tokens" in word for word in words)]
(UNEVEN,) = [words for words in SHOWN if words != CHUNKED]
CASES = {
    "chunked": [*CHUNKED, "runtime.num_new_tokens=6", "hardware=cpu", EAGER],
    "uneven": [*UNEVEN, "dataset=sample_prompts", "runtime.num_new_tokens=3", "hardware=cpu", EAGER],
    "preempted amid decode": [*TINY, *FEW_BLOCKS, "runtime.num_new_tokens=64"],
    "preempted at its last token": [*TINY, *FEW_BLOCKS, "runtime.num_new_tokens=10"],
    "fewer layers": [*TINY, *SHAPE, "runtime.engine.hf_overrides.num_hidden_layers=1"],
    "unknown": [*TINY, "runtime.engine.max_num_seq=3"],
    "set elsewhere": [*TINY, "runtime.engine.dtype=float16"],
    "refused": [*TINY, "runtime.engine.max_num_batched_tokens=1", "runtime.engine.max_num_seqs=2"],
}


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three prompts of 400 tokens; the first 384 are the same, which is three blocks of the cache."""
    file = tmp_path_factory.mktemp("prompts") / "alike.jsonl"
    common = "The same words for all. " * 16
    file.write_text("".join(json.dumps({"text": f"{common}Number {number}, at the end."}) + "\n" for number in range(3)))
    sizes = ["runtime.batch_size=3", "runtime.prompt_tokens=400", "runtime.num_new_tokens=3", "hardware=cpu"]
    return ["dataset=sample_prompts", f"dataset.path={file}", *sizes, "model.dtype=fp32", "runtime.engine.enforce_eager=true"]


NAMES = """
import sys
from dataclasses import fields
from llm_perf_opt.config.runtimes import traits_of

known = traits_of("vllm").arguments.known()
loaded = {"vllm", "torch"} & set(sys.modules)
from vllm import EngineArgs
found = {"known": sorted(known), "loaded": sorted(loaded), "fields": sorted(field.name for field in fields(EngineArgs))}
"""
"""The names of arguments are read before vLLM is imported, so this is the first step of the process."""
OFFERS = """
from vllm import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

base = {"model": given["folder"], "dtype": "bfloat16", "skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 256}
opened = [EngineArgs(**base, **each).create_engine_config() for each in given["offers"]]
found = {"opened": len(opened), "backends": [each.name for each in AttentionBackendEnum]}
"""


@pytest.fixture(scope="module")
def offered() -> list[dict[str, Any]]:
    """The engine arguments of every finding, in each of their spellings."""
    values = asdict(compose(["model=tiny", "runtime=vllm", "hardware=cpu"]).config)
    given = [with_overrides(values, remedy.overrides).runtime.engine for remedy in every_offer()]
    return [json.loads(text) for text in sorted({json.dumps(each) for each in given})]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a finding, and of the trial of it."""
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def cases(
    vllm_python: Path, saved_model: Path, alike: list[str], offered: list[dict[str, Any]], trials: Path
) -> dict[str, dict[str, Any]]:
    """What the engine does with each of them. Its core stays in the process, which is started once: importing takes longest."""
    cached = ["runtime=vllm", "model=tiny", *alike, "runtime.engine.enable_prefix_caching=true"]
    uncached = ["runtime=vllm", "model=hf", f"model.path={saved_model}", *alike, "runtime.engine.enable_prefix_caching=false"]
    run = ["run", "-q", *uncached, *SHORT, *QUIET, f"hydra.run.dir={trials / 'run'}"]
    advise = ["advise", str(trials / "run"), "--verify", "--top", "1", "--json", "-q"]
    given: dict[str, list[str] | dict[str, Any]] = {
        "names": {"code": NAMES},
        **CASES,
        "cached": {"words": cached, "traces": str(trials / "traces")},
        "run": {"command": run, "cwd": str(trials)},
        "advise": {"command": advise, "cwd": str(trials)},
        "offers": {"code": OFFERS, "given": {"folder": str(saved_model), "offers": offered}},
    }
    return dict(zip(given, requests(vllm_python, *given.values(), VLLM_ENABLE_V1_MULTIPROCESSING="0"), strict=True))


def test_the_names_of_arguments_are_those_of_its_class(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["names"]["found"]
    assert found["loaded"] == [], "they are read from its source"
    assert found["known"] == found["fields"]
    assert len(found["known"]) > 50


def test_no_argument_of_a_finding_is_refused(cases: dict[str, dict[str, Any]], offered: list[dict[str, Any]]) -> None:
    found = cases["offers"]["found"]
    assert found["opened"] == len(offered) >= len(ARGUMENTS) - 1
    assert {name for each in offered for name in each} <= set(cases["names"]["found"]["fields"])
    assert "FLASHINFER" in found["backends"]


def test_random_weights_and_texts_of_different_length(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["uneven"]
    assert found["runtime"]["engine"]["load_format"] == "dummy"
    assert not Path(found["runtime"]["engine"]["model"]).exists(), "the folder without weights is cleared away"
    assert len(set(found["prompts"])) == 2
    assert "without padding" in found["runtime"]["uncosted"]


@pytest.mark.parametrize("case", ["preempted amid decode", "preempted at its last token"])
def test_a_preempted_sequence_is_not_told_apart(cases: dict[str, dict[str, Any]], case: str) -> None:
    found = cases[case]
    assert "some sequences decoded while others were held back" in found["inseparable"]
    assert found["held_back"] is True


def test_another_configuration_is_not_costed(cases: dict[str, dict[str, Any]]) -> None:
    why = cases["fewer layers"]["runtime"]["uncosted"]
    assert "hf_overrides={'num_hidden_layers': 1} changes the model's configuration" in why


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unknown", "ConfigError: .*no such engine argument. Did you mean 'max_num_seqs'?"),
        ("set elsewhere", "ConfigError: .*runtime.engine.dtype is set by model.dtype"),
        ("refused", "ResourceError: .*cannot open this model"),
    ],
)
def test_what_the_engine_does_not_take_is_refused(cases: dict[str, dict[str, Any]], case: str, said: str) -> None:
    assert re.match(said, cases[case]["error"]), cases[case]


def test_chunked_prefill_is_not_told_apart(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["chunked"]
    assert "some sequences decoded while others were still in prefill" in found["inseparable"]
    assert found["held_back"] is False, "none waited for another to end"


def test_a_shared_prefix_is_not_costed(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["cached"]["runtime"]
    assert "their prefill is not computed" in found["uncosted"]
    assert found["engine"]["enable_prefix_caching"] is True


def test_a_finding_is_an_argument_of_the_engine_and_is_tried(cases: dict[str, dict[str, Any]], trials: Path) -> None:
    """Found in a run without a prefix cache, tried with one: the same tokens, and each request computes the prefix once."""
    for name in ("run", "advise"):
        assert cases[name]["returncode"] == 0, cases[name]["stderr"]
    shown = json.loads(cases["advise"]["stdout"])
    (finding,) = [each for each in shown["findings"] if each["kind"] == "latency"]
    assert (finding["id"], finding["overrides"]) == ("unshared_prefix", ["runtime.engine.enable_prefix_caching=true"])
    assert "768 of 1,200 prompt tokens" in finding["headline"]
    assert 0 < finding["saving_low_ns"] < finding["saving_ns"] <= finding["saving_high_ns"] < finding["before_ns"]
    (trial,) = shown["verification"]["trials"]
    assert (trial["id"], trial["why"], trial["same_tokens"]) == ("unshared_prefix", "", True)
    assert trial["after_ns"] > 0
    tried = timings(trials / trial["run"])["runtime"]
    assert tried["engine"]["enable_prefix_caching"]
    assert [remedy["kind"] for remedy in tried["remedies"]] == [], "nothing is left to change"


def test_sequences_share_a_prefix_and_requests_do_not(cases: dict[str, dict[str, Any]]) -> None:
    """After two requests, the profiled one still computes the prefix: 400 + 2 × 16 tokens."""
    assert "execute_context_3(432)_generation_0(0)" in {event["name"] for event in annotations(Path(cases["cached"]["trace"]))}


def test_nsys_sees_the_engines_stages(vllm_python: Path, saved_model: Path, real_nsys: Path, tmp_path: Path) -> None:
    from llm_perf_opt.traces.nsys_sqlite import read_nsys

    words = ["runtime=vllm", "model=hf", f"model.path={saved_model}", *SHAPE, "profiling=nsys", "profiling.clean=false"]
    environment = {**os.environ, "NSYS": str(real_nsys), "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    argv = [str(vllm_python), "-m", "llm_perf_opt", "run", "-q", *words, *SHORT, *QUIET, "runtime.engine.enforce_eager=true"]
    done = subprocess.run(
        [*argv, f"hydra.run.dir={tmp_path / 'run'}"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = read_nsys(tmp_path / "run/raw/nsys/run.sqlite")
    names = [trace.name_of(int(index)) for index in trace.ranges.name]
    assert (names.count("prefill"), names.count("decode_step")) == (1, 5)
