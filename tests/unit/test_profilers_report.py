"""Sweeps, categories, pictures and what a record says of a capture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikit_ops.profilers import report
from ikit_ops.profilers.capture import Capture, DeviceUse, Graphs, Kernel, KernelKey, Tally, shape
from ikit_ops.profilers.categories import CATEGORIES, RULES, category_of, short_name_of
from ikit_ops.profilers.picture import svg
from ikit_ops.profilers.sweep import Runs, Unordered, merged_gaps, sweep, timeline_of

_rows = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(0, 4)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(rows=_rows, block=st.integers(1, 30), run=st.integers(1, 20))
def test_a_sweep_finds_what_counting_every_nanosecond_finds(
    rows: list[tuple[int, int, int]], block: int, run: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ikit_ops.profilers.sweep.RUN_ROWS", run)
        runs = Runs()
        for start, length, key in rows:
            runs.add(start, start + length, key)
        ordered = [row for part in runs.blocks() for row in part]
        parts = [ordered[n : n + block] for n in range(0, len(ordered), block)]
        swept = sweep(parts, runs.span)
    assert sorted(ordered) == sorted((s, s + n, k) for s, n, k in rows)
    busy = {t for start, length, _ in rows for t in range(start, start + length)}
    assert swept.use.busy_ns == len(busy)
    if rows:
        assert swept.use.span_ns == swept.use.busy_ns + swept.use.gap_total_ns
        assert sum(swept.use.gap_histogram.values()) == swept.use.gap_count
    sums: defaultdict[int, int] = defaultdict(int)
    for _, length, key in rows:
        sums[key] += length
    assert {key[0]: t.total_ns for key, t in swept.tallies.items()} == dict(sums)
    sliced: defaultdict[int, int] = defaultdict(int)
    for times in swept.slices:
        for number, total in times.items():
            sliced[number[0]] += total
    assert {k: v for k, v in sliced.items() if v} == {k: v for k, v in sums.items() if v}


def test_rows_out_of_order_stop_a_sweep() -> None:
    with pytest.raises(Unordered):
        sweep([[(5, 6, 0)], [(4, 9, 0)]], (0, 9))


def test_gaps_of_several_devices_are_put_together() -> None:
    first = sweep([[(0, 10, 1), (2_010, 2_020, 2)]], (0, 100)).use
    second = sweep([[(0, 10, 1), (110, 120, 2)]], (0, 100)).use
    first.id, second.id = 0, 1
    found = merged_gaps([first, second])
    assert found is not None
    assert (found["count"], found["total_ns"], found["max_ns"]) == (2, 2_100, 2_000)
    assert [gap["device"] for gap in found["largest"]] == [0, 1]
    assert found["histogram"]["1-10us"] == 1 and found["histogram"]["<1us"] == 1
    assert merged_gaps([]) is None


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64>(T1::P)",
            "gemm",
        ),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x16x64", "gemm"),
        ("void mul_mat_vec_q<(ggml_type)8, 1, false>(void const*, void const*)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, 4>", "gemm"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("BatchDecodeWithPagedKVCacheKernel", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("void rope_norm<true, false, float>(float const*)", "attention"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "attention"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norm"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "norm"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::topkGatingSoftmax<float, 8, 128>", "moe"),
        ("void mul_mat_id<float>(float*)", "moe"),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "communication",
        ),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_rmsnorm",
            "communication",
        ),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "sampling"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", "sampling"),
        ("void at::native::upsample_nearest2d_out_frame<float>", "other"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2>", "memcpy"),
        ("void at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)", "memcpy"),
        ("__amd_rocclr_copyBuffer", "memcpy"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "other"),
        ("", "other"),
    ],
)
def test_categories_of_kernels_that_engines_run(name: str, category: str) -> None:
    assert category_of(name) == category


def test_rules_name_known_categories_alone() -> None:
    assert {category for category, _ in RULES} <= set(CATEGORIES)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, f>(int, T2)",
            "vectorized_elementwise_kernel",
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_gemm>(T1::Params)", "cutlass_80_tensorop_gemm"),
        ("ampere_sgemm_32x32_sliced1x4_nn", "ampere_sgemm_32x32_sliced1x4_nn"),
        ("void at::native::(anonymous namespace)::fused_dropout<float>(X)", "fused_dropout"),
        ("<lambda>", "<lambda>"),
        ("", ""),
    ],
)
def test_short_names_are_the_functions_own(name: str, short: str) -> None:
    assert short_name_of(name) == short


def capture(**changes: object) -> Capture:
    """A whole capture of two kernels."""
    made = Capture("nsys-sqlite", tool="nsys")
    made.kernels = [
        Kernel(KernelKey("gemm", (1, 1, 1), (32, 1, 1)), Tally(3, 900, 200, 400)),
        Kernel(KernelKey("rms_norm"), Tally(1, 100, 100, 100)),
    ]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_whole_capture_is_valid_and_says_no_speed() -> None:
    draft = report.draft(capture(), report.Context("derived", "imported nsys"))
    assert draft.valid is True and draft.missing == []
    assert (
        draft.summary
        == "imported nsys: GEMM 90 %, norm 10 %; largest: gemm (90 % of time, 3 calls)"
    )
    assert draft.gates.warnings == ["profiled run: no speed claim may rest on it"]
    top = draft.data["top_kernels"]
    assert top[0]["share"] == 0.9 and top[0]["mean_ns"] == 300.0
    assert draft.data["gpu_busy_share"] is None and draft.data["memory_ops"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"incomplete": ["events were lost"]},
        {"kernels": []},
        {"kernels": None},
        {"kernels": None, "functions": []},
        {"kernels": None, "cpu_only": True, "host_ops": {}},
        {"kernels": [], "cpu_only": True, "host_ops": None},
        {"kernels": [], "cpu_only": True},
        {"kernels": None, "counters": [{"name": "cycles", "value": None}]},
        {"kernels": None, "counters": []},
    ],
)
def test_a_capture_that_is_not_whole_is_not_known_to_be_valid(changes: dict[str, object]) -> None:
    draft = report.draft(capture(**changes), report.Context("derived", "x"))
    assert draft.valid is None and draft.missing and draft.summary.startswith("INCOMPLETE (")
    assert draft.data["capture"]["complete"] is False


def test_a_cpu_capture_without_kernels_is_whole() -> None:
    made = capture(
        kernels=[], cpu_only=True, host_ops={"aten::mm": Tally(2, 60), "b": Tally(1, 40)}
    )
    draft = report.draft(made, report.Context("derived", "torch"))
    assert draft.valid is True
    assert draft.data["top_functions"][0]["share"] == 0.6
    assert "most CPU time: aten::mm 60 %" in draft.summary


def test_counters_that_were_counted_are_a_whole_capture() -> None:
    made = capture(kernels=None, counters=[{"name": "cycles", "value": None},
                                           {"name": "task-clock", "value": 7}])  # fmt: skip
    draft = report.draft(made, report.Context("derived", "perf"))
    assert draft.valid is True and "1 of 2 counters were counted" in draft.summary


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0 %"),
        (0.0029, "<1 %"),
        (0.006, "1 %"),
        (0.994, "99 %"),
        (0.997, ">99 %"),
        (1, "100 %"),
    ],
)
def test_a_little_is_not_nothing_and_much_is_not_all(share: float, shown: str) -> None:
    device = DeviceUse(0, first_ns=0, last_ns=10_000, busy_ns=round(share * 10_000))
    draft = report.draft(capture(devices=[device]), report.Context("derived", "x"))
    assert f"GPU busy {shown};" in draft.summary


def test_more_rows_than_a_record_holds_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_ROWS", 1)
    draft = report.draft(capture(graphs=Graphs()), report.Context("derived", "x"))
    assert draft.data["kernels_left_out"] == {"rows": 1, "total_ns": 100}
    assert any("1 rows of the kernel table" in line for line in draft.missing)
    assert draft.data["capture"]["whole_graphs"] == 0


def test_the_picture_is_plain_shapes_and_adds_up() -> None:
    swept = sweep([[(n, n + 5, n % 2) for n in range(0, 600, 6)]], (0, 600))
    timeline = timeline_of([(swept.slices, {(0,): "gemm", (1,): "other"})], (0, 600))
    root = ElementTree.fromstring(svg(timeline))  # our own text
    tags = {element.tag.split("}")[1] for element in root.iter()}
    assert tags <= {"svg", "rect", "path", "text"}
    assert all(
        not key.startswith("on") and "href" not in key for e in root.iter() for key in e.attrib
    )
    assert sum(sum(times) for times in timeline.categories.values()) == 500


def test_full_names_are_kept_where_they_were_cut() -> None:
    long = "void k<" + "int, " * 200 + ">"
    made = capture(kernels=[Kernel(KernelKey(long), Tally(1, 5, 5, 5))])
    artifacts = report.artifacts_of(made)
    assert long.encode() in artifacts["kernel-names.json"][0]
    assert report.artifacts_of(capture()) == {}


def test_differences_name_variables_and_flags() -> None:
    found = report.differences(
        {"a": 1, "b": {"x": 1}}, {"a": 1, "b": [2]}, ["OMP_NUM_THREADS"], ["GGML_NEW"]
    )
    rows = {row["field"]: (row["benchmark"], row["profile"]) for row in found}
    assert rows == {
        "environment OMP_NUM_THREADS": ("set", "not passed on"),
        "environment GGML_NEW": ("not set", "set"),
        "flag b": ('{"x": 1}', "[2]"),
    }


def test_a_shape_is_three_numbers() -> None:
    assert shape((1, 2, 3)) == (1, 2, 3)
    for wrong in (None, (1, 2), (1, 2, "3"), (1, 2, -1), (True, 1, 1), (1, 2, 1 << 50)):
        assert shape(wrong) is None
