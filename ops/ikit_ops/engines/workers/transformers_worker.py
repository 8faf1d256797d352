"""The worker for Hugging Face transformers: ``generate`` with a streamer that stamps.

The streamer's first ``put`` is the prompt, each later one a token; ``generate`` copies the
token to the host before it hands it over, so that a stamp is taken when the device is done.
Nothing is cached between calls.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 -- run by path

import ikit_harness as harness

LOADING = ("dtype", "attn_implementation", "trust_remote_code", "quantization_config", "device_map")
GENERATING = ("cache_implementation",)


class Transformers(harness.Engine):
    """One model in this process."""

    def prepare(self) -> None:
        """Import torch and transformers, with the threads that were asked for."""
        import torch
        import transformers

        self.torch: Any = torch
        self.transformers: Any = transformers
        if self.config["threads"]:
            torch.set_num_threads(self.config["threads"])
        args = dict(self.config["engine_args"])
        self.generating = {key: args.pop(key) for key in GENERATING if key in args}
        self.compiled = bool(args.pop("compile", False))
        unknown = sorted(set(args) - set(LOADING))
        if unknown:
            known = ", ".join((*LOADING, *GENERATING, "compile"))
            raise harness.Stopped(f"engine_args: unknown {', '.join(unknown)}; known: {known}")
        self.loading = {"dtype": "auto", **args}

    def load(self) -> None:
        """Load from safetensors alone: pickles can run code."""
        torch, config = self.torch, self.config
        wanted = config["device"] or "cpu"
        cuda = wanted != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda:0" if cuda else "cpu")
        self.model: Any = self.transformers.AutoModelForCausalLM.from_pretrained(
            config["model"], revision=config["revision"] or "main", use_safetensors=True,
            **self.loading,
        )  # fmt: skip
        if "device_map" not in self.loading:
            self.model.to(self.device)
        self.model.eval()
        if self.compiled:
            self.model.forward = torch.compile(self.model.forward, mode="reduce-overhead")
        text = self.model.config.get_text_config()
        self.bound = int(text.vocab_size)
        limit = getattr(text, "max_position_embeddings", None)
        wanted_length = config["prompt_len"] + config["gen_len"]
        if isinstance(limit, int) and limit < wanted_length:
            raise harness.Stopped(
                f"prompt_len + gen_len is {wanted_length}, the model was made for {limit} tokens"
            )

    def vocabulary(self) -> int:
        """The model's own figure."""
        return self.bound

    def generate(self, ids: list[int], count: int) -> harness.Generation:
        """One greedy generation."""
        torch = self.torch
        stamps: list[float] = []
        tokens: list[int] = []

        class Streamer(self.transformers.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
            """Keeps the time of each token."""

            def put(self, value: Any) -> None:
                stamps.append(time.monotonic())
                tokens.extend(value.flatten().tolist())

            def end(self) -> None:
                """Nothing is left to do."""

        prompt = torch.tensor([ids], device=self.device)
        start = time.monotonic()
        with torch.inference_mode():
            self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                min_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0,
                streamer=Streamer(), **self.generating,
            )  # fmt: skip
        end = time.monotonic()
        made = tokens[len(ids) :]
        return harness.Generation(
            start, stamps[1], stamps[-1], end, count=len(made), tokens=made, prompt=len(ids),
            cached=0, finish="length" if len(made) == count else "stop", speculative=0,
        )  # fmt: skip

    def capture(self, what: str) -> bool:
        """In this process, through torch."""
        return harness.torch_capture(what)

    def describe(self) -> dict[str, Any]:
        """The model object's own attributes."""
        torch, model = self.torch, self.model
        settings = model.config
        quantized = getattr(settings, "quantization_config", None)
        method = quantized if isinstance(quantized, dict) else getattr(quantized, "__dict__", {})
        places = {str(p.device) for p in model.parameters()}
        platform = "cpu" if self.device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
        return {
            "version": self.transformers.__version__,
            "platform": platform,
            "attention_backend": getattr(settings, "_attn_implementation", None),
            "flags_source": "model object",
            "flags": {
                "dtype": str(model.dtype).replace("torch.", ""),
                "attn_implementation": getattr(settings, "_attn_implementation", None),
                "cache_implementation": self.generating.get("cache_implementation", "dynamic"),
                "compile": self.compiled,
                "device": str(self.device),
                "parameter_devices": sorted(places),
                "quantization": str(method.get("quant_method")) if quantized else None,
                "n_threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "speculative_decoding": False,
                "revision": getattr(settings, "_commit_hash", None),
            },
        }


if __name__ == "__main__":
    harness.main(Transformers)
