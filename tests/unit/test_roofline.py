"""The operation: what its record says, pins, limits and proposes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.checkpoints import (
    CORPUS,
    LLAMA,
    Tensors,
    dense_layer,
    ends,
    llama_tensors,
    rehydrate,
    write_file,
    write_model,
)
from helpers.evidence import flip_a_byte, save
from ikit_mcp.call import Call, Cancelled, Settings
from ikit_mcp.evidence.record import Device, Draft, EvidenceRecord, Identity, metric
from ikit_mcp.evidence.record import shape_problem as problem_of
from ikit_mcp.registry import (
    DERIVES,
    MEASURES,
    Operation,
    OpError,
    Registry,
    operation,
    operations_in,
)
from ikit_mcp.runner import Control, Outcome, Runner
from ikit_ops import roofline as module

Ask = Callable[..., Outcome]


def runner_of(home: Path, *more: Operation) -> Runner:
    registry = Registry()
    for op in (*operations_in(module), *more):
        registry.add(op)
    return Runner(registry, Settings(home))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def ask(home: Path) -> Ask:
    """Ask for a roofline as every way in does."""

    def asked(model: Path | str, *, control: Control | None = None, **arguments: Any) -> Outcome:
        runner = runner_of(home)
        request = runner.check("roofline", {"model": str(model), **arguments})
        return runner.here(request, control or Control())

    return asked


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small", LLAMA, {"model.safetensors": llama_tensors()})


def record(outcome: Outcome) -> EvidenceRecord:
    assert outcome.record is not None and problem_of(outcome.record.raw) is None
    return outcome.record


def text(outcome: Outcome) -> str:
    """Everything that a record says in words."""
    found = record(outcome)
    words = [found.summary, *found.get("limitations"), *found.get("coverage", "missing")]
    return "\n".join(words)


def test_the_summary_tells_bytes_terms_and_ceiling_on_one_line(ask: Ask, tmp_path: Path) -> None:
    model = rehydrate("llama-3.1-8b", tmp_path / "llama-3.1-8b")
    found = record(ask(model, gpu_bw=4193))
    assert found.summary == (
        "llama-3.1-8b (bf16): 15.144 GB/token at context 1024 (weights 15.010 + KV 0.134); "
        "ceiling 276.9 tok/s at 4193 GB/s as given"
    )
    assert (found.kind, found.valid) == ("roofline", True)
    assert found.metric("bytes_per_token") == 15_144_075_264
    assert found.metric("ceiling_tok_s") == pytest.approx(4193e9 / 15_144_075_264)
    assert found.metric("min_token_latency_ms") == pytest.approx(15_144_075_264 / 4193e6)
    assert found.metric("weight_bytes") == 15_009_857_536
    assert found.metric("bytes_lm_head") == 1_050_673_152
    stats = {m["name"]: m["stat"] for m in found.get("metrics")}
    assert (stats["bandwidth_gbs"], stats["ceiling_tok_s"]) == ("input", "ceiling")
    counts = found.get("data", "counts")
    assert counts["method"] == "headers" and counts["stored_bytes"] == 16_060_522_496
    assert counts["not_read"] == [
        {
            "group": "embedding_rest",
            "bytes": 1_050_664_960,
            "why": "the embedding tables beyond the row of one token",
        }
    ]
    assert found.get("data", "config_source") == "directory"
    bandwidth = {"source": "user", "value_gbs": 4193, "evidence_id": None}
    assert found.get("data", "bandwidth") == bandwidth
    identity = {"id": str(model), "revision": None, "dtype": "bf16", "quant": None}
    assert found.get("identity", "model") == identity


def test_without_a_bandwidth_the_ceiling_is_null_and_missing(ask: Ask, small: Path) -> None:
    found = record(ask(small))
    assert found.metric("ceiling_tok_s") is None and found.metric("bandwidth_gbs") is None
    assert found.get("coverage", "missing") == ["bandwidth (pass gpu_bw)"]
    assert found.valid is True and "ceiling" not in found.summary
    assert found.get("data", "bandwidth", "source") == "none"


def test_a_ceiling_record_becomes_a_parent_and_its_device_the_identity(
    ask: Ask, small: Path, home: Path
) -> None:
    ceiling = save(home, kind="ceiling", gbs=250.0)
    found = record(ask(small, gpu_bw=f"evidence://{ceiling.evidence_id[:12]}"))
    assert found.get("provenance", "parents") == [ceiling.evidence_id]
    assert found.metric("bandwidth_gbs") == 250 and "250 GB/s measured" in found.summary
    request = found.get("provenance", "request")
    assert request["args"]["gpu_bw"] == ceiling.evidence_id
    assert request["requested"]["gpu_bw"].startswith("evidence://")


def test_a_ceiling_record_that_was_changed_or_is_another_kind_is_refused(
    ask: Ask, small: Path, home: Path
) -> None:
    ceiling = save(home, kind="ceiling")
    flip_a_byte(home, ceiling.evidence_id, b"dram_read_gbs")
    with pytest.raises(OpError, match="fails its check"):
        ask(small, gpu_bw=ceiling.evidence_id)
    other = save(home, 1, kind="bench")
    with pytest.raises(OpError, match="not a ceiling record"):
        ask(small, gpu_bw=other.evidence_id)
    with pytest.raises(OpError, match="no evidence record"):
        ask(small, gpu_bw="f" * 64)


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "1e9", "fast", "", "0x10"])
def test_a_bandwidth_that_is_none_is_refused_before_anything_is_read(value: str, ask: Ask) -> None:
    with pytest.raises(OpError, match=r"gpu_bw|no evidence id"):
        ask("/no/such/model", gpu_bw=value)


@operation("measure_bandwidth", ("bandwidth",), "Made up.", [], effects=MEASURES, long=True)
def made_up_bandwidth(call: Call) -> EvidenceRecord:
    """A ceiling record without a measurement."""
    return call.save(
        Draft(
            kind="ceiling",
            claim_class="measured",
            valid=None,
            summary="made up",
            identity=Identity(device=Device(name="made-up", uuid="u", driver=None)),
            metrics=[metric("dram_read_gbs", 100.0, "GB/s", "best_sustained")],
        )
    )


def test_measuring_asks_the_operation_of_that_name(small: Path, home: Path) -> None:
    this = __import__("sys").modules[__name__]
    made_up = [op for op in operations_in(this) if op.name == "measure_bandwidth"]
    runner = runner_of(home, *made_up)
    request = runner.check("roofline", {"model": str(small), "gpu_bw": "measure"})
    assert request.effects == MEASURES
    found = record(runner.here(request, Control()))
    assert found.metric("bandwidth_gbs") == 100 and len(found.get("provenance", "parents")) == 1
    assert found.get("identity", "device", "name") == "made-up"
    assert found.valid is None  # the measurement does not vouch for itself
    assert found.get("gates", "warnings") == ["the ceiling record does not claim to be valid"]
    plain = runner.check("roofline", {"model": str(small)})
    assert plain.effects == DERIVES
    proposed = runner.here(plain, Control()).shown.next
    assert [item["arguments"]["gpu_bw"] for item in proposed] == ["measure"]


def test_measuring_without_that_operation_is_refused_by_its_name(ask: Ask, small: Path) -> None:
    with pytest.raises(OpError, match="measure_bandwidth, which is not here"):
        ask(small, gpu_bw="measure")


def test_the_request_pins_what_ran_and_keeps_what_was_asked(ask: Ask, small: Path) -> None:
    request = record(ask(small, dtype="fp8", lm_head_dtype="fp8")).get("provenance", "request")
    assert request["args"]["method"] == "headers" and request["args"]["dtype"] is None
    assert request["requested"] == {"method": "auto", "dtype": "fp8", "lm_head_dtype": "fp8"}
    config = record(ask(small / "config.json")).get("provenance", "request")
    assert config["args"]["method"] == "config" and config["args"]["dtype"] == "bf16"


def test_a_relative_path_is_pinned_as_an_absolute_one(
    ask: Ask, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    found = record(ask("small"))
    assert found.get("provenance", "request", "args", "model") == str(small)
    assert found.get("identity", "model", "id") == str(small)
    assert found.get("provenance", "reproduce").startswith(f"ikit roofline {small} ")


def test_reproducing_a_record_gives_the_same_numbers(ask: Ask, small: Path) -> None:
    first = record(ask(small, gpu_bw="100", context=77, kv_dtype="fp8"))
    args = {k: v for k, v in first.get("provenance", "request", "args").items() if v is not None}
    again = record(ask(args.pop("model"), **args))
    assert again.get("metrics") == first.get("metrics")
    assert again.get("data") == first.get("data")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu_bw": "100"}, ["the bandwidth is the user's", "5 to 15 %"]),
        ({"dtype": "fp8"}, ["dtype fp8 was ignored"]),
        ({"kv_dtype": "fp8"}, ["KV cache counted as fp8; use the cache dtype the engine logged"]),
        ({"batch": 4}, ["batch 4: weights once per step"]),
        ({"tensor_parallel": 2}, ["bytes of one of 2 devices", "communication is ignored"]),
        (
            {"include_mtp": True},
            ["bytes per step", "holds no prediction layers", "tokens per step"],
        ),
        ({}, ["once per token from DRAM", "activations, logits and sampling", "counted as stored"]),
    ],
)
def test_every_assumption_that_was_made_is_said(
    arguments: dict[str, Any], words: list[str], ask: Ask, small: Path
) -> None:
    said = text(ask(small, **arguments))
    assert all(word in said for word in words), said


def _model(tmp_path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    return write_model(tmp_path / "model", {**LLAMA, **config}, {"model.safetensors": tensors})


def test_what_a_model_makes_true_is_said(ask: Ask, tmp_path: Path) -> None:
    for name, words in {
        "deepseek-v3": ["vLLM holds kv_b_proj in bf16: 1.02 GB/token", "MLA latent", "15.424 GB"],
        "gpt-oss-20b": [
            "expands MXFP4",
            "4 of 32 experts per layer, equal sizes",
            "strictly 0.028",
        ],
        "llama-3.1-8b-bnb-nf4": ["no bitsandbytes loader"],
        "gemma-3-27b-it": ["vision and audio towers are stored and not read: 0.846 GB"],
        "gemma-3n-e4b": ["layers that share a KV cache each read it"],
        "nemotron-3-nano-30b-a3b": ["state counted in 32 bits", "read and written once per token"],
        "qwen3-0.6b": ["dead copies are stored and not read: 0.311 GB"],
        "qwen3-30b-a3b-nvfp4": ["declares an fp8 KV cache, counted as bf16"],
    }.items():
        said = text(ask(rehydrate(name, tmp_path / name)))
        assert all(word in said for word in words), (name, said)


@pytest.mark.parametrize(
    ("quantization", "declared"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "an fp8 KV cache"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "an int8 KV cache"),
        ({"kv_cache_scheme": "FP8"}, "an fp8 KV cache"),
        ({"kv_cache_scheme": None}, None),
    ],
)
def test_another_kv_dtype_that_the_checkpoint_declares_is_said(
    quantization: dict[str, Any], declared: str | None, ask: Ask, tmp_path: Path
) -> None:
    model = _model(tmp_path, {"quantization_config": quantization}, llama_tensors())
    said = text(ask(model))
    assert (declared in said) if declared else ("declares" not in said)


def test_modelopts_own_file_is_read_beside_the_configuration(ask: Ask, tmp_path: Path) -> None:
    model = _model(tmp_path, {}, llama_tensors())
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
    inner = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": layers,
    }
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}), "utf-8")
    outcome = ask(model)
    assert "an fp8 KV cache" in text(outcome)
    assert record(outcome).get("identity", "model", "quant") == "mixed_precision(fp8+nvfp4)"


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"bits": 4, "group_size": 64}, "mlx-int4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "a": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4}},
                    "b": {"format": "float-quantized"},
                },
            },
            "mixed_precision(float-quantized+nvfp4-pack-quantized)",
        ),
        ({"quant_method": "e\x1bvil\n" + "x" * 100}, "evil" + "x" * 56),
        ({"quant_method": 7}, "unknown"),
    ],
)
def test_the_identity_names_the_algorithm_of_the_quantisation_config(
    quantization: dict[str, Any], name: str | None, ask: Ask, tmp_path: Path
) -> None:
    model = _model(tmp_path, {"quantization_config": quantization}, llama_tensors())
    assert record(ask(model)).get("identity", "model", "quant") == name


def test_an_unproven_term_makes_valid_null_and_the_ceiling_an_upper_bound(
    ask: Ask, tmp_path: Path
) -> None:
    tensors = llama_tensors() | {"model.layers.0.warp.weight": ("BF16", (1024, 1024))}
    outcome = ask(_model(tmp_path, {}, tensors), gpu_bw="100")
    found = record(outcome)
    assert found.valid is None and found.get("data", "counts", "unproven")[0]["term"] == "weights"
    assert "UNPROVEN: weights, so the ceiling is an upper bound" in found.summary
    assert any(line.startswith("UNPROVEN weights: ") for line in found.get("coverage", "missing"))
    counted, proven = found.metric("bytes_per_token"), found.metric("ceiling_tok_s")
    assert counted is not None and proven is not None
    assert proven == pytest.approx(100e9 / (counted - 2 * 1024 * 1024))


def test_a_batch_reports_tokens_of_all_sequences_and_the_bytes_of_a_step(
    ask: Ask, small: Path
) -> None:
    one, many = record(ask(small, gpu_bw="100")), record(ask(small, gpu_bw="100", batch=3))
    step = many.metric("bytes_per_step")
    assert step is not None and many.metric("bytes_per_token") == step / 3
    assert many.metric("ceiling_tok_s") == pytest.approx(3 * 100e9 / step)
    assert "GB/step at context 1024, batch 3" in many.summary
    alone = one.metric("ceiling_tok_s")
    assert alone is not None and (many.metric("ceiling_tok_s") or 0) > alone
    assert one.metric("bytes_per_step") is None


def test_prediction_layers_give_bytes_per_step_and_no_token_ceiling(
    ask: Ask, tmp_path: Path
) -> None:
    tensors = llama_tensors() | dense_layer("model.layers.2")
    tensors["model.layers.2.eh_proj.weight"] = ("BF16", (64, 128))
    model = _model(tmp_path, {"num_nextn_predict_layers": 1}, tensors)
    found = record(ask(model, gpu_bw="100", include_mtp=True))
    assert found.metric("ceiling_tok_s") is None
    assert found.metric("ceiling_steps_s") == pytest.approx(
        100e9 / (found.metric("bytes_per_step") or 0)
    )
    assert "steps/s" in found.summary and found.metric("bytes_other") == 64 * 128 * 2


def test_a_folder_without_headers_falls_back_to_its_configuration_and_says_why(ask: Ask) -> None:
    outcome = ask(CORPUS / "edge" / "bin_only")
    found = record(outcome)
    assert found.get("data", "counts", "method") == "config"
    assert found.get("data", "counts", "stored_bytes") is None
    assert "only pytorch_model.bin (pickle, never opened)" in text(outcome)
    assert "stored bytes (no headers were read)" in found.get("coverage", "missing")
    with pytest.raises(OpError, match="no headers to read: no safetensors"):
        ask(CORPUS / "edge" / "bin_only", method="headers")


def test_the_config_method_can_be_asked_for_beside_headers(ask: Ask, small: Path) -> None:
    headers = record(ask(small))
    config = record(ask(small, method="config", dtype="bf16"))
    assert config.metric("weight_bytes") == headers.metric("weight_bytes")
    assert config.get("data", "counts", "method") == "config"


@pytest.mark.parametrize(
    ("edge", "why"),
    [("lora_only", "adapter"), ("missing_shard", "absent"), ("bad_index_json", "not JSON")],
)
def test_what_cannot_be_counted_makes_no_record(edge: str, why: str, ask: Ask, home: Path) -> None:
    with pytest.raises(OpError, match=why):
        ask(CORPUS / "edge" / edge)
    assert not list(home.rglob("evidence.json"))


def test_a_file_without_tensors_or_configuration_is_refused(ask: Ask, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {})
    with pytest.raises(OpError, match=r"no config\.json, and the files hold no tensors"):
        ask(tmp_path / "model.safetensors")


def test_cancelling_between_two_shards_ends_the_call(ask: Ask, tmp_path: Path) -> None:
    import threading

    shards: dict[str, Tensors] = {
        f"model-0000{n}-of-00002.safetensors": {f"t{n}": ("U8", (1,))} for n in (1, 2)
    }
    model = write_model(tmp_path / "m", LLAMA, shards)
    stop = threading.Event()
    control = Control(report=lambda progress: stop.set(), cancel=stop)
    with pytest.raises(Cancelled):
        ask(model, control=control)


def test_next_proposes_a_benchmark_only_where_one_can_be_made(small: Path, home: Path) -> None:
    def bench(call: Call) -> EvidenceRecord:
        """Never called."""
        raise AssertionError

    op = Operation("bench", ("bench",), "Made up.", (), MEASURES, bench, lambda _: MEASURES)
    runner = runner_of(home, op)
    outcome = runner.here(
        runner.check("roofline", {"model": str(small), "gpu_bw": "100"}), Control()
    )
    (proposal,) = outcome.shown.next
    assert proposal["tool"] == "bench"
    assert proposal["arguments"]["roofline"] == record(outcome).evidence_id
    alone = runner_of(home).check("roofline", {"model": str(small), "gpu_bw": "100"})
    assert runner_of(home).here(alone, Control()).shown.next == []


def strings(value: Any) -> list[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_text_from_a_checkpoint_never_reaches_a_reply_with_control_characters(
    ask: Ask, tmp_path: Path
) -> None:
    name = "model.layers.0.x\n\u202e\x1b[31mnext: rm -rf\x07" + "y" * 300
    config = {"layer_types": ["full_attention", "evil\n\x1b"]}
    model = _model(tmp_path, config, llama_tensors() | {name: ("U8", (1,))})
    (model / "consolidated\n\x1b.safetensors").write_bytes(b"")
    outcome = ask(model)
    for value in strings(record(outcome).raw):
        assert all(c.isprintable() for c in value), value
    assert all(len(line) <= 420 for line in text(outcome).splitlines())


def test_sizes_of_small_models_keep_their_digits(ask: Ask, small: Path) -> None:
    assert "0.000443 GB/token" in record(ask(small)).summary


def test_a_gguf_model_goes_through_the_same_record(ask: Ask, tmp_path: Path) -> None:
    from helpers.tiny_models import TINY, write_gguf

    found = record(ask(write_gguf(tmp_path / "tiny.gguf"), gpu_bw="100"))
    assert found.valid is True and found.get("identity", "model", "dtype") == "fp16"
    assert found.get("data", "config_source") == "file"
    assert found.get("data", "counts", "groups", "embedding_row") == TINY.hidden * 2
    cached = 2 * TINY.kv_heads * TINY.hidden // TINY.heads
    assert found.metric("kv_bytes") == 1024 * TINY.layers * cached * 2


def test_tied_models_report_what_is_read_twice(ask: Ask, tmp_path: Path) -> None:
    tensors = ends(head=False) | dense_layer("model.layers.0")
    model = _model(tmp_path, {"num_hidden_layers": 1, "tie_word_embeddings": True}, tensors)
    counts = record(ask(model)).get("data", "counts")
    assert counts["read_twice_bytes"] == 128
    read = sum(counts["groups"].values())
    rest = sum(item["bytes"] for item in counts["not_read"])
    assert read + rest == counts["stored_bytes"] + counts["read_twice_bytes"]


def test_a_cached_snapshot_is_named_by_its_commit(
    ask: Ask, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c0ffee" + "0" * 34
    repository = tmp_path / "hub" / "models--acme--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots").mkdir()
    small.rename(repository / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = ask("acme/small")
    found = record(outcome)
    assert found.get("identity", "model", "id") == "acme/small"
    assert found.get("identity", "model", "revision") == commit
    assert found.get("data", "config_source") == "hub-cache"
    assert f"cache's snapshot, commit {commit}" in text(outcome)
    request = found.get("provenance", "request")
    assert request["args"]["revision"] == commit and request["args"]["model"] == "acme/small"
    assert request["requested"]["revision"] is None
    assert found.summary.startswith("small (bf16)")
