"""What the vLLM runner uses exists in vLLM 0.24 (recorded from its wheel) and in the installed version (read from its source)."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "fixtures" / "vllm" / "names_0.24.0.json"
"""File → class → its names; of LLMEngine, the parameters of each method. Written by `names_of` from vllm-0.24.0's wheel."""
USED: dict[str, dict[str, set[str]]] = {
    "config/attention.py": {"AttentionConfig": {"backend"}},
    "config/cache.py": {
        "CacheConfig": {
            "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes",
            "kv_cache_size_tokens", "num_gpu_blocks",
        }
    },
    "config/compilation.py": {"CompilationConfig": {"cudagraph_mode", "mode", "static_forward_context"}},
    "config/model.py": {"ModelConfig": {"dtype", "enforce_eager", "quantization"}},
    "config/parallel.py": {
        "ParallelConfig": {"data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "world_size"}
    },
    "config/profiler.py": {
        "ProfilerConfig": {
            "profiler", "torch_profiler_dir", "torch_profiler_record_shapes", "torch_profiler_with_memory",
            "torch_profiler_with_stack",
        }
    },
    "config/scheduler.py": {"SchedulerConfig": {"async_scheduling", "max_num_batched_tokens", "max_num_seqs"}},
    "config/vllm.py": {
        "VllmConfig": {
            "attention_config", "cache_config", "compilation_config", "model_config", "parallel_config", "scheduler_config",
            "speculative_config",
        }
    },
    "engine/arg_utils.py": {
        "EngineArgs": {
            "async_scheduling", "create_engine_config", "disable_log_stats", "dtype", "enable_prefix_caching",
            "kv_cache_memory_bytes", "load_format", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "model",
            "profiler_config", "seed", "skip_tokenizer_init", "trust_remote_code",
        }
    },
    "platforms/interface.py": {"Platform": {"device_type"}},
    "sampling_params.py": {
        "RequestOutputKind": {"DELTA"},
        "SamplingParams": {
            "detokenize", "ignore_eos", "max_tokens", "output_kind", "temperature",
        },
    },
    "usage/usage_lib.py": {"UsageContext": {"LLM_CLASS"}},
    "v1/core/sched/interface.py": {"PauseState": {"PAUSED_NEW", "UNPAUSED"}},
    "v1/engine/core_client.py": {"InprocClient": {"engine_core"}},
    "v1/engine/llm_engine.py": {
        "LLMEngine": {
            "add_request(request_id, prompt, params)", "engine_core",
            "from_vllm_config(vllm_config, usage_context, disable_log_stats)", "has_unfinished_requests()",
            "reset_prefix_cache()", "sleep(level)", "start_profile()", "step()", "stop_profile()", "vllm_config", "wake_up(tags)",
        }
    },
}  # fmt: skip


def names_of(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the names of the classes that the runner uses: fields, attributes that a method sets, methods with parameters."""
    found: dict[str, dict[str, list[str]]] = {}
    for file, classes in USED.items():
        tree = ast.parse((folder / file).read_text())
        named = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        found[file] = {name: sorted(set(_members(named[name]))) for name in classes if name in named}
    return found


def _members(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id
        elif isinstance(line, ast.Assign):
            yield from (target.id for target in line.targets if isinstance(target, ast.Name))
        elif isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{line.name}({', '.join(each.arg for each in (*line.args.args, *line.args.kwonlyargs))})"
            yield from _attributes(line)


def _attributes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for part in ast.walk(method):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name):
            yield part.attr


def missing(names: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return what the runner uses and these names lack. A method has at least the parameters that are used."""
    lost = []
    for file, classes in USED.items():
        for name, members in classes.items():
            there = names.get(file, {}).get(name)
            lost += [f"{file}: {name}.{member}" for member in members if there is None or not _has(there, member)]
    return lost


def _has(there: list[str], member: str) -> bool:
    name, called, given = member.partition("(")
    methods = {entry.partition("(")[0]: entry for entry in there if "(" in entry}
    if not called:
        return name in there or name in methods
    found = methods.get(name, "").partition("(")[2].rstrip(")").split(", ")
    return name in methods and {part for part in given.rstrip(")").split(", ") if part} <= set(found)


def test_vllm_0_24_has_every_name() -> None:
    assert missing(json.loads(RECORDED.read_text())) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    names = json.loads(RECORDED.read_text())
    names["sampling_params.py"]["SamplingParams"].remove("ignore_eos")
    del names["usage/usage_lib.py"]
    names["v1/engine/llm_engine.py"]["LLMEngine"] = [
        "sleep(self, mode)" if name.startswith("sleep(") else name for name in names["v1/engine/llm_engine.py"]["LLMEngine"]
    ]
    assert missing(names) == [
        "sampling_params.py: SamplingParams.ignore_eos",
        "usage/usage_lib.py: UsageContext.LLM_CLASS",
        "v1/engine/llm_engine.py: LLMEngine.sleep(level)",
    ]


@pytest.mark.slow
def test_the_installed_vllm_has_every_name(vllm_python: Path) -> None:
    (folder,) = vllm_python.parent.parent.glob("lib/python*/site-packages/vllm")
    assert missing(names_of(folder)) == []
