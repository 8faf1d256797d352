"""Workers run in other Pythons: what they may import, and how they read answers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ikit_ops.engines import result as results
from ikit_ops.engines.adapter import WORKERS

sys.path.insert(0, str(WORKERS))
import ikit_harness as harness
import llamacpp_worker as llama
import openai_worker as openai
import vllm_worker as vllm

SCRIPTS = sorted(WORKERS.glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_a_worker_is_python_3_10_and_imports_nothing_but_the_library_at_its_top(
    path: Path,
) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    assert names <= sys.stdlib_module_names | {"ikit_harness"}


def chunk(stamp: float, *tokens: int, so_far: int | None = None, stop: bool = False) -> Any:
    return stamp, {"tokens": list(tokens), "tokens_predicted": so_far, "stop": stop}


def test_stamps_of_a_plain_stream_are_its_first_and_last_token() -> None:
    chunks = [chunk(1.0, 5, so_far=1), chunk(2.0, 6, so_far=2), chunk(3.0, 7, so_far=3),
              chunk(3.1, so_far=3, stop=True)]  # fmt: skip
    assert llama.token_stamps(chunks, 3) == (1.0, 3.0)


def test_tokens_that_were_held_back_are_reckoned_at_the_pace_of_the_others() -> None:
    chunks = [chunk(3.0, 7, so_far=3), chunk(4.0, 8, so_far=4), chunk(5.0, 9, so_far=5),
              chunk(6.5, so_far=6, stop=True)]  # fmt: skip
    first, last = llama.token_stamps(chunks, 6)
    pace = (6.5 - 3.0) / 3
    assert last == 6.5, "the sixth token came in no chunk: the last chunk follows it"
    assert first == pytest.approx(3.0 - 2 * pace)
    assert 5 / (last - first) == pytest.approx(1 / pace)


def test_a_stream_without_a_token_has_the_stamp_of_its_end() -> None:
    assert llama.token_stamps([chunk(2.0, so_far=1, stop=True)], 1) == (2.0, 2.0)


def test_chat_roles_are_no_token_and_reasoning_is() -> None:
    assert not openai.holds_token({"delta": {"role": "assistant", "content": ""}})
    assert not openai.holds_token({"text": "", "finish_reason": "length"})
    for delta in ({"content": "a"}, {"reasoning_content": "b"}, {"reasoning": "c"}):
        assert openai.holds_token({"delta": delta})
    assert openai.holds_token({"text": " a"}) and openai.holds_token({"text": "", "token_ids": [1]})


def answer(sizes: list[int], pace: float = 0.01) -> Any:
    """A row of a stream whose chunks hold so many tokens, made at that pace from 0 on."""
    worker: Any = openai.OpenAIServer({})
    worker.chunks = []
    made, chunks = 0, list[Any]()
    for size in sizes:
        made += size
        chunks.append((made * pace, {"choices": [{"text": "x" * size}]}))
    end = made * pace
    chunks.append((end, {"choices": [], "usage": {"completion_tokens": made}}))
    row = worker._read(0.0, chunks, end).row(0, 0.0)
    fields = {k: v for k, v in row.items() if k in results.Round.__struct_fields__}
    return results.Round(**fields)


@pytest.mark.parametrize(
    "sizes",
    [[8, 8], [8, 7, 1], [1] * 16, [2] + [1] * 14, [1] * 14 + [2], [16], [1, 15], [2, *[1] * 60],
     [5, *[1] * 123], [3, 1, 1, 3, *[1] * 120]],
    ids=str,
)  # fmt: skip
def test_a_rate_by_chunks_is_never_faster_than_the_server(sizes: list[int]) -> None:
    row = answer(sizes)
    assert row.gen_tokens == sum(sizes)
    rate = row.rate()
    assert rate is None or 85.0 < rate <= 100.0 + 1e-9
    assert (rate is None) == (len(sizes) - 1 < (sum(sizes) - 1) * 0.9)
    assert (row.ttft_ms is None) == (rate is None)


def test_as_many_words_as_ids_and_the_same_for_the_same_ids() -> None:
    words = openai.words_of([1, 2, 3])
    assert len(words.split()) == 3 and words == openai.words_of([1, 2, 3])
    assert words != openai.words_of([1, 2, 4])


def config(**parts: Any) -> Any:
    """A VllmConfig as far as the worker looks at it."""
    usual: dict[str, Any] = {
        "compilation_config": SimpleNamespace(),
        "speculative_config": None,
        "model_config": SimpleNamespace(),
    }
    return SimpleNamespace(**usual | parts)


def test_flags_of_vllm_are_names_and_sizes_and_never_a_whole_object() -> None:
    import enum

    class Mode(enum.IntEnum):
        """As vLLM's."""

        NONE = 0
        FULL = 2

        def decode_mode(self) -> Mode:
            return self

    told = vllm.config_flags(
        config(
            compilation_config=SimpleNamespace(
                mode=Mode.NONE, cudagraph_mode=Mode.FULL, cudagraph_capture_sizes=[4, 1, 2]
            ),
            model_config=SimpleNamespace(
                enforce_eager=False, dtype="torch.bfloat16", hf_token="made-up"
            ),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        )
    )
    assert told["compilation_mode"] == "NONE" and told["cudagraph_decode_mode"] == "FULL"
    assert told["cudagraph_capture_sizes"] == {"count": 3, "min": 1, "max": 4, "includes_1": True}
    assert told["dtype"] == "bfloat16" and told["kv_cache_dtype"] == "auto"
    assert told["speculative_decoding"] is False
    assert "made-up" not in str(told)
    drafting = vllm.config_flags(config(speculative_config=SimpleNamespace(method="ngram")))
    assert drafting["speculative_decoding"] == "ngram"


def test_a_redirect_and_an_error_are_told_without_following() -> None:
    class Answer(SimpleNamespace):
        """An HTTP answer."""

        def read(self, size: int) -> bytes:
            return bytes(self.body)

    assert "not followed" in harness.refusal(Answer(status=302, body=b""))  # type: ignore[arg-type]
    told = harness.refusal(Answer(status=400, body=b'{"error": {"message": "bad"}}'))  # type: ignore[arg-type]
    assert told == "the server answered 400 bad"
    assert harness.refusal(Answer(status=500, body=b"<html>")) == "the server answered 500 "  # type: ignore[arg-type]
