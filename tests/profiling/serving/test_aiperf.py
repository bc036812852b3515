"""AIPerf as load generator."""

from pathlib import Path

from llm_perf_opt.config.serving import LoadRequest
from llm_perf_opt.profiling.serving.aiperf import prepare


def load(tokenizer: str, folder: Path) -> LoadRequest:
    return LoadRequest(
        url="http://127.0.0.1:1", model="tiny", tokenizer=tokenizer, kind="rate", asked=1.0, requests=1, warmup=0,
        prompt_tokens=8, new_tokens=4, seed=0, request_s=1.0, folder=folder,
    )  # fmt: skip


def test_the_folder_of_a_tokenizer_seems_cached(tmp_path: Path) -> None:
    """As AIPerf 0.13 looks for it: `models--NAME`, slashes as two dashes, with a snapshot of the revision."""
    assert prepare(load("/models/tiny", tmp_path), tmp_path) == {"HF_HUB_CACHE": str(tmp_path)}
    assert (tmp_path / "models----models--tiny/snapshots/main").is_dir()


def test_a_long_path_is_left_to_aiperf(tmp_path: Path) -> None:
    assert prepare(load("/models/" + "x" * 300, tmp_path), tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
