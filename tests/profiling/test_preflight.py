"""What is rejected before a process is started."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataset_builders import added, small_source, write_jsonl
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import DatasetConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.profiling import preflight
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.runners.measure import device
from llm_perf_opt.runners.measure.device import TorchBuild
from llm_perf_opt.runners.measure.gpu import GpuSize
from llm_perf_opt.workflows.sweep import plan_sweep


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
        ({"path": "empty.txt"}, ResourceError, "empty.txt contains no text"),
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


def test_a_reference_without_logits_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    config = compose(["profiling.logits=true", f"profiling.logits_reference={tmp_path}"]).config
    with pytest.raises(ConfigError, match=r"there is no .*logits\.json"):
        refuse_early([config])
    (tmp_path / "raw" / "clean").mkdir(parents=True)
    (tmp_path / "raw" / "clean" / "logits.json").write_text("{}")
    refuse_early([config])


def test_a_source_that_went_away_is_named(tmp_path: Path) -> None:
    folder, _ = added(tmp_path, small_source(tmp_path / "source"))
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(ResourceError, match=r"is a link to .*source, which does not exist"):
        refuse_early([asking(root=str(folder.path))])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("models/qwn", "no such folder. Did you mean 'qwen'? In models there are: empty, qwen."),
        ("models/gone", "models/gone is a link to nowhere, which does not exist"),
        ("models/empty", "models/empty has no config.json"),
        ("models", "models has no config.json. In models there are: qwen."),
        ("models/qwen/config.json", "is a file, not a folder"),
        ("x" * 5000, "cannot be accessed"),
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
    with pytest.raises(ConfigError, match=r"set by model\.seed"):
        plan_sweep(["runtime=vllm", "runtime.batch_size=1,2", "runtime.engine.seed=3"], None)


# --- what the machine cannot do -----------------------------------------------------------------------------------------

GIB = 2**30
NO_GPU = Missing("NVML: no driver")
H100 = GpuSize("NVIDIA H100", 80 * GIB, (9, 0), 13)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of the test's own."""

    def made(
        *, cuda: str | None = "13.0", gpus: Maybe[int] = NO_GPU, size: Maybe[GpuSize] = NO_GPU, memory: int = 24 * GIB,
        bf16: bool = True, driver: bool = False, hip: str | None = None,
    ) -> None:  # fmt: skip
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(preflight, "torch_build", lambda: TorchBuild(cuda, hip))
        monkeypatch.setattr(device, "gpu_count", lambda: gpus)
        monkeypatch.setattr(device, "_driver_is_installed", lambda: driver)
        monkeypatch.setattr(preflight, "gpu_size", lambda index: size)
        monkeypatch.setattr(preflight, "total_memory_bytes", lambda: memory)
        monkeypatch.setattr(preflight, "cpu_has_native_bf16", lambda: bf16)

    return made


def refused(*overrides: str) -> LlmPerfError:
    with pytest.raises(LlmPerfError) as caught:
        refuse_early([compose(overrides).config])
    assert caught.value.remedy
    return caught.value


def allowed(*overrides: str) -> None:
    refuse_early([compose(overrides).config])


def test_no_gpu_is_told_where_one_is_asked_for(machine: Any) -> None:
    machine(cuda=None, gpus=1, size=H100)
    error = refused("hardware=single_gpu")
    assert (error.exit_code, error.fact) == (3, "hardware.device=cuda, but the installed torch is built without CUDA.")
    machine()
    assert "torch finds no CUDA device" in refused("hardware=single_gpu").fact
    machine(gpus=0)
    assert "torch finds no CUDA device" in refused("hardware=single_gpu").fact
    machine(gpus=2, size=H100)
    assert "there are 2 CUDA devices" in refused("hardware=single_gpu", "hardware.device_index=2").fact
    allowed("hardware=single_gpu", "hardware.device_index=1")


def test_a_gpu_asked_for_by_its_number_alone_is_looked_for(machine: Any) -> None:
    machine(gpus=2, size=H100)
    assert "there are 2 CUDA devices" in refused("hardware.device_index=2").fact
    allowed("hardware.device_index=1")
    machine(gpus=0)
    allowed("hardware.device_index=2")  # it runs on the CPU, where the number means nothing


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,1,2,3", 2), ("GPU-8a", 1), ("MIG-1/2/3", 1)]
)
def test_devices_that_are_hidden_do_not_count(machine: Any, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    machine(gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.most_cuda_devices(TorchBuild("13.0", None)) == count


def test_what_only_torch_can_tell_is_left_to_it(machine: Any) -> None:
    machine(driver=True)  # as on a board whose driver has no NVML
    allowed("hardware=single_gpu")
    machine(cuda=None, hip="6.4")
    allowed("hardware=single_gpu")
    allowed("model=llama3_70b")
    assert device.most_cuda_devices(None) is None


def test_weights_that_no_memory_holds_are_refused(machine: Any) -> None:
    machine(cuda=None, memory=24 * GIB)
    error = refused("model=llama3_70b")
    assert error.exit_code == 3
    assert "llama3_70b does not fit" in error.fact
    assert "131.42 GiB in bf16" in error.fact
    assert "24.00 GiB" in error.fact
    machine(cuda=None, memory=24 * GIB, bf16=False)
    assert "262.83 GiB in fp32" in refused("model=llama3_70b").fact
    machine(cuda=None, memory=132 * GIB)
    allowed("model=llama3_70b")
    assert "in fp32" in refused("model=llama3_70b", "model.dtype=fp32").fact
    machine(gpus=1, size=H100, memory=1000 * GIB)
    assert "NVIDIA H100" in refused("model=llama3_70b").fact
    allowed("model=llama3_70b", "hardware=cpu")
    allowed("model=llama3_8b")


def test_a_cache_that_no_memory_holds_is_refused(machine: Any) -> None:
    machine(cuda=None, memory=24 * GIB)
    large = ("runtime.batch_size=100000", "runtime.prompt_tokens=4000", "model.dtype=bf16")
    error = refused(*large)
    assert error.exit_code == 3
    config = compose(large).config
    shape = config.model.architecture
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    each = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    cache = each * 100_000 * (4000 + config.runtime.num_new_tokens - 1)
    assert f"KV cache {cache / GIB:.2f} GiB" in error.fact
    assert "batch" in error.remedy
    machine(cuda=None, memory=cache + GIB)
    allowed(*large)
    machine(cuda=None, memory=24 * GIB)
    allowed(*large[::2], "dataset=sample_prompts", "runtime.prompt_tokens=4000", "runtime.num_new_tokens=2")


def test_an_attention_package_that_is_not_here_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cuda=None)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    error = refused("runtime.attn_implementation=flash_attention_2")
    assert (error.exit_code, "flash_attn" in error.fact) == (3, True)
    allowed("runtime.attn_implementation=sdpa")
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    allowed("runtime.attn_implementation=flash_attention_2")


def test_an_engine_is_given_no_images() -> None:
    assert "images of tiny_vlm" in refused("runtime=vllm", "model=tiny_vlm").fact
    allowed("runtime=vllm", "model=tiny_vlm", "dataset.images=0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model=tiny_vlm hardware=cpu runtime.tensor_parallel=2", "runtime.tensor_parallel=2"),
        ("model=tiny_vlm runtime.quantization=int8", "runtime.quantization=int8"),
        ("model=tiny_vlm dataset.image_tiles=2", "dataset.image_tiles=2"),
        ("model=tiny_vlm dataset.image_height=64 dataset.image_width=64", "112 × 112"),
        ("model=tiny_vlm model.architecture.vision_config.model_type=pixtral", "pixtral"),
        ("model=tiny_qwen2_5_vl dataset.image_tiles=2", "dataset.image_tiles=2"),
        (
            "model=tiny_qwen2_5_vl dataset.image_height=60 dataset.image_width=56 "
            "+model.architecture.vision_config.patch_size=14 +model.architecture.vision_config.spatial_merge_size=2",
            "multiples of 28",
        ),
    ],
)
def test_images_that_a_model_cannot_take_are_refused_unless_it_runs_on_text(words: str, said: str) -> None:
    assert said in refused(*words.split()).fact
    allowed(*words.split(), "dataset.images=0")


@pytest.mark.parametrize("words", ["dataset.image_height=64 dataset.image_width=64", "dataset.image_tiles=2", "dataset.images=3"])
def test_a_text_model_takes_no_settings_of_images(words: str) -> None:
    error = refused("model=tiny", *words.split())
    assert "qwen2 models run on text only" in error.fact
    assert "llava" in error.remedy


def test_images_that_every_family_takes_are_allowed() -> None:
    for name in ("vlm", "deepseek_ocr2", "deepseek_vl", "gemma3", "got_ocr2", "internvl", "qwen2_5_vl", "qwen3_vl"):
        allowed(f"model=tiny_{name}")
    for name in ("deepseek_ocr2", "got_ocr2", "internvl"):
        allowed(f"model=tiny_{name}", "dataset.image_tiles=2")
    allowed("model=tiny_qwen2_5_vl", "dataset.image_height=56", "dataset.image_width=84")
    allowed("model=tiny_vlm", "dataset.image_height=112", "dataset.image_width=112")


def test_a_field_that_is_left_to_its_default_is_not_judged() -> None:
    """The size of a CLIP encoder without `image_size` is known to transformers alone."""
    unknown = ("model=tiny_vlm", "~model.architecture.vision_config.image_size")
    allowed(*unknown, "dataset.image_height=64", "dataset.image_width=64")
    assert "image_tiles" in refused(*unknown, "dataset.image_tiles=2").fact


def test_a_folder_of_images_is_looked_at_first(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    words = ["model=tiny_vlm", "dataset=image_folder", f"dataset.path={tmp_path}"]
    assert "contains no images" in refused(*words).fact
    (tmp_path / "a.png").write_bytes(b"text")
    assert "a.png cannot be used" in refused(*words).fact


def test_a_size_that_is_not_certain_is_not_refused(machine: Any) -> None:
    machine(gpus=1, size=Missing("NVML: not permitted"))
    allowed("model=llama3_70b")
    machine(gpus=1, size=replace(H100, driver_cuda=12))  # torch for CUDA 13 would take the CPU
    allowed("model=llama3_70b")
    machine(cuda=None, memory=GIB // 1000)
    refused("model=tiny_vlm")
    # There is no cost model of this encoder, and it does not run with images.
    allowed("model=tiny_vlm", "model.architecture.vision_config.model_type=pixtral", "dataset.images=0")


def folder(path: Path, **fields: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return f"model.path={path}"


def test_a_folder_is_judged_by_its_own_config(tmp_path: Path, machine: Any) -> None:
    machine(cuda=None, memory=GIB // 1000)
    shape = compose([]).config.model.architecture
    plain = folder(tmp_path / "plain", **shape)
    assert "plain does not fit" in refused("model=hf", plain).fact
    allowed("model=hf", folder(tmp_path / "packed", **shape, quantization_config={"bits": 4}))
    allowed("model=hf", folder(tmp_path / "strange", model_type="mystery", max_position_embeddings=4096))
    coded = folder(tmp_path / "coded", **shape, auto_map={})
    allowed("model=hf", coded, "model.trust_remote_code=true", "runtime.prompt_tokens=9999")
    (tmp_path / "plain" / "config.json").write_text("{")
    allowed("model=hf", plain)


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        (["runtime.prompt_tokens=4033"], True),
        (["runtime.prompt_tokens=4034"], False),
        (["model=gpt2", "runtime.prompt_tokens=961"], True),
        (["model=gpt2", "runtime.prompt_tokens=962"], False),
        (["model=tiny_vlm", "runtime.prompt_tokens=4034"], False),
        (["dataset=sample_prompts", "runtime.prompt_tokens=99999"], True),  # texts are cut to this, and may be short
        (["dataset=sample_prompts", "runtime.num_new_tokens=4097"], False),
        (["~model.architecture.max_position_embeddings", "runtime.prompt_tokens=99999"], True),
    ],
)
def test_positions_are_counted_before_anything_starts(machine: Any, overrides: list[str], fits: bool) -> None:
    machine(cuda=None)
    if fits:
        allowed(*overrides)
    else:
        error = refused(*overrides)
        assert error.exit_code == 2
        assert "positions" in error.fact


def test_the_installed_torch_is_read_without_loading_it() -> None:
    import torch

    found = device.torch_build()
    assert found is not None
    assert (found.cuda, found.hip) == (torch.version.cuda, torch.version.hip)


def test_a_refusal_loads_nothing_heavy() -> None:
    from llm_perf_opt.core.processes import ask

    code = (
        "import sys\nfrom llm_perf_opt.cli.run import run\nfrom llm_perf_opt.core.errors import ConfigError\n"
        "try:\n    run(['runtime.prompt_tokens=5000'])\nexcept ConfigError as error:\n"
        "    print('positions' in error.fact, {'torch', 'numpy', 'duckdb', 'transformers'} & set(sys.modules))"
    )
    assert ask([sys.executable, "-c", code]) == "True set()"


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compose(["hardware=cpu", "runtime.compile=default"]).config
    monkeypatch.setattr(preflight, "compiler_problem", lambda: "")
    refuse_early([compiled])
    monkeypatch.setattr(preflight, "compiler_problem", lambda: "there is no g++ on the PATH")
    with pytest.raises(ConfigError, match=r"no g\+\+ on the PATH") as caught:
        refuse_early([compiled])
    for command in ("apt-get install g++", "dnf install gcc-c++", "brew"):
        assert command in caught.value.remedy
    refuse_early([compose(["hardware=cpu"]).config])


def test_cpus_that_this_process_may_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="CPU 8191"):
        refuse_early([compose(["hardware.cpus=8191"]).config])


def test_ranks_need_their_share_of_the_memory(machine: Any) -> None:
    """Llama-3-70B in bf16 is 131 GiB: one H100 does not hold it, each of two holds half, both halves on one are too much."""
    machine(gpus=4, size=H100, memory=1000 * GIB)
    wide = ("model=llama3_70b", "model.dtype=bf16")
    assert "131." in refused(*wide, "hardware=single_gpu").fact
    allowed(*wide, "hardware=multi_gpu", "runtime.tensor_parallel=2")
    assert "does not fit" in refused(*wide, "hardware=single_gpu", "runtime.tensor_parallel=2").fact


def test_as_many_gpus_as_requested_must_exist(machine: Any) -> None:
    machine(gpus=1, size=H100)
    error = refused("hardware=multi_gpu", "runtime.tensor_parallel=2")
    assert "hardware.devices=2 needs GPUs 0 to 1, but there is one" in error.fact
    assert "hardware=single_gpu" in error.remedy
    allowed("hardware=single_gpu", "runtime.tensor_parallel=2", "model.dtype=fp32")
    allowed("hardware=multi_gpu", "hardware.devices=1", "runtime.tensor_parallel=1")


def test_heads_that_ranks_cannot_divide_are_refused_before_anything_starts(machine: Any) -> None:
    machine(cuda=None)
    error = refused("model=tiny", "hardware=cpu", "runtime.tensor_parallel=4")
    assert "8 attention heads and 2 key-value heads" in error.fact
    assert error.remedy == "It fits: 1, 2."
