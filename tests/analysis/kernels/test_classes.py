"""Kernel classes: names of the recorded traces and of other engines."""

import re
from pathlib import Path

import pytest

from llm_perf_opt.analysis.kernels.classes import CLASSES, RULES, KernelClass, class_of_work, classify
from llm_perf_opt.analysis.trace.stage_launches import kernels_by_time
from llm_perf_opt.traces.events import Trace, WorkKind
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from trace_builders import Builder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "h200"

# Checked by hand: what the name must contain → its class. Every kernel of the recorded traces fits exactly one line.
RECORDED = {
    r"^nvjet_sm90_": "GEMM",
    r"cublasLt::splitKreduce_kernel": "GEMM",
    r"cutlass_80_simt_sgemm_": "GEMM",
    r"^cudnn_generated_fort_native_sdpa_": "attention",
    r"cudnn::fusion::lean_reduction_kernel": "attention",
    r"^Memset|^\[CUDA memset\]": "copy",
    r"CatArrayBatchedCopy": "copy",
    r"indexSelectSmallIndex": "copy",
    r"vectorized_gather_kernel": "copy",
    r"direct_copy_kernel_cuda": "copy",
    r"bfloat16_copy_kernel_cuda": "copy",
    r"ReduceOp<float, at::native::MeanOps": "reduction",
    r"ArgMaxOps": "sampling",
    r"arange_cuda_out": "elementwise",
    r"elementwise_kernel<.*(MulFunctor|CUDAFunctor_add|CUDAFunctorOnSelf_add)": "elementwise",
    r"(neg|rsqrt|cos|sin)_kernel_cuda|silu_kernel|pow_tensor_scalar": "elementwise",
}


def recorded_names() -> list[str]:
    traces: list[Trace] = [read_torch_trace(FIXTURES / "torch_trace.json.gz"), read_nsys(FIXTURES / "nsys_decode.sqlite.gz")]
    return sorted({trace.name_of(int(name)) for trace in traces for name in set(trace.work.name.tolist())})


def test_every_kernel_of_the_recorded_traces() -> None:
    names = recorded_names()
    assert len(names) > 60
    for name in names:
        expected = [kind for pattern, kind in RECORDED.items() if re.search(pattern, name)]
        assert len(expected) == 1, name
        assert str(classify(name)) == expected[0], name


def test_no_time_of_the_recorded_traces_is_unknown() -> None:
    rows = kernels_by_time(read_torch_trace(FIXTURES / "torch_trace.json.gz"))
    assert KernelClass.OTHER not in {row.kind for row in rows}
    assert sum(row.calls for row in rows) == 1711
    assert sum(row.total_ns for row in rows) == 5_521_227
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.share for row in rows if row.kind is KernelClass.GEMM) == pytest.approx(0.5525, abs=1e-4)


# Names from public traces, sources and reports of the engines.
SEEN = {
    "GEMM": [
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_64x64_64x6_tn_align8>(cutlass_80_tensorop::Params)",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiEEE",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true, cublasGemvTensorStridedBatched<float const>>",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "void marlin::Marlin<nv_bfloat16, 1125899906909960l, 256, 4, 16, 4, 4, false>(int4 const*, int4 const*)",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u>(float*, int*)",
        "fused_moe_kernel",
        "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI16x16x1_SN",
        "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<…>>",
        "triton_tem_fused_addmm_mm_3",
        "triton_mm",
        "bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x512_s6_et128x8_m128x8x64_cga1x1x1_16dp256b_rM_TN_transOut_schedS_bN_dynBatch_sm100f",
        "void mul_mat_q<(ggml_type)12, 128, 8, false>(char const*, int const*, float*)",
        "void tensorrt_llm::kernels::cutlass_kernels::fused_moe::run_global<…GemmUniversal…>",
    ],
    "GEMV": [
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false, true>(…)",
        "void gemvNSP_kernel<__half, __half, __half, float, 1, 32, 4, 1024>(…)",
        "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16>(…)",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 4, 16, 8, 1, 1>(int, int)",
        "void mul_mat_vec_q<(ggml_type)12, 1, false>(void const*, void const*)",
        "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(int, int, int)",
    ],
    "attention": [
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false>>(…)",
        "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(flash::Flash_fwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<…>>>(…)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(…)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvVarSeqQ16Kv128StaticKeepsAbForGen",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u, 8u>(…)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, 128u>>(…)",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, float, __nv_bfloat16, int>(…)",
        "void vllm::paged_attention_v2_kernel<unsigned short, unsigned short, 128, 16, 128>(…)",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<…>",
        "kernel_paged_attention_2d",
        "kernel_unified_attention_2d",
        "_fwd_grouped_kernel_stage1",
        "_fwd_kernel_stage2",
        "_fwd_kernel",
        "void tensorrt_llm::kernels::mmha::masked_multihead_attention_kernel<unsigned short, unsigned short>(…)",
        "kernel_mha(unsigned int, float, OutputHead*, IOHead const*)",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<…>>",
        "triton_tem_fused_flex_attention_2",
        "void flash_fwd_splitkv_mla_kernel<…>",
        "void merge_attn_states_kernel<__nv_bfloat16, 128>(…)",
        "void flash_attn_ext_vec<128, 1, (ggml_type)1>(…)",
    ],
    "norm": [
        "void vllm::rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*)",
        "std::enable_if<…>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "void flashinfer::norm::FusedAddRMSNormKernel<(unsigned int)8, __nv_bfloat16>(T2 *, T2 *)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int, float)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1",
        "triton_per_fused_add_mean_pow_rsqrt_0",
        "void tensorrt_llm::kernels::generalRmsNorm<__nv_bfloat16, signed char>(…)",
        "void vllm::fused_qk_norm_rope_kernel<…>",
        "_rms_norm_forward_kernel",
        "rms_norm_f32<1024>",
    ],
    "elementwise": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(…)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<…>",
        "void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*)",
        "void per_token_group_quant_8bit_kernel<c10::BFloat16, …>",
        "_static_quant_fp8",
        "triton_poi_fused_mul_silu_2",
        "triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy__unsafe_view_add_arange_bmm_cat_clone_cos_5",
        "triton_poi_fused__to_copy_add_arange_bmm_cat_cos_index_copy_mul_neg_sin_slice_transpose_unsqueeze_view_2",
        "triton_poi_fused_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::compare_scalar_kernel<int>(at::TensorIteratorBase&)>",
        "_swiglu_forward_kernel",
        "quantize_q8_1(float const*, void*)",
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(…)",
    ],
    "reduction": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float, float>(…)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(…)",
        "void at_cuda_detail::cub::DeviceScanKernel<…>",
        "triton_red_fused_sum_4",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(…)",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>(…)",
        "soft_max_f32<true, 0, 0, __half>",
    ],
    "copy": [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "[CUDA memcpy Device-to-Host]",
        "[CUDA memset]",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(…)",
        "void vllm::concat_and_cache_mla_kernel<…>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>(…)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<…>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<…>",
        "create_flashinfer_kv_indices_triton",
        "set_mla_kv_buffer_kernel",
        "triton_poi_fused__to_copy_0",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8, …>",
        "void k_get_rows_float<float, float>(…)",
    ],
    "MoE routing": [
        "void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, 32, int>(float const*)",
        "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*)",
        "void count_and_sort_expert_tokens_kernel<int>(…)",
        "void moe_fused_gate_kernel_dynamic<…>",
        "void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(…)",
        "_moe_sum_reduce_kernel",
        "void tensorrt_llm::kernels::finalizeMoeRoutingKernel<…>",
        "void moe::dev::routing::routingDeepSeek::routingIndicesClusterKernel<…>",
        "void vllm::moe::grouped_topk_fused_kernel<…>",
    ],
    "sampling": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(…)",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, …>",
        "void flashinfer::sampling::OnlineSoftmaxMapKernel<…>",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(…)",
        "void at::native::(anonymous namespace)::sampleMultinomialOnce<float, float>(long*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<…>",
        "void vllm::apply_repetition_penalties_kernel<float>(…)",
        "triton_red_fused_argmax_0",
        "_gumbel_sample_kernel",
        "rejection_greedy_sample_kernel",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>",
        "two_shot_all_reduce_kernel",
        "multimem_all_reduce_kernel",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<…>",
        "void deep_ep::internode_ll::dispatch<false, false, 7168>(…)",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        "void c10d::symmetric_memory::(anonymous namespace)::wait_signal_kernel(unsigned int**, int)",
        "put_signal_kernel",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in SEEN.items() for name in names])
def test_names_of_other_engines(expected: str, name: str) -> None:
    assert str(classify(name)) == expected


def test_what_no_rule_knows_is_other_and_shown_as_a_share_of_the_time() -> None:
    assert classify("frobnicate") is KernelClass.OTHER
    built = Builder()
    built.launch(0, 0, 30, "nvjet_tst")
    built.launch(1, 30, 40, "frobnicate")
    built.launch(2, 50, 90, "frobnicated on the way", kind=WorkKind.MEMCPY)
    trace = built.trace()
    assert [CLASSES[number] for number in class_of_work(trace)] == [KernelClass.GEMM, KernelClass.OTHER, KernelClass.COPY]
    assert {str(row.kind): row.share for row in kernels_by_time(trace)} == {"GEMM": 0.75, "other": 0.25}, "a copy is no kernel"


def test_every_class_but_other_has_a_rule() -> None:
    assert {kind for kind, _ in RULES} == set(KernelClass) - {KernelClass.OTHER}


def test_a_trace_without_kernels_has_no_classes() -> None:
    assert kernels_by_time(Builder().trace()) == ()
    assert len(class_of_work(Builder().trace())) == 0
