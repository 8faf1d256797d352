"""Bytes per decoded token: roles, formats, experts, KV cache, recurrent state."""

CONFIG_DTYPES = ("bf16", "fp16", "fp8", "q8_0")
"""The weight formats that the config method can count."""
