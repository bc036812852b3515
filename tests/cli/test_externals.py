"""`llm-perf externals` as typed by a user; every command of docs/externals.md."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import llm_perf_opt
from command import HANG_S, llm_perf, llm_perf_process
from git_repositories import Upstream, entry, git, listing, new_project
from hub_stand_in import Hub, running_hub
from llm_perf_opt.workspace.externals.listing import read_listing, template
from llm_perf_opt.workspace.externals.places import Places

ROOT = Path(__file__).parents[2]
SOURCE = str(Path(llm_perf_opt.__file__).parent.parent)
PAGE = (ROOT / "docs" / "externals.md").read_text()
PLACEHOLDER, NEW = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


def run(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)


def externals(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = llm_perf_process if environment else llm_perf  # the Hub's library reads its variables when it is imported
    return start("externals", *words, cwd=folder, env=environment)


def test_status_says_it_in_rows_and_in_its_code(tmp_path: Path) -> None:
    upstream, project = Upstream(tmp_path / "upstream"), new_project(tmp_path / "project")
    listing(project, entry("x", "sparse", upstream.url, upstream.first))
    missing = externals(project.root, "status")
    assert missing.returncode == 1
    assert re.search(r"^x +sparse +\w{12} +missing +third_party/github/x$", missing.stdout, re.MULTILINE)
    made = externals(project.root / "third_party", "init", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["externals"][0]["action"] == "made"
    there = externals(project.root, "status", "--json")
    assert there.returncode == 0
    assert json.loads(there.stdout)["externals"][0] | {"detail": ""} == {
        "name": "x",
        "way": "sparse",
        "path": "third_party/github/x",
        "pinned": upstream.first,
        "state": "ok",
        "detail": "",
        "commit": upstream.first,
        "warnings": [],
    }


def test_names_of_files_cannot_move_the_cursor(tmp_path: Path) -> None:
    upstream, project = Upstream(tmp_path / "upstream"), new_project(tmp_path / "project")
    listing(project, entry("x", "sparse", upstream.url, upstream.first))
    externals(project.root, "init")
    (project.third_party / "github/x/src/one/\x1b[2Jevil").write_text("x")
    (project.third_party / "\x1b[2Jevil").write_text("x")
    done = externals(project.root, "status")
    assert "edited" in done.stdout
    assert "unlisted" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("verb", ["init", "update", "snapshot"])
def test_without_network_each_verb_ends_with_one_line(verb: str, tmp_path: Path) -> None:
    project = new_project(tmp_path / "project")
    way, source = ("hub", "Owner/Name") if verb == "snapshot" else ("submodule", "https://127.0.0.1:9/x")
    listing(project, entry("x", way, source, "1" * 40))
    done = externals(project.root, verb, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 3
    told = [line for line in done.stderr.splitlines() if not line.startswith(("x: ", "  → "))]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("error: x: ")
    assert "1" * 40 not in git(project.root, "ls-files", "--stage")


@pytest.mark.parametrize("verb", ["init", "update", "snapshot", "status"])
def test_without_a_list_it_is_said_how_to_begin(verb: str, tmp_path: Path) -> None:
    done = externals(tmp_path, verb)
    assert done.returncode == 2
    assert "--template" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_template_is_not_written_over_a_list(tmp_path: Path) -> None:
    assert externals(tmp_path, "init", "--template").returncode == 0
    assert "nothing is listed" in externals(tmp_path, "init").stdout
    again = externals(tmp_path, "init", "--template")
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    listing(Places.find(tmp_path), template())
    for words in (["init", "../x"], ["update", "x", "--to", "--upload-pack=x"], ["snapshot", "../../x", "--commit", "1" * 40]):
        done = externals(tmp_path, *words)
        assert done.returncode == 2, words
        assert "Traceback" not in done.stderr
    assert externals(tmp_path, "snapshot", "a/b", "--commit", "main").returncode == 2


def test_this_repository_lists_the_reference_code_of_the_guides() -> None:
    text = (ROOT / "third_party" / "externals.yaml").read_text()
    assert text.startswith(template())
    entries = read_listing(text, "externals.yaml")
    assert {"transformers", "vllm", "TensorRT-LLM", "flash-attention", "Llama-3", "Qwen2.5"} == set(entries)


def documented_commands() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for kind, block in blocks if not kind for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_of_the_page(tmp_path: Path) -> None:
    """In the order of the page, with the page's own list; only addresses and commits are those of repositories made here."""
    upstream, project = Upstream(tmp_path / "upstream"), new_project(tmp_path / "project")
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert {one.way for one in read_listing(yaml, "page").values()} == {"sparse", "submodule", "subtree", "symlink", "hub"}
    git(tmp_path, "clone", "--quiet", upstream.url, "pytorch")
    git(tmp_path / "pytorch", "checkout", "--quiet", upstream.first)
    (project.root / "scripts").symlink_to(ROOT / "scripts")
    yaml = re.sub(r"https://github\S+", upstream.url, yaml).replace("src/transformers/models/llama", "src/one")
    files = {"modeling.py": b"x = 1\n", "LICENSE": b"free\n", "model.safetensors": b"weights"}
    commands = documented_commands()
    assert len(commands) > 14
    with running_hub(Hub("Qwen/Qwen2.5-7B", {upstream.first: files, upstream.second: files})) as hub:
        identity = {
            f"GIT_{who}_{what}": f"{who}@example.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        for command in commands:
            words = shlex.split(command.replace(NEW, upstream.second))
            if words[0] == "llm-perf":
                done = llm_perf_process(*words[1:], cwd=project.root, env={"HF_ENDPOINT": hub.url, **identity})
            else:
                start = {"python": [sys.executable], "git": ["git"]}[words[0]]
                done = run([*start, *words[1:]], project.root, HF_ENDPOINT=hub.url, **identity)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            if "--template" in command:
                listing(project, project.listing_file.read_text() + yaml.replace(PLACEHOLDER, upstream.first))
    assert "model.safetensors" not in hub.asked
    assert read_listing(project.listing_text(), "list")["vllm"].commit == upstream.second
    assert (project.root / ".git/hooks/pre-commit").exists()
