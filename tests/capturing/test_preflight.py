"""What is refused before a process is started for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from dataset_builders import added, small_source, write_jsonl
from llm_perf_opt.capturing import preflight
from llm_perf_opt.capturing.preflight import refuse_early
from llm_perf_opt.composition import compose
from llm_perf_opt.config import DatasetConfig, RunConfig
from llm_perf_opt.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.sweeps.running import plan_sweep


def asking(**dataset: object) -> RunConfig:
    config = compose(["dataset=sample_prompts"]).config
    return replace(config, dataset=replace(config.dataset, **dataset))  # type: ignore[arg-type]


def test_what_can_be_met_is_let_through(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    refuse_early([compose([]).config, asking(), asking(root=str(folder.path)), compose(["model=tiny_vlm"]).config])


@pytest.mark.parametrize(
    ("dataset", "kind", "said"),
    [
        ({"path": "gone.jsonl"}, ConfigError, "no such file"),
        ({"path": "."}, ConfigError, "no such file"),
        ({"path": "empty.txt"}, ResourceError, "empty.txt holds no text"),
        ({"root": "datasets/mine", "variant": "nope"}, ConfigError, "mine has no variant 'nope'"),
        ({"root": "datasets/mine", "text_field": "txt"}, ConfigError, "Did you mean 'text'?"),
        ({"root": "datasets/mien"}, ConfigError, "There is no dataset 'mien'. Did you mean 'mine'?"),
    ],
)
def test_data_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: dict[str, object], kind: type[LlmPerfError], said: str
) -> None:
    added(tmp_path, small_source(tmp_path / "source"))
    (tmp_path / "empty.txt").write_text("\n\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        refuse_early([compose([]).config, asking(**dataset)])
    assert said in str(caught.value)
    assert caught.value.remedy
    assert "--skip-bad" not in str(caught.value)
    assert "--text-field" not in str(caught.value)


def test_a_source_that_went_away_is_named(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(ResourceError, match=r"is a link to .*source, which is not there"):
        refuse_early([asking(root=str(folder.path))])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("models/qwn", "no such folder. Did you mean 'qwen'? In models there are: empty, qwen."),
        ("models/gone", "models/gone is a link to nowhere, which is not there"),
        ("models/empty", "models/empty has no config.json"),
        ("models", "models has no config.json. In models there are: qwen."),
        ("models/qwen/config.json", "is a file, not a folder"),
        ("x" * 5000, "cannot be looked at"),
        ("a/b/c", "no such folder"),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    write_jsonl(tmp_path / "models" / "qwen" / "config.json", [{"model_type": "qwen2"}])
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "gone").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    refuse_early([compose(["model=hf", "model.path=models/qwen"]).config])
    with pytest.raises(ConfigError) as caught:
        refuse_early([compose(["model=hf", f"model.path={path}", "model.name=x"]).config])
    assert said in caught.value.fact
    assert "config.json" in caught.value.remedy or "model link" in caught.value.remedy


def test_a_model_on_the_hub_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        refuse_early([compose(["model=hf", "model.path=Qwen/Qwen2.5-7B"]).config])
    assert "no such folder" in caught.value.fact
    assert "hf download Qwen/Qwen2.5-7B" in caught.value.remedy
    assert "model=qwen2_5_7b" in caught.value.remedy


def test_a_sweep_is_refused_whole_and_looks_at_what_points_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[DatasetConfig] = []
    monkeypatch.setattr(preflight, "check_first_text", looked.append)
    plan_sweep(["dataset=sample_prompts", "runtime.batch_size=1,2,3"], None)
    assert len(looked) == 1
    with pytest.raises(ConfigError, match=r"decided by model\.seed"):
        plan_sweep(["runtime=vllm", "runtime.batch_size=1,2", "runtime.engine.seed=3"], None)
