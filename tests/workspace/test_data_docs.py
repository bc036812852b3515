"""Every command on the pages about datasets and models works as written."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import HANG_S, llm_perf
from dataset_builders import RECORDS, write_jsonl

ROOT = Path(__file__).parents[2]
FAST = (
    "runtime.num_new_tokens=3",
    "runtime.prompt_tokens=16",
    "runtime.max_repeats=6",
    "runtime.min_repeats=6",
    "profiling=none",
)


def commands(page: str) -> list[str]:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith(("llm-perf ", "python "))]


def run_as_written(line: str, project: Path) -> None:
    words = [word.replace("/data/", f"{project}/data/") for word in shlex.split(line, comments=True)]
    if words[0] == "llm-perf":
        done = llm_perf(*words[1:], *(FAST if words[1] == "run" else ()), cwd=project)
    else:
        words[:2] = [sys.executable, str(ROOT / words[1])]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert done.stdout, line


@pytest.mark.slow
def test_the_page_of_datasets(tmp_path: Path) -> None:
    source = tmp_path / "data" / "datasets" / "openwebtext"
    write_jsonl(source / "train.jsonl", RECORDS * 30)
    write_jsonl(source / "validation.jsonl", RECORDS)
    lines = commands("datasets.md")
    assert len(lines) == 17
    for line in lines:
        run_as_written(line, tmp_path)
    assert len(list((tmp_path / "runs").glob("*/*/*"))) == 3


def test_the_page_of_models(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "data" / "weights" / "qwen2_5_7b")
    lines = commands("models.md")
    assert len(lines) == 5
    for line in lines:
        run_as_written(line, tmp_path)
    (run,) = (tmp_path / "runs").glob("*/qwen2_5_7b/*")
    assert not run.name.endswith("_random")
    report = (run / "report.md").read_text()
    assert "real weights" in report
    assert "hidden_size is 32, not 3584" in report, "the name stands for another shape"
    (row,) = json.loads(llm_perf("runs", "--json", cwd=tmp_path).stdout)
    assert (row["model"], row["weights"]) == ("qwen2_5_7b", "real")
    done = llm_perf("model", "link", "gpt2", tmp_path / "data" / "weights" / "qwen2_5_7b", cwd=tmp_path)
    assert "packaged model gpt2: model_type is qwen2, not gpt2" in done.stdout
    assert "llm-perf run model=gpt2" in done.stdout


@pytest.mark.parametrize("page", ["datasets.md", "models.md"])
def test_the_pages_are_linked(page: str) -> None:
    assert f"docs/{page}" in (ROOT / "README.md").read_text()
