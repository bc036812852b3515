"""What `llm-perf serve` refuses before anything is started."""

from pathlib import Path

import pytest

from command import llm_perf
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
