"""Validation by jsonschema, in one place: it comes without types."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]  # no types are published with it


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    """What a standard validator of JSON Schema 2020-12 says against a value."""
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(value)]


def check(schema: dict[str, Any]) -> None:
    """Raise when the schema itself is none."""
    jsonschema.Draft202012Validator.check_schema(schema)
