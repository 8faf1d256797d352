"""Bytes per decoded token: roles, formats, experts, KV cache, recurrent state."""
