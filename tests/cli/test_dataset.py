"""The verbs `dataset` and `model` as a user types them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import HANG_S, llm_perf
from dataset_builders import RECORDS, small_source, write_jsonl

SMALL = (
    "runtime.num_new_tokens=3",
    "runtime.prompt_tokens=16",
    "runtime.max_repeats=6",
    "runtime.min_repeats=6",
    "profiling=none",
)


def answer(*words: str, cwd: Path) -> Any:
    done = llm_perf(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one dataset."""
    small_source(tmp_path / "source")
    (tmp_path / "project").mkdir()
    done = llm_perf("dataset", "add", "mine", "--source", "../source", cwd=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    return tmp_path / "project"


@pytest.mark.slow
def test_from_add_to_a_run(project: Path) -> None:
    made = answer("dataset", "prepare", "mine", "--variant", "subset-5", "--num-samples", "5", cwd=project)
    assert made["metadata"]["size"]["records"] == 5
    assert "mine" in answer("options", cwd=project)["dataset"]
    assert answer("dataset", "list", cwd=project)[0]["variants"].keys() == {"subset-5"}
    outcome = answer("run", "-q", "dataset=mine", "dataset.variant=subset-5", "runtime.batch_size=7", *SMALL, cwd=project)
    inputs = " ".join((Path(outcome["run"]) / "inputs.yaml").read_text().split())
    assert "dataset mine, variant subset-5, bytes as ids, without a tokenizer, 5 texts repeated" in inputs
    plan = answer("run", "--dry-run", "dataset=mine", cwd=project)["config"]["dataset"]
    assert (plan["root"], plan["variant"]) == ("datasets/mine", None)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "dataset=mien", "--dry-run"], 2, "Did you mean 'mine'?"),
        (["run", "dataset=mine", "dataset.variant=../x", "--dry-run"], 2, "cannot name a variant"),
        (["run", "dataset=synthetic", "dataset.variant=x", "--dry-run"], 2, "which has no variants"),
        (["run", "dataset=mine", "dataset.path=x.txt", "--dry-run"], 2, "contradict each other"),
        (["dataset", "add", "mine", "--source", "../source"], 2, "already exists"),
        (["dataset", "add", "../x", "--source", "../source"], 2, "cannot name a dataset"),
        (["dataset", "add", "x", "--source", "../nowhere"], 2, "No such file"),
        (["dataset", "prepare", "mine", "--variant", "/abs", "--num-samples", "1"], 2, "cannot name a variant"),
        (["dataset", "prepare", "mine", "--variant", "v"], 2, "no transform is given"),
        (["dataset", "prepare", "mine", "--variant", "v", "--tokenizer", "bytes", "--seed", "0"], 2, "--seed 0 has no effect"),
        (["dataset", "prepare", "mine", "--variant", "v", "--to", "txt", "--seed", "7"], 2, "--seed 7 has no effect"),
        (["dataset", "prepare", "mime", "--variant", "v", "--num-samples", "1"], 2, "Did you mean 'mine'?"),
        (["dataset", "add", "x", "--source", "x" * 5000], 2, "File name too long"),
        (["dataset", "add", "x", "--source", "/dev/null"], 2, "character device"),
        (["dataset", "check", "--root", "datasetz"], 2, "--root datasetz: no such folder"),
        (["dataset", "list", "--root", "x" * 5000], 2, "no such folder"),
        (["model", "check", "--root", "modelz"], 2, "--root modelz: no such folder"),
        (["model", "list", "--root", "/dev/null"], 2, "no such folder"),
        (["model", "link", "m", "x" * 5000], 2, "File name too long"),
        (["dataset", "check", "other"], 2, "There is no dataset 'other'"),
        (["model", "link", "m", "../nowhere"], 2, "not a folder"),
        (["model", "check", "m"], 2, "There is no model 'm'"),
    ],
)
def test_a_wrong_request_is_answered_with_one_message(project: Path, words: list[str], code: int, said: str) -> None:
    before = sorted(project.rglob("*"))
    done = llm_perf(*words, cwd=project)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize("how", [["--dry-run"], ["-q"], ["-q", "-m"]])
def test_a_variant_that_is_not_there_is_refused_with_those_that_are(project: Path, how: list[str]) -> None:
    assert llm_perf("dataset", "prepare", "mine", "--variant", "subset-5", "--num-samples", "5", cwd=project).returncode == 0
    before = sorted(project.rglob("*"))
    done = llm_perf("run", *how, "dataset=mine", "dataset.variant=subset-1k", *SMALL, cwd=project)
    assert done.returncode == 2
    assert "mine has no variant 'subset-1k'. Did you mean 'subset-5'?" in done.stderr
    assert "It has: subset-5. Make one with `llm-perf dataset prepare mine" in done.stderr
    assert sorted(project.rglob("*")) == before, "no run folder, and no process that would have made one"


def test_ids_the_model_does_not_have_are_refused(project: Path) -> None:
    assert llm_perf("dataset", "prepare", "mine", "--variant", "b", "--tokenizer", "bytes", cwd=project).returncode == 0
    words = ["run", "-q", "dataset=mine", "dataset.variant=b", "model.architecture.vocab_size=64", *SMALL]
    done = llm_perf(*words, cwd=project)
    assert done.returncode == 2, done.stderr
    assert "but the model's vocabulary has 64" in done.stderr


def test_drift_ends_with_code_1_and_its_name(project: Path) -> None:
    done = llm_perf("dataset", "check", cwd=project)
    assert (done.returncode, "0 differences" in done.stdout) == (0, True)
    with (project.parent / "source" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    done = llm_perf("dataset", "check", "--json", "-q", cwd=project)
    assert done.returncode == 1
    (difference,) = json.loads(done.stdout)["differences"]
    assert (difference["dataset"], difference["part"]) == ("mine", "source-data")
    assert done.stderr == ""


def test_a_name_says_what_to_make_and_the_readme_follows(project: Path) -> None:
    readme = project / "datasets" / "mine" / "README.md"
    readme.write_text(f"{readme.read_text()}\nMy own words.\n")
    done = llm_perf("dataset", "prepare", "mine", "--variant", "subset-10", cwd=project)
    assert done.returncode == 0, done.stderr
    assert ": --num-samples 10" in done.stdout
    done = llm_perf("dataset", "prepare", "mine", "--variant", "cleaned", cwd=project)
    assert "left out: 0 empty, 0 duplicate" in done.stdout
    text = readme.read_text()
    assert "| subset-10 | subset | source-data | 10 records |" in " ".join(text.split()).replace("  ", " ")
    assert "cleaned" in text
    assert text.endswith("\nMy own words.\n")
    readme.write_text(text.replace("<!-- llm-perf: end -->", ""))
    done = llm_perf("dataset", "prepare", "mine", "--variant", "subset-11", cwd=project)
    assert (done.returncode, "the README was not updated" in done.stderr) == (0, True)


def test_a_dataset_made_by_hand(project: Path) -> None:
    folder = project / "datasets" / "hand"
    folder.mkdir()
    (folder / "source-data").symlink_to(project.parent / "source")
    (folder / "metadata.yaml").write_text("name: hand\nversion: 1.0\nsplits: {train: 45}\n")
    write_jsonl(folder / "own" / "data" / "a.jsonl", RECORDS[:4])
    option = (project / "conf" / "dataset" / "mine.yaml").read_text().replace("mine", "hand")
    (project / "conf" / "dataset" / "hand.yaml").write_text(option)
    (hand, _) = answer("dataset", "list", cwd=project)
    assert (hand["name"], hand["records"], hand["filled"]) == ("hand", 45, ["format", "text_field", "size"])
    assert answer("run", "--dry-run", "dataset=hand", "dataset.variant=own", cwd=project)["config"]["dataset"]["variant"] == "own"
    shown = llm_perf("dataset", "check", "hand", cwd=project)
    assert (shown.returncode, "no hashes are recorded" in shown.stdout) == (1, True), "the split test is not stated"
    (folder / "metadata.yaml").write_text("name: hand\n")
    changed = answer("dataset", "refresh", "hand", cwd=project)["changed"]
    assert [Path(path).parent.name for path in changed] == ["hand", "own", "hand"]
    assert answer("dataset", "list", cwd=project)[0]["records"] == 50
    assert llm_perf("dataset", "check", "hand", cwd=project).returncode == 0


def test_skipped_records_are_counted_and_named(project: Path) -> None:
    write_jsonl(project.parent / "bad" / "a.jsonl", RECORDS)
    with (project.parent / "bad" / "a.jsonl").open("a") as file:
        file.write("broken\n")
    assert llm_perf("dataset", "add", "bad", "--source", "../bad", cwd=project).returncode == 0
    words = ["dataset", "prepare", "bad", "--variant", "v", "--num-samples", "50"]
    done = llm_perf(*words, cwd=project)
    assert done.returncode == 5
    assert "a.jsonl, line 51: not a JSON object" in done.stderr
    done = llm_perf(*words, "--skip-bad", cwd=project)
    assert done.returncode == 0
    assert "1 records left out" in done.stdout
    assert "a.jsonl, line 51" in done.stdout


def test_a_damaged_dataset_does_not_hide_the_others(project: Path) -> None:
    assert llm_perf("dataset", "add", "other", "--source", "../source", cwd=project).returncode == 0
    (project / "datasets" / "mine" / "metadata.yaml").write_text("{{{")
    done = llm_perf("dataset", "list", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "mine  → " in done.stdout
    assert "(unreadable: " in done.stdout
    assert "other  50 records" in done.stdout
    found = answer("dataset", "list", cwd=project)
    assert [(entry["name"], entry["records"]) for entry in found] == [("mine", None), ("other", 50)]


WAITS = """
import time
from llm_perf_opt.cli import progress as watching
from llm_perf_opt.cli.app import main

def advance(phase, count, plain=watching._Phase.advance):
    plain(phase, count)
    if count and "converted" in phase._phase:
        time.sleep(900)  # until the signal comes

watching._Phase.advance = advance
main()
"""
"""The command, which stops in the middle of its work and waits."""


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopping_a_prepare_leaves_nothing_half_made(project: Path, sent: signal.Signals, code: int) -> None:
    write_jsonl(project.parent / "big" / "a.jsonl", RECORDS * 200)
    assert llm_perf("dataset", "add", "big", "--source", "../big", cwd=project).returncode == 0
    argv = [sys.executable, "-c", WAITS, "dataset", "prepare", "big", "--variant", "p", "--to", "parquet"]
    process = subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "prepare: converted" in line:
            break
    process.send_signal(sent)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, err
    assert "Traceback" not in err
    names = sorted(path.name for path in (project / "datasets" / "big").iterdir())
    assert names == ["README.md", "metadata.yaml", "source-data"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("asked", [["--num-samples", "40000"], ["--tokenizer", "bytes"], ["--to", "parquet"], ["--to", "txt"]])
def test_a_full_disk_leaves_nothing_half_made(small_disk: Path, tmp_path: Path, asked: list[str]) -> None:
    noise = [{"text": os.urandom(40).hex()} for _ in range(1000)]  # which no compression makes small
    write_jsonl(tmp_path / "big" / "a.jsonl", noise * 40)
    words = ["dataset", "add", "big", "--source", "../big"]
    assert llm_perf(*words, cwd=small_disk).returncode == 0
    before = sorted(small_disk.rglob("*"))
    if asked == ["--to", "parquet"]:
        write_jsonl(tmp_path / "more" / "a.jsonl", ({"text": os.urandom(40).hex()} for _ in range(40_000)))
        assert llm_perf("dataset", "add", "more", "--source", "../more", cwd=small_disk).returncode == 0
        before = sorted(small_disk.rglob("*"))
    name = "more" if asked == ["--to", "parquet"] else "big"
    done = llm_perf("dataset", "prepare", name, "--variant", "v", *asked, cwd=small_disk)
    assert done.returncode == 3, done.stderr
    assert "No space left on the disk" in done.stderr
    assert sorted(small_disk.rglob("*")) == before


def test_a_dangling_model_is_named_and_ends_with_code_1(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "weights" / "config.json", [{"model_type": "qwen2"}])
    done = llm_perf("model", "link", "m", "weights", cwd=tmp_path)
    assert done.returncode == 0
    assert "problem: no *.safetensors" in done.stdout
    (tmp_path / "weights").rename(tmp_path / "moved")
    done = llm_perf("model", "check", cwd=tmp_path)
    assert done.returncode == 1
    assert f"a dangling link: {tmp_path / 'weights'} does not exist" in done.stdout
    assert "dangling" in llm_perf("model", "list", cwd=tmp_path).stdout
    done = llm_perf("run", "-q", "model=hf", "model.path=models/m", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert f"model.path=models/m is a link to {tmp_path / 'weights'}, which does not exist" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_empty_tree_says_how_to_begin(tmp_path: Path) -> None:
    assert "llm-perf dataset add" in llm_perf("dataset", "list", cwd=tmp_path).stdout
    assert "llm-perf model link" in llm_perf("model", "list", cwd=tmp_path).stdout
    assert llm_perf("dataset", "check", cwd=tmp_path).returncode == 0
    assert answer("model", "check", cwd=tmp_path) == []


@pytest.mark.parametrize(
    "verb", [["dataset", "add"], ["dataset", "list"], ["dataset", "check"], ["dataset", "prepare"], ["model", "link"],
             ["model", "list"], ["model", "check"]],
)  # fmt: skip
def test_every_verb_has_help(tmp_path: Path, verb: list[str]) -> None:
    done = llm_perf(*verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_a_dataset_is_found_from_another_folder_or_plainly_refused(project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    found = answer("run", "--dry-run", "dataset=mine", "--config-dir", "../project/conf", cwd=elsewhere)
    assert found["config"]["dataset"]["root"] == str(project / "datasets" / "mine")
    assert (
        llm_perf("dataset", "check", "--root", "../project/datasets", "--conf", "../project/conf", cwd=elsewhere).returncode == 0
    )
    done = llm_perf("run", "--dry-run", "dataset=mine", cwd=elsewhere)
    assert done.returncode == 2
    assert "dataset=mine is not known" in done.stderr
    words = ["dataset=mine", "dataset.root=datasets/mine", "--config-dir", "../project/conf"]
    done = llm_perf("run", "--dry-run", *words, cwd=elsewhere)
    assert done.returncode == 2
    assert "There is no dataset 'mine'" in done.stderr
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("root", "conf", "written"),
    [
        ("datasets", "conf", "datasets/other"),
        ("../project/data", "conf", "data/other"),
        ("../shared", "conf", "{above}/shared/other"),
        ("datasets", "../options/conf", "{above}/project/datasets/other"),
    ],
)
def test_an_option_names_its_folder_so_that_it_is_found(project: Path, root: str, conf: str, written: str) -> None:
    done = llm_perf("dataset", "add", "other", "--source", "../source", "--root", root, "--conf", conf, cwd=project)
    assert done.returncode == 0, done.stderr
    option = (project / conf / "dataset" / "other.yaml").read_text()
    assert f"root: {written.format(above=project.parent)}\n" in option
    for cwd in (project, project.parent):
        words = ["run", "--dry-run", "dataset=other", "--config-dir", str(project / conf)]
        assert llm_perf(*words, cwd=cwd).returncode == 0
    assert llm_perf("dataset", "check", "other", "--root", root, "--conf", conf, cwd=project).returncode == 0


def test_another_programs_conf_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "tiny.yaml").write_text("layers: 3\n")
    done = llm_perf("run", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "conf/model/tiny.yaml: There is no key 'model.layers'" in done.stderr
    assert llm_perf("run", "--dry-run", "model=gpt2", cwd=tmp_path).returncode == 0
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [nothing]\n")
    done = llm_perf("run", "--dry-run", "model=gpt2", cwd=tmp_path)
    assert done.returncode == 2
    assert "conf/config.yaml" in done.stderr
