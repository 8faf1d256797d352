"""Names of kernels that today's engines run, and what part of the work they do."""

from __future__ import annotations

import re

import pytest

from ikit_ops.profilers.categories import CATEGORIES, FUSED_RULES, RULES, category_of

NAMES = {
    "attention": [
        # Triton decode attention of vLLM and SGLang
        "_fwd_kernel_stage1", "_fwd_kernel_stage2", "_fwd_grouped_kernel_stage1", "_fwd_kernel",
        "_attn_fwd", "kernel_unified_attention_3d", "reduce_segments",
        "_correct_attn_cp_out_kernel",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u>",
        "void vllm::paged_attention_v2_reduce_kernel<__hip_bfloat16, 128, 128, 512>",
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, unsigned char>",
        "void vllm::cp_gather_indexer_k_quant_cache_kernel<8>",
        "void vllm::topKPerRowDecode<512, true>",
        "sm90_fp8_paged_mqa_logits_kernel", "set_mla_kv_buffer_kernel",
        "create_flashinfer_kv_indices_triton", "fusedQKNormRopeKernel<128, true>",
        "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<T>>>",
        "fmhaSm100aKernel_QkvBfloat16OBfloat16H128PagedKvCausal", "kernel_mha",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KTraits, Params>",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<KTraits, Params>",
        "void flashinfer::SinglePrefillWithKVCacheKernel<KTraits>",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0, 2u>",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u>",
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<KTraits>",
        "void flashinfer::AppendPagedKVCacheKernel<128u, 8u>",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel<true>",
        "get_mla_metadata_kernel", "flash_fwd_splitkv_mla_kernel<Traits>",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelE", "aiter::pa_fwd_bf16",
        "aiter::mla_a16w16_qh16",
        # llama.cpp
        "void flash_attn_ext_f16<128, 128, 8, 4, __half, false>",
        "void flash_attn_tile<128, 128, 32, 1, false>", "void flash_attn_ext_vec<128, 1>",
        "void flash_attn_stream_k_fixup<128, 8, 4>", "void flash_attn_combine_results<128>",
        "void soft_max_f32<true, 0, 0, float>(float const*)", "void rope_neox<true, false, float>",
        "void k_set_rows<float, long, __half>", "void ssm_scan_f32<256, 16, 128>",
        "void rwkv_wkv_f32<64>",
        # recurrences
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_fwd_kernel_o",
        "fused_recurrent_gated_delta_rule_fwd_kernel", "chunk_local_cumsum_scalar_kernel",
        "_chunk_scan_fwd_kernel", "_chunk_state_fwd_kernel", "_state_passing_fwd_kernel",
        "_bmm_chunk_fwd_kernel", "_selective_scan_update_kernel", "_causal_conv1d_update_kernel",
        # fused by a compiler
        "triton_tem_fused_flex_attention_0", "triton_per_fused__softmax_add_div_3",
        "triton_poi_fused_add_cat_cos_mul_neg_sin_slice_2",
    ],
    "gemm": [
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64", "nvjet_tst_128x64_64x9_1x2_v_TNT",
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>",
        "std::enable_if<!false, void>::type internal::gemvx::kernel<int, int, float>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>", "void dot_kernel<float, 128, 0>",
        "void splitKreduce_kernel<32, 16, int, __nv_bfloat16>",
        "void marlin::Marlin<__half, 256, 1, 8, 8, 4, 8, false>",
        "void gptq_marlin_repack_kernel<4>",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u>", "_w8a8_block_fp8_matmul",
        "_gemm_a8w8_blockscale_kernel", "scaled_mm_kernel", "bmm_E4m3_E4m3E4m3_Fp32_t128x8x512",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16>",
        "Custom_Cijk_Alik_Bljk_BBS_BH_MT256x256",
        "void kgemm_4bit_inference_naive<__half, 128, 16>", "machete_mm_kernel",
        "void mul_mat_q<(ggml_type)12, 128, false>", "void mul_mat_vec_q<(ggml_type)12, 1, false>",
        "void mul_mat_vec_f<__half, float, 1, 256>", "void mul_mat_q_stream_k_fixup<(ggml_type)8>",
        "void mul_mat_f<__half2, 32, 8, 4>", "void dequantize_mul_mat_vec<32, 1>",
        "triton_tem_fused_mm_0", "triton_tem_fused_addmm_relu_7", "triton_tem_fused__to_copy_bmm_1",
    ],
    "moe": [
        "fused_moe_kernel_gptq_awq", "void vllm::moe::moe_align_block_size_kernel<int>",
        "void vllm::moe::count_and_sort_expert_tokens_kernel<int>", "_moe_sum_reduce_kernel",
        "void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, 32, int>", "moe_fused_gate_kernel",
        "void vllm::moe::grouped_topk_fused_kernel<float, float, int>", "_fwd_kernel_ep_scatter_1",
        "_fwd_kernel_ep_gather", "void marlin_moe_wna16::Marlin<__nv_bfloat16, 256>",
        "void deep_gemm::sm90_m_grouped_fp8_gemm_masked_1d2d", "_grouped_mm", "grouped_gemm_kernel",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<S>>>",
        "void cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<T>>",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_32x256x128x1", "_p_matmul_ogs_NNT_bf16", "_topk_forward",
        "_sum_bitmatrix_rows", "_combined_routing_compute", "_reduce_grouped",
        "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<T>",
        "void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel<P>",
        "aiter::fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256",
        "void topk_moe_cuda<128, true>", "void mm_ids_helper<8>", "void k_argsort_f32_i32<true>",
    ],
    "norm": [
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "_layer_norm_fwd_1pass_kernel",
        "void vllm::rms_norm_static_fp8_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn>",
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>",
        "void flashinfer::norm::GemmaRMSNormKernel<8u>", "l2norm_fwd_kernel", "_rms_norm_kernel",
        "void rms_norm_f32<1024, true, false>", "void norm_f32<1024>", "void l2_norm_f32<32>",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0", "triton_per_fused_native_layer_norm_1",
        "triton_red_fused__to_copy_add_copy__mean_mul_pow_rsqrt_split_2",
    ],
    "sampling": [
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>",
        "void at::native::mbtopk::radixFindKthValues<float, unsigned int>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy, false, float>",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>",
        "void flashinfer::sampling::TopPRenormProbKernel<1024u>", "rejection_greedy_sample_kernel",
        "void vllm::apply_repetition_penalties_kernel<float>", "_topk_topp_kernel",
        "apply_token_bitmask_inplace_kernel", "_gumbel_sample_kernel",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float>",
        "void at::native::distribution_elementwise_grid_stride_kernel<float, 4, exponential>",
        "void softmax_warp_forward<LogSoftmax, log_softmax>", "triton_red_fused_argmax_0",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16", "ncclDevKernel_Generic_4(ncclDevKernelArgs)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>", "one_shot_all_reduce_kernel",
        "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>",
        "void multimem_all_reduce_kernel<c10::BFloat16>", "mscclpp::allreduce7",
        "void deep_ep::intranode::dispatch<8, 768>", "void deep_ep::internode_ll::combine<true>",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<T>",
        "void quickreduce::allreduce_prototype_twoshot<T>",
    ],
    "memcpy": [
        "[CUDA memcpy Device-to-Device]", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)",
        "void vllm::copy_blocks_kernel<unsigned short>", "void cpy_scalar<cpy_1_f32_f16>",
        "void concat_f32_dim0<float>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
        "triton_poi_fused__to_copy_0", "triton_poi_fused_clone_3", "triton_poi_fused_cat_1",
        "triton_poi_fused__to_copy_clone_cat_12",
    ],
    "other": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, silu>",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu>",
        "void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<c10::BFloat16>",
        "void k_get_rows<32, 2, dequantize_q4_0>", "void k_bin_bcast<op_add, float, float, float>",
        "void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)1>", "void unary_op_kernel<op_silu, float>",
        "triton_poi_fused__to_copy_mul_silu_1", "triton_poi_fused_embedding_0",
        "gemma_scale_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::normal_kernel<float>", "write_req_to_token_pool_triton",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("category", "name"), [(category, name) for category, names in NAMES.items() for name in names]
)
def test_kernels_of_todays_engines_have_their_category(category: str, name: str) -> None:
    assert category_of(name) == category


def test_the_table_names_every_category_and_the_rules_know_no_other() -> None:
    assert set(NAMES) == set(CATEGORIES)
    assert {category for category, _ in (*RULES, *FUSED_RULES)} < set(CATEGORIES)


def test_rules_are_tried_on_lower_case_names() -> None:
    for _, pattern in (*RULES, *FUSED_RULES):
        assert not re.search(r"(?<!\\)[A-Z]", pattern)


def test_no_rule_goes_through_a_long_name_from_every_place_in_it() -> None:
    for _, pattern in (*RULES, *FUSED_RULES):
        assert not re.search(r"(\\w|\.|\])[*+]", pattern)
    for part in ("group_", "gather", "cos_", "t", "_1", "sin_cos", "a "):
        for start in ("", "triton_poi_fused_"):
            assert category_of(start + part * (4_096 // len(part)) + "!") in CATEGORIES
