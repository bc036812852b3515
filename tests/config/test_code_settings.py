"""What can run code is honoured only if it was typed: in the files of a project, in a stored configuration, in the child."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import HANG_S
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.config.code_settings import CodeSetting, Stored, may_run_code, typed_settings
from llm_perf_opt.config.composition import compose, config_to_yaml
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.profiling.capture import capture
from llm_perf_opt.runners import models
from llm_perf_opt.runners.llm_profile_runner import read_config
from llm_perf_opt.runners.server import _read_config

PLANT = "from pathlib import Path\nPath({marker!r}).touch()\n"
CODE: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"trust_remote_code": True}, "model.trust_remote_code=true"),
    (
        "model",
        {"architecture": {"auto_map": {"AutoConfig": "evil.Config"}}},
        "model.architecture.auto_map.AutoConfig=evil.Config",
    ),
    ("model", {"architecture": {"attn_implementation": "a/b"}}, "model.architecture.attn_implementation=a/b"),
    ("runtime", {"attn_implementation": "someone/kernels"}, "runtime.attn_implementation=someone/kernels"),
    ("runtime", {"type": "./runner.py:RUNTIME"}, "runtime.type="),
    ("runtime", {"type": "vllm", "engine": {"worker_cls": "evil.Worker"}}, "runtime.engine.worker_cls=evil.Worker"),
    ("runtime", {"type": "vllm", "engine": {"load_format": "pt"}}, "runtime.engine.load_format=pt"),
    ("runtime", {"type": "vllm", "engine": {"quantization": "evil"}}, "runtime.engine.quantization=evil"),
    ("runtime", {"type": "vllm", "engine": {"chat_template": "../x.jinja"}}, "runtime.engine.chat_template="),
    ("runtime", {"type": "vllm", "engine": {"logits_processors": ["evil:P"]}}, "runtime.engine.logits_processors=["),
    (
        "runtime",
        {"type": "vllm", "engine": {"hf_overrides": {"auto_map": {"A": "b"}}}},
        "runtime.engine.hf_overrides.auto_map.A=b",
    ),
    (
        "runtime",
        {"type": "vllm", "engine": {"speculative_config": {"model": "evil"}}},
        "runtime.engine.speculative_config.model=evil",
    ),
    ("runtime", {"type": "vllm", "engine": {"allow_pickle": 1}}, "runtime.engine.allow_pickle=1"),
    ("runtime", {"type": "tensorrtllm", "engine": {"trust_tokenizer": True}}, "runtime.engine.trust_tokenizer=true"),
    ("profiling", {"nsys": {"args": ["--python-functions-trace=x.json"]}}, "profiling.nsys.args=["),
    ("profiling", {"ncu": {"args": "--source-folders evil"}}, "profiling.ncu.args="),
    ("launcher", {"type": "ray", "address": "evil:10001"}, "launcher.address="),
    ("launcher", {"type": "slurm", "extra": {"export": "LD_PRELOAD=x.so"}}, "launcher.extra.export="),
]
"""A group, what a file sets in it, and what has to be typed."""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: Path, values: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return file


def refused(overrides: Sequence[str], config_dir: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    return caught.value


def planted_model(folder: Path, marker: Path) -> Path:
    """Return a model folder with code of its own, which leaves a marker."""
    write(folder / "config.json", json.dumps({"model_type": "planted", "auto_map": {"AutoConfig": "planted.Planted"}}))
    text = "from transformers import PretrainedConfig\nclass Planted(PretrainedConfig):\n    model_type = 'planted'\n"
    write(folder / "planted.py", PLANT.format(marker=str(marker)) + text)
    return folder


def stored_config(file: Path, **model: Any) -> Path:
    config = compose(["profiling=none"]).config
    return write(file, config_to_yaml(replace(config, model=replace(config.model, architecture={}, **model))))


# --- files of a project -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "values", "typed"), CODE, ids=[typed for _, _, typed in CODE])
@pytest.mark.parametrize("where", ["conf", "mine"])
def test_an_option_that_can_run_code_is_refused_with_what_to_type(
    project: Path, where: str, group: str, values: dict[str, Any], typed: str
) -> None:
    file = write(project / where / group / "theirs.yaml", values)
    error = refused([f"{group}=theirs"], Path("mine") if where == "mine" else None)
    assert str(file.relative_to(project)) in error.fact
    assert typed in error.fact
    assert typed in error.remedy


@pytest.mark.parametrize(("group", "values", "typed"), CODE, ids=[typed for _, _, typed in CODE])
def test_so_it_is_in_the_configuration_of_a_project(project: Path, group: str, values: dict[str, Any], typed: str) -> None:
    kind = values.get("type")
    defaults = [{group: kind}, "_self_"] if kind in ("vllm", "tensorrtllm", "slurm", "ray") else ["_self_"]
    write(project / "conf" / "config.yaml", {"defaults": defaults, group: values})
    error = refused([])
    assert "conf/config.yaml" in error.fact
    assert typed in error.remedy


def test_what_was_typed_is_used(project: Path) -> None:
    write(project / "conf" / "model" / "theirs.yaml", {"path": "models/theirs", "trust_remote_code": True})
    made = compose(["model=theirs", "model.trust_remote_code=true"])
    assert made.config.model.trust_remote_code
    assert made.code == (CodeSetting("model.trust_remote_code", True),)
    assert compose(["model=theirs", "model.trust_remote_code=false"]).code == ()


def test_typing_one_argument_does_not_allow_its_neighbours(project: Path) -> None:
    write(project / "conf" / "runtime" / "theirs.yaml", {"type": "tensorrtllm", "engine": {"a": {"cls": "evil.X", "n": 3}}})
    error = refused(["runtime=theirs", "runtime.engine.a={n:4}"])
    assert "runtime.engine.a.cls=evil.X" in error.fact
    assert compose(["runtime=theirs", "runtime.engine.a.cls=evil.X"]).config.runtime.engine["a"]["cls"] == "evil.X"


def test_what_is_to_be_typed_can_be_pasted(project: Path) -> None:
    write(
        project / "conf" / "runtime" / "theirs.yaml", {"type": "tensorrtllm", "engine": {"a": ['x "y"', "b:c", 1, {"d": None}]}}
    )
    typed = typed_settings([refused(["runtime=theirs"]).remedy.partition(": ")[2].rstrip(".")])
    assert typed == (CodeSetting("runtime.engine.a", ['x "y"', "b:c", 1, {"d": None}]),)


@pytest.mark.parametrize(
    "header", ["# @package model\ntrust_remote_code: true\n", "# @package _global_\nmodel: {trust_remote_code: true}\n"]
)
def test_a_file_of_another_group_cannot_either(project: Path, header: str) -> None:
    write(project / "conf" / "runtime" / "other.yaml", header)
    assert "model.trust_remote_code=true" in refused(["runtime=other"]).remedy


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("runtime", {"type": "vllm", "engine": {"max_num_seqs": 4, "enforce_eager": True, "quantization": "fp8"}}),
        (
            "runtime",
            {"type": "vllm", "engine": {"cudagraph_capture_sizes": [1, 2], "compilation_config": {"cudagraph_mode": "FULL"}}},
        ),
        ("runtime", {"type": "llamacpp", "engine": {"cache_type_k": "q8_0", "n_batch": 32}}),
        ("runtime", {"attn_implementation": "flash_attention_2"}),
        (
            "model",
            {"architecture": {"model_type": "qwen2", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "layer_types": ["a"]}},
        ),
        ("profiling", {"nsys": {"args": ["--gpuctxsw=true", "--samples-per-backtrace=2"]}}),
        ("launcher", {"type": "slurm", "extra": {"account": "me", "gres": "gpu:h100:2", "requeue": True}}),
        ("launcher", {"type": "ray", "extra": {"resources": {"node": 1}}}),
    ],
)
def test_numbers_switches_and_known_words_are_for_files(project: Path, group: str, values: dict[str, Any]) -> None:
    write(project / "conf" / group / "theirs.yaml", values)
    assert compose([f"{group}=theirs"]).code == ()


def test_every_free_mapping_of_the_configuration_is_marked() -> None:
    values = asdict(compose([]).config)
    free = [f"{group}.{name}" for group, section in values.items() if isinstance(section, dict) for name in section]
    mappings = {key for key in free if isinstance(values[key.split(".")[0]][key.split(".")[1]], dict)}
    harmless = {
        "model.substages",
        "project.files",
        *(f"profiling.{name}" for name in ("torch", "nvml", "nsys", "ncu", "metrics", "regions")),
    }
    assert {key for key in mappings if not may_run_code(key)} == harmless
    assert not any(map(may_run_code, ("model.path=x", "runtime.batch_size=1", "runtime", "runtime.engines=1")))


# --- stored configurations --------------------------------------------------------------------------------------------


def test_a_stored_setting_needs_the_same_value_typed() -> None:
    stored = Stored(Path("run/config.yaml"), "llm-perf advise run --verify")
    asked = (CodeSetting("runtime.engine.worker_cls", "evil.Worker"), CodeSetting("model.trust_remote_code", True))
    with pytest.raises(ConfigError) as caught:
        stored.allowed(asked)
    assert "run/config.yaml sets" in caught.value.fact
    command = "llm-perf advise run --verify runtime.engine.worker_cls=evil.Worker model.trust_remote_code=true"
    assert command in caught.value.remedy
    words = ("model.trust_remote_code=true", "runtime.engine.worker_cls=evil.Worker")
    assert replace(stored, words=words).allowed(asked) == asked
    with pytest.raises(ConfigError, match="worker_cls"):
        replace(stored, words=(words[0], "runtime.engine.worker_cls=other.Worker")).allowed(asked)


def test_other_words_are_refused() -> None:
    stored = Stored(Path("plan.json"), "llm-perf run --resume x", ("runtime.batch_size=2",))
    with pytest.raises(ConfigError, match=r"does not take runtime\.batch_size=2"):
        stored.check_words([CodeSetting("model.trust_remote_code", True)])


def test_nothing_starts_that_was_not_allowed(project: Path) -> None:
    made = compose(["profiling=none", "hydra.run.dir=run", "model=hf", "model.path=.", "model.trust_remote_code=true"])
    with pytest.raises(ConfigError, match="trust_remote_code"):
        capture(replace(made, code=()), ["llm-perf"], QuietProgress())
    assert not (project / "run").exists()


@pytest.mark.parametrize("read", [read_config, _read_config])
def test_the_measured_process_is_told_as_well(project: Path, read: Any) -> None:
    file = stored_config(project / "config.yaml", source="pretrained", path="theirs", trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"config\.yaml sets model\.trust_remote_code=true"):
        read(file, [])
    found: RunConfig = read(file, ["model.trust_remote_code=true"])
    assert found.model.trust_remote_code


def test_a_model_runs_its_code_only_then(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(project / "modules"))
    marker = project / "marker"
    folder = planted_model(project / "theirs", marker)
    file = stored_config(project / "config.yaml", source="pretrained", path=str(folder), trust_remote_code=True)
    with pytest.raises(ConfigError):
        models.load_config(read_config(file).model)
    with pytest.raises(ConfigError, match="its own Python code"):
        models.load_config(replace(compose(["model=hf", f"model.path={folder}"]).config.model))
    assert not marker.exists()
    models.load_config(read_config(file, ["model.trust_remote_code=true"]).model)
    assert marker.exists(), "the plant works"


def test_a_model_folder_cannot_name_kernels_of_a_repository(project: Path) -> None:
    config = {"model_type": "gpt2", "attn_implementation": "someone/kernels"}
    write(project / "theirs" / "config.json", json.dumps(config))
    with pytest.raises(ConfigError, match="someone/kernels"):
        models.load_config(compose(["model=hf", "model.path=theirs"]).config.model)


@pytest.mark.parametrize("module", ["llm_perf_opt.runners.llm_profile_runner", "llm_perf_opt"])
def test_nothing_is_imported_from_the_working_folder(project: Path, module: str) -> None:
    for name in ("yaml", "typer", "torch", "numpy"):
        write(project / f"{name}.py", PLANT.format(marker=str(project / "marker")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTHONSAFEPATH", None)
    argv = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(argv, cwd=project, env=environment, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert not (project / "marker").exists()
