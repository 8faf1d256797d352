"""The call that a benchmark proposes next: the same one, less what is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import shared_gguf
from ikit_mcp.call import Call, Settings
from ikit_mcp.registry import EXECUTES, load
from ikit_ops.engines import adapter_named, again, planning

ARGS = load(None).get("bench").args


def arguments(**changes: Any) -> dict[str, Any]:
    """The arguments of bench at their defaults, but for the changes."""
    return {arg.name: arg.default for arg in ARGS} | {"model": str(shared_gguf())} | changes


def test_every_argument_that_is_not_at_its_default_is_repeated() -> None:
    changed: dict[str, Any] = {
        "model": "m", "python": "/p", "revision": "r", "prompt_len": 16, "gen_len": 8,
        "rounds": 3, "warmup": 0, "seed": 7, "round_offset": 2, "device": "cpu", "threads": 1,
        "roofline": "a", "reference": "b", "keep_going": True, "timeout": 60,
        "engine_args": ["a=1"],
    }  # fmt: skip
    assert again.given(ARGS, arguments(**changed)) == changed
    assert again.given(ARGS, arguments()) == {"model": str(shared_gguf())}


@pytest.mark.parametrize(
    ("engine", "given", "blamed", "kept"),
    [
        ("llamacpp", ["--n-gpu-layers", "0", "-c", "99"], "n_gpu_layers", ["-c", "99"]),
        ("llamacpp", ["-ngl 0 -c 99"], "n_gpu_layers", ["-c", "99"]),
        ("llamacpp", ["-ngl", "-1", "-c", "99"], "n_gpu_layers", ["-c", "99"]),
        ("llamacpp", ["fa=off"], "flash_attn", None),
        ("llamacpp", ["--no-kv-offload", "-a 'x y'"], "no_kv_offload", ["-a", "'x y'"]),
        ("llamacpp", ["-t 9"], "threads", None),
        ("vllm", ["enforce_eager=true", "max_model_len=9"], "enforce_eager", ["max_model_len=9"]),
        ("vllm", ['compilation_config={"mode": 0}'], "compilation_config", None),
        ("vllm", ["--enforce-eager=true"], "enforce_eager", None),
    ],
)
def test_what_is_to_blame_is_left_out_with_its_value_and_the_rest_still_reads(
    engine: str, given: list[str], blamed: str, kept: list[str] | None
) -> None:
    adapter = adapter_named(engine)
    mended, out = again.without(adapter, {"model": "m", "engine_args": given}, [blamed])
    assert out == [blamed] and mended.get("engine_args") == kept and mended["model"] == "m"


def test_a_call_that_has_nothing_to_blame_loses_nothing() -> None:
    same = {"model": "m", "engine_args": ["-c 99"]}
    assert again.without(adapter_named("llamacpp"), same, ["threads"]) == (same, [])
    assert again.without(adapter_named("vllm"), {"model": "m"}, ["threads"]) == ({"model": "m"}, [])


def test_a_mended_call_can_be_planned(tmp_path: Path) -> None:
    adapter = adapter_named("llamacpp")
    asked = arguments(engine_args=["-ngl", "0", "-t 64"], seed=3)
    mended, _ = again.without(adapter, again.given(ARGS, asked), ["n_gpu_layers", "threads"])
    call = Call(operation=load(None).get("bench"), args={}, settings=Settings(tmp_path),
                scope=EXECUTES)  # fmt: skip
    _, plan = planning.make_plan(call, arguments(**mended))
    assert (plan.seed, plan.engine_args) == (3, ())


def test_text_that_had_to_be_changed_to_be_shown_is_not_plain() -> None:
    assert again.is_plain({"a": ["b", 1], "c": "d"})
    assert not again.is_plain({"a": ["b\nc"]}) and not again.is_plain({"a": "\u202e"})


def test_servers_and_commands_are_not_ours_to_mend() -> None:
    assert [n for n in ("vllm", "openai", "cmd") if again.is_ours(adapter_named(n))] == ["vllm"]
