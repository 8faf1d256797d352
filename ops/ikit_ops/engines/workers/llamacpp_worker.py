"""The worker for llama.cpp: its own HTTP server, embedded, or an installed llama-server.

Both are the same C++ server, asked over HTTP as a user would: ``/completion`` streams a
chunk a token.  ``cache_prompt`` is off in each request, and ``timings.cache_n`` is what
says whether the prompt was served from a cache (``tokens_cached`` is the context length).
The server's own ``predicted_ms`` covers the n - 1 steps after the first token; it is kept
beside our stamps, and a request of one token has none.

``llama-bench`` measures without sampling and without a server; its samples become rounds.
Its JSON repeats what was asked for, so it runs with ``-v``: what it did is in its log.  Both
ways agree within a few tenths of a per cent where tokens are dear; to sample one of 131,072
costs the server of b11434 about 2 % of a token of 12 ms, which llama-bench does not pay.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 -- run by path

import ikit_harness as harness

READY_SECONDS = 0.02
DYING_SECONDS = 1.0
"""How long after its last word a server may take to be dead."""


class LlamaServer(harness.Engine):
    """llama-server, in this process (xllamacpp) or as a child (``config["program"]``)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.server: Any = None
        self.module: Any = None
        self.child: subprocess.Popen[bytes] | None = None
        self._draft: int | None = None

    def prepare(self) -> None:
        """Import xllamacpp, unless a program is to be run."""
        if not self.config.get("program"):
            import xllamacpp

            self.module = xllamacpp

    def load(self) -> None:
        """Start the server; it listens on loopback alone."""
        if self.config.get("program"):
            self._start_child()
        else:
            self._start_embedded()
        props = self.connection.get("/props")
        if props is None:
            raise harness.Stopped("llama-server does not answer /props")
        if props.get("model_path") not in (None, self.config["model"]):
            # The port was free when it was chosen; somebody else may have been quicker.
            raise harness.Stopped("another server answers at the port that was free a moment ago")
        self.props: dict[str, Any] = props

    def _start_embedded(self) -> None:
        params = self.module.CommonParams()
        params.model.path = self.config["model"]
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.verbosity = 4  # offloaded layers, flash attention, cache types: only the log says
        params.endpoint_props = params.endpoint_slots = True
        apply_options(params, self.config["options"], self.module)
        self.params = params
        self.server = self.module.Server(params)
        host, _, port = self.server.listening_address.rpartition(":")
        self._connect(host.rpartition("/")[2], int(port))

    def _start_child(self) -> None:
        port = free_port()
        argv = [self.config["program"], "--model", self.config["model"], "--host", "127.0.0.1",
                "--port", str(port), "-lv", "4", "--no-ui", *self.config["options"]]  # fmt: skip
        self.child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)  # noqa: S603 -- found, not given
        self._connect("127.0.0.1", port)
        while True:
            health = self.connection.get("/health")
            if self.child.poll() is not None:
                raise harness.Stopped(f"llama-server {how_it_ended(self.child.returncode)}")
            if health is not None and health.get("status") == "ok":
                return
            time.sleep(READY_SECONDS)

    def _connect(self, host: str, port: int) -> None:
        self.connection = harness.Connection("http", host, port)

    def vocabulary(self) -> int:
        """The length of the model's token list."""
        return int(self.config["vocabulary"])

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Say that the server died, where that is why its answer is none."""
        try:
            yield
        except harness.Refused:
            raise
        except (OSError, ValueError, http.client.HTTPException, harness.Stopped):
            try:
                status = self.child.wait(DYING_SECONDS) if self.child is not None else None
            except subprocess.TimeoutExpired:
                status = None
            if status is None:
                raise
            raise harness.Stopped(f"llama-server {how_it_ended(status)}") from None

    def _body(self, ids: list[int], count: int, stream: bool) -> dict[str, Any]:
        return {
            "prompt": ids, "n_predict": count, "ignore_eos": True, "return_tokens": True,
            "cache_prompt": bool(self.config.get("read_cache")), "temperature": 0.0,
            "stream": stream,
        }  # fmt: skip

    def generate(self, ids: list[int], count: int) -> harness.Generation:
        """One streamed /completion."""
        body = self._body(ids, count, stream=True)
        with self._alive():
            start, lines, end = self.connection.post("/completion", body)
            chunks = harness.parsed(lines)
            if not chunks or not chunks[-1][1].get("stop"):
                raise harness.Stopped("llama-server ended its answer without a last chunk")
        last = chunks[-1][1]
        made = last.get("tokens_predicted")
        first, final = token_stamps(chunks, made or 0)
        tokens = [token for _, chunk in chunks for token in chunk.get("tokens") or []]
        timings = last.get("timings", {})
        # predicted_ms of a request of one token is a placeholder, not a time.
        timed = (made or 0) > 1
        self._draft = timings.get("draft_n") or self._draft
        return harness.Generation(
            start, first, final, end,
            count=made, tokens=tokens,
            prompt=last.get("tokens_evaluated"), cached=timings.get("cache_n"),
            finish=finish_reason(last.get("stop_type")),
            engine_s=timings["predicted_ms"] / 1e3 if timed and "predicted_ms" in timings else None,
            speculative=timings.get("draft_n", 0),
        )  # fmt: skip

    def reference(self, ids: list[int], count: int) -> list[int]:
        """All tokens, in one piece: a stream leaves out those that end amid a character."""
        with self._alive():
            answer = self.connection.ask("/completion", self._body(ids, count, stream=False))
        return [int(token) for token in answer["tokens"]]

    def describe(self) -> dict[str, Any]:
        """Flags that the server holds; what only its log says is read from there."""
        settings = self.props.get("default_generation_settings", {})
        flags = {
            "n_ctx": settings.get("n_ctx"),
            "total_slots": self.props.get("total_slots"),
            "model_ftype": self.props.get("model_ftype"),
            "speculative": bool(self._draft)
            or settings.get("params", {}).get("speculative.types", "none") != "none",
            "samplers": "greedy (temperature 0)",
        }
        told: dict[str, Any] = {
            "version": self.config.get("version"),
            "platform": None,
            "flags": flags,
            "flags_source": "server /props and log",
            "devices": None,
        }
        if self.module is not None:
            told["version"] = self.module.__version__
            told["devices"] = [device_row(d) for d in self.module.get_device_info()]
            params = self.params
            flags.update(
                n_threads=params.cpuparams.n_threads,
                n_batch=params.n_batch,
                n_ubatch=params.n_ubatch,
                n_gpu_layers=params.n_gpu_layers,
                no_kv_offload=params.no_kv_offload,
                no_op_offload=params.no_op_offload,
                n_parallel=params.n_parallel,
            )
        return told

    def close(self) -> None:
        """End the child; an embedded server ends with this process."""
        if self.child is not None:
            self.child.terminate()
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()


def token_stamps(chunks: list[tuple[float, dict[str, Any]]], made: int) -> tuple[float, float]:
    """When the first and the last of ``made`` tokens came.

    A token that ends amid a character is held back until the character is whole, so that the
    first chunk may stand for several tokens.  Each chunk counts the tokens so far: the first
    one's time is then reckoned back at the pace of the others.  The last chunk of all follows
    the last token at once.
    """
    counted = [
        (stamp, int(chunk["tokens_predicted"])) for stamp, chunk in chunks if chunk.get("tokens")
    ]
    end = chunks[-1][0]
    if not counted:
        return end, end
    final = counted[-1][0] if counted[-1][1] == made else end
    stamp, number = counted[0]
    if number > 1 and made > number:
        stamp -= (number - 1) * (final - stamp) / (made - number)
    return stamp, final


def finish_reason(stop_type: str | None) -> str | None:
    """Why the server stopped, in the word that other engines use."""
    return "length" if stop_type == "limit" else stop_type


def device_row(device: dict[str, Any]) -> dict[str, Any]:
    """A device as xllamacpp names it."""
    kind = str(getattr(device.get("type"), "name", device.get("type")))
    return {"name": device.get("name"), "type": kind.rpartition("_")[2].lower()}


def how_it_ended(status: int) -> str:
    """The end of a child, in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- llama-server's options, for the embedded server ------------------------------------

OPTIONS: dict[str, tuple[str, Any]] = {
    "ctx-size": ("n_ctx", int), "c": ("n_ctx", int),
    "batch-size": ("n_batch", int), "b": ("n_batch", int),
    "ubatch-size": ("n_ubatch", int), "ub": ("n_ubatch", int),
    "threads": ("cpuparams.n_threads", int), "t": ("cpuparams.n_threads", int),
    "threads-batch": ("cpuparams_batch.n_threads", int), "tb": ("cpuparams_batch.n_threads", int),
    "parallel": ("n_parallel", int), "np": ("n_parallel", int),
    "n-gpu-layers": ("n_gpu_layers", int), "gpu-layers": ("n_gpu_layers", int),
    "ngl": ("n_gpu_layers", int), "main-gpu": ("main_gpu", int), "mg": ("main_gpu", int),
    "cache-type-k": ("cache_type_k", "ggml_type"), "ctk": ("cache_type_k", "ggml_type"),
    "cache-type-v": ("cache_type_v", "ggml_type"), "ctv": ("cache_type_v", "ggml_type"),
    "flash-attn": ("flash_attn_type", "flash"), "fa": ("flash_attn_type", "flash"),
    "split-mode": ("split_mode", "split"), "sm": ("split_mode", "split"),
    "spec-type": ("speculative.types", "spec"),
    "seed": ("sampling.seed", int), "cache-ram": ("cache_ram_mib", int),
}  # fmt: skip
SWITCHES: dict[str, tuple[str, bool]] = {
    "no-kv-offload": ("no_kv_offload", True), "nkvo": ("no_kv_offload", True),
    "no-op-offload": ("no_op_offload", True), "no-host": ("no_host", True),
    "no-warmup": ("warmup", False), "swa-full": ("swa_full", True),
    "check-tensors": ("check_tensors", True),
}  # fmt: skip


def apply_options(params: Any, options: list[str], module: Any) -> None:
    """Set the parameters that llama-server's own options name; Stopped for an unknown one."""
    words = list(options)
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            raise harness.Stopped(f"engine_args: {word[:60]!r} is no option")
        if name in SWITCHES:
            place, fixed = SWITCHES[name]
            assign(params, place, fixed)
        elif name in OPTIONS:
            if not equals and not words:
                raise harness.Stopped(f"engine_args: --{name} needs a value")
            place, kind = OPTIONS[name]
            assign(params, place, converted(name, value if equals else words.pop(0), kind, module))
        else:
            known = ", ".join("--" + n for n in sorted({*OPTIONS, *SWITCHES}) if len(n) > 3)
            raise harness.Stopped(
                f"engine_args: the embedded llama.cpp has no option --{name[:60]} here "
                f"(it has {known}); an installed llama-server takes them all"
            )


def assign(params: Any, place: str, value: Any) -> None:
    """Set ``a.b`` of the parameters."""
    target = params
    *path, last = place.split(".")
    for part in path:
        target = getattr(target, part)
    setattr(target, last, value)


def converted(name: str, text: str, kind: Any, module: Any) -> Any:
    """The option's text as the value that the parameter takes."""
    try:
        if kind is int:
            return int(text)
        if kind == "ggml_type":
            return getattr(module.ggml_type, "GGML_TYPE_" + text.upper())
        if kind == "flash":
            return getattr(module.llama_flash_attn_type, "LLAMA_FLASH_ATTN_TYPE_" + {
                "on": "ENABLED", "off": "DISABLED", "auto": "AUTO",
                "1": "ENABLED", "0": "DISABLED"}[text])  # fmt: skip
        if kind == "split":
            return getattr(module.llama_split_mode, "LLAMA_SPLIT_MODE_" + text.upper())
        kinds = module.common_speculative_type
        return [getattr(kinds, "COMMON_SPECULATIVE_TYPE_" + text.upper().replace("-", "_"))]
    except (ValueError, KeyError, AttributeError):
        raise harness.Stopped(f"engine_args: --{name} cannot be {text[:60]!r}") from None


# --- llama-bench --------------------------------------------------------------------------


class LlamaBench:
    """Runs llama-bench for the prompt, and for the tokens behind it, and converts its JSON.

    It warms up with one token, so that repetitions of the very shape are added and left out.
    """

    timing = (
        "llama-bench: decode = n / t of feeding random tokens one by one behind the prompt "
        "(-d prompt_len), without sampling; ttft = t of the prompt alone"
    )

    def __init__(self, session: BenchSession) -> None:
        self.config = session.config
        self.session = session
        self.repetitions = self.config["warmup"] + self.config["rounds"]
        self.done = 0
        self.starts: list[float] = []

    def run(self) -> dict[str, Any]:
        """The result of both tests."""
        prompt, count, warm = (self.config[key] for key in ("prompt_len", "gen_len", "warmup"))
        first = self._test(["-p", str(prompt), "-n", "0"])
        second = self._test(["-p", "0", "-n", str(count), "-d", str(prompt)])
        starts = self.starts if len(self.starts) == self.repetitions else []
        rows = []
        for index, (ttft, decode) in enumerate(
            zip(first["samples_ns"][warm:], second["samples_ns"][warm:], strict=False)
        ):
            start = starts[warm + index] if starts else None
            rows.append({
                "index": index + self.config["round_offset"], "t_start": start,
                "t_end": None if start is None else start + decode / 1e9,
                "ttft_ms": ttft / 1e6, "total_ms": (ttft + decode) / 1e6,
                "decode_ms": decode / 1e6 * (count - 1) / count, "engine_decode_ms": None,
                "gen_tokens": count, "prompt_tokens": prompt, "cached_tokens": 0,
                "finish_reason": "length", "speculative_tokens": 0,
            })  # fmt: skip
        return {
            "format": harness.RESULT_FORMAT,
            "version": self.config.get("version"),
            "platform": None,
            "flags": {key: second[key] for key in BENCH_FLAGS if key in second},
            "flags_source": "llama-bench JSON (what was asked for) and log (what it did)",
            "devices": None,
            "rounds": rows,
            "failed_rounds": [],
            "tokens": None,
            "two_call": None,
            "load_s": None,
            "timing": {"definition": self.timing},
            "prompt": {"rule": "llama-bench's own random tokens", "vocab_bound": None},
            "notes": ["llama-bench feeds random tokens: it samples nothing, not even greedily"],
        }

    def _test(self, options: list[str]) -> dict[str, Any]:
        """The one row of a test."""
        argv = [self.config["program"], "-m", self.config["model"], "-o", "json", "-v",
                "--progress", "-r", str(self.repetitions), *options,
                *self.config["options"]]  # fmt: skip
        with tempfile.TemporaryFile() as output:
            with subprocess.Popen(  # noqa: S603 -- the program was found, not given
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE
            ) as child:
                for line in child.stderr or ():
                    self._heard(line)
            if child.returncode != 0:
                raise harness.Stopped(f"llama-bench {how_it_ended(child.returncode)}")
            output.seek(0)
            text = output.read(harness.MAX_ANSWER)
        try:
            rows = [row for row in json.loads(text) if row["samples_ns"]]
        except (ValueError, KeyError, TypeError):
            rows = []
        if len(rows) != 1:
            raise harness.Stopped(f"llama-bench printed results of {len(rows)} tests, not of one")
        return dict(rows[0])

    def _heard(self, line: bytes) -> None:
        """Give a line of its log on; the beginning of a repetition is progress."""
        now = time.time()
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        match = RUN.match(line)
        if match is None:
            return
        if match[1] == b"generation":
            self.starts.append(now)
        # Half of a round is its prompt, and half its tokens.
        rounds = self.config["rounds"]
        self.session.enter("round", self.done * rounds // (2 * self.repetitions), rounds)
        self.done += 1


RUN = re.compile(rb"llama-bench: benchmark \d+/\d+: (prompt|generation) run \d+/\d+\s*$")
BENCH_FLAGS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type", "n_batch",
    "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode",
    "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "no_op_offload", "no_host", "repack", "n_depth",
)  # fmt: skip


class BenchSession(harness.Session):
    """llama-bench has its own rounds: there is one phase."""

    def run(self) -> None:
        """Run it, write what it says."""
        self.enter("load")
        harness.write_json(self.config["result_path"], LlamaBench(self).run())


def main() -> None:
    """A server is asked round by round; llama-bench brings its rounds."""
    config = harness.read_config(sys.argv)
    if os.path.basename(config.get("program") or "").startswith("llama-bench"):  # noqa: PTH119 -- small
        harness.main(LlamaServer, BenchSession)
    harness.main(LlamaServer)


if __name__ == "__main__":
    main()
