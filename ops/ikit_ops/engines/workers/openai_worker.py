"""The worker for any server that speaks the OpenAI API and streams.

It sends token ids to ``/v1/completions`` where the server takes them, else words, else words
to ``/v1/chat/completions``.  Which of them works is found out by requests of one token before
anything is timed.  The count of tokens is the server's ``usage``, or nobody's: chunks are not
tokens (a chunk may hold several, or none: a chat's first one only names the role).  The first
chunk that holds a token is the first token, where there are as many chunks as tokens.

Of n tokens in c < n chunks nobody knows how many came in the first chunk, and those took no
time that was seen: ``(n - 1) / (last - first)`` would be too fast, by ``(n - 1) / (n - k)`` for
k tokens in the first.  Sure is that each later chunk brought one, so ``(c - 1) / (last -
first)`` is the least rate.  It is given where it is close; else neither TTFT nor decode was
seen, and only the check by two calls tells a rate.

A fresh prompt cannot have been cached whole; what of it was, ``usage`` may tell.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 -- run by path

import ikit_harness as harness

KEY_VARIABLE = "IKIT_SERVER_KEY"
BOUNDS = (30000, 2000)
"""Vocabularies to try ids of: that of nearly every model, and that of a tiny one."""
CLOSE = 0.9
"""The least share of the gaps between tokens that must have been seen as gaps of chunks."""
EXTRAS = {"ignore_eos": True}
"""What vLLM, SGLang and llama.cpp take, and the OpenAI API itself does not."""


class OpenAIServer(harness.Engine):
    """A server that somebody else runs."""

    loads = False
    timing = harness.TIMING + "; stamps are the client's"

    def prepare(self) -> None:
        """Take the key out of the environment, before anything could print it."""
        key = os.environ.pop(KEY_VARIABLE, None)
        headers = {"Authorization": "Bearer " + key} if key else {}
        config = self.config
        self.connection = harness.Connection(
            config["scheme"], config["host"], config["port"], headers, config["answer_timeout"]
        )
        self.base: str = config["base_path"]
        self.style: tuple[str, int | None, dict[str, Any]] = ("ids", BOUNDS[0], EXTRAS)
        self.chunks: list[tuple[int, int | None]] = []

    def load(self) -> None:
        """Find out which kind of request the server takes."""
        refused = []
        for kind, bound in (*(("ids", b) for b in BOUNDS), ("words", None), ("chat", None)):
            for extras in (EXTRAS, {}):
                self.style = (kind, bound, extras)
                try:
                    probe = harness.prompt_ids(0, self.config["nonce"] + ":probe", 8, bound or 2000)
                    self.generate(probe, 1)
                except harness.Refused as error:
                    refused.append(f"{kind}: {error}")
                    if error.status not in (400, 404, 405, 422, 500, 501):
                        raise  # a key or a quota: another request would not help
                else:
                    self.chunks.clear()
                    return
        raise harness.Stopped("the server takes no prompt: " + "; ".join(refused[-2:]))

    def vocabulary(self) -> int:
        """The bound of ids that the server took; that of words is of no matter."""
        return self.style[1] or BOUNDS[0]

    def generate(self, ids: list[int], count: int) -> harness.Generation:
        """One streamed completion."""
        kind, _, extras = self.style
        body: dict[str, Any] = {
            "model": self.config["served_model"], "max_tokens": count, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True}, **extras,
        }  # fmt: skip
        if kind == "chat":
            path = "/chat/completions"
            body["messages"] = [{"role": "user", "content": words_of(ids)}]
        else:
            path = "/completions"
            body["prompt"] = ids if kind == "ids" else words_of(ids)
        try:
            start, lines, end = self.connection.post(self.base + path, body)
        except (OSError, http.client.HTTPException) as error:
            # Where it happened in here tells nobody anything: a sentence, and no traceback.
            raise harness.Stopped(f"{type(error).__name__}: {error}") from None
        return self._read(start, harness.parsed(lines), end)

    def _read(
        self, start: float, chunks: list[tuple[float, dict[str, Any]]], end: float
    ) -> harness.Generation:
        """Stamps from the chunks that hold text, counts from usage."""
        stamps = []
        usage: dict[str, Any] = {}
        finish = None
        for stamp, chunk in chunks:
            usage = typed(chunk, "usage", dict) or usage
            for choice in typed(chunk, "choices", list) or []:
                if not isinstance(choice, dict):
                    raise harness.Stopped(f"the server's choice is {shown(choice)}")
                if holds_token(choice):
                    stamps.append(stamp)
                finish = typed(choice, "finish_reason", str) or finish
        details = typed(usage, "prompt_tokens_details", dict) or {}
        count = counted(usage, "completion_tokens")
        if not stamps and not count:
            raise harness.Stopped("the server answered without a token")
        self.chunks.append((len(stamps), count))
        first, last = (stamps[0], stamps[-1]) if stamps else (None, None)
        timed: int | None = None
        if count is not None and len(stamps) < count:
            timed = len(stamps) - 1
            if timed < (count - 1) * CLOSE:
                first = last = timed = None  # nobody saw them
        return harness.Generation(
            start, first, last, end,
            count=count, prompt=counted(usage, "prompt_tokens"),
            cached=counted(details, "cached_tokens"), finish=finish, tokens=None, timed=timed,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """How it was asked; how the server is configured, it does not say."""
        kind, bound, extras = self.style
        served = {"ids": "token ids", "words": "words", "chat": "words in a chat message"}[kind]
        notes = [f"prompts were sent as {served}"]
        merged = [(n, c) for n, c in self.chunks if c is not None and c > 1 and n < c]
        if merged:
            worst, of = min(merged, key=lambda seen: seen[0] / seen[1])
            lost = worst - 1 < (of - 1) * CLOSE
            notes.append(
                f"chunks hold several tokens ({worst} chunks for {of} tokens): "
                + (
                    "how many came in the first is unknown, so TTFT and decode rate were not "
                    "seen; the check by two calls tells a rate"
                    if lost
                    else "the decode rate counts one token a chunk, and is a little too slow"
                )
            )
        told: dict[str, Any] = {
            "platform": None,
            "flags": None,
            "flags_source": None,
            "notes": notes,
            "request": {"style": kind, "vocab_bound": bound, "extras": sorted(extras)},
        }
        told.update(self._server())
        return told

    def _server(self) -> dict[str, Any]:
        """Name and version, where the server has a page that tells them."""
        told = self.connection.get("/version")
        if isinstance(told, dict) and isinstance(told.get("version"), str):
            return {"version": told["version"]}
        return {}


def holds_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice brings a token: text, or ids behind text that is not complete."""
    delta = typed(choice, "delta", dict) or {}
    return bool(
        choice.get("text")
        or choice.get("token_ids")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
    )


def typed(holder: dict[str, Any], name: str, kind: type) -> Any:
    """A value of the server's answer, or None; Stopped where it is of another type."""
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise harness.Stopped(f"the server's {name} is {shown(value)}")
    return value


def counted(holder: dict[str, Any], name: str) -> int | None:
    """A count of the server's answer, or None; Stopped where it is no count."""
    value = holder.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**63:  # True is no count either
        raise harness.Stopped(f"the server's {name} is {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value as a short text."""
    return json.dumps(value)[: harness.MAX_TOLD]


WORDS = json.loads(
    '["time","year","people","way","day","man","thing","woman","life","child","world","school",'
    '"state","family","student","group","country","problem","hand","part","place","case","week",'
    '"company","system","program","question","work","number","night","point","home","water","room"]'
)


def words_of(ids: list[int]) -> str:
    """As many common words as there are ids, decided by the ids alone."""
    source = random.Random(str(ids))  # noqa: S311 -- prompts, not secrets
    return " ".join(source.choice(WORDS) for _ in ids)


if __name__ == "__main__":
    harness.main(OpenAIServer)
