"""What `llm-perf serve` refuses before anything is started."""

from pathlib import Path

import pytest

from command import llm_perf
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.profiling.serving import generators
from llm_perf_opt.profiling.serving.generators import LocatedGenerator


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["runtime=pytorch"], "runtime=pytorch has no server"),
        (["--rates", "1,x"], "--rates x"),
        (["--concurrency", "1.5"], "--concurrency 1.5"),
        (["--slo", "ttft=fast"], "'ttft=fast'"),
        (["--rates", "1", "--concurrency", "1"], "exclude each other"),
        (
            ["--requests", "10000", "runtime.num_new_tokens=1024"],
            "--requests 10000 is more than the 9,578 requests of 1,024 tokens that llm-perf can read from the file of AIPerf",
        ),
        (
            ["--concurrency", "1,2000", "runtime.num_new_tokens=3000"],
            "--concurrency 2000 needs more than the 3,311 requests of 3,000 tokens that llm-perf can read",
        ),
        (["--rates", "1,1e308"], "--rates 1e+308 --least-s 10 needs more than the"),
        (["--profile-s", "inf"], "--profile-s inf is not a number of seconds"),
        (["--point-s", "inf"], "--point-s inf is not a number of seconds"),
        (["--least-s", "inf"], "--least-s inf is not a number of seconds"),
        (["dataset=sample_prompts"], "dataset=sample_prompts has no effect"),
        (["--url", "example.org"], "is not the address of a server"),
        (["--generator", "aiperv"], "Did you mean 'aiperf'?"),
        (["--model", "tiny"], "Did you mean 'model=OPTION'?"),
    ],
)
def test_requests_that_cannot_work(words: list[str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--generator" not in words:
        found = LocatedGenerator(generators.known_generators()["aiperf"], ("aiperf",), "0.13.0")
        monkeypatch.setattr("llm_perf_opt.profiling.serving.request.locate_generator", lambda *_: found)
    done = llm_perf("serve", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert fact in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_server_is_looked_for_before_the_generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*_: object) -> LocatedGenerator:
        raise ResourceError("AIPerf is not installed.")

    def unreachable(url: str, *_: object) -> None:
        raise ResourceError(f"{url} does not answer.")

    monkeypatch.setattr("llm_perf_opt.profiling.serving.request.locate_generator", missing)
    monkeypatch.setattr("llm_perf_opt.profiling.serving.request.served_model", unreachable)
    done = llm_perf("serve", "--url", "http://127.0.0.1:9/v1", cwd=tmp_path)
    assert done.returncode == 3
    assert "does not answer" in done.stderr
