"""Credentials in the environment and in commands: none is in a file of a run folder or on the terminal."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from command import llm_perf
from llm_perf_opt.core.urls import HIDDEN
from planted_secrets import MARKS, PASSWORDS, TOKENS, leaks, planted_argv, planted_environment, texts_of

SERVING = Path(__file__).parents[1] / "fixtures" / "serving"
ENVIRONMENT = planted_environment()
KEPT = {"CUDA_VISIBLE_DEVICES": "GPU-3f2a1b4c-1234-5678-9abc-def012345678", "NCCL_SOCKET_IFNAME": "eth0"}


def assert_none(folder: Path, done: "subprocess.CompletedProcess[str]") -> None:
    texts = {**texts_of(folder), "stdout": done.stdout, "stderr": done.stderr}
    assert len(texts) > 2, "the command wrote nothing"
    assert leaks(texts) == []


def test_a_run(tmp_path: Path) -> None:
    words = ("model=tiny", "profiling=minimal", "runtime.prompt_tokens=8", "runtime.num_new_tokens=2", "runtime.max_repeats=2")
    out = tmp_path / "out"
    done = llm_perf("run", *words, f"hydra.run.dir={out}", cwd=tmp_path, env={**ENVIRONMENT, **KEPT})
    assert done.returncode == 0, done.stderr
    assert_none(tmp_path, done)
    variables = json.loads((out / "env.json").read_text())["variables"]
    assert KEPT.items() <= variables.items()
    assert variables["TORCH_STORE"] == f"redis://{HIDDEN}@host:6379/0"
    assert "NCCL_PIN" not in variables


@pytest.mark.parametrize(
    "setting",
    [
        f"+runtime.engine.hf_token={PASSWORDS[0]}",
        f"+runtime.engine.api_key={TOKENS[0]}",
        f'+runtime.engine.store="redis://me:{PASSWORDS[1]}@host"',
        f"+runtime.engine.nested.client.secret={PASSWORDS[2]}",
    ],
)
def test_a_setting_that_config_yaml_would_keep_is_refused(setting: str, tmp_path: Path) -> None:
    done = llm_perf("run", "model=tiny", "runtime=vllm", setting, cwd=tmp_path)
    assert done.returncode == 2
    assert "looks like a credential" in done.stderr
    assert leaks({**texts_of(tmp_path), "stderr": done.stderr}) == []


def test_a_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, pathlib; pathlib.Path('given.txt').write_text(repr(sys.argv[1:]))")
    words = ["exec", "--passes", "program,torch", "--", "env", "HF_TOKEN=planted39-Pa55", sys.executable, "script.py"]
    done = llm_perf(*words[:2], "program", *words[3:], *planted_argv(), cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    given = tmp_path / "given.txt"
    assert given.read_text() == repr(planted_argv()), "what is run has its values"
    given.unlink()
    assert_none(tmp_path, done)
    (command,) = tmp_path.glob("runs/exec/*/*/raw/program/cmd.txt")
    assert command.read_text().count(HIDDEN) > 50
    assert command.read_text().splitlines()[-1].startswith(f"# {HIDDEN}: ")
    (run,) = tmp_path.glob("runs/exec/*/*")
    for verb in (["report", run], ["report", run, "--json"], ["runs", tmp_path / "runs"], ["runs", tmp_path / "runs", "--json"]):
        again = llm_perf(*verb, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert_none(run, again)


def test_a_python_program_under_torch_and_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch; torch.ones(2) + 1\nraise SystemExit(3)")
    done = llm_perf("exec", "--passes", "program,torch", "--", sys.executable, "script.py", *planted_argv(), cwd=tmp_path)
    assert done.returncode == 4
    (tmp_path / "script.py").write_text("import torch; torch.ones(2) + 1")
    other = llm_perf("exec", "--passes", "torch", "--", sys.executable, "script.py", *planted_argv(), cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    assert_none(tmp_path, done)
    assert_none(tmp_path, other)


def test_a_program_that_prints_its_own_arguments_prints_them_hidden_to_the_log(tmp_path: Path) -> None:
    code = "import sys, os; print(sys.argv); print(os.environ['HF_TOKEN']); print('loss 0.5, ok')"
    planted = [word for word in planted_argv() if "\n" not in word]
    words = ("exec", "--passes", "program", "--", sys.executable, "-c", code, *planted)
    done = llm_perf(*words, cwd=tmp_path, env={"HF_TOKEN": TOKENS[0]})
    assert done.returncode == 0, done.stderr
    assert_none(tmp_path, done)
    (log,) = tmp_path.glob("runs/exec/*/*/raw/program/log.txt")
    assert "loss 0.5, ok" in log.read_text()


def test_an_old_run_is_shown_without_them(tmp_path: Path) -> None:
    """A run folder that an earlier version wrote has them in run.json."""
    done = llm_perf("exec", "--passes", "program", "--", sys.executable, "-c", "0", cwd=tmp_path)
    (run,) = tmp_path.glob("runs/exec/*/*")
    content = json.loads((run / "run.json").read_text())
    content["command"] += planted_argv()
    content["passes"][0]["argv"] += planted_argv()
    (run / "run.json").write_text(json.dumps(content))
    done = llm_perf("report", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert leaks({"stdout": done.stdout, "report": (run / "report.md").read_text()}) == []


def test_imported_loads(tmp_path: Path) -> None:
    for name in ("vllm_bench_serve.json", "profile_export.jsonl", "profile_export_aiperf.json"):
        shutil.copy(SERVING / name, tmp_path)
    summary = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    summary["input_config"]["endpoint"] |= {"urls": [f"http://me:{PASSWORDS[0]}@host:8000"], "api_key": TOKENS[1]}
    summary["input_config"]["endpoint"]["headers"] = {"Authorization": f"Bearer {PASSWORDS[1]}"}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary))
    for number, name in enumerate(("vllm_bench_serve.json", "profile_export.jsonl")):
        run = tmp_path / "runs" / str(number)
        done = llm_perf("import", name, "--out", run, cwd=tmp_path, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert_none(run, done)


def test_an_imported_file_that_is_packed(tmp_path: Path) -> None:
    found = json.loads((SERVING / "vllm_bench_serve.json").read_text()) | {"api_key": TOKENS[1]}
    (tmp_path / "load.json.gz").write_bytes(gzip.compress(json.dumps(found).encode()))
    done = llm_perf("import", "load.json.gz", "--out", "run", cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "run").glob("raw/*/load.json.gz")
    assert json.loads(gzip.decompress(kept.read_bytes())) == found | {"api_key": HIDDEN}


@contextmanager
def answering(models: str) -> Iterator[str]:
    """A server that answers every request with this text."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(models.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{PASSWORDS[0]}@127.0.0.1:9",
        f"http://me:{PASSWORDS[0]}@[::1/",
        f"http://me:{PASSWORDS[0]}@host:99999",
        f"http://{TOKENS[0]}@host",
        f"http://host/?api_key={PASSWORDS[1]}",
        f"http://host/?sig={PASSWORDS[1]}\n",
        f"ftp://me:{PASSWORDS[0]}@host",
    ],
)
def test_an_address_with_a_password_is_refused_without_it(url: str, tmp_path: Path) -> None:
    done = llm_perf("serve", "--url", url, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "--url" in done.stderr
    assert leaks({"stdout": done.stdout, "stderr": done.stderr}) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["--help", "-m", "a\\u0000b", "\\ud800", "a\\nb", "\\u001b[31m", " "])
def test_a_model_that_cannot_be_an_argument_is_one_sentence(name: str, tmp_path: Path) -> None:
    with answering(f'{{"data": [{{"id": "{name}"}}]}}') as address:
        done = llm_perf("serve", "--url", f"http://{address}", "--tokenizer", tmp_path, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "cannot be used" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_there_are_marks_of_every_kind() -> None:
    assert len(set(MARKS)) >= 60
