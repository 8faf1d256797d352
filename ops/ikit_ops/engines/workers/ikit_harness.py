"""What every engine worker shares: rounds, prompts, clocks, the result file.

A worker runs in the engine's own Python, started by path, below a supervisor.  It may
use the standard library and its engine, nothing else, and the syntax of Python 3.10.

One round is one request of ``gen_len`` tokens with a prompt that nobody has seen, and it
is timed by the stamps of its tokens: TTFT is the first token's stamp less the start of the
call, the decode rate is ``(n - 1) / (last - first)``.  The older way, two calls and a
subtraction, spends a second prefill and adds the noise of two requests; it is made once a
run, as a cross-check.  All stamps are of ``time.monotonic`` in one process.

Fresh prompts are not enough against prefix caches: a page of one token hits on the first
token that two prompts share.  So workers also switch the reading of caches off, and report
what the engine says was cached.

Whatever the engine prints goes to standard error: the result is a file, written whole
under another name and then renamed, so that logs, pipes and a death while writing cannot
spoil it.  It is written *before* the engine is shut down, because shutting down can hang.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import ssl
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

RESULT_FORMAT = "ikit.bench-result/1"
SHUTDOWN_SECONDS = 15.0
TIMING = "ttft = first token - start of call; decode = (n - 1) / (last token - first token)"
PROMPT_RULE = "lo + int(r.random() * (hi - lo)), r = random.Random('SEED:LABEL')"
MAX_LINE = 1 << 20
MAX_ANSWER = 64 << 20
MAX_TOLD = 16_384  # of an error: who shows it redacts it whole, and cuts it shorter
FAILED = 3


class Stopped(Exception):
    """The engine did not do what it was asked; the text says what."""


def prompt_ids(seed: int, label: str, length: int, vocabulary: int) -> list[int]:
    """``length`` token ids by the rule that is named in every record.

    The range leaves out special tokens (the low ids) and rare ones (the high ids).
    """
    low = 10 if vocabulary <= 2000 else 1000
    high = min(vocabulary, 30000)
    if high <= low:
        raise Stopped(f"a vocabulary of {vocabulary} tokens is too small for prompts")
    source = random.Random(f"{seed}:{label}")  # noqa: S311 -- prompts, not secrets
    return [low + int(source.random() * (high - low)) for _ in range(length)]


class Refused(Stopped):
    """A server answered with an error; ``status`` is its HTTP status."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class Generation:
    """One request: stamps (``time.monotonic``), tokens, and what the engine said of it.

    ``count`` None: nobody counted.  ``cached`` None: the engine does not say.
    ``engine_s`` is the engine's own time from first to last token, where it has one.
    ``timed`` is how many tokens surely came after the first stamp, where it is not count - 1.
    """

    def __init__(
        self,
        start: float,
        first: float | None,
        last: float | None,
        end: float,
        count: int | None,
        tokens: list[int] | None = None,
        prompt: int | None = None,
        cached: int | None = None,
        finish: str | None = None,
        engine_s: float | None = None,
        speculative: int | None = None,
        timed: int | None = None,
    ) -> None:
        self.start, self.first, self.last, self.end = start, first, last, end
        self.count, self.tokens = count, tokens
        self.prompt, self.cached, self.finish = prompt, cached, finish
        self.engine_s, self.speculative, self.timed = engine_s, speculative, timed

    def row(self, index: int, offset: float) -> dict[str, Any]:
        """The round as the result file holds it; ``offset`` makes wall time of stamps."""
        return {
            "index": index,
            "t_start": self.start + offset,
            "t_end": self.end + offset,
            "ttft_ms": None if self.first is None else (self.first - self.start) * 1e3,
            "total_ms": (self.end - self.start) * 1e3,
            "decode_ms": None
            if self.first is None or self.last is None
            else (self.last - self.first) * 1e3,
            "engine_decode_ms": None if self.engine_s is None else self.engine_s * 1e3,
            "gen_tokens": self.count,
            "timed_tokens": self.timed,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "finish_reason": self.finish,
            "speculative_tokens": self.speculative,
        }


class Engine:
    """What a worker must bring: how its engine is imported, loaded, asked, described, closed."""

    loads = True
    """Whether ``load`` loads a model, so that its time means something."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def prepare(self) -> None:
        """Import the engine."""

    def load(self) -> None:
        """Load the model."""

    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        raise NotImplementedError

    def generate(self, ids: list[int], count: int) -> Generation:
        """Generate exactly ``count`` tokens after the prompt ``ids``; a Generation."""
        raise NotImplementedError

    def reference(self, ids: list[int], count: int) -> list[int] | None:
        """The ids that answer the reference prompt; None where the engine gives none."""
        return self.generate(ids, count).tokens

    def capture(self, what: str) -> bool:
        """Open (``start``) or close (``stop``) the capture range where the kernels run.

        False: this engine cannot.
        """
        return False

    def describe(self) -> dict[str, Any]:
        """``{version, platform, flags, flags_source, ...}``, read where it is true."""
        raise NotImplementedError

    def close(self) -> None:
        """Shut the engine down; a watchdog stands behind it."""


class Session:
    """Runs one engine through the phases and leaves the result file."""

    def __init__(self, engine: Engine, config: dict[str, Any]) -> None:
        self.engine = engine
        self.config = config
        self.phase = "start"
        self.offset = time.time() - time.monotonic()
        self.result: dict[str, Any] = {"format": RESULT_FORMAT}

    def enter(self, phase: str, done: int = 0, total: int | None = None) -> None:
        """Say where the run is; a reader of the file sees the old or the new line."""
        self.phase = phase
        path = self.config.get("progress_path")
        if path:
            write_json(path, {"phase": phase, "done": done, "total": total})

    def run(self) -> None:
        """All phases up to the result; the engine is still up afterwards."""
        config, engine = self.config, self.engine
        self.enter("import")
        started = time.monotonic()
        engine.prepare()
        self.enter("load")
        loading = time.monotonic()
        engine.load()
        ready = time.monotonic()
        self.result["import_s"] = loading - started
        self.result["load_s"] = ready - loading if engine.loads else None
        self.warm_up()
        rounds = self.rounds()
        if not config.get("capture"):  # under a profiler only the rounds are of interest
            self.result["two_call"] = self.two_calls(rounds) if rounds else None
            self.enter("reference")
            prompt = self.ids("reference", fresh=False)
            self.result["tokens"] = engine.reference(prompt, config["gen_len"])
        self.enter("flags")
        self.result.update(engine.describe())
        self.result["timing"] = {"definition": engine_timing(engine)}
        self.result["prompt"] = {"rule": PROMPT_RULE, "vocab_bound": engine.vocabulary()}
        write_json(config["result_path"], self.result)

    def ids(self, label: str, fresh: bool = True) -> list[int]:
        """The prompt of a label; a fresh one carries this run's nonce."""
        if fresh and not self.config.get("repeat_prompt"):
            label = self.config["nonce"] + ":" + label
        elif fresh:
            label = "repeated"
        config = self.config
        return prompt_ids(config["seed"], label, config["prompt_len"], self.engine.vocabulary())

    def warm_up(self) -> None:
        """Requests of the very shape of the rounds: kernels are compiled for a shape."""
        total = self.config["warmup"]
        for number in range(total):
            self.enter("warm-up", number, total)
            self.engine.generate(self.ids(f"warmup:{number}"), self.config["gen_len"])

    def rounds(self) -> list[dict[str, Any]]:
        """The timed requests; a failed one ends the run, or is noted with ``keep_going``."""
        total, rows, failed = self.config["rounds"], [], []
        with Capture(self.engine, self.config, self.result):
            for number in range(total):
                index = number + self.config["round_offset"]
                ids = self.ids(f"round:{index}")  # before the clock runs
                self.enter("round", number, total)
                try:
                    made = self.engine.generate(ids, self.config["gen_len"])
                except Exception as error:  # the engine's own; noted, or given on
                    if not self.config.get("keep_going"):
                        raise
                    failed.append({"index": index, "why": f"{type(error).__name__}: {error}"})
                    traceback.print_exc()
                else:
                    rows.append(made.row(index, self.offset))
        self.result["rounds"], self.result["failed_rounds"] = rows, failed
        return rows

    def two_calls(self, rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Decode by two calls: the time of a whole round less that of a request of one token."""
        count = self.config["gen_len"]
        if count < 2:
            return None
        self.enter("two-call check")
        for attempt in ("warm", "timed"):
            one = self.engine.generate(self.ids(f"two-call:{attempt}"), 1)
        ttft = one.end - one.start
        totals = sorted(row["total_ms"] / 1e3 for row in rounds)
        total = totals[len(totals) // 2]
        rate = (count - 1) / (total - ttft) if total > ttft else None
        return {"ttft_ms": ttft * 1e3, "total_ms": total * 1e3, "decode_tok_s": rate}


class Capture:
    """Opens a profiler's capture range around the rounds, where a profiler is told to wait.

    Loading and warm-up, which would fill the profile, stay outside.  ``captured`` in the
    result says whether the engine could open the range.
    """

    def __init__(self, engine: Engine, config: dict[str, Any], result: dict[str, Any]) -> None:
        self.wanted = bool(config.get("capture"))
        self.engine, self.result = engine, result

    def __enter__(self) -> None:
        """Start capturing."""
        if self.wanted:
            self.result["captured"] = bool(self.engine.capture("start"))

    def __exit__(self, *_: object) -> None:
        """Stop capturing."""
        if self.wanted:
            self.engine.capture("stop")


def torch_capture(what: str) -> bool:
    """``cudaProfilerStart`` or ``Stop`` through torch; False where there is no GPU to profile."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    getattr(torch.cuda.profiler, what)()
    return True


def engine_timing(engine: Engine) -> str:
    """The definition of TTFT and decode that this engine's stamps follow."""
    return str(getattr(engine, "timing", TIMING))


def write_json(path: str, value: Any) -> None:
    """Replace a file as a whole."""
    fresh = f"{path}.{os.getpid()}.new"
    with open(fresh, "w", encoding="utf-8") as file:  # noqa: PTH123 -- workers stay small
        json.dump(value, file)
    os.replace(fresh, path)  # noqa: PTH105 -- as above


def read_config(argv: list[str]) -> dict[str, Any]:
    """The configuration: the file that is the one argument."""
    with open(argv[1], encoding="utf-8") as file:  # noqa: PTH123 -- workers stay small
        config: dict[str, Any] = json.load(file)
    return config


def main(engine_class: type[Engine], session_class: type[Session] | None = None) -> NoReturn:
    """Run the worker; never returns.  Engines that fork or spawn need this below ``__main__``."""
    os.dup2(2, 1)  # an engine's print, and its children's, must not pass for anything else
    config = read_config(sys.argv)
    # An interrupt is how the run above asks to stop.  Python would notice it when a call into
    # the engine returns, which can be minutes; there is nothing here to save, and the run
    # ends whatever the engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    session = (session_class or Session)(engine_class(config), config)
    code = 0
    try:
        session.run()
    except BaseException as error:  # noqa: BLE001 -- told in the result, whatever an engine raises
        code = FAILED
        if not isinstance(error, Stopped):
            traceback.print_exc()
        write_json(config["result_path"], failure(session.phase, error))
    close(session, code)


def failure(phase: str, error: BaseException) -> dict[str, Any]:
    """What the result file says of a run that failed."""
    kind = "" if isinstance(error, Stopped) else type(error).__name__ + ": "
    return {
        "format": RESULT_FORMAT,
        "error": {"phase": phase, "what": kind + str(error)[:MAX_TOLD]},
    }


def close(session: Session, code: int) -> NoReturn:
    """Shut the engine down, but not for longer than the watchdog allows; then leave."""

    def leave() -> NoReturn:
        sys.stderr.flush()
        os._exit(code)

    watchdog = threading.Timer(SHUTDOWN_SECONDS, leave)
    watchdog.daemon = True
    watchdog.start()
    try:
        session.enter("shutdown")
        session.engine.close()
    except BaseException:  # noqa: BLE001 -- the result is on disk: a bad end must not undo it
        traceback.print_exc()
    leave()


# --- HTTP with streamed answers ------------------------------------------------------


class Connection:
    """A server that streams: one POST at a time, its lines stamped as they come.

    It follows no redirect and asks no proxy: a key must not go anywhere else.
    """

    def __init__(
        self,
        scheme: str,
        host: str,
        port: int | None,
        headers: dict[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.scheme, self.host, self.port = scheme, host, port
        self.headers = dict(headers or {})
        self.timeout = timeout

    def _open(self) -> http.client.HTTPConnection:
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout, context=context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def post(
        self, path: str, body: dict[str, Any]
    ) -> tuple[float, list[tuple[float, bytes]], float]:
        """``[(stamp, line)]`` of the answer's ``data:`` lines, and the stamps of start and end."""
        connection = self._open()
        try:
            text = json.dumps(body).encode("utf-8")
            connection.connect()  # no round pays for the handshake
            start = time.monotonic()
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request("POST", path, text, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(answer.status, refusal(answer))
            lines: list[tuple[float, bytes]] = []
            size = 0
            while line := answer.readline(MAX_LINE):
                size += len(line)
                if size > MAX_ANSWER:
                    raise Stopped(f"the server streamed more than {MAX_ANSWER >> 20} MiB")
                if line.startswith(b"data:"):
                    lines.append((time.monotonic(), line[5:].strip()))
            return start, lines, time.monotonic()
        finally:
            connection.close()

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a POST that is answered in one piece."""
        connection = self._open()
        try:
            text = json.dumps(body).encode("utf-8")
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request("POST", path, text, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(answer.status, refusal(answer))
            return json.loads(answer.read(MAX_ANSWER))
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON of a GET, or None where the server has none."""
        connection = self._open()
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            text = answer.read(MAX_LINE)
            return json.loads(text) if answer.status == 200 else None
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def refusal(answer: http.client.HTTPResponse) -> str:
    """What an error answer says: its status, and the message where it is a JSON error."""
    if 300 <= answer.status < 400:
        return f"the server answered with a redirect ({answer.status}), which is not followed"
    try:
        told = json.loads(answer.read(MAX_LINE))
        error = told.get("error", told)
        message = error if isinstance(error, str) else str(error.get("message", ""))
    except (ValueError, AttributeError, RecursionError):
        message = ""
    return f"the server answered {answer.status} {message[:MAX_TOLD]}"


def parsed(lines: list[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """``[(stamp, object)]`` of streamed lines; the end mark is left out."""
    found = []
    for stamp, line in lines:
        if line == b"[DONE]":
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise Stopped("the server streamed a line that is not JSON") from None
        if isinstance(value, dict):
            if "error" in value:
                said = str(value["error"])[:MAX_TOLD]
                raise Stopped(f"the server streamed an error: {said}")
            found.append((stamp, value))
    return found
