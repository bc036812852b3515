"""The class of each framework operator on a CPU, by its name."""

import re
from enum import Enum


class HostRow(str, Enum):
    """What the host does at a moment of a stage."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    COMPILED = "compiled"
    """Kernels that torch.compile generated; the trace does not show what is in them."""
    MEMORY = "memory"
    """Copies, concatenations, allocations, gathers."""
    COMMUNICATION = "communication"
    """Collectives of several processes."""
    FRAMEWORK = "framework"
    """Views, operators that only call others, and the dispatch of every operator."""
    PYTHON = "python"
    """No operator runs: Python, modules, and calls into the framework before their operator begins."""


_NAMES = {
    HostRow.MATMUL: """
        addmm mm bmm baddbmm addbmm mv addmv dot vdot linear matmul einsum conv1d conv2d conv3d convolution
        thnn_conv2d slow_conv2d_forward slow_conv3d slow_conv3d_forward
        convolution_overrideable _int_mm _scaled_mm _grouped_mm _addmm_activation _weight_int8pack_mm _weight_int4pack_mm_for_cpu
        _dyn_quant_matmul_4bit _linear_pointwise qlinear_pointwise _mkl_linear mkldnn_linear linear_dynamic linear_relu_dynamic
        _convolution mkldnn_convolution onednn_mm onednn_scaled_mm weight_packed_linear cpu_gemm_wna16
        MatMul FusedMatMul Gemm FusedGemm MatMulNBits MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QMoE MoE
    """,
    HostRow.ATTENTION: """
        scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_fused_attention_overrideable _softmax softmax _safe_softmax unified_attention
        unified_attention_with_output _flash_attention_forward cpu_attention_with_kv_cache mla_decode_kvcache
        GroupQueryAttention MultiHeadAttention Attention Softmax
    """,
    HostRow.NORM: """
        native_layer_norm layer_norm rms_norm _fused_rms_norm fused_add_rms_norm native_group_norm group_norm native_batch_norm
        batch_norm
        SimplifiedLayerNormalization SkipSimplifiedLayerNormalization LayerNormalization SkipLayerNormalization RMSNormalization
    """,
    HostRow.MEMORY: """
        copy_ _copy_from cat _cat stack clone contiguous empty empty_like empty_strided new_empty new_empty_strided new_zeros
        new_full new_ones zeros zeros_like zero_ ones ones_like full full_like fill_ index_copy_ index_put_ _index_put_impl_ index
        index_select embedding gather scatter scatter_ slice_scatter resize_ resize_as_ repeat repeat_interleave to _to_copy
        arange roll pad constant_pad_nd tril triu masked_fill masked_fill_ reshape_and_cache set_ item _local_scalar_dense
        Gather GatherBlockQuantized Concat Expand Slice ScatterND
    """,
    HostRow.FRAMEWORK: """
        view _unsafe_view reshape _reshape_alias transpose transpose_ t permute expand expand_as slice select unsqueeze unsqueeze_
        squeeze squeeze_ as_strided as_strided_ detach detach_ alias narrow chunk split split_with_sizes unbind flatten unflatten
        view_as movedim swapaxes numpy_T mT lift_fresh resolve_conj resolve_neg result_type is_nonzero is_floating_point
        broadcast_to diagonal unfold real view_as_real view_as_complex dropout feature_dropout Shape Reshape Squeeze Unsqueeze
    """,
}
_KNOWN = {name: row for row, names in _NAMES.items() for name in names.split()}
_WRAPPER_NAMES = """
    linear matmul einsum scaled_dot_product_attention softmax layer_norm group_norm rms_norm batch_norm to _to_copy contiguous
    stack repeat zeros ones full item is_nonzero conv1d conv2d conv3d convolution _convolution thnn_conv2d slow_conv3d zeros_like
    ones_like full_like new_zeros new_full new_ones index_put_ embedding pad
"""
_WRAPPERS = frozenset(_WRAPPER_NAMES.split())
"""Operators that only call others: their own time is framework overhead if they do."""
_COMPILED_CODE = re.compile(r"(## Call )?CompiledFxGraph|(graph_\d+_)?cpp_fused")
_COMMUNICATION = re.compile(r"(c10d|gloo|mpi|nccl)::?|.*(all_?reduce|all_?gather|reduce_scatter|all_to_all)")
"""Collectives of several processes: the thread waits for the others."""
_ENTRY_OF_COMPILED_CODE = ("Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph", "CompiledFunction", "Inductor")


def row_of(name: str, calls_others: bool) -> HostRow:
    """Return the row of an operator's own time; `calls_others` is whether other operators run inside it.

    An unknown operator computes, unless it calls others.
    """
    bare = name.rpartition("::")[2].partition(".")[0]
    if _COMPILED_CODE.match(name):
        return HostRow.COMPILED
    if _COMMUNICATION.match(name):
        return HostRow.COMMUNICATION
    if name.startswith(_ENTRY_OF_COMPILED_CODE):
        return HostRow.FRAMEWORK
    known = _KNOWN.get(bare)
    if known is None:
        return HostRow.FRAMEWORK if calls_others else HostRow.ELEMENTWISE
    return HostRow.FRAMEWORK if calls_others and bare in _WRAPPERS else known
