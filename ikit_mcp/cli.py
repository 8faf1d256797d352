"""The command line: the same registry, one command an operation.

A command prints for whom it runs: a table or a record for a person at a terminal,
tab-separated lines into a pipe, and with ``--json`` exactly the stored record (or the
reply of an operation that only reads).  Everything else -- progress, errors, logs --
goes to standard error.

Exit status: 0 a record was made, whatever its verdict (3 with ``--check`` when it is not
valid); 1 the call was refused or failed; 2 usage.

A long operation runs here, in this process: there are no jobs, Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ikit_mcp import __version__, snippets, terminal
from ikit_mcp.arguments import add_options
from ikit_mcp.call import Cancelled, Progress, Settings, visible
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import secrets
from ikit_mcp.registry import (
    EXECUTES,
    READS,
    ArgumentError,
    Effects,
    Operation,
    OpError,
    Registry,
    load,
)
from ikit_mcp.runner import Control, Outcome, Runner
from ikit_mcp.worker import log_to_stderr, report_bug

if TYPE_CHECKING:
    from ikit_mcp.evidence.record import EvidenceRecord

DONE, FAILED, USAGE, NOT_VALID = 0, 1, 2, 3
DESCRIPTION = "Honest measurement of inference engines: rooflines, benchmarks, evidence."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    log_to_stderr(logging.WARNING)
    _survive_any_encoding()
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    with _diverted():
        registry = load(os.environ.get("IKIT_PLUGINS"))
    parser = build_parser(registry)
    chosen = parsed(parser, words)
    if chosen.run is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        return int(chosen.run(registry, chosen))
    except OpError as error:
        _say(str(error))
        return USAGE if isinstance(error, ArgumentError) else FAILED
    except Cancelled:
        _say("cancelled")
        return FAILED
    except OutputError as error:  # the reader has gone, as with `| head`, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _say(str(error))
        return FAILED
    except Exception as error:  # noqa: BLE001 -- a bug: an id to the user, its traceback redacted
        _say(f"internal error {report_bug(error).id}; report it with the lines above")
        return FAILED


def serve_main() -> int:
    """The ``ikit-mcp`` command: ``ikit serve``."""
    return main(["serve", *sys.argv[1:]])


# --- commands ------------------------------------------------------------------


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The chosen command; usage (status 2) for what is not known, with the nearest option."""
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        command: argparse.ArgumentParser = getattr(chosen, "_parser", parser)
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word[:64], command._option_string_actions, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        command.error(visible(secrets.redact(f"unknown argument {word}{hint}")))
    return chosen


def build_parser(registry: Registry) -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of what it returns takes (registry, chosen)."""
    parser = argparse.ArgumentParser(prog="ikit", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ikit-mcp {__version__}")
    parser.set_defaults(run=None)
    groups: dict[tuple[str, ...], Any] = {(): parser.add_subparsers(metavar="COMMAND")}
    for operation in registry.commands():
        path = operation.cli or ()
        command = _subparsers(groups, path[:-1]).add_parser(
            path[-1], help=operation.help, description=operation.help, allow_abbrev=False
        )
        add_options(command, operation.args)
        _add_output(command, operation)
        # No argument's name begins with an underscore, so none can take this one's place.
        command.set_defaults(run=_run_operation, operation=operation.name, _parser=command)
    _add_own(groups[()])
    return parser


def _subparsers(groups: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """The sub-commands of a group, made when first asked for."""
    if path not in groups:
        above = _subparsers(groups, path[:-1])
        group = above.add_parser(path[-1], help=f"{path[-1]} commands", allow_abbrev=False)
        groups[path] = group.add_subparsers(metavar="COMMAND", required=True)
    return groups[path]


def _add_output(command: argparse.ArgumentParser, operation: Operation) -> None:
    shown = "reply" if operation.effects == READS else "stored record"
    command.add_argument("--json", action="store_true", help=f"print the {shown} as JSON")
    command.add_argument(
        "--check", action="store_true", help=f"exit {NOT_VALID} when the result is not valid"
    )
    if operation.effects != READS:
        command.add_argument("--svg", metavar="FILE", help="also write the record's picture there")


def _add_own(top: Any) -> None:
    """The commands that are no operations."""
    serve = top.add_parser("serve", help="run the MCP server on stdio")
    _add_serve_options(serve)
    snippet = top.add_parser("install-snippet", help="print the set-up for an MCP client")
    snippet.add_argument("--client", choices=sorted(snippets.CLIENTS), default="standard")
    snippet.set_defaults(run=_print_snippet)
    completion = top.add_parser("completion", help="print a shell completion script")
    completion.add_argument("shell", choices=sorted(snippets.SHELLS))
    completion.set_defaults(run=_print_completion)


def _print_snippet(registry: Registry, chosen: argparse.Namespace) -> int:
    sys.stdout.write(snippets.for_client(chosen.client) + "\n")
    return DONE


def _print_completion(registry: Registry, chosen: argparse.Namespace) -> int:
    sys.stdout.write(snippets.completion(build_parser(registry), chosen.shell))
    return DONE


def _run_operation(registry: Registry, chosen: argparse.Namespace) -> int:
    """Run the chosen operation here, and print what came of it."""
    settings = Settings.from_environment()
    runner = Runner(registry, settings)
    operation = registry.get(chosen.operation)
    raw = {arg.name: getattr(chosen, arg.name) for arg in operation.args}
    raw = {k: v for k, v in raw.items() if v is not None and v != []}
    request = runner.check(operation.name, raw)
    picture: str | None = getattr(chosen, "svg", None)
    if picture is not None:
        _refuse_target(Path(picture))
    cancel = threading.Event()
    with _interruptible(cancel), _diverted():
        outcome = runner.here(request, Control(_report, cancel))
    _print(outcome, as_json=chosen.json)
    if picture is not None and outcome.record is not None:
        _write_picture(Store(settings.home), outcome.record, Path(picture))
    return NOT_VALID if chosen.check and not _valid(outcome) else DONE


def _refuse_target(path: Path) -> None:
    """Refuse a place where no picture can be written, before hours of measuring."""
    if os.path.isdir(path):  # noqa: PTH112 -- unlike Path.is_dir, no error for a name too long
        raise OpError(f"--svg {path}: is a folder", "name a file in it")
    if not os.path.isdir(path.parent):  # noqa: PTH112 -- as above
        raise OpError(f"--svg {path}: there is no folder {path.parent}", "make the folder first")


def _write_picture(store: Store, record: EvidenceRecord, path: Path) -> None:
    """Copy the record's first SVG artifact to a file; OpError when it has none."""
    listed = record.get("artifacts") or []
    names = [str(a["name"]) for a in listed if a.get("media_type") == "image/svg+xml"]
    shown = record.evidence_id[:12]
    if not names:
        raise OpError(
            f"--svg: a {record.kind} record has no picture; the record is stored as {shown}",
            "leave --svg out",
        )
    with os.fdopen(store.open_artifact(record.evidence_id, names[0]), "rb") as source:
        content = source.read()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OpError(
            f"--svg {path}: {error.strerror}; the record is stored as {shown}",
            "name a file that you may write",
        ) from None
    _say(f"{names[0]} of {shown} written to {path}")


def _valid(outcome: Outcome) -> bool:
    """Whether the record is valid; of a reply, whether all that it says of validity is good."""
    if outcome.record is not None:
        return outcome.record.valid is True
    reply = outcome.reply or {}
    sound = reply.get("ok") is not False and reply.get("integrity", {}).get("ok") is not False
    return sound and reply.get("record", {}).get("valid", True) is True


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if outcome.record is not None:
        raw = secrets.redact_json(outcome.record.raw)
        text = _json(raw) if as_json else terminal.record(raw, sys.stdout.isatty())
    else:
        reply = secrets.redact_json(outcome.reply)
        text = _json(reply) if as_json else terminal.reply(reply, sys.stdout.isatty())
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"cannot write the output: {error.strerror}") from None


class OutputError(Exception):
    """Standard output cannot take what is printed; the record, if any, is stored."""


def _json(value: Any) -> str:
    plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    return json.dumps(value, ensure_ascii=plain, indent=1)


def _survive_any_encoding() -> None:
    """A character that the terminal's encoding lacks is shown as its escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(progress: Progress) -> None:
    _say(f"… {progress.what} {progress.part}".rstrip())


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a standard error that is full or gone
        sys.stderr.write(visible(secrets.redact(text)) + "\n")


@contextlib.contextmanager
def _diverted() -> Iterator[None]:
    """What anybody prints inside the block goes to standard error: output is ours alone."""
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by something that is no file, as tests do
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


class _interruptible:
    """While the block runs, a first signal cancels the call; a second one ends the process."""

    def __init__(self, cancel: threading.Event) -> None:
        self._cancel = cancel
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._cancel.is_set():
            os._exit(128 + number)  # the supervisors end what was started
        self._cancel.set()


# --- the server ------------------------------------------------------------------


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--read-only", action="store_true", help="offer only what writes and measures nothing"
    )
    parser.add_argument("--version", action="version", version=f"ikit-mcp {__version__}")


def _serve(words: Sequence[str]) -> int:
    """Serve over stdio; standard output belongs to the protocol from here on."""
    parser = argparse.ArgumentParser(prog="ikit serve", description="The MCP server, on stdio.")
    _add_serve_options(parser)
    chosen = parser.parse_args(words)
    wire = _claim_wire()
    logging.getLogger("ikit_mcp").setLevel(logging.INFO)
    from ikit_mcp.server import stdio  # mcp costs over a second of CPU: only when serving

    def make_runner() -> Runner:
        """Load the operations: after the wire is safe from what an import may print."""
        settings = Settings.from_environment()
        scope: Effects = READS if chosen.read_only else EXECUTES
        return Runner(load(settings.plugins), settings, scope)

    try:
        return stdio.serve(wire, make_runner)
    except OpError as error:
        _say(str(error))
        return FAILED


def _claim_wire() -> io.TextIOWrapper:
    """A private stream on standard output; descriptor 1 leads to standard error from now on."""
    sys.stdout.flush()
    wire = os.dup(1)
    os.dup2(2, 1)
    return io.TextIOWrapper(os.fdopen(wire, "wb"), encoding="utf-8", write_through=True)


if __name__ == "__main__":
    sys.exit(main())
