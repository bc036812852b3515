"""The measured process, run in this one: what it records about its inputs."""

from pathlib import Path

import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.records import TextUse
from llm_perf_opt.core.weight_records import WeightFacts
from llm_perf_opt.runners import models
from llm_perf_opt.runners.llm_profile_runner import run_pass
from llm_perf_opt.traces.pass_records import read_timings

SHORT = ("runtime.num_new_tokens=2", "runtime.prompt_tokens=8", "runtime.max_repeats=1", "runtime.max_warmup=1", "profiling=none")
SMALL = ("model.architecture.num_hidden_layers=1", "model.architecture.vocab_size=300")


def saved(folder: Path) -> int:
    """A small model as a folder, its weights in bf16; the bytes of its weights."""
    run = compose(SMALL).config
    built = models.build_model(models.load_config(run.model), run.model, run.runtime, torch.device("cpu"), torch.bfloat16)
    built.save_pretrained(folder)
    return sum(tensor.numel() * 2 for tensor in built.parameters())


def test_a_run_records_what_it_was_given(tmp_path: Path) -> None:
    weights = saved(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("a text that is longer than eight bytes\nshort\nthe third\nthe fourth\n")
    texts = ("dataset=sample_prompts", f"dataset.path={tmp_path / 'texts.txt'}", "runtime.batch_size=2")
    stored = compose(["model=hf", f"model.path={tmp_path / 'model'}", "model.dtype=fp32", *texts, *SHORT]).config
    run_pass(stored, "clean", tmp_path / "stored")
    found = read_timings(tmp_path / "stored" / "timings.json")
    assert found.model.dtype == "fp32"
    assert found.model.weights == WeightFacts(
        "stored", {"bf16": weights}, folder=str(tmp_path.resolve() / "model"), counted_on="module"
    )
    assert found.workload.texts == TextUse(used=2, cut=1, longest=38, limit=8, unused=2)
    run_pass(compose([*SMALL, *SHORT]).config, "clean", tmp_path / "random")
    found = read_timings(tmp_path / "random" / "timings.json")
    assert found.model.weights == WeightFacts("random", counted_on="module")
    assert found.workload.texts is None
