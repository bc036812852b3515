"""The launcher of a sweep: times, memory, options of sbatch."""

from pathlib import Path

import pytest

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.launchers import gpus_of, memory_bytes, minutes
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import ConfigError


@pytest.mark.parametrize(("text", "found"), [("90", 90), ("01:30:00", 90), ("0:00:01", 1), ("2-01:00:00", 2940), (None, None)])
def test_time_limits(text: str | None, found: int | None) -> None:
    assert minutes(LauncherConfig("slurm", time=text)) == found


@pytest.mark.parametrize(("text", "found"), [("32G", 32 * 2**30), ("512MB", 512 * 2**20), ("1tib", 2**40), (None, None)])
def test_memory(text: str | None, found: int | None) -> None:
    assert memory_bytes(LauncherConfig("slurm", memory=text)) == found


@pytest.mark.parametrize(
    "word",
    [
        "launcher.time=soon",
        "launcher.time=0",
        "launcher.time=1:99",
        "launcher.memory=32",
        "launcher.memory=0G",
        "launcher.gpus=-1",
        "launcher.address=a",
        "'launcher.partition=\"a\nb\"'".strip("'"),
        "launcher.extra.array=1-3",
        "launcher.extra.job_name=x",
        "launcher.extra.account=[a]",
        'launcher.extra.comment="a\nrm"',
        "launcher.nothing=1",
    ],
)
def test_what_cannot_work_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        compose(["launcher=slurm", word])


@pytest.mark.parametrize("word", ["launcher.partition=a", "launcher.gpus=1", "launcher.time=5"])
def test_settings_without_effect_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"no effect on launcher\.type=local"):
        compose([word])


def test_settings_of_one_launcher_are_not_of_another() -> None:
    with pytest.raises(ConfigError, match=r"no effect on launcher\.type=ray"):
        compose(["launcher=ray", "launcher.partition=a"])
    with pytest.raises(ConfigError, match="not an option for Ray"):
        compose(["launcher=ray", "launcher.extra.max_retries=3"])


def test_an_option_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "big.yaml").write_text("type: slurm\npartition: h100\ntime: 90\nextra: {account: me}\n")
    found = compose(["launcher=big"], tmp_path).config
    assert found.launcher == LauncherConfig("slurm", partition="h100", time="90", extra={"account": "me"})
    assert gpus_of(found) == 0
    assert gpus_of(compose(["launcher=big", "hardware.device=cuda"], tmp_path).config) == 1


def test_a_point_asks_for_the_gpus_of_its_ranks_or_workers() -> None:
    cuda = ["launcher=slurm", "hardware.device=cuda"]
    assert gpus_of(compose([*cuda, "hardware.devices=4", "runtime.tensor_parallel=4"]).config) == 4
    assert gpus_of(compose([*cuda, "hardware.devices=2", "runtime.tensor_parallel=4"]).config) == 2
    assert gpus_of(compose([*cuda, "runtime=vllm", "runtime.tensor_parallel=8"]).config) == 8
    assert gpus_of(compose([*cuda, "hardware.devices=4", "runtime.tensor_parallel=4", "launcher.gpus=8"]).config) == 8
    assert gpus_of(compose(["launcher=slurm", "hardware=cpu", "runtime.tensor_parallel=4"]).config) == 0


@pytest.mark.parametrize("name", ["ntasks", "ntasks_per_node", "tasks-per-node"])
def test_options_that_would_start_a_point_several_times_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is set by llm-perf"):
        compose(["launcher=slurm", f"launcher.extra.{name}=2"])
