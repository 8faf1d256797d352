"""Any command as an engine: it reads a configuration, runs the rounds, writes a result.

An engine that nobody wrote an adapter for takes part by two files.  The command finds the
path of the configuration (JSON, ``ikit.bench-config/1``) in ``IKIT_CONFIG`` and writes its
result (JSON, ``ikit.bench-result/1``) to the path in ``IKIT_RESULT_PATH``, or prints it on
one line behind ``IKIT_RESULT ``; of several such lines the last counts.

The result holds ``rounds``, a list of objects with ``ttft_ms``, ``total_ms`` and
``gen_tokens``, and, where the command knows them, ``decode_ms`` (first to last token),
``prompt_tokens``, ``cached_tokens``, ``finish_reason``, ``t_start`` and ``t_end`` (seconds
since 1970), ``speculative_tokens``.  Beside them: ``engine`` {name, version}, ``flags`` (what
the engine really ran; without it nobody can say whether the number is valid), ``platform``
(cuda, rocm, cpu), ``attention_backend``, ``tokens`` (ids answered to the reference prompt),
``two_call`` {ttft_ms, total_ms, decode_tok_s}, ``load_s``, ``timing`` {definition}.

Flags of an engine that is known by name are judged by that engine's rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter, Found, Plan, device_variables
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.result import WorkerResult


class Command(Adapter):
    """The adapter for any command."""

    name = "cmd"
    title = "the command"
    rank = 90
    reports_cache = False

    def find(self, call: Call, plan: Plan) -> Found:
        """There is nothing to find: the caller gave the command."""
        if not plan.command:
            raise OpError(
                "engine=cmd needs command",
                'give command as a list of words, e.g. ["python", "my_bench.py"]',
            )
        rule = call.secret_rule(plan.command)
        if rule is not None:
            raise OpError(
                f"the command was refused: {rule} looks like a secret",
                "let the command read it from a file or a variable of its own",
            )
        return Found()

    def options(self, plan: Plan) -> dict[str, Any]:
        """``key=value`` items are handed over; anything else stays a text under its number."""
        found: dict[str, Any] = {}
        for number, item in enumerate(plan.engine_args):
            key, equals, text = item.partition("=")
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = text
            found[key if equals else str(number)] = value if equals else item
        return found

    def command(self, plan: Plan, found: Found, config_path: Path) -> list[str]:
        """The command as it was given."""
        return list(plan.command)

    def environment(self, plan: Plan) -> dict[str, str]:
        """The device and the threads by variables, as for all."""
        return device_variables(plan)

    def requested(self, plan: Plan) -> dict[str, Any]:
        """Nothing: a command's options and its flags need not share names."""
        return {}

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """The device is the one that was meant, unless the command says another."""
        if result.platform is None:
            result.platform = plan.platform

    def checks(self, seen: Seen) -> list[Check]:
        """The checks of the engine that the command names, where its name is known."""
        from ikit_ops.engines import adapters  # the package imports this module

        told = seen.result.engine.name if seen.result.engine else None
        other = adapters().get((told or "").lower())
        return [] if other is None or other is self else other.checks(seen)


ADAPTER = Command()
