"""Classify the kernels of a trace by name."""

import functools
import re
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


RULES: tuple[tuple[KernelClass, str], ...] = (
    # --- copies by the runtime -----------------------------------------------------------------------------------------
    # copies and fills, as torch and nsys name them
    (KernelClass.COPY, r"^\[?(CUDA )?(memcpy|memset)\b"),
    # copies and fills on ROCm
    (KernelClass.COPY, r"^(CopyHostToDevice|CopyDeviceToHost|CopyDeviceToDevice|FillBuffer)"),
    # --- collectives ---------------------------------------------------------------------------------------------------
    # communication libraries
    (KernelClass.COLLECTIVE, r"nccl|rccl|nvshmem|rocshmem|msccl"),
    # hand-written collectives
    (KernelClass.COLLECTIVE, r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast_kernel"),
    # collectives of vLLM, torch, TensorRT-LLM, ROCm
    (KernelClass.COLLECTIVE, r"cross_device_reduce|multimem_|lamport|moe_?a2a|quick_?reduce|user_?buffers"),
    # torch's barriers and signals between ranks, which wait for their peers
    (KernelClass.COLLECTIVE, r"symmetric_memory::|(wait|put)_signal"),
    # DeepEP's dispatch and combine between ranks
    (KernelClass.COLLECTIVE, r"deep_ep::|(intra|inter)node(_ll)?::"),
    # --- Inductor: before the rules with the same words, because names list everything fused ---------------------------
    # a product of one row that the compiler generated
    (KernelClass.GEMV, r"triton_(red|per|spl)_fused\w{0,1000}(?<!grouped)_(add)?mm(_|$)"),
    # compiled selection of the next token
    (KernelClass.SAMPLING, r"triton_(red|per|spl)_fused\w{0,1000}argmax"),
    # compiled reduction with 1/√: RMS or layer norm
    (KernelClass.NORM, r"triton_(red|per)_fused\w{0,1000}rsqrt"),
    # compiled reductions and scans
    (KernelClass.REDUCTION, r"triton_(red|per|spl)_"),
    # compiled copies
    (KernelClass.COPY, r"triton_poi_fused_(_to_copy|clone|cat|stack|index_select|embedding|copy_|view|t|transpose|slice|_)+\d*$"),
    # compiled pointwise kernels, whatever was fused
    (KernelClass.ELEMENTWISE, r"triton_(poi|for)_"),
    # --- KV cache writes: before attention, which shares their words ---------------------------------------------------
    # writes to the KV cache
    (KernelClass.COPY, r"reshape_and_cache|concat_and_cache|copy_blocks|swap_blocks|set_(mla_)?kv_buffer|store_?kv"),
    # KV cache bookkeeping
    (KernelClass.COPY, r"append_?paged_?kv|gather_(and_maybe_dequant_)?cache|update_?kv_?cache|kv_indices"),
    # --- attention -----------------------------------------------------------------------------------------------------
    # FlashAttention and derivatives
    (KernelClass.ATTENTION, r"flash_?(fwd|bwd|attn|mla|decod)|FlashAttn|\bflash::|pytorch_flash::"),
    # fused attention of any library
    (KernelClass.ATTENTION, r"fmha|sdpa|attention|[_:]attn_|_attn\b|attn_fwd"),
    # TensorRT-LLM's masked attention, XQA
    (KernelClass.ATTENTION, r"multihead|\bx?mmha|kernel_mha|\bxqa|paged_attn"),
    # FlashInfer
    (KernelClass.ATTENTION, r"With(Paged|Ragged)?KVCache|MergeStates?Kernel|merge_states"),
    # cuDNN: combines the results of split attention
    (KernelClass.ATTENTION, r"lean_reduction_kernel"),
    # Triton decode attention, MLA
    (KernelClass.ATTENTION, r"_fwd_(grouped_)?kernel_stage[12]|^_fwd_kernel|mla_(metadata|decode|combine)"),
    # --- experts: matrix products before routing -----------------------------------------------------------------------
    # matrix products of all experts at once
    (KernelClass.GEMM, r"fused_moe_kernel|moe_wna16|moe_gemm|group(ed)?_?(mm|gemm)|fused_experts"),
    # routing in OpenAI's triton_kernels
    (KernelClass.MOE_ROUTING, r"_topk_forward|bitmatrix|combined_routing"),
    # selection of experts
    (KernelClass.MOE_ROUTING, r"topk_?gating|topk_?softmax|grouped_topk|moe_?fused_?gate|routing(Main|Indices|Init|Deep|Custom)"),
    # tokens sorted by expert
    (KernelClass.MOE_ROUTING, r"moe_?align|count_and_sort_expert|expert_(offset|token|first)|expandInputRows|finalizeMoeRouting"),
    # tokens gathered back
    (KernelClass.MOE_ROUTING, r"moe_?(sum|permute|unpermute|sort|gather|finalize)|shuffle_?rows|ep_(gather|scatter)|\bmoe::"),
    # --- sampling ------------------------------------------------------------------------------------------------------
    # sampling from the logits
    (KernelClass.SAMPLING, r"sampling|multinomial|arg_?max|gumbel|top_?[kp]_?(top_?p|mask|renorm)|min_?p_"),
    # top-k and sorting
    (KernelClass.SAMPLING, r"gatherTopK|radixSelect|radixFindKthValues|bitonicSort|radixSort|top_?k|RadixSort"),
    # processing of the logits
    (KernelClass.SAMPLING, r"repetition_penalt|apply_penalt|logit_bias|rejection_|exponential_kernel|log_softmax_kernel"),
    # --- matrix-vector products ----------------------------------------------------------------------------------------
    # matrix × vector
    (KernelClass.GEMV, r"gemv(?!Tensor)|row_product|mul_mat_vec|wvSplitK|LLMM1|gemm_4bit_inference|mat_?vec"),
    # --- matrix products -----------------------------------------------------------------------------------------------
    # cuBLAS, CUTLASS, rocBLAS, Triton
    (KernelClass.GEMM, r"gemm|nvjet|splitKreduce|\bmul_mat_q|xmma|Cijk_|matmul|_mm_|[_a-z]bmm_|^bmm_"),
    # quantized and hand-written matrix products
    (KernelClass.GEMM, r"marlin|machete|cutlass|exllama|scaled_mm|wgmma|hmma|triton_mm|dense_mlp"),
    # convolutions, counted as matrix products
    (KernelClass.GEMM, r"conv(2d|3d|_fwd|olve)|implicit_|winograd|fprop"),
    # --- norms ---------------------------------------------------------------------------------------------------------
    # norms by name
    (KernelClass.NORM, r"(rms|layer|group|batch|qk|l2|instance)_?norm|RowwiseMoments|norm_kernel|NormKernel"),
    # --- other Inductor kernels ----------------------------------------------------------------------------------------
    # other compiled templates
    (KernelClass.ELEMENTWISE, r"triton_tem_"),
    # --- data movement -------------------------------------------------------------------------------------------------
    # copies, casts, fills
    (KernelClass.COPY, r"CatArrayBatchedCopy|copy_kernel|copy_device|Memcpy|transpose|permute_kernel|FillFunctor"),
    # indexed copies
    (
        KernelClass.COPY,
        r"index_?(select|put|copy|kernel|elementwise)|gather|scatter|(?<!rotary_)embedding(_kernel|_lookup|Kernel)?\b",
    ),
    # copies in llama.cpp and elsewhere
    (KernelClass.COPY, r"k_get_rows|cpy_|convert_unary|concat_|repeat_kernel|roll_cuda|triu|tril"),
    # --- other arithmetic ----------------------------------------------------------------------------------------------
    # reductions
    (
        KernelClass.REDUCTION,
        r"reduce_kernel|softmax|soft_max|DeviceScan|scan_(inner|outer)|DeviceReduce|reduce_1Block|\bdot_kernel",
    ),
    # more reductions
    (KernelClass.REDUCTION, r"sum_rows|cumsum|reduction"),
    # elementwise operations and activations
    (KernelClass.ELEMENTWISE, r"elementwise|rotary|rope|act_and_mul|silu|gelu|swiglu|relu|doActivation|activation"),
    # quantization and scaling
    (KernelClass.ELEMENTWISE, r"quantize|_quant_|dequant|QuantKernel|fp8_cast|scale_kernel|add_bias|bin_bcast|unary_op"),
    # plain arithmetic
    (KernelClass.ELEMENTWISE, r"^k?_?(add|mul|div|sub|where|clamp|fill)_?(kernel|f32|f16)?\b"),
)
"""Class and pattern of names; the first match counts."""

CLASSES = tuple(KernelClass)
"""In columns, the number of a class is its index here."""


def _lower(pattern: str) -> str:
    """Return the pattern for lower-case names: searching them is four times as fast as ignoring case."""
    return re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0].startswith("\\") else found[0].lower(), pattern)


_COMPILED = [(re.compile(_lower(pattern)), kind) for kind, pattern in RULES]


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def classify(name: str) -> KernelClass:
    """Return the class of a kernel name; `other` if no rule matches or the name is too long to parse."""
    if len(name) > LONGEST:
        return KernelClass.OTHER
    lower = name.lower()
    return next((kind for pattern, kind in _COMPILED if pattern.search(lower)), KernelClass.OTHER)


def class_of_work(trace: Trace) -> UInt8:
    """Return the index in CLASSES per row of device work. Copies and memsets are copies, whatever their name."""
    names, number = np.unique(trace.work.name, return_inverse=True)
    if not within_reason(trace, names):
        return np.full(len(trace.work), CLASSES.index(KernelClass.OTHER), np.uint8)
    of_name = np.array([CLASSES.index(classify(trace.name_of(int(name)))) for name in names], np.uint8)
    found = of_name[number.reshape(-1)] if len(names) else np.empty(0, np.uint8)
    found[trace.work.kind != WorkKind.KERNEL] = CLASSES.index(KernelClass.COPY)
    return found
