"""What the vLLM runner uses exists in vLLM 0.24 (recorded from its wheel) and in the installed version (read from its source)."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "fixtures" / "vllm" / "names_0.24.0.json"
"""File → class → its names, with the parameters of methods; the class "" has the names of the file itself, with the values of
literal types. Written by `names_of` from vllm-0.24.0's wheel."""
USED: dict[str, dict[str, set[str]]] = {
    "config/__init__.py": {"": {"set_current_vllm_config"}},
    "config/attention.py": {"AttentionConfig": {"backend", "use_non_causal"}},
    "config/cache.py": {
        "CacheConfig": {
            "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes",
            "kv_cache_size_tokens", "num_gpu_blocks", "user_specified_block_size",
        },
        "": {"CacheDType[fp8]", "CacheDType[fp8_e4m3]", "CacheDType[fp8_e5m2]", "CacheDType[fp8_inc]"},
    },
    "config/compilation.py": {
        "CUDAGraphMode": {"FULL_AND_PIECEWISE", "NONE", "PIECEWISE"},
        "CompilationConfig": {
            "cudagraph_capture_sizes", "cudagraph_mode", "max_cudagraph_capture_size", "mode", "static_forward_context",
        },
    },
    "config/kv_transfer.py": {"KVTransferConfig": {"is_kv_transfer_instance()"}},
    "config/model.py": {
        "ModelConfig": {
            "dtype", "enforce_eager", "get_head_size()", "get_sliding_window()", "is_prefix_caching_supported()", "quantization",
            "use_mla()",
        }
    },
    "config/parallel.py": {
        "ParallelConfig": {
            "data_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
            "tensor_parallel_size", "world_size",
        }
    },
    "config/profiler.py": {
        "ProfilerConfig": {
            "profiler", "torch_profiler_dir", "torch_profiler_record_shapes", "torch_profiler_with_memory",
            "torch_profiler_with_stack",
        }
    },
    "config/scheduler.py": {"SchedulerConfig": {"async_scheduling", "max_num_batched_tokens", "max_num_seqs"}},
    "config/speculative.py": {"SpeculativeConfig": {"method", "num_speculative_tokens", "prompt_lookup_max"}},
    "config/vllm.py": {
        "VllmConfig": {
            "attention_config", "cache_config", "compilation_config", "kv_transfer_config", "model_config", "parallel_config",
            "scheduler_config", "speculative_config",
        }
    },
    "engine/arg_utils.py": {
        "EngineArgs": {
            "async_scheduling", "attention_backend", "compilation_config", "create_engine_config", "cudagraph_capture_sizes",
            "disable_log_stats", "dtype", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype",
            "kv_cache_memory_bytes", "load_format", "max_cudagraph_capture_size", "max_model_len", "max_num_batched_tokens",
            "max_num_seqs", "model", "num_gpu_blocks_override", "optimization_level", "profiler_config", "quantization", "seed",
            "skip_tokenizer_init", "speculative_config", "trust_remote_code",
        }
    },
    "model_executor/layers/quantization/__init__.py": {"": {"QUANTIZATION_METHODS", "QuantizationMethods[fp8]"}},
    "platforms/cuda.py": {"CudaPlatformBase": {"get_valid_backends(device_capability, attn_selector_config)"}},
    "platforms/interface.py": {"Platform": {"device_type", "get_device_capability()", "has_device_capability(capability)"}},
    "sampling_params.py": {
        "RequestOutputKind": {"DELTA"},
        "SamplingParams": {
            "detokenize", "ignore_eos", "max_tokens", "output_kind", "temperature",
        },
    },
    "usage/usage_lib.py": {"UsageContext": {"LLM_CLASS"}},
    "v1/attention/selector.py": {
        "AttentionSelectorConfig": {
            "block_size", "dtype", "head_size", "kv_cache_dtype", "use_batch_invariant", "use_kv_connector", "use_mla",
            "use_non_causal",
        }
    },
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
        named: dict[str, ast.ClassDef | ast.Module] = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        }
        named[""] = tree
        found[file] = {name: sorted(set(_members(named[name]))) for name in classes if name in named}
    return found


def _members(node: ast.ClassDef | ast.Module) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id
        elif isinstance(line, ast.Assign):
            targets = [target.id for target in line.targets if isinstance(target, ast.Name)]
            yield from targets
            yield from (f"{target}[{value}]" for target in targets for value in _literals(line.value))
        elif isinstance(line, ast.ImportFrom):
            yield from (each.name for each in line.names)
        elif isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{line.name}({', '.join(each.arg for each in (*line.args.args, *line.args.kwonlyargs))})"
            yield from _attributes(line)


def _literals(node: ast.expr) -> Iterator[str]:
    """Yield the values of a `Literal[...]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        yield from (str(each.value) for each in ast.walk(node.slice) if isinstance(each, ast.Constant))


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
    names["config/cache.py"][""].remove("CacheDType[fp8]")
    names["v1/engine/llm_engine.py"]["LLMEngine"] = [
        "sleep(self, mode)" if name.startswith("sleep(") else name for name in names["v1/engine/llm_engine.py"]["LLMEngine"]
    ]
    assert missing(names) == [
        "config/cache.py: .CacheDType[fp8]",
        "sampling_params.py: SamplingParams.ignore_eos",
        "usage/usage_lib.py: UsageContext.LLM_CLASS",
        "v1/engine/llm_engine.py: LLMEngine.sleep(level)",
    ]


@pytest.mark.slow
def test_the_installed_vllm_has_every_name(vllm_python: Path) -> None:
    (folder,) = vllm_python.parent.parent.glob("lib/python*/site-packages/vllm")
    assert missing(names_of(folder)) == []
