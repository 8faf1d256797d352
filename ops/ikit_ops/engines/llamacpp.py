"""llama.cpp: embedded (the xllamacpp wheel), or an installed llama-server or llama-bench.

The wheel carries the real server, so that every machine with Python has an engine, without
a compiler.  What llama.cpp did is mostly said by its log: how many layers are on the GPU,
whether flash attention was switched on, which types the KV cache has and in whose memory
it is.  ``/props`` says none of it, and llama-bench's JSON repeats the request:
``n_gpu_layers -1`` is "all that fit", ``flash_attn -1`` is "auto", ``backends: CUDA`` is
printed by a CUDA build that found no GPU.  So the rules look at ``gpu_info``, the devices
and the log.

Names and defaults as of b11434 and b11549 (November 2026).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ikit_mcp.call import Call, one_line
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter, Found, Plan, device_variables
from ikit_ops.engines.find import PROGRAMS, find_distribution, find_program, is_gguf
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.result import WorkerResult

_OFFLOADED = re.compile(r"offloaded (\d{1,6})/(\d{1,6}) layers to GPU")
_THREADS = re.compile(r"n_threads = (\d{1,5}) \(n_threads_batch = (\d{1,5})\)")
_FLASH = re.compile(
    r"Flash Attention (?:was auto, set to |not supported, set to )?(enabled|disabled)"
    r"|llama_context: flash_attn {1,20}= (enabled|disabled)"
)
_BATCH = re.compile(r"llama_context: (n_batch|n_ubatch) {1,20}= (\d{1,9})")
_SPECULATIVE = re.compile(r"adding speculative implementation '([\w-]{1,30})'")
_CACHE = re.compile(r"K \((\w{1,12})\):.{0,40}?V \((\w{1,12})\):")
_CACHE_PLACE = re.compile(r"llama_kv_cache\w{0,20}: {1,12}(\w{1,30}) KV buffer size")
_DEVICE = re.compile(r"common_param: {1,9}- (\w{1,30}) {0,30}: (.{1,80}?) \(\d")
_NO_GPU = re.compile(
    r"no CUDA-capable device|no CUDA devices found|failed to initialize CUDA"
    r"|no ROCm-capable device",
    re.IGNORECASE,
)
_VERSION = re.compile(
    r"version: (?:(?P<name>\d[\w.+-]{0,40}) \(build )?(?P<number>\d{1,9})(?:, commit | \()"
    r"(?P<commit>[\w.-]{1,40})\)"
)
_SEVERAL = re.compile(r",|^\d+-\d")
_OVERFLOW = re.compile(r"n_ctx_seq \(\d{1,9}\) > n_ctx_train \((\d{1,9})\)")
_SLOW_BUILD = re.compile(r"performance may be affected|built without optimi", re.IGNORECASE)
_WORKERS_OWN = (
    "model", "m", "host", "port", "model_url", "mu", "hf_repo", "hf", "hfr", "hf_file", "hff",
    "hf_token", "hft", "api_key", "api_key_file", "ssl_key_file", "ssl_cert_file", "path",
    "log_file", "slot_save_path", "prompt_cache", "o", "output", "oe", "output_err", "r",
    "repetitions", "p", "n_prompt", "n", "n_gen", "d", "n_depth", "pg", "api_prefix",
)  # fmt: skip


class LlamaCpp(Adapter):
    """The adapter; ``python`` may name an interpreter, a llama-server or a llama-bench."""

    name = "llamacpp"
    title = "llama.cpp"
    rank = 40
    distributions = ("xllamacpp",)
    worker = "llamacpp_worker.py"
    formats = frozenset({"gguf"})
    executing_args = frozenset({"rpc", "tools", "server_tools", "models_dir", "mcp_servers_config"})
    refused_args: ClassVar[Mapping[str, str]] = dict.fromkeys(_WORKERS_OWN, "the benchmark sets it")

    def find(self, call: Call, plan: Plan) -> Found:
        """The embedded server, unless ``python`` names a program; else what is on PATH."""
        for name in PROGRAMS:
            if plan.python and (program := find_program(name, plan.python)):
                if not (Path(program).is_file() and os.access(program, os.X_OK)):
                    raise OpError(
                        f"{one_line(program)} is no program",
                        "give the path of a llama-server or a llama-bench",
                    )
                return Found(program=program, version=program_version(call, program))
        try:
            return find_distribution(call, self, plan.python)
        except OpError:
            program = None if plan.python else find_program("llama-server", None)
            if program is None:
                raise
            return Found(program=program, version=program_version(call, program))

    def config(self, plan: Plan, found: Found) -> dict[str, Any]:
        """The worker's configuration; ``options`` as the server's own command line."""
        if plan.path is None or not is_gguf(plan.path):
            raise OpError(
                f"llama.cpp needs a .gguf file, and {one_line(plan.model, 120)} is none",
                "give the path of a .gguf file",
            )
        path, vocabulary = _file_and_vocabulary(plan.path)
        if is_bench(found.program) and "," in str(path):
            what = f"llama-bench takes {one_line(path.name, 80)} for several models: of the comma"
            raise OpError(what, "give a path without a comma")
        return {
            **plan.config(),
            "model": str(path),
            "vocabulary": vocabulary,
            "program": found.program,
            "version": found.version,
            "options": self._options(plan, found),
        }

    def _options(self, plan: Plan, found: Found) -> list[str]:
        """Options of the caller, and those that make the workload fit."""
        given = split_options(plan.engine_args)
        names = option_names(given)
        self.refuse(names)
        bench = is_bench(found.program)
        own: list[str] = []
        if plan.threads is not None and not names & {"threads", "t"}:
            own += ["--threads", str(plan.threads)]
            if not bench and not names & {"threads_batch", "tb"}:
                own += ["--threads-batch", str(plan.threads)]
        if _on_the_cpu(plan) and not names & {"n_gpu_layers", "gpu_layers", "ngl"}:
            own += ["--n-gpu-layers", "0"]
            if found.program is not None and not names & {"device", "dev"}:
                own += ["--device", "none"]  # with no layer there, a GPU still takes long prompts
        if bench:
            _refuse_several(given)
            return own + given
        if not names & {"ctx_size", "c"}:
            own += ["--ctx-size", str(plan.prompt_len + plan.gen_len + 8)]
        if not names & {"parallel", "np"}:
            own += ["--parallel", "1"]
        return own + given

    def environment(self, plan: Plan) -> dict[str, str]:
        """As for all; threads are an option of the server, not a variable."""
        found = device_variables(plan)
        found.pop("OMP_NUM_THREADS", None)
        return found

    def command(self, plan: Plan, found: Found, config_path: Path) -> list[str]:
        """The worker runs in the Python that has the wheel, or in ours beside a program."""
        return super().command(plan, Found(python=found.python), config_path)

    def requested(self, plan: Plan) -> dict[str, Any]:
        """The options that have an effective flag of the same meaning."""
        given = split_options(plan.engine_args)
        found = {
            _FLAG_NAMES[name]: value
            for name, value in option_values(given).items()
            if name in _FLAG_NAMES
        }
        wish = found.get("flash_attn")
        return found | ({} if wish is None else {"flash_attn": _WISHES.get(wish, wish)})

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """Layers, flash attention, cache types and devices, from the log."""
        flags = result.flags if result.flags is not None else {}
        devices: list[dict[str, Any]] = []
        places: set[str] = set()
        if "gpu_info" in flags:  # llama-bench
            _rename(flags)
        for line in log:
            if match := _OFFLOADED.search(line):
                flags["offloaded_layers"], flags["layers"] = int(match[1]), int(match[2])
            elif match := _THREADS.search(line):
                flags["n_threads"], flags["n_threads_batch"] = int(match[1]), int(match[2])
            elif match := _FLASH.search(line):
                flags["flash_attn"] = (match[1] or match[2]) == "enabled"
            elif match := _SPECULATIVE.search(line):
                flags["speculative"] = match[1]
            elif match := _CACHE.search(line):
                flags["cache_type_k"], flags["cache_type_v"] = match[1].lower(), match[2].lower()
            elif match := _CACHE_PLACE.search(line):
                places.add(match[1])
            elif match := _BATCH.search(line):
                flags.setdefault(match[1], int(match[2]))
            elif match := _DEVICE.search(line):
                kind = "cpu" if match[1].upper().startswith(("CPU", "BLAS")) else "gpu"
                devices.append({"name": match[1], "type": kind})
        if places:
            flags["kv_cache_in"] = sorted(places)
        if "gpu_info" not in flags:
            flags |= _moved(option_values(split_options(plan.engine_args)))
        if result.devices is None and devices:
            result.devices = devices
        if "gpu_info" in flags:  # llama-bench
            found = {"name": one_line(str(flags["gpu_info"]), 80), "type": "gpu"}
            result.devices = [found] if flags["gpu_info"] else [{"name": "CPU", "type": "cpu"}]
        if result.devices is not None:
            result.platform = _platform(result.devices, flags, plan)
        if isinstance(used := flags.get("flash_attn"), bool):
            result.attention_backend = "flash_attn" if used else "no flash_attn"
        result.flags = flags

    def checks(self, seen: Seen) -> list[Check]:
        """Offloading, flash attention, a GPU build without a GPU, slow builds."""
        return [*_gpu(seen), *_offload(seen), *_flash(seen), *_context(seen), *_build(seen)]


ADAPTER = LlamaCpp()

_FLAG_NAMES = {
    "threads": "n_threads", "t": "n_threads", "ctx_size": "n_ctx", "c": "n_ctx",
    "batch_size": "n_batch", "b": "n_batch", "ubatch_size": "n_ubatch", "ub": "n_ubatch",
    "cache_type_k": "cache_type_k", "ctk": "cache_type_k", "cache_type_v": "cache_type_v",
    "ctv": "cache_type_v", "flash_attn": "flash_attn", "fa": "flash_attn",
}  # fmt: skip
_WISHES: Mapping[str | bool, str] = {"enabled": "on", "disabled": "off"}
"""Other words for the values of ``--flash-attn``."""


def is_bench(program: str | None) -> bool:
    """Whether the program is a llama-bench, which brings its own rounds."""
    return program is not None and Path(program).name.startswith("llama-bench")


def split_options(arguments: Sequence[str]) -> list[str]:
    """``["--ctx-size 512", "fa=on"]`` as the words of a command line."""
    words: list[str] = []
    for item in arguments:
        try:
            parts = shlex.split(item)
        except ValueError:
            raise OpError(f"engine_args: {item[:80]!r} has an open quote", "close it") from None
        if len(parts) == 1 and not parts[0].startswith("-") and "=" in parts[0]:
            name, _, value = parts[0].partition("=")
            parts = ["--" + name.replace("_", "-"), value]
        words += parts
    return words


def option_values(words: Sequence[str]) -> dict[str, str | bool]:
    """Options by name (``n_gpu_layers``), with their value, or True for a switch."""
    found: dict[str, str | bool] = {}
    name = None
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+(?:\.\d+)?", word):
            name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
            found[name] = value if equals else True
        elif name is not None:
            found[name] = word
    return found


def option_names(words: Sequence[str]) -> set[str]:
    """The names of the options, with underscores."""
    return set(option_values(words))


def program_version(call: Call, program: str) -> str | None:
    """What a program of llama.cpp says of its version (``version_in``); None: nothing of use."""
    try:
        done = call.run([program, "--version"], timeout=20, grace=1.0)
    except OpError:
        return None
    return version_in(done.stdout + done.stderr)


def version_in(text: str) -> str | None:
    """The version in the answer to ``--version``, without what a build does not know.

    ``version: 11434 (abcdef0)`` before 2026, now ``version: 0.6.0 (build 11434, commit
    abcdef0)``.  A build from a tarball knows neither number nor commit: ``build 0, commit
    unknown``, so that the name remains, if it has one.
    """
    match = _VERSION.search(text)
    if match is None:
        return None
    name, number, commit = match["name"], int(match["number"]), match["commit"]
    if number == 0:
        return name
    if commit == "unknown":
        return f"{name} (build {number})" if name else str(number)
    return f"{name} (build {number}, commit {commit})" if name else f"{number} ({commit})"


def _refuse_several(given: Sequence[str]) -> None:
    """OpError where llama-bench would run several tests: a record is of one."""
    for name, value in option_values(given).items():
        if isinstance(value, str) and _SEVERAL.search(value):
            raise OpError(
                f"engine_args: {name} has several values, and each is a benchmark of its own",
                "give one value, and call bench once for each",
            )


def _rename(flags: dict[str, Any]) -> None:
    """The flags of llama-bench by the names that the server's have; unknown is left out."""
    for old, new in (("type_k", "cache_type_k"), ("type_v", "cache_type_v")):
        if old in flags:
            flags[new] = flags.pop(old)
    if flags.get("flash_attn") in (0, 1):  # -1: auto, which is no answer
        flags["flash_attn"] = bool(flags["flash_attn"])
    if model := str(flags.get("model_type") or ""):  # architecture, size, format
        flags["model_ftype"] = model.split(" ", 2)[-1]
    if flags.get("build_number") == 0 or flags.get("build_commit") == "unknown":
        flags.pop("build_number", None)
        flags.pop("build_commit", None)


def _moved(options: Mapping[str, str | bool]) -> dict[str, Any]:
    """What the options of a server keep in the CPU's memory: its log has no word of it."""
    found: dict[str, Any] = {}
    if options.keys() & {"cpu_moe", "cmoe"}:
        found["n_cpu_moe"] = "all"
    for name in ("n_cpu_moe", "ncmoe"):
        if (count := options.get(name)) not in (None, "0"):
            found["n_cpu_moe"] = count
    for name in ("override_tensor", "ot"):  # codespell:ignore ot
        if (moved := options.get(name)) is not None:
            found["tensor_buft_overrides"] = moved
    return found


def _asked_layers(plan: Plan) -> str | None:
    """How many layers were asked to be on a GPU; None: none were, or as many as fit."""
    options = option_values(split_options(plan.engine_args))
    asked = [options[name] for name in ("n_gpu_layers", "gpu_layers", "ngl") if name in options]
    return None if not asked or asked[-1] in ("0", "auto", "-1") else str(asked[-1])


def _on_the_cpu(plan: Plan) -> bool:
    """Whether the CPU was asked for, so that a GPU that is not used is no fault."""
    return plan.device_asked != "auto" and plan.platform == "cpu"


def _file_and_vocabulary(path: Path) -> tuple[Path, int]:
    """The .gguf file that llama.cpp opens, and the number of tokens of its model."""
    from ikit_ops.checkpoint.resolve import read_checkpoint  # only this engine reads headers

    checkpoint = read_checkpoint(str(path))
    if path.is_dir():
        path /= min(checkpoint.files)  # of a split model, the first part names the others
    declared = (checkpoint.config or {}).get("vocab_size")
    if isinstance(declared, int) and declared > 0:
        return path, declared
    for name in ("model.embed_tokens.weight", "token_embd.weight"):
        entry = checkpoint.tensors.get(name)
        if entry is not None and entry.shape:
            return path, int(max(entry.shape))
    raise OpError(
        f"{one_line(path.name, 80)}: the size of its vocabulary is not in its header",
        "give a .gguf file of a language model",
    )


def _layers(plan: Plan) -> int | None:
    """The layers that llama.cpp counts when it offloads: the blocks, and the output layer."""
    from ikit_ops.checkpoint.resolve import read_checkpoint  # as above

    if plan.path is None:
        return None
    try:
        blocks = (read_checkpoint(str(plan.path)).config or {}).get("num_hidden_layers")
    except OpError:
        return None
    return blocks + 1 if isinstance(blocks, int) else None


def _platform(devices: list[dict[str, Any]], flags: dict[str, Any], plan: Plan) -> str:
    """Where it ran: a GPU is used when one is there and layers are on it."""
    gpus = [d for d in devices if d.get("type") in ("gpu", "igpu")]
    offloaded = flags.get("offloaded_layers")
    if not gpus or offloaded == 0 or flags.get("n_gpu_layers") == 0:
        return "cpu"
    return plan.platform if plan.platform in ("cuda", "rocm") else "gpu"


def _gpu(seen: Seen) -> list[Check]:
    """A build for GPUs that found none, or a GPU that was wanted and not used."""
    name = "gpu_found"
    if _on_the_cpu(seen.plan):
        return []
    found_none = any(_NO_GPU.search(line) for line in seen.log)
    backends = str(seen.flag("backends") or "").upper()
    if not found_none and "gpu_info" in seen.flags:
        named = any(word in backends for word in ("CUDA", "ROCM", "HIP", "VULKAN", "SYCL"))
        found_none = named and not seen.flag("gpu_info")
    if found_none:
        text = "a GPU build found no GPU: everything ran on the CPU"
        return [Check(name, "violation", text)]
    gpu = any(d.get("type") in ("gpu", "igpu") for d in seen.result.devices or [])
    if (asked := _asked_layers(seen.plan)) and seen.result.devices is not None and not gpu:
        text = f"n_gpu_layers {one_line(asked, 20)} was requested, and everything ran on the CPU"
        return [Check(name, "violation", text, argument="n_gpu_layers")]
    if seen.plan.platform not in ("cuda", "rocm"):
        return []
    if seen.result.devices is None:
        return [Check(name, "unknown", "which devices it used was not seen", required=True)]
    if not gpu:
        text = "this build of llama.cpp has no GPU backend: everything ran on the CPU"
        return [Check(name, "warning" if seen.plan.device_asked == "auto" else "violation", text)]
    return [Check(name, "ok")]


def _offload(seen: Seen) -> list[Check]:
    """Layers, cache or experts that stayed in the CPU's memory."""
    name, found = "offload", []
    if seen.platform in (None, "cpu") and seen.flag("n_gpu_layers") != 0:
        return []
    if _on_the_cpu(seen.plan):
        return []
    if not any(d.get("type") in ("gpu", "igpu") for d in seen.result.devices or []):
        return []
    done, layers = seen.flag("offloaded_layers"), seen.flag("layers")
    asked = seen.flag("n_gpu_layers")
    if isinstance(done, int) and isinstance(layers, int):
        if done < layers:
            text = f"{layers - done} of {layers} layers stayed on the CPU: decode waits for them"
            found.append(Check(name, "violation", text, argument="n_gpu_layers"))
    elif asked == 0:
        text = "no layer was offloaded to the GPU (n_gpu_layers 0)"
        found.append(Check(name, "violation", text, argument="n_gpu_layers"))
    elif isinstance(asked, int) and asked > 0:  # llama-bench says the request alone
        layers = _layers(seen.plan)
        if layers is None:
            text = f"n_gpu_layers {asked} was requested; of how many layers was not seen"
            found.append(Check(name, "unknown", text, required=True))
        elif asked < layers:
            text = f"{layers - asked} of {layers} layers stayed on the CPU: decode waits for them"
            found.append(Check(name, "violation", text, argument="n_gpu_layers"))
    for flag, words in (
        ("no_kv_offload", "the KV cache stayed in the CPU's memory (no_kv_offload)"),
        ("n_cpu_moe", "experts stayed in the CPU's memory (n_cpu_moe)"),
    ):
        if seen.flag(flag) not in (None, False, 0):
            found.append(Check(name, "violation", words, argument=flag))
    stayed = "CPU" in (seen.flag("kv_cache_in") or []) and not found
    if stayed:  # the one sign that a server gives of it
        text = "a part of the KV cache stayed in the CPU's memory"
        found.append(Check(name, "violation", text, argument="no_kv_offload"))
    if seen.flag("tensor_buft_overrides") not in (None, "none", "", []):
        text = "tensors were moved by override-tensor; some may be in the CPU's memory"
        found.append(Check(name, "warning", text))
    return found or [Check(name, "ok")]


def _flash(seen: Seen) -> list[Check]:
    """Flash attention: off is legitimate for models that it does not support, and slower."""
    name, used = "attention_backend", seen.flag("flash_attn")
    if used in (True, 1):
        return [Check(name, "ok")]
    if used in (None, -1):
        text = "whether flash attention was used was not seen (auto)"
        return [Check(name, "unknown", text)]
    return [
        Check(name, "warning", "flash attention was off: attention reads and writes its scores")
    ]


def _context(seen: Seen) -> list[Check]:
    """A context that the model was not made for costs what it costs, and nobody would use it."""
    used = seen.plan.prompt_len + seen.plan.gen_len
    trained = [int(match[1]) for line in seen.log if (match := _OVERFLOW.search(line))]
    if not trained or used <= trained[0]:  # the room for it is rounded up
        return []
    text = f"a context of {used} tokens, of a model that was trained with {trained[0]}"
    return [Check("context", "warning", text)]


def _build(seen: Seen) -> list[Check]:
    if any(_SLOW_BUILD.search(line) for line in seen.log):
        return [Check("build", "warning", "llama.cpp says that its build is not a fast one")]
    return []
