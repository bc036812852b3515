"""The measured process: runtimes and how they are measured."""

ENTRY_POINTS = {
    "pytorch": "llm_perf_opt.runners.models:RUNTIME",
    "vllm": "llm_perf_opt.runners.vllm_runner:RUNTIME",
    "tensorrtllm": "llm_perf_opt.runners.tensorrtllm_runner:RUNTIME",
    "onnxruntime_genai": "llm_perf_opt.runners.onnxruntime_genai_runner:RUNTIME",
    "openvino_genai": "llm_perf_opt.runners.openvino_genai_runner:RUNTIME",
    "llamacpp": "llm_perf_opt.runners.llamacpp_runner:RUNTIME",
}
"""The built-in runtimes, in the form of entry points of the group `llm_perf_opt.runners`."""
