"""The worker for SGLang: offline ``Engine``, asked for a stream of chunks.

The engine spawns its scheduler, so everything stands below the ``__main__`` guard.  Its log
is off by default and goes to standard error; it is switched on here, because only lines such
as ``Decode batch ... cuda graph: True`` prove that graphs were used.  A child that fails sends
SIGQUIT to this process, which then ends without a result.

Chunks carry the cumulative count of tokens, so that a chunk's stamp is that of its last one.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 -- run by path

import ikit_harness as harness

TOLD = (
    "attention_backend", "decode_attention_backend", "prefill_attention_backend",
    "sampling_backend", "dtype", "kv_cache_dtype", "quantization", "context_length", "tp_size",
    "dp_size", "pp_size", "page_size", "mem_fraction_static", "max_running_requests",
    "max_total_tokens", "chunked_prefill_size", "disable_radix_cache", "enable_torch_compile",
    "cuda_graph_config", "disable_cuda_graph", "disable_decode_cuda_graph",
    "disable_prefill_cuda_graph", "disable_cuda_graph_padding", "debug_cuda_graph",
    "cuda_graph_bs", "cuda_graph_max_bs", "disable_overlap_schedule", "cpu_offload_gb",
    "speculative_algorithm", "device", "schedule_policy",
)  # fmt: skip
"""What of the server's information is told: the whole of it holds API keys."""


class Sglang(harness.Engine):
    """One ``Engine``."""

    def prepare(self) -> None:
        """Import SGLang."""
        import sglang

        self.sglang: Any = sglang

    def load(self) -> None:
        """Start the engine with its log on."""
        config = self.config
        args = {
            "model_path": config["model"],
            "random_seed": config["seed"],
            "log_level": "info",
            "decode_log_interval": max(1, min(40, config["gen_len"] // 3)),
            **config["engine_args"],
        }
        if config["revision"]:
            args["revision"] = config["revision"]
        self.engine: Any = self.sglang.Engine(**args)
        model = self.engine.tokenizer_manager.model_config
        self.bound = int(model.vocab_size)
        limit = int(model.context_len)
        if limit < config["prompt_len"] + config["gen_len"]:
            raise harness.Stopped(f"prompt_len + gen_len is more than context_length {limit}")
        self.requests = 0
        self.speculative = False

    def vocabulary(self) -> int:
        """The model's own figure."""
        return self.bound

    def generate(self, ids: list[int], count: int) -> harness.Generation:
        """One streamed request, salted so that no cached page fits it."""
        self.requests += 1
        extra: dict[str, Any] = {}
        if not self.config.get("read_cache"):
            extra["cache_salt"] = f"{self.config['nonce']}:{self.requests}"
        sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0}
        stamps: list[float] = []
        seen = 0
        tokens: list[int] = []
        told: dict[str, Any] = {}
        start = time.monotonic()
        for chunk in self.engine.generate(
            input_ids=ids, sampling_params=sampling, stream=True, **extra
        ):
            told = chunk["meta_info"]
            made = int(told["completion_tokens"])
            if made > seen:
                stamps.append(time.monotonic())
                found = [int(token) for token in chunk.get("output_ids") or []]
                tokens = found if len(found) == made else tokens + found
                seen = made
        end = time.monotonic()
        if not stamps:
            raise harness.Stopped("the engine answered without a token")
        self.speculative = self.speculative or any(key.startswith("spec_") for key in told)
        reason = told.get("finish_reason") or {}
        return harness.Generation(
            start, stamps[0], stamps[-1], end, count=seen,
            tokens=tokens if len(tokens) == seen else None,
            prompt=told.get("prompt_tokens"), cached=told.get("cached_tokens"),
            finish=reason.get("type") if isinstance(reason, dict) else str(reason),
            speculative=int(bool(self.speculative)),
        )  # fmt: skip

    def capture(self, what: str) -> bool:
        """In SGLang's scheduler, which has this as an activity of its profiler."""
        if self._platform(str(self.engine.get_server_info().get("device"))) != "cuda":
            return False
        if what == "start":
            self.engine.start_profile(activities=["CUDA_PROFILER"])
        else:
            self.engine.stop_profile()
        return True

    def describe(self) -> dict[str, Any]:
        """The resolved configuration, by an allowlist."""
        info = self.engine.get_server_info()
        flags = {name: info[name] for name in TOLD if name in info}
        graphs = flags.get("cuda_graph_config")
        if isinstance(graphs, dict):
            kept = ("backend", "bs", "max_bs")
            flags["cuda_graph_config"] = {
                stage: {name: told.get(name) for name in kept}
                for stage, told in graphs.items()
                if isinstance(told, dict)
            }
        flags["speculative_decoding"] = bool(info.get("speculative_algorithm")) or self.speculative
        backend = info.get("decode_attention_backend") or info.get("attention_backend")
        return {
            "version": self.sglang.__version__,
            "platform": self._platform(str(info.get("device"))),
            "flags": flags,
            "flags_source": "get_server_info",
            "attention_backend": backend,
        }

    @staticmethod
    def _platform(device: str) -> str | None:
        if device != "cuda":
            return device if device in ("cpu", "xpu", "npu") else None
        import torch

        return "rocm" if torch.version.hip else "cuda"

    def close(self) -> None:
        """End the scheduler and the detokenizer."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.shutdown()


if __name__ == "__main__":
    harness.main(Sglang)
