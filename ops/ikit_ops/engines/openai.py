"""Any server that speaks the OpenAI API: measured from outside, configured by somebody else.

The number is what a client sees.  How the server runs (graphs, kernels, caches) it does not
say, so a benchmark of it is never *valid* in the sense of the gates: at best nothing was seen
that spoils it.

A key is named by its variable.  It goes over TLS to the hosts in ``IKIT_KEY_HOSTS``, or to
this machine, and along no redirect; to any other host the call is refused before it starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ikit_mcp.call import Call, one_line
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter, Found, Plan
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.result import WorkerResult, median

KEY_VARIABLE = "IKIT_SERVER_KEY"
ANSWER_SECONDS = 600.0
BUNCHED = 2.0
"""How much faster than by two calls a rate by stamps may be, before it is not believed."""
BUNCHED_MS = 20.0
"""What two calls may differ by for other reasons: noise of two short requests."""


class OpenAI(Adapter):
    """The adapter for servers."""

    name = "openai"
    title = "the server"
    rank = 80
    worker = "openai_worker.py"
    reports_cache = False
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("load", "warm-up", "round"),
        "check url, the model's name on the server, and api_key_env where it wants a key",
    )

    def find(self, call: Call, plan: Plan) -> Found:
        """Check the address, and that the key may be sent there; from now on it is redacted."""
        target = address(plan.url)
        if plan.api_key_env:
            refuse_key(target)
            call.secret(plan.api_key_env)
        return Found()

    def options(self, plan: Plan) -> dict[str, Any]:
        """A server is not configured from here."""
        if plan.engine_args:
            raise OpError("engine_args do not reach a server that runs", "leave them out")
        return {}

    def config(self, plan: Plan, found: Found) -> dict[str, Any]:
        """The address in parts, the model by the name that the server serves it under."""
        scheme, host, port, path = address(plan.url)
        return {
            **plan.config(),
            "engine_args": self.options(plan),
            "served_model": plan.model,
            "scheme": scheme,
            "host": host,
            "port": port,
            "base_path": path,
            "answer_timeout": min(plan.timeout, ANSWER_SECONDS),
        }

    def environment(self, plan: Plan) -> dict[str, str]:
        """The key goes by the environment: a command line is shown to everybody."""
        key = os.environ.get(plan.api_key_env) if plan.api_key_env else None
        return {KEY_VARIABLE: key} if key else {}

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """Nothing: the server's log is not here."""

    def checks(self, seen: Seen) -> list[Check]:
        """What only a client can find odd."""
        found = [
            Check("chunks", "unknown" if "not seen" in note else "warning", note, required=True)
            for note in seen.result.notes
            if note.startswith("chunks hold")
        ]
        return [*found, *_bunched(seen)]


ADAPTER = OpenAI()


def _bunched(seen: Seen) -> list[Check]:
    """A proxy that keeps chunks back and sends them at once makes any rate out of any server."""
    two, rounds = seen.result.two_call, seen.result.rounds
    ours, took = median([r.rate() for r in rounds]), median([r.time_of_decoding() for r in rounds])
    if two is None or not two.decode_tok_s or two.ttft_ms is None or two.total_ms is None:
        return []
    if ours is None or took is None:
        return []
    unseen = two.total_ms - two.ttft_ms - took
    if ours <= two.decode_tok_s * BUNCHED or unseen <= BUNCHED_MS:
        return [Check("bunched", "ok")]
    text = (
        f"tokens came in bunches: {ours:.1f} tok/s by their stamps, {two.decode_tok_s:.1f} by two "
        "calls; something between keeps chunks back, and stamps do not tell when tokens were made"
    )
    return [Check("bunched", "violation", text)]


def address(url: str | None) -> tuple[str, str, int | None, str]:
    """``(scheme, host, port, path)`` of a base URL; the path ends in ``/v1``, or is as given."""
    if not url:
        raise OpError("engine=openai needs url", "for example url=http://127.0.0.1:8000/v1")
    # urlsplit drops line ends and tabs without a word: what is read is not what was given.
    if not url.isascii() or not url.isprintable() or " " in url:
        raise OpError(
            "url holds a space, a control character or a character outside ASCII",
            "for example http://127.0.0.1:8000/v1",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise OpError("url is not a URL", "for example http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OpError("url is not an http or https URL", "for example http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise OpError(
            "url holds user information, a query or a fragment",
            "give scheme, host, port and path alone, and a key by api_key_env",
        )
    if _link_local(parts.hostname):
        raise OpError(
            f"url: {one_line(parts.hostname, 80)} is a link-local address, where machines keep "
            "their credentials",
            "give the address of an inference server",
        )
    path = parts.path.rstrip("/")
    return parts.scheme, parts.hostname, port, path or "/v1"


def _link_local(host: str) -> bool:
    return any(ip.is_link_local for ip in _addresses(host))


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host; [] when it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def is_loopback(host: str) -> bool:
    """Whether the host is this machine: a loopback address, or ``localhost``.

    A name of the DNS is not believed: it may lead elsewhere when it is asked again.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        found = _addresses(host) if host.lower() == "localhost" else []
        return bool(found) and all(ip.is_loopback for ip in found)


def refuse_key(target: tuple[str, str, int | None, str]) -> None:
    """OpError when a key may not be sent to this address."""
    scheme, host, _, _ = target
    if is_loopback(host):
        return
    allowed = {part.strip().lower() for part in os.environ.get("IKIT_KEY_HOSTS", "").split(",")}
    shown = one_line(host, 80)
    if host.lower() not in allowed - {""}:
        raise OpError(
            f"a key may not be sent to {shown}",
            "the user of this machine may allow the host in IKIT_KEY_HOSTS",
        )
    if scheme != "https":
        raise OpError(f"a key may not be sent to {shown} over plain http", "use https")
