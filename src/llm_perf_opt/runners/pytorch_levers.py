"""What `llm-perf tune` may change in the PyTorch runtime without a prediction."""

from llm_perf_opt.config.runtimes import Lever, Machine

_STATIC, _PREFILL = "runtime.cache=static", "runtime.compile_prefill=true"
_DESCENT, _EAGER = "runtime.coordinate_descent_tuning=true", "runtime.attn_implementation=eager"
_GRAPHS = (_STATIC, "runtime.compile=reduce-overhead")


def pytorch_levers(machine: Machine) -> tuple[Lever, ...]:
    """Return the levers of this machine, those that usually matter most first. Unsupported choices are refused by the runner."""
    return (*(_on_gpu() if machine.device == "cuda" else _on_cpu(machine)), *_EVERYWHERE)


def _on_gpu() -> tuple[Lever, ...]:
    modes = ("reduce-overhead", "max-autotune", "default")
    return (
        Lever("compile", tuple((_STATIC, f"runtime.compile={mode}") for mode in modes)),
        Lever("row kernel", ((*_GRAPHS, "runtime.row_kernel=true"),)),
        Lever("coordinate descent", ((*_GRAPHS, _DESCENT),)),
        Lever("fused projections", (("runtime.fuse_projections=true",),)),
        Lever("compile prefill", tuple((_STATIC, f"runtime.compile={mode}", _PREFILL) for mode in modes[::2]), stage="prefill"),
        Lever("static cache", ((_STATIC,),)),
        Lever(
            "attention",
            tuple((f"runtime.attn_implementation={name}",) for name in ("sdpa", "flash_attention_2", "flex_attention")),
        ),
        Lever("generated attention", ((*_GRAPHS, _DESCENT, _EAGER),)),
        Lever("attention backend", tuple((f"runtime.attention_backend={name}",) for name in ("flash", "cudnn", "efficient"))),
        Lever("quantization", tuple((f"runtime.quantization={name}",) for name in ("int8", "fp8", "int4")), lossy=True),
        Lever("dtype", (("model.dtype=bf16",), ("model.dtype=fp16",)), lossy=True),
    )


def _on_cpu(machine: Machine) -> tuple[Lever, ...]:
    compiling: tuple[Lever, ...] = ()
    if machine.compiler:
        compiling = (
            Lever("compile", ((_STATIC, "runtime.compile=default"),)),
            Lever("compile prefill", ((_STATIC, "runtime.compile=default", _PREFILL),), stage="prefill"),
            Lever("generated attention", ((_STATIC, "runtime.compile=default", _EAGER),)),
        )
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < machine.processors] + [machine.processors]
    return (
        *compiling,
        Lever("threads", tuple((f"hardware.threads={count}",) for count in counts)),
        Lever("fused projections", (("runtime.fuse_projections=true",),)),
        Lever("static cache", ((_STATIC,),)),
        Lever("waiting", (("hardware.wait_policy=active",), ("hardware.wait_policy=passive",))),
        Lever("attention", (("runtime.attn_implementation=sdpa",),)),
        Lever("quantization", (("runtime.quantization=int8",),), lossy=True),
        Lever("dtype", (("model.dtype=bf16",), ("model.dtype=fp32",)), lossy=True),
    )


_EVERYWHERE = (Lever("batch", tuple((f"runtime.batch_size={size}",) for size in (2, 4, 8, 16, 32, 64)), throughput=True),)
