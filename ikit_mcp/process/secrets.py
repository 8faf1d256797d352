"""Secrets: how they are recognised, kept out of what is shown, and searched for in files.

Four walls, from the outside in; each holds where the one before it failed:

1. ``secret_name``, ``secret_value``, ``secret_argv`` refuse before anything starts
   (``secret_rules``).
2. The environments of ``environment`` do not hold them.
3. ``redact`` and ``redact_json`` stand at the two ways out, the record writer and the reply
   writer (``redaction``).
4. ``scan_or_remove`` searches finished files for the values themselves (``scan``).
"""

from __future__ import annotations

from ikit_mcp.process.redaction import (
    Redactor,
    head,
    known_in,
    known_secrets,
    own_secrets,
    redact,
    redact_bytes,
    redact_json,
    redactor,
    variants,
)
from ikit_mcp.process.scan import scan_file, scan_or_remove
from ikit_mcp.process.secret_rules import secret_argv, secret_name, secret_value

__all__ = [
    "Redactor",
    "head",
    "known_in",
    "known_secrets",
    "own_secrets",
    "redact",
    "redact_bytes",
    "redact_json",
    "redactor",
    "scan_file",
    "scan_or_remove",
    "secret_argv",
    "secret_name",
    "secret_value",
    "variants",
]
