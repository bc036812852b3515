"""A project as the structure guide lays it out, with small data and weights behind its links."""

import shutil
from pathlib import Path

from dataset_builders import RECORDS, write_jsonl

ROOT = Path(__file__).parent.parent

CONF = {
    "config.yaml": (
        "defaults:\n  - hydra: default\n  - model: qwen2_5_7b\n  - runtime: pytorch\n  - profiling: minimal\n  - _self_\n"
        "experiment: baseline\n"
    ),
    "hydra/default.yaml": (
        "hydra:\n  run:\n    dir: runs/${experiment}/${model.name}/${now:%Y-%m-%d_%H-%M-%S}\n"
        "  job:\n    name: ${experiment}\n    chdir: true\n"
    ),
    "model/qwen2_5_7b.yaml": "name: qwen2_5_7b\npath: ${hydra:runtime.cwd}/models/qwen2_5_7b\ndtype: bf16\n",
    "model/llama3_70b.yaml": "name: llama3_70b\npath: ${hydra:runtime.cwd}/models/llama3_70b\ndtype: bf16\n",
    "dataset/openwebtext.yaml": "name: openwebtext\nroot: ${hydra:runtime.cwd}/datasets/openwebtext\nvariant: null\n",
    "dataset/c4.yaml": "name: c4\nroot: ${hydra:runtime.cwd}/datasets/c4\nvariant: null\n",
    "runtime/pytorch.yaml": "type: pytorch\nbatch_size: 1\nnum_new_tokens: 64\ntorch_profiler: { enabled: false }\n",
    "runtime/vllm.yaml": "type: vllm\nbatch_size: 1\nnum_new_tokens: 64\n",
    "runtime/tensorrtllm.yaml": "type: tensorrtllm\nbatch_size: 1\nnum_new_tokens: 64\n",
    "hardware/single_gpu.yaml": "device_index: 0\n",
    "profiling/minimal.yaml": "nsys: { enable: false }\nncu:  { enable: false }\nnvml: { enable: true }\n",
    "profiling/full.yaml": (
        'nsys: { enable: true, args: "--cuda-memory-usage=true" }\nncu:  { enable: true }\nnvml: { enable: true }\n'
    ),
    "profiling/stage2.yaml": (
        "defaults:\n  - /profiling/torch@profiling: torch-profiler.min\n  - _self_\n"
        "run:\n  mode: deep          # deep|light\n  top_n_kernels: 30   # used by ncu selection\n"
        "artifacts:\n  stage2_dir: ${hydra:runtime.cwd}/tmp/stage2/${now:%Y%m%d-%H%M%S}\n"
        "hydra:\n  run:\n    dir: ${artifacts.stage2_dir}\n  output_subdir: null\n  job:\n    chdir: true\n"
    ),
}
METADATA = """\
name: {name}
version: "1.0"
source: https://huggingface.co/datasets/{name}
splits: {{ train: {count} }}
notes: "Downloaded with HF datasets; source-data is read-only."
"""


def lay_out(folder: Path, *, conf: bool) -> Path:
    """Create the tree of the guide; without `conf`, without its option files."""
    project, data = folder / "project", folder / "data"
    for name, text in CONF.items() if conf else ():
        _write(project / "conf" / name, text)
    first = _weights(data / "weights" / "qwen2_5_7b")
    for name in ("qwen2_5_7b", "llama3_70b"):
        if name != first.name:
            shutil.copytree(first, data / "weights" / name)
        _link(project / "models" / name, data / "weights" / name)
    for name, variant in (("openwebtext", "tokenized-gpt2"), ("c4", "en-validation")):
        write_jsonl(data / "datasets" / name / "train.jsonl", RECORDS * 21)
        _link(project / "datasets" / name / "source-data", data / "datasets" / name)
        _write(project / "datasets" / name / "metadata.yaml", METADATA.format(name=name, count=21 * len(RECORDS)))
        _write(project / "datasets" / name / "README.md", f"# {name}\n")
        (project / "datasets" / name / variant).mkdir()
    _write(project / "datasets" / ".gitignore", "*/source-data\n*/source-data/**\n")
    for name in ("github/transformers", "github/vllm", "hf/meta-llama/Llama-3", "hf/Qwen/Qwen2.5"):
        (project / "third_party" / name).mkdir(parents=True)
    _write(project / "src" / "gpu_bench" / "__init__.py", "")
    for name in ("scripts", "tests"):
        _link(project / name, ROOT / name)
    _write(project / "pyproject.toml", (ROOT / "pyproject.toml").read_text())
    _write(project / "README.md", "# gpu-bench\n")
    return project


def _weights(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target, target_is_directory=True)
