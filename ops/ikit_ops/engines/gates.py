"""Gates: is the number the speed of what it claims to be?

A benchmark that silently ran without CUDA graphs, on a fallback kernel, from a warm cache
or for fewer tokens than asked measures a mistake, to three digits.  Gates judge the
configuration that the engine *says it ran*, never the one that was asked for.

A check has three values: it is ``ok``, it is a ``violation``, or what it needs was not
seen (``unknown``).  A fourth, ``warning``, is an ok with something to know.  A violation
makes the record invalid; an unknown that is required makes its validity null: not enough
was seen to say.  What does not apply to a platform (CUDA graphs on a CPU) is not checked
at all, because a healthy CPU run must not be blamed for them.

Each text says what the finding means for the number, for that is what a reader needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ikit_mcp.call import one_line
from ikit_mcp.evidence.record import Gates
from ikit_ops.engines.adapter import Plan
from ikit_ops.engines.result import WorkerResult, median

State = Literal["ok", "warning", "violation", "unknown"]
TIMING_TOLERANCE = 0.03
WRONG_CLOCK = 1.5
"""How far stamps and the engine's own clock may be apart before one of them is wrong."""
ENGINE_CLOCK = "the engine's own clock"
EXTRA_TOKENS = 2
FIRST_ROUND_TOLERANCE = 0.10
DRIFT_TOLERANCE = 0.05
CEILING_TOLERANCE = 0.02
SHARED_MEMORY = 1.5
"""How much the memory bandwidth of a virtual machine moves from one minute to the next."""


@dataclass(frozen=True)
class Check:
    """What one check found.

    ``text`` says what it means for the number (unknown: what was not seen); ``required``
    unknowns take the record's validity; ``argument`` is the engine argument to blame.
    """

    name: str
    state: State
    text: str = ""
    required: bool = False
    argument: str | None = None


@dataclass(frozen=True)
class Beside:
    """What was seen of the device while the rounds ran; None: nobody could see it.

    ``foreign`` are other compute processes, as words; ``throttling`` the reasons for which
    clocks were lowered; ``clock_drift`` and ``memory_clock_drift`` are (max - min) / max of
    the clocks over the rounds; ``other_load`` the CPUs' time that went to others, in cores.
    """

    foreign: Sequence[str] | None = None
    throttling: Sequence[str] | None = None
    clock_drift: float | None = None
    memory_clock_drift: float | None = None
    other_load: float | None = None
    steal: float | None = None


@dataclass(frozen=True)
class Seen:
    """All that the checks may look at.

    ``cached_part`` is the most of a token's bytes that the last-level cache can hold, 0 to 1;
    ``ceiling_doubtful`` says that the ceiling's bandwidth does not claim to be right,
    ``shared_memory`` that other machines draw on the same memory (a virtual machine's CPU).
    """

    plan: Plan
    result: WorkerResult
    platform: str | None
    requested: Mapping[str, Any]
    log: Sequence[str] = ()
    beside: Beside = field(default_factory=Beside)
    usable_threads: int | None = None
    ceiling_tok_s: float | None = None
    ceiling_doubtful: bool = False
    shared_memory: bool = False
    cached_part: float = 0.0
    environment: Sequence[str] = ()
    reports_cache: bool = True
    configuration_seen: bool = True

    @property
    def flags(self) -> Mapping[str, Any]:
        """The effective flags; empty where none were told."""
        return self.result.flags or {}

    def flag(self, name: str) -> Any:
        """One effective flag, or None."""
        return self.flags.get(name)


@dataclass(frozen=True)
class Verdict:
    """The checks together: what goes into the record."""

    valid: bool | None
    gates: Gates
    unknown: list[str]
    blamed: list[str]


def evaluate(checks: Iterable[Check]) -> Verdict:
    """The verdict of all checks: false on a violation, null on a required unknown."""
    found = list(checks)
    violations = [c.text for c in found if c.state == "violation"]
    unsure = any(c.state == "unknown" and c.required for c in found)
    return Verdict(
        valid=False if violations else None if unsure else True,
        gates=Gates(
            checked=list(dict.fromkeys(c.name for c in found if c.state != "unknown")),
            violations=list(dict.fromkeys(violations)),
            warnings=list(dict.fromkeys(c.text for c in found if c.state == "warning")),
        ),
        unknown=[
            f"gate {c.name}: {c.text}"
            for c in sorted(found, key=lambda c: not c.required)  # what decided comes first
            if c.state == "unknown"
        ],
        blamed=[c.argument for c in found if c.state == "violation" and c.argument],
    )


def common_checks(seen: Seen) -> list[Check]:
    """The checks that every engine stands before."""
    found = [configuration(seen), *token_count(seen), *prompt_tokens(seen), prefix_cache(seen)]
    found += [*speculative(seen), *requested_flags(seen), *threads(seen), *device_checks(seen)]
    found += [*timing(seen), *steadiness(seen), *failed_rounds(seen), *ceiling(seen)]
    return found


def configuration(seen: Seen) -> Check:
    """Whether the engine said how it was configured at all."""
    if seen.configuration_seen and seen.result.flags:
        return Check("configuration", "ok")
    return Check(
        "configuration", "unknown", "the engine did not say how it was configured", required=True
    )


def token_count(seen: Seen) -> list[Check]:
    """Every round made exactly the tokens that were asked for."""
    name, wanted = "token_count", seen.plan.gen_len
    counts = [row.gen_tokens for row in seen.result.rounds]
    if any(count is not None and count != wanted for count in counts):
        wrong = sorted({count for count in counts if count is not None and count != wanted})
        text = (
            f"stopped early: {', '.join(map(str, wrong[:4]))} tokens instead of {wanted}; rates "
            "of shorter texts are of another workload"
            if max(wrong) < wanted
            else f"{', '.join(map(str, wrong[:4]))} tokens instead of {wanted} were made"
        )
        return [Check(name, "violation", text)]
    if any(count is None for count in counts):
        return [Check(name, "unknown", "the tokens of a round were not counted", required=True)]
    ends = {row.finish_reason for row in seen.result.rounds} - {None, "length"}
    if ends:
        text = f"a round ended by {', '.join(sorted(str(e) for e in ends))}, not by its length"
        return [Check(name, "warning", text)]
    return [Check(name, "ok")]


def prefix_cache(seen: Seen) -> Check:
    """No prompt token came from a cache: TTFT would be that of a shorter prompt."""
    name = "prefix_cache"
    hits = [r.cached_tokens for r in seen.result.rounds if r.cached_tokens]
    if hits and max(hits) == 1 and not seen.reports_cache:
        # Its cache cannot be switched off from here, and two prompts may share a first token.
        return Check(name, "warning", "one prompt token came from the prefix cache")
    if hits:
        return Check(
            name,
            "violation",
            f"prefix cache hit: up to {max(hits)} of {seen.plan.prompt_len} prompt tokens were "
            "not computed; TTFT and prefill rate are of a shorter prompt",
        )
    if any(row.cached_tokens is None for row in seen.result.rounds):
        text = "the engine does not say how many prompt tokens came from a cache"
        return Check(name, "unknown", text, required=seen.reports_cache)
    return Check(name, "ok")


def speculative(seen: Seen) -> list[Check]:
    """Drafted tokens make a decode rate that depends on the text."""
    name = "speculative_decoding"
    drafted = any(row.speculative_tokens for row in seen.result.rounds)
    flag = next(
        (seen.flag(key) for key in ("speculative", "speculative_decoding", "speculative_algorithm")
         if seen.flag(key) is not None), None)  # fmt: skip
    if drafted or flag not in (None, False, "none", "NONE", ""):
        return [
            Check(
                name,
                "violation",
                "speculative decoding: several tokens a step, as many as random prompts let "
                "through; the rate says nothing about real text, nor about bytes per token",
            )
        ]
    if flag is None and all(row.speculative_tokens is None for row in seen.result.rounds):
        return [Check(name, "unknown", "whether tokens were drafted was not seen")]
    return [Check(name, "ok")]


_NO_WISH = ("auto", "none", "")
_DECIDES = (
    "dtype", "quantization", "cache_type", "_backend", "_parallel_size", "tp_size",
    "attn_implementation",
)  # fmt: skip
"""How names end or begin whose value decides what is computed, and where."""


def requested_flags(seen: Seen) -> list[Check]:
    """What was asked for, and is not what ran.

    A switch, a number format, a kernel or a split over devices that did not take effect makes
    the number that of another configuration.  Sizes are rounded, and names are written in
    several ways: those are told.
    """
    asked = {**seen.requested, **(seen.result.requested_flags or {})}
    found = []
    for key, wanted in asked.items():
        got = seen.flags.get(key)
        if (
            got is None
            or wanted is None
            or (isinstance(wanted, str) and wanted.lower() in _NO_WISH)
        ):
            continue
        if not same_setting(wanted, got):
            text = (
                f"{key} was requested as {one_line(str(wanted), 60)}, "
                f"the engine ran {one_line(str(got), 60)}"
            )
            switch = isinstance(wanted, bool) and isinstance(got, bool)
            if switch or key.endswith(_DECIDES) or key.startswith(_DECIDES):
                text += ": the number is not of the configuration that was asked for"
                found.append(Check("requested_flags", "violation", text, argument=key))
            else:
                found.append(Check("requested_flags", "warning", text))
    return found or ([Check("requested_flags", "ok")] if asked and seen.flags else [])


_FORMATS = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "fp8": "fp8_e4m3",
}  # fmt: skip
"""Other names of number formats."""


def same_setting(wanted: Any, got: Any) -> bool:
    """Whether a requested and an effective value mean the same."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return all(key in got and same_setting(value, got[key]) for key, value in wanted.items())
    if isinstance(got, Mapping):
        return True  # a summary of what ran, nothing to compare word by word

    def plain(value: Any) -> str:
        text = str(value).strip().lower()
        for prefix in ("torch.", "cudagraphmode.", "attentionbackendenum."):
            text = text.removeprefix(prefix)
        text = _FORMATS.get(text, text)
        return {"on": "true", "off": "false", "yes": "true", "no": "false"}.get(text, text)

    if plain(wanted) == plain(got):
        return True
    try:
        return float(wanted) == float(got)
    except (TypeError, ValueError):
        return False


def threads(seen: Seen) -> list[Check]:
    """More threads than cores: spinning threads wait for those that are not running."""
    used = seen.flag("n_threads") or seen.flag("threads") or seen.plan.threads
    if seen.platform != "cpu" or not isinstance(used, int):
        return []
    if seen.usable_threads is None:
        return [Check("threads", "unknown", "the cores that may be used are not known")]
    if used > seen.usable_threads:
        text = (
            f"{used} threads on {seen.usable_threads} cores: threads that spin wait for threads "
            "that are not running; this measures the scheduler"
        )
        return [Check("threads", "violation", text, argument="threads")]
    return [Check("threads", "ok")]


def device_checks(seen: Seen) -> list[Check]:
    """What happened on the device beside the rounds."""
    if seen.platform in ("cuda", "rocm"):
        return [_foreign(seen.beside), _throttling(seen.beside), *_clocks(seen.beside)]
    return _load(seen.beside) if seen.platform == "cpu" else []


def _foreign(beside: Beside) -> Check:
    name = "foreign_processes"
    if beside.foreign is None:
        # In containers the driver hides them: to require this would spoil every run there.
        return Check(name, "unknown", "other processes on the device could not be told from ours")
    if beside.foreign:
        shown = one_line(", ".join(beside.foreign[:4]), 160)
        text = f"other processes computed on the device ({shown}): bandwidth was shared"
        return Check(name, "violation", text)
    return Check(name, "ok")


_HARD = ("thermal", "hw_slowdown", "brake")


def _throttling(beside: Beside) -> Check:
    name = "throttling"
    if beside.throttling is None:
        return Check(name, "unknown", "reasons for lowered clocks were not seen")
    hard = [r for r in beside.throttling if any(word in r.lower() for word in _HARD)]
    if hard:
        text = f"throttled ({', '.join(hard)}): the number is of a device that is too hot or weak"
        return Check(name, "violation", text)
    if beside.throttling:
        text = f"clocks were limited ({', '.join(beside.throttling)}): normal at full power"
        return Check(name, "warning", text)
    return Check(name, "ok")


def _clocks(beside: Beside) -> list[Check]:
    found = []
    for name, drift, hard in (
        ("memory_clock", beside.memory_clock_drift, True),
        ("clock", beside.clock_drift, False),
    ):
        if drift is not None and drift > DRIFT_TOLERANCE:
            text = (
                f"the {'memory' if hard else 'SM'} clock moved by {drift:.0%} between rounds: "
                "they are not of one device state"
            )
            found.append(Check(name, "violation" if hard else "warning", text))
        elif drift is not None:
            found.append(Check(name, "ok"))
    return found


def _load(beside: Beside) -> list[Check]:
    """On a CPU, other programs take cores and bandwidth; a number taken beside them is low."""
    found = []
    if beside.other_load is not None:
        busy = beside.other_load > 0.2
        text = f"other processes used {beside.other_load:.1f} cores during the rounds"
        found.append(Check("foreign_processes", "warning" if busy else "ok", text if busy else ""))
    if beside.throttling:
        text = "the CPU slowed down to cool during the rounds"
        found.append(Check("throttling", "warning", text))
    if beside.steal is not None and beside.steal > 0.02:
        text = f"the hypervisor took {beside.steal:.0%} of the CPU time during the rounds"
        found.append(Check("steal", "warning", text))
    return found


def timing(seen: Seen) -> list[Check]:
    """Stamps, two calls and the engine's own clock should tell the same rate."""
    ours = median([row.rate() for row in seen.result.rounds])
    if ours is None:
        text = "no decode rate: too few tokens, or times and counts were not seen"
        return [Check("timing", "unknown", text, required=True)]
    others = {
        "two calls": seen.result.two_call.decode_tok_s if seen.result.two_call else None,
        ENGINE_CLOCK: median([row.engine_rate() for row in seen.result.rounds]),
        "the command's own figure": median([row.decode_tok_s for row in seen.result.rounds]),
    }
    found = []
    for how, other in others.items():
        if other is None or abs(other / ours - 1) <= TIMING_TOLERANCE:
            continue
        text = (
            f"timing_disagreement: {ours:.1f} tok/s by token stamps, {other:.1f} by {how} "
            f"({other / ours - 1:+.1%})"
        )
        apart = max(other / ours, ours / other)
        wrong = how == ENGINE_CLOCK and apart > WRONG_CLOCK
        found.append(Check("timing", "violation" if wrong else "warning", text))
    return found or [Check("timing", "ok")]


def steadiness(seen: Seen) -> list[Check]:
    """The first round against the others (warm-up was too short), and drift over all."""
    rates = [rate for row in seen.result.rounds if (rate := row.rate()) is not None]
    if len(rates) < 3:
        return []
    rest = median(list(rates[1:]))
    found = []
    if rest and rates[0] < rest * (1 - FIRST_ROUND_TOLERANCE):
        text = (
            f"the first round was {1 - rates[0] / rest:.0%} slower than the others: warm-up was "
            "not enough (kernels compiled in the round)"
        )
        found.append(Check("warm_up", "warning", text))
    middle = median(list(rates)) or 0.0
    spread = (max(rates) - min(rates)) / middle if middle else 0.0
    if spread > DRIFT_TOLERANCE:
        text = f"rounds differ by {spread:.0%}: the median of a few such rounds moves as much"
        found.append(Check("steadiness", "warning", text))
    return found or [Check("steadiness", "ok")]


def failed_rounds(seen: Seen) -> list[Check]:
    """As many rounds as were asked for; some may have failed and been passed over."""
    failed, asked = len(seen.result.failed_rounds), seen.plan.rounds
    told = len(seen.result.rounds) + failed
    if told != asked:
        text = f"{told} rounds instead of {asked} were told: some were left out, or made up"
        return [Check("rounds", "violation", text)]
    if failed:
        return [Check("rounds", "warning", f"{failed} of {asked} rounds failed")]
    return [Check("rounds", "ok")]


def prompt_tokens(seen: Seen) -> list[Check]:
    """Every prompt was as long as was asked for: context and TTFT belong to that length.

    A server that takes no ids gets words, and how many tokens those are is its own affair.
    """
    name, asked = "prompt_tokens", seen.plan.prompt_len
    counts = {row.prompt_tokens for row in seen.result.rounds} - {None}
    # Some engines put a token or two of their own before the prompt.
    wrong = sorted(n for n in counts if n is not None and not asked <= n <= asked + EXTRA_TOKENS)
    if wrong:
        text = (
            f"{', '.join(map(str, wrong[:4]))} prompt tokens instead of {asked} were computed: "
            "TTFT and decode rate are of another context"
        )
        return [Check(name, "warning" if seen.plan.url is not None else "violation", text)]
    return [Check(name, "ok")] if counts else []


def ceiling(seen: Seen) -> list[Check]:
    """Nothing decodes faster than memory can be read.

    A rate above its ceiling is a violation.  It is unknown, and so is the record's validity,
    where the ceiling itself may be too low: the number then waits for a better ceiling.
    """
    rate = median([row.rate() for row in seen.result.rounds])
    if seen.ceiling_tok_s is None or rate is None:
        return []
    limit = seen.ceiling_tok_s * (1 + CEILING_TOLERANCE)
    if rate <= limit:
        return [Check("ceiling", "ok")]
    text = f"{rate:.1f} tok/s is above the ceiling of {seen.ceiling_tok_s:.1f}: "
    if rate * (1 - seen.cached_part) <= limit:
        text += (
            f"the last-level cache can hold {seen.cached_part:.0%} of the bytes of a token, which "
            "then do not come from memory; only a larger model shows the memory"
        )
        return [Check("ceiling", "warning", text)]
    if seen.shared_memory and rate <= limit * SHARED_MEMORY:
        text += (
            "the memory of a virtual machine is shared with others, and what is left of its "
            "bandwidth moves; measure the bandwidth again, close to the benchmark"
        )
        return [Check("ceiling", "unknown", text, required=True)]
    if seen.ceiling_doubtful:
        text += "its bandwidth was measured amid noise; measure it again on a quiet machine"
        return [Check("ceiling", "unknown", text, required=True)]
    text += (
        "weights were not all read from memory for each token (a cache, drafted tokens, early "
        "stops, a wrong count), or the bandwidth of the ceiling is too low"
    )
    return [Check("ceiling", "violation", text)]
