"""How a weight is stored: the name of its number format.

A quantised linear layer is several tensors: packed weights and the scales, zero points
and maps that belong to them.  Element types alone do not name the format (a U8 tensor is
NVFP4, MXFP4 or NF4 by what lies beside it), so a module's parameters are looked at
together, and all of a module's bytes are counted under its weight's format.  Packing
loses the matrix's shape, so shapes are never derived from packed tensors.

Sources: the on-disk layouts of compressed-tensors 0.20.1, AutoAWQ, GPTQ, bitsandbytes,
MLX, modelopt and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikit_ops.checkpoint.dtypes import GGML_TYPES
from ikit_ops.decode.vocabulary import words

_PLAIN = {
    "BF16": "bf16",
    "F16": "fp16",
    "F32": "fp32",
    "F64": "fp64",
    "I8": "int8",
    "F4": "fp4",
    "F6_E2M3": "fp6",
    "F6_E3M2": "fp6",
    "BOOL": "bool",
}
UNPACKED = words("BF16 F16 F32 F64 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2")
UNPACKED |= {name for name, _, _ in GGML_TYPES.values()} - words("I16 I32 I64")
"""Element types whose tensors keep the matrix's shape; GGUF states it for every type."""


def format_of(parameters: Mapping[str, str], bits: int | None) -> str:
    """The format of a module, from its parameters' element types.

    Args:
        parameters: parameter -> element type (``{"weight": "U8", "weight_scale": "F8_E4M3"}``).
        bits: bits of a weight by the quantisation config, for integer packing.

    Returns:
        ``bf16``, ``fp8``, ``nvfp4``, ``mxfp4``, ``int4``, ``nf4``, ``q4_k`` and so on;
        the element type in lower case when nothing says more.
    """
    names = set(parameters)
    last = {name.rpartition(".")[2] for name in names}
    weight = next(
        (
            parameters[key]
            for key in ("weight", "weight_packed", "qweight", "", "bias")
            if key in parameters
        ),
        next(iter(parameters.values()), ""),
    )
    if weight.startswith("F8_"):
        return "fp8"
    if weight == "U8":
        return _of_bytes(parameters, last)
    if weight in ("I32", "U32") and names & {"qweight", "weight_packed", "scales", "weight_scale"}:
        return f"int{bits}" if bits else "int"
    return _PLAIN.get(weight, weight.lower())


def _of_bytes(parameters: Mapping[str, str], last: set[str]) -> str:
    """The format of a module whose weights are packed in bytes."""
    if last & {"bitsandbytes__nf4", "quant_map", "absmax"}:
        return "fp4" if "bitsandbytes__fp4" in last else "nf4"
    scale = parameters.get("weight_scale", "")
    if last & {"weight_scale_2", "weight_global_scale"} or scale.startswith("F8_E4M3"):
        return "nvfp4"
    if scale in ("U8", "F8_E8M0"):
        return "mxfp4"
    if "SCB" in last:
        return "int8"
    return "u8"


def weight_bits(quantization: Mapping[str, Any] | None) -> int | None:
    """Bits of a packed integer weight, by the quantisation config; None when it does not say."""
    if quantization is None:
        return None
    candidates: list[Any] = [quantization.get("bits"), quantization.get("w_bit")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            candidates.append(weights.get("num_bits"))
    return next((b for b in candidates if type(b) is int and 0 < b <= 16), None)


def quantization_name(
    quantization: Mapping[str, Any] | None, modelopt: Mapping[str, Any] | None
) -> str | None:
    """The algorithm that a checkpoint's quantisation config declares, or None.

    ``modelopt`` is hf_quant_config.json.  A mixed-precision one is
    ``mixed_precision(a+b)`` with its algorithms in order.
    """
    inner = (modelopt or {}).get("quantization")
    section: Mapping[str, Any] = inner if isinstance(inner, dict) else (quantization or {})
    algorithm = section.get("quant_algo") or (quantization or {}).get("quant_algo")
    if isinstance(algorithm, str):
        if algorithm.upper() != "MIXED_PRECISION":
            return _clean(algorithm)
        layers = section.get("quantized_layers")
        found = {
            _clean(layer["quant_algo"])
            for layer in (layers.values() if isinstance(layers, dict) else ())
            if isinstance(layer, dict) and isinstance(layer.get("quant_algo"), str)
        }
        return f"mixed_precision({'+'.join(sorted(found))})"
    if quantization is None:
        return None
    if "quant_method" not in quantization and "bits" in quantization:
        return f"mlx-int{weight_bits(quantization)}"
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method == "compressed-tensors" and isinstance(form, str):
        return _mixed_groups(quantization) if form == "mixed-precision" else _clean(form)
    # Declared and not readable is not the same as not declared.
    return (_clean(method) if isinstance(method, str) else "") or "unknown"


def _mixed_groups(quantization: Mapping[str, Any]) -> str:
    """``mixed_precision(a+b)`` of a compressed-tensors config, by its groups' formats."""
    groups = quantization.get("config_groups")
    found = {
        _clean(group["format"])
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("format"), str)
    }
    return f"mixed_precision({'+'.join(sorted(found))})"


def _clean(text: str) -> str:
    """A name from a config, in lower case and safe for one line."""
    return "".join(c for c in text.lower() if c.isalnum() or c in "_-.+")[:60]
