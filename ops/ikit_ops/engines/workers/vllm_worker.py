"""The worker for vLLM: offline ``LLM``, in the process layout that users run.

``LLM(...)`` starts an engine core and workers of its own.  What they decide (CUDA-graph mode,
attention backends) changes *their* copy of the configuration; the one that this process sees
is from before.  So the flags are read in the worker, by ``collective_rpc`` with a function,
and ``flags_source`` says when that was not possible.

Stamps are the engine core's: ``RequestOutput.metrics`` holds the first and the last token's
monotonic time, which on one machine is the same clock as ours.
"""

from __future__ import annotations

import enum
import os
import re
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 -- run by path

import ikit_harness as harness

OWN = {"disable_log_stats": False}


class Vllm(harness.Engine):
    """One ``LLM``."""

    timing = harness.TIMING + "; token stamps are the engine core's"

    def prepare(self) -> None:
        """Import vLLM with its log on standard error, and without its usage reports."""
        for name, value in (
            ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DO_NOT_TRACK", "1"),
            # Lets collective_rpc carry a function; the socket is this machine's own.
            ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"),
        ):
            os.environ.setdefault(name, value)
        import vllm
        from vllm.platforms import current_platform

        self.vllm: Any = vllm
        self.platform: Any = current_platform

    def load(self) -> None:
        """Build the engine."""
        config = self.config
        args = {"model": config["model"], "seed": config["seed"], **config["engine_args"], **OWN}
        if config["revision"]:
            args["revision"] = config["revision"]
        self.llm: Any = self.vllm.LLM(**args)
        self.parent: Any = self.llm.llm_engine.vllm_config
        self.bound = int(self.parent.model_config.get_vocab_size())
        limit = int(self.parent.model_config.max_model_len)
        wanted = config["prompt_len"] + config["gen_len"]
        if limit < wanted:
            raise harness.Stopped(f"prompt_len + gen_len is {wanted}, max_model_len is {limit}")
        self.skips = "skip_reading_prefix_cache" in getattr(
            self.vllm.SamplingParams, "__struct_fields__", ()
        )

    def vocabulary(self) -> int:
        """The model's own figure; a guess above it would be refused."""
        return self.bound

    def generate(self, ids: list[int], count: int) -> harness.Generation:
        """One request; its prompt is not read from the prefix cache."""
        extra: dict[str, Any] = {}
        if not self.config.get("read_cache"):
            if self.skips:
                extra["skip_reading_prefix_cache"] = True
            else:
                self.llm.reset_prefix_cache()
        params = self.vllm.SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0.0, **extra
        )
        start = time.monotonic()
        output = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        end = time.monotonic()
        answer, metrics = output.outputs[0], output.metrics
        # 0.0 stands for "not stamped".
        first = getattr(metrics, "first_token_ts", 0.0) or None
        last = getattr(metrics, "last_token_ts", 0.0) or None
        tokens = [int(token) for token in answer.token_ids]
        return harness.Generation(
            start, first, last, end, count=len(tokens), tokens=tokens,
            prompt=len(output.prompt_token_ids), cached=output.num_cached_tokens,
            finish=answer.finish_reason,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """An allowlist of what the worker runs, else of what the parent asked for."""
        try:
            told = self.llm.collective_rpc(worker_flags)[0]
            source = "worker"
        except Exception as error:  # noqa: BLE001 -- the parent's copy is left, and is named
            told = config_flags(self.parent)
            source = f"parent_config ({type(error).__name__})"
        layers = told.pop("attention_layers", None)
        return {
            "version": self.vllm.__version__,
            "platform": self._platform(),
            "flags": told,
            "flags_source": source,
            "attention_layers": layers,
            "attention_backend": ", ".join(layers) if layers else None,
        }

    def capture(self, what: str) -> bool:
        """In vLLM's worker, where the kernels are launched."""
        return all(self.llm.collective_rpc(worker_capture, args=(what,)))

    def _platform(self) -> str | None:
        for name in ("cuda", "rocm", "cpu", "xpu", "tpu"):
            if getattr(self.platform, "is_" + name, lambda: False)():
                return name
        return None

    def close(self) -> None:
        """End the core and its workers: leaving them to the interpreter leaks them."""
        llm = getattr(self, "llm", None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def config_flags(config: Any) -> dict[str, Any]:
    """What of a ``VllmConfig`` is told: names that hold no secrets, values that JSON has."""
    compilation = config.compilation_config
    sizes = list(getattr(compilation, "cudagraph_capture_sizes", None) or [])
    mode = getattr(compilation, "cudagraph_mode", None)
    decode = mode.decode_mode() if mode is not None and hasattr(mode, "decode_mode") else mode
    speculative = getattr(config, "speculative_config", None)

    def plain(value: Any) -> Any:
        if not isinstance(value, enum.Enum) and (
            value is None or isinstance(value, (bool, int, float))
        ):
            return value
        return re.sub(r"^(?:torch|\w*Mode|\w*Enum)\.", "", str(getattr(value, "name", value)))

    told: dict[str, Any] = {
        "compilation_mode": plain(getattr(compilation, "mode", None)),
        "cudagraph_mode": plain(mode),
        "cudagraph_decode_mode": plain(decode),
        "cudagraph_capture_sizes": {
            "count": len(sizes),
            "min": min(sizes, default=None),
            "max": max(sizes, default=None),
            "includes_1": 1 in sizes,
        },
        "speculative_decoding": False if speculative is None else str(speculative.method),
    }
    for part, names in (
        ("model_config", ("enforce_eager", "dtype", "quantization", "max_model_len")),
        ("cache_config", ("cache_dtype", "block_size", "enable_prefix_caching",
                          "gpu_memory_utilization", "cpu_offload_gb")),
        ("parallel_config", ("tensor_parallel_size", "pipeline_parallel_size",
                             "data_parallel_size")),
        ("scheduler_config", ("max_num_batched_tokens", "max_num_seqs",
                              "enable_chunked_prefill", "async_scheduling")),
    ):  # fmt: skip
        holder = getattr(config, part, None)
        for name in names:
            if hasattr(holder, name):
                told[name] = plain(getattr(holder, name))
    told["kv_cache_dtype"] = told.pop("cache_dtype", None)
    return told


def worker_flags(worker: Any) -> dict[str, Any]:
    """Runs in vLLM's worker: its configuration, and the attention backends of its layers."""
    import torch

    runner = worker.model_runner
    told = config_flags(runner.vllm_config)
    names = {
        group.backend.get_name()
        for groups in getattr(runner, "attn_groups", None) or []
        for group in groups
    }
    told["attention_layers"] = sorted(names)
    told["n_threads"] = torch.get_num_threads()
    told["runner"] = type(runner).__name__
    return told


def worker_capture(worker: Any, what: str) -> bool:
    """Runs in vLLM's worker: opens or closes the capture range; False without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    getattr(torch.cuda.profiler, what)()
    return True


if __name__ == "__main__":
    harness.main(Vllm)
