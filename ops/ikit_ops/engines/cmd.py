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

``prompt`` {vocab_bound} belongs beside ``tokens``: without it answers are not compared.

The times of a round must hold together: the first token and the decoding fit into the whole,
and fill it.  A rate that only one of them would carry is a mistake, or is made up.

Flags of an engine that is known by name are judged by that engine's rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter, Found, Plan, device_variables, strict_json
from ikit_ops.engines.gates import TIMING_TOLERANCE, Check, Seen
from ikit_ops.engines.result import Round, WorkerResult

TOLERANCE = 0.10
"""The part of the time after the first token that may go by without being decoding."""
CLOSING_MS = 5.0
"""What ending a request may take beside that, in milliseconds."""
FAR = 1.5
"""How far below its times a claimed rate may be before nobody knows what it is of."""


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
                value = strict_json(text)
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
        known = [] if other is None or other is self else other.checks(seen)
        return [*times(seen.result.rounds), *known]


ADAPTER = Command()


def times(rounds: Sequence[Round]) -> list[Check]:
    """Whether the times and the rate that a command tells of each round fit each other."""
    found = [check for row in rounds if (check := _times_of(row)) is not None]
    worst = sorted(found, key=lambda check: check.state != "violation")
    return worst[:1] or [Check("times", "ok")]


def _times_of(row: Round) -> Check | None:
    """What is odd about the times of one round, or None."""
    name = "times"
    if row.ttft_ms is None or row.total_ms is None:
        if row.time_of_decoding() is None:
            return None  # no rate, which the gate of timing tells
        text = "ttft_ms and total_ms, which would bear decode_ms out, were not told"
        return Check(name, "unknown", text, required=True)
    rest = row.total_ms - row.ttft_ms
    decode = row.decode_ms if row.decode_ms is not None else rest
    told = f"round {row.index}: ttft {row.ttft_ms:g} ms, total {row.total_ms:g} ms"
    if row.ttft_ms + decode > row.total_ms * (1 + TIMING_TOLERANCE) or rest < 0:
        text = f"impossible times ({told}, decode {decode:g} ms): the parts are more than the whole"
        return Check(name, "violation", text)
    if row.gen_tokens is None or row.gen_tokens < 2 or rest <= 0:
        return None
    gaps = row.gen_tokens - 1
    # Some divide by n instead of n - 1: one token's time is no lie.
    if rest - decode > rest * TOLERANCE + decode / gaps + CLOSING_MS:
        text = (
            f"impossible times ({told}, decode {decode:g} ms): {rest - decode:.4g} ms after the "
            "first token are no decoding; the rate is of a part of it"
        )
        return Check(name, "violation", text)
    carried, claimed = gaps / rest * 1e3, row.decode_tok_s
    if claimed is None:
        return None
    if claimed > carried * (1 + TOLERANCE) * (gaps + 1) / gaps and _beyond(rest, gaps, claimed):
        text = f"the command claims {claimed:.4g} tok/s, its times carry {carried:.4g} ({told})"
        return Check(name, "violation", text)
    if claimed * FAR < carried:
        text = f"the command claims {claimed:.4g} tok/s, far below the {carried:.4g} of its times"
        return Check(name, "unknown", text, required=True)
    return None


def _beyond(rest: float, gaps: int, claimed: float) -> bool:
    """Whether a claimed rate leaves out more time than ending a request takes."""
    return rest - gaps / claimed * 1e3 > CLOSING_MS
