"""The class of every kernel of a trace, by its name: each distinct name is looked at once."""

import functools
import re
from dataclasses import dataclass
from enum import Enum

import numpy as np

from llm_perf_opt.analysis.kernels.names import LONGEST
from llm_perf_opt.traces.events import Trace, UInt8, WorkKind
from llm_perf_opt.traces.health import MOST_NAMES, within_reason


class KernelClass(str, Enum):
    """What a kernel computes."""

    GEMM = "GEMM"
    GEMV = "GEMV"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    COPY = "copy"
    MOE_ROUTING = "MoE routing"
    SAMPLING = "sampling"
    COLLECTIVE = "collective"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


RULES: tuple[tuple[str, KernelClass, str], ...] = (
    # --- the runtime's own work ---------------------------------------------------------------------------------------
    (r"^\[?(CUDA )?(memcpy|memset)\b", KernelClass.COPY, "copies and fills as torch and nsys spell them"),
    (r"^(CopyHostToDevice|CopyDeviceToHost|CopyDeviceToDevice|FillBuffer)", KernelClass.COPY, "the same on ROCm"),
    # --- collectives --------------------------------------------------------------------------------------------------
    (r"nccl|rccl|nvshmem|rocshmem|msccl", KernelClass.COLLECTIVE, "communication libraries"),
    (
        r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast_kernel",
        KernelClass.COLLECTIVE,
        "hand-written collectives",
    ),
    (
        r"cross_device_reduce|multimem_|lamport|moe_?a2a|quick_?reduce|user_?buffers",
        KernelClass.COLLECTIVE,
        "of vLLM, torch, TensorRT-LLM, ROCm",
    ),
    (
        r"symmetric_memory::|(wait|put)_signal",
        KernelClass.COLLECTIVE,
        "torch's barriers and signals between ranks, which wait for their peers",
    ),
    (r"deep_ep::|(intra|inter)node(_ll)?::", KernelClass.COLLECTIVE, "DeepEP's dispatch and combine between ranks"),
    # --- Inductor's own kernels: before all whose words they share, since they are named after everything fused into them --
    (r"triton_(red|per|spl)_fused\w{0,1000}argmax", KernelClass.SAMPLING, "a compiled choice of the token"),
    (r"triton_(red|per)_fused\w{0,1000}rsqrt", KernelClass.NORM, "a compiled reduction with 1/√: RMS or layer norm"),
    (r"triton_(red|per|spl)_", KernelClass.REDUCTION, "compiled reductions and scans"),
    (
        r"triton_poi_fused_(_to_copy|clone|cat|stack|index_select|embedding|copy_|view|t|transpose|slice|_)+\d*$",
        KernelClass.COPY,
        "compiled copies",
    ),
    (r"triton_(poi|for)_", KernelClass.ELEMENTWISE, "compiled pointwise kernels, whatever they are fused of"),
    # --- writing the KV cache: before attention, whose words it shares --------------------------------------------------
    (
        r"reshape_and_cache|concat_and_cache|copy_blocks|swap_blocks|set_(mla_)?kv_buffer|store_?kv",
        KernelClass.COPY,
        "into the KV cache",
    ),
    (
        r"append_?paged_?kv|gather_(and_maybe_dequant_)?cache|update_?kv_?cache|kv_indices",
        KernelClass.COPY,
        "KV cache bookkeeping",
    ),
    # --- attention ----------------------------------------------------------------------------------------------------
    (
        r"flash_?(fwd|bwd|attn|mla|decod)|FlashAttn|\bflash::|pytorch_flash::",
        KernelClass.ATTENTION,
        "FlashAttention and kin",
    ),
    (r"fmha|sdpa|attention|[_:]attn_|_attn\b|attn_fwd", KernelClass.ATTENTION, "fused attention of any library"),
    (r"multihead|\bx?mmha|kernel_mha|\bxqa|paged_attn", KernelClass.ATTENTION, "TensorRT-LLM's masked attention, XQA"),
    (r"With(Paged|Ragged)?KVCache|MergeStates?Kernel|merge_states", KernelClass.ATTENTION, "FlashInfer"),
    (r"lean_reduction_kernel", KernelClass.ATTENTION, "cuDNN adds up the parts of a split attention"),
    (
        r"_fwd_(grouped_)?kernel_stage[12]|^_fwd_kernel|mla_(metadata|decode|combine)",
        KernelClass.ATTENTION,
        "Triton decode attention, MLA",
    ),
    # --- experts: the products before the routing ---------------------------------------------------------------------
    (
        r"fused_moe_kernel|moe_wna16|moe_gemm|group(ed)?_?(mm|gemm)|fused_experts",
        KernelClass.GEMM,
        "products of all experts at once",
    ),
    (
        r"topk_?gating|topk_?softmax|grouped_topk|moe_?fused_?gate|routing(Main|Indices|Init|Deep|Custom)",
        KernelClass.MOE_ROUTING,
        "which experts",
    ),
    (
        r"moe_?align|count_and_sort_expert|expert_(offset|token|first)|expandInputRows|finalizeMoeRouting",
        KernelClass.MOE_ROUTING,
        "sorting tokens",
    ),
    (
        r"moe_?(sum|permute|unpermute|sort|gather|finalize)|shuffle_?rows|ep_(gather|scatter)|\bmoe::",
        KernelClass.MOE_ROUTING,
        "and back",
    ),
    # --- choosing the next token --------------------------------------------------------------------------------------
    (
        r"sampling|multinomial|arg_?max|gumbel|top_?[kp]_?(top_?p|mask|renorm)|min_?p_",
        KernelClass.SAMPLING,
        "picking from the logits",
    ),
    (
        r"gatherTopK|radixSelect|radixFindKthValues|bitonicSort|radixSort|top_?k|RadixSort",
        KernelClass.SAMPLING,
        "top-k and sorting",
    ),
    (
        r"repetition_penalt|apply_penalt|logit_bias|rejection_|exponential_kernel|log_softmax_kernel",
        KernelClass.SAMPLING,
        "on the logits",
    ),
    # --- products with one row ----------------------------------------------------------------------------------------
    (r"gemv(?!Tensor)|mul_mat_vec|wvSplitK|LLMM1|gemm_4bit_inference|mat_?vec", KernelClass.GEMV, "matrix × vector"),
    # --- matrix products ----------------------------------------------------------------------------------------------
    (
        r"gemm|nvjet|splitKreduce|\bmul_mat_q|xmma|Cijk_|matmul|_mm_|[_a-z]bmm_|^bmm_",
        KernelClass.GEMM,
        "cuBLAS, CUTLASS, rocBLAS, Triton",
    ),
    (
        r"marlin|machete|cutlass|exllama|scaled_mm|wgmma|hmma|triton_mm|dense_mlp",
        KernelClass.GEMM,
        "quantized and hand-written products",
    ),
    (r"conv(2d|3d|_fwd|olve)|implicit_|winograd|fprop", KernelClass.GEMM, "convolutions are products"),
    # --- norms --------------------------------------------------------------------------------------------------------
    (r"(rms|layer|group|batch|qk|l2|instance)_?norm|RowwiseMoments|norm_kernel|NormKernel", KernelClass.NORM, "named so"),
    # --- compiled by inductor -----------------------------------------------------------------------------------------
    (r"triton_tem_", KernelClass.ELEMENTWISE, "other compiled templates"),
    # --- moving data --------------------------------------------------------------------------------------------------
    (
        r"CatArrayBatchedCopy|copy_kernel|copy_device|Memcpy|transpose|permute_kernel|FillFunctor",
        KernelClass.COPY,
        "copies, casts, fills",
    ),
    (
        r"index_?(select|put|copy|kernel|elementwise)|gather|scatter|(?<!rotary_)embedding(_kernel|_lookup|Kernel)?\b",
        KernelClass.COPY,
        "indexed",
    ),
    (
        r"k_get_rows|cpy_|convert_unary|concat_|repeat_kernel|roll_cuda|triu|tril",
        KernelClass.COPY,
        "moves in llama.cpp and elsewhere",
    ),
    # --- the rest of the arithmetic -----------------------------------------------------------------------------------
    (
        r"reduce_kernel|softmax|soft_max|DeviceScan|scan_(inner|outer)|DeviceReduce|reduce_1Block|\bdot_kernel",
        KernelClass.REDUCTION,
        "sums",
    ),
    (r"sum_rows|cumsum|reduction", KernelClass.REDUCTION, "more sums"),
    (
        r"elementwise|rotary|rope|act_and_mul|silu|gelu|swiglu|relu|doActivation|activation",
        KernelClass.ELEMENTWISE,
        "one value at a time",
    ),
    (
        r"quantize|_quant_|dequant|QuantKernel|fp8_cast|scale_kernel|add_bias|bin_bcast|unary_op",
        KernelClass.ELEMENTWISE,
        "casts with a scale",
    ),
    (r"^k?_?(add|mul|div|sub|where|clamp|fill)_?(kernel|f32|f16)?\b", KernelClass.ELEMENTWISE, "plain arithmetic"),
)
"""(pattern, class, why)"""


__all__ = ["CLASSES", "ClassShare", "KernelClass", "class_of_work", "class_shares", "classify", "within_reason"]

CLASSES = tuple(KernelClass)
"""A class's number in columns is its place here."""


def _lower(pattern: str) -> str:
    """A pattern for names in lower case, which are searched four times as fast as names whose case is ignored."""
    return re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0].startswith("\\") else found[0].lower(), pattern)


_COMPILED = [(re.compile(_lower(pattern)), kind) for pattern, kind, _ in RULES]


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def classify(name: str) -> KernelClass:
    """What a kernel of this name computes; `other` where no rule knows it, or the name is longer than any compiler's."""
    if len(name) > LONGEST:
        return KernelClass.OTHER
    lower = name.lower()
    return next((kind for pattern, kind in _COMPILED if pattern.search(lower)), KernelClass.OTHER)


@dataclass(frozen=True)
class ClassShare:
    """All kernels of one class."""

    kind: KernelClass
    calls: int
    total_ns: int
    share: float
    """Of the summed kernel time. That of `other` is what the rules do not know."""


def class_of_work(trace: Trace) -> UInt8:
    """Per row of device work: the place of its class in CLASSES. Copies and memsets are copies whatever they are called."""
    names, number = np.unique(trace.work.name, return_inverse=True)
    if not within_reason(trace, names):
        return np.full(len(trace.work), CLASSES.index(KernelClass.OTHER), np.uint8)
    of_name = np.array([CLASSES.index(classify(trace.name_of(int(name)))) for name in names], np.uint8)
    found = of_name[number.reshape(-1)] if len(names) else np.empty(0, np.uint8)
    found[trace.work.kind != WorkKind.KERNEL] = CLASSES.index(KernelClass.COPY)
    return found


def class_shares(trace: Trace, class_of: UInt8 | None = None) -> tuple[ClassShare, ...]:
    """Kernel time by class, the largest first; copies and memsets by the runtime are not kernels and stand apart."""
    of_work = class_of_work(trace) if class_of is None else class_of
    kernel = trace.work.kind == WorkKind.KERNEL
    duration = (trace.work.end_ns - trace.work.start_ns)[kernel]
    total = int(duration.sum())
    rows = []
    for number, kind in enumerate(CLASSES):
        mine = of_work[kernel] == number
        time = int(duration[mine].sum())
        if mine.any():
            rows.append(ClassShare(kind, int(mine.sum()), time, time / total if total else 0.0))
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind)))
