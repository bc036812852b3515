"""Ranks on a CPU: tokens as on one rank, a straggler that is named, and ranks that die, hang or disagree."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

import command
from forked_ranks import end_fork_server, forked_ranks
from llm_perf_opt.core.rank_records import RankFacts
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.traces.pass_records import read_timings
from llm_perf_opt.workflows.run_reader import RunReader
from plugins import bring, installed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

LATE_MS = 400
STEPS = 2
SMALL = (
    "model.dtype=fp32", "hardware=cpu", "runtime.prompt_tokens=16", f"runtime.num_new_tokens={STEPS + 1}",
    "runtime.max_repeats=1", "runtime.max_warmup=1", "profiling.ceilings=false", "profiling.nvml.enable=false",
)  # fmt: skip
FAULTS = Path(__file__).parents[1] / "stand_ins" / "rank_faults.py"


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    yield
    end_fork_server()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a runtime whose ranks misbehave on request."""
    place = bring(tmp_path_factory.mktemp("site"), "rank_faults", "rank_faults:RUNTIME", distribution="rank-faults")
    shutil.copy(FAULTS, place)
    return place


def run(folder: Path, *words: str, site: Path | None = None, fault: str = "", forked: bool = True) -> Any:
    """Run the command here; its ranks are processes, by default without their own imports."""
    paths = [str(site)] if site else []
    env = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), "RANK_FAULT": fault or "::"}
    words = (*SMALL, *words, f"hydra.run.dir={folder}")
    with forked_ranks() if forked else nullcontext():
        if site is None:
            return command.llm_perf("run", *words, env=env)
        with installed(site):
            return command.llm_perf("run", "runtime=engine", "runtime.type=rank_faults", *words, env=env)


def timings(folder: Path) -> CleanTimings:
    return read_timings(folder / "raw" / "clean" / "timings.json")


@pytest.fixture(scope="session")
def late_run(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    """Two ranks with random weights, the second of which sleeps before every decode step; with traces."""
    folder = tmp_path_factory.mktemp("ranks") / "late"
    done = run(folder, "model=tiny", "runtime.tensor_parallel=2", "profiling=minimal", site=site, fault=f"late:1:{LATE_MS}")
    assert done.returncode == 0, done.stderr
    return folder


def test_two_ranks_give_the_tokens_of_one_and_the_time_of_the_slower(late_run: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "one", "model=tiny", "profiling=none")
    assert done.returncode == 0, done.stderr
    found, one = timings(late_run), timings(tmp_path / "one")
    assert found.tokens_sha256 == one.tokens_sha256
    assert found.model.parameters == one.model.parameters
    assert [entry.rank for entry in found.ranks] == [0, 1]
    assert found.iterations[0].wall_ns == max(entry.request_ns[0] for entry in found.ranks)
    assert found.iterations[0].decode_ns >= STEPS * LATE_MS * 10**6
    assert [len(entry.request_ns) for entry in found.ranks] == [1, 1]


def test_each_rank_holds_half_of_the_weights_and_its_share_of_the_processors(late_run: Path) -> None:
    found = timings(late_run)
    first: RankFacts = found.ranks[0]
    norms = 9 * 256 * 4  # every rank has the norms, and the biases are cut with their weights
    assert first.weight_bytes == (found.model.weight_bytes - norms) // 2 + norms
    assert (first.backend, first.device, first.size) == ("gloo", "cpu", 2)
    assert first.threads == max(1, len(os.sched_getaffinity(0)) // 2)
    memory, each = found.memory.process_rss_bytes, [entry.process_rss_bytes for entry in found.ranks]
    assert not isinstance(memory, Missing)
    assert memory >= sum(size for size in each if not isinstance(size, Missing))


def test_the_report_names_the_straggler_and_counts_the_collectives(late_run: Path) -> None:
    traced = json.loads((late_run / "ranks.json").read_text())
    assert traced["complete"]
    assert [rank["rank"] for rank in traced["ranks"]] == [0, 1]
    per_step = 10  # an all-reduce for the embedding and two per layer, an all-gather for the logits
    assert len(traced["collectives"]) == per_step * (STEPS + 1)
    decode = [step for step in traced["steps"] if step["step"].startswith("decode_step")]
    assert [step["straggler"] for step in decode] == [1] * STEPS
    delays = [step["newly_late_ns"] / 1e6 for step in decode]
    assert all(LATE_MS / 2 < delay < 3 * LATE_MS for delay in delays), delays
    page = (late_run / "report.md").read_text()
    for name in ("report.md", "stakeholder_summary.md"):
        assert "tensor parallel 2 (2 ranks share the CPU)" in (late_run / name).read_text()
    section = page.partition("## Ranks")[2].partition("\n## ")[0]
    assert "Ranks share a device (2 ranks on cpu)" in section
    assert "| decode_step | all_reduce | 9 | 9 |" in section
    assert "| decode_step | all_gather | 1 | 1 |" in section
    assert "1.00 KiB" in section  # a hidden state in fp32
    assert "Rank 1 was the last to enter" in section
    assert "2 ranks share the CPU and its peaks" in page.partition("## Roofline")[2].partition("\n## ")[0]
    assert re.search(r"\d threads? in each of 2 ranks", page)


def test_the_analysis_of_the_run_has_no_utilization_and_no_note_about_missing_ranks(late_run: Path) -> None:
    from llm_perf_opt.workflows.analyze_run import analyze

    found = analyze(RunReader.open(late_run))
    assert isinstance(found.efficiency, Missing)
    assert not isinstance(found.trace, Missing)
    assert "one_rank" not in {problem.id for problem in found.trace.problems}
    assert found.ranks is not None
    assert not isinstance(found.ranks.cost, Missing)
    assert found.ranks.cost.weight_bytes == found.ranks.ranks[0].weight_bytes
    assert [(line.expected, line.counted) for line in found.ranks.cost.collectives] == [(9, 9), (1, 1)] * 2


def test_four_ranks_read_their_parts_of_stored_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=512, num_key_value_heads=4, max_position_embeddings=128, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "stored")
    stored = ("model=hf", f"model.path={tmp_path / 'stored'}", "profiling=none")
    for name, words in (("one", ()), ("four", ("runtime.tensor_parallel=4",))):
        done = run(tmp_path / name, *stored, *words)
        assert done.returncode == 0, done.stderr
    found = timings(tmp_path / "four")
    assert found.tokens_sha256 == timings(tmp_path / "one").tokens_sha256
    assert [entry.rank for entry in found.ranks] == [0, 1, 2, 3]
    assert len({entry.pid for entry in found.ranks}) == 4


@pytest.mark.parametrize(
    ("fault", "facts", "limit_s"),
    [
        ("kill_early:1", ["Rank 1 of 2 was killed by SIGKILL", "rank 0 was running ("], 600),
        ("hang_step:1", ["Rank 1 of 2 hangs (request 1)", "rank 0 ended with exit code 4", "in faulty_step"], 15),
        ("tokens:1", ["rank 1 differs from rank 0", "on rank 0"], 600),
    ],
    ids=["killed", "hangs", "disagrees"],
)
def test_a_rank_that_dies_hangs_or_disagrees_ends_the_run(
    fault: str, facts: list[str], limit_s: int, site: Path, tmp_path: Path
) -> None:
    """The rank that is killed and the other are started as a user's are, with their own imports."""
    words = ("model=tiny", "runtime.tensor_parallel=2", f"runtime.rank_timeout_s={limit_s}", "profiling=none")
    done = run(tmp_path / "run", *words, site=site, fault=fault, forked=not fault.startswith("kill"))
    assert done.returncode == 4
    assert [fact for fact in facts if fact not in done.stderr] == []
    logs = sorted((tmp_path / "run" / "raw" / "clean").glob("rank*.log"))
    assert [log.name for log in logs] == ["rank0.log", "rank1.log"]
    manifest = RunReader.open(tmp_path / "run").manifest
    assert manifest.status == "failed"
    assert facts[0] in manifest.why
    running = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert [words for words in running if "llm_perf_opt.runners.rank_process" in words] == []
