"""What a call keeps for every operation: the reproduce line, scopes, records, one line of text."""

from __future__ import annotations

import argparse
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.arguments import add_options, parse
from ikit_mcp.call import Call, Cancelled, Progress, Settings, command_line, one_line
from ikit_mcp.evidence.record import Draft, EvidenceRecord
from ikit_mcp.registry import (
    DERIVES,
    EXECUTES,
    MEASURES,
    READS,
    Arg,
    Effects,
    Operation,
    OpError,
    Registry,
    Varying,
)
from ikit_mcp.runner import Control, Request, Runner

ARGS = (
    Arg("model", "string", "What", required=True, positional=True),
    Arg("steps", "integer", "How many", default=3),
    Arg("rate", "number", "How fast"),
    Arg("deep", "boolean", "Whether", default=False),
    Arg("names", "array", "Which", items="string"),
)


def made(name: str, function: Any, effects: Effects | Varying = READS, *args: Arg) -> Operation:
    """An operation as the decorator makes it."""
    strongest = effects.strongest if isinstance(effects, Varying) else effects
    of = effects.of if isinstance(effects, Varying) else lambda _args: strongest
    return Operation(name, (name,), "An operation for a test of the call and runner.", args,
                     strongest, function, of)  # fmt: skip


def runner(home: Path, *operations: Operation, scope: Effects = EXECUTES) -> Runner:
    """A runner of these operations."""
    registry = Registry()
    for op in operations:
        registry.add(op)
    return Runner(registry, Settings(home), scope)


def run(which: Runner, name: str, **arguments: Any) -> Any:
    """What a call leaves: its record or reply."""
    outcome = which.here(which.check(name, arguments), Control())
    return outcome.record or outcome.reply


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(
    model=texts,
    steps=st.integers(-(2**40), 2**40),
    rate=st.none() | st.floats(-1e6, 1e6),
    deep=st.booleans(),
    names=st.lists(texts, max_size=3),
)
def test_the_reproduce_line_parses_back_to_the_same_arguments(
    model: str, steps: int, rate: float | None, deep: bool, names: list[str]
) -> None:
    args = {"model": model, "steps": steps, "rate": rate, "deep": deep, "names": names}
    op = made("thing", None, READS, *ARGS)
    words = shlex.split(command_line(op, args))
    assert words[:2] == ["ikit", "thing"]
    parser = argparse.ArgumentParser()
    add_options(parser, ARGS)
    raw = {k: v for k, v in vars(parser.parse_args(words[2:])).items() if v is not None}
    assert parse(ARGS, raw, "thing") == {**args, "names": names or None}


def test_text_from_outside_becomes_one_line_without_what_a_terminal_obeys() -> None:
    assert one_line("a\x1b[31m\r\nb\u202ec\u2066\u200fd") == "a [31m bcd"
    assert one_line("x" * 500) == "x" * 199 + "…"
    assert one_line("\n\n") == ""
    assert one_line("a\ud800b") == "a\\ud800b"


def test_what_only_reads_may_not_save_and_must_return_a_dict(tmp_path: Path) -> None:
    def saves(call: Call) -> Any:
        """Tries what it may not."""
        return call.save(Draft(kind="x", claim_class="derived", valid=True, summary="x"))

    with pytest.raises(TypeError, match="READS and may not save"):
        run(runner(tmp_path / "h", made("saves", saves)), "saves")
    with pytest.raises(TypeError, match="must return a dict"):
        run(runner(tmp_path / "h", made("nothing", lambda call: None)), "nothing")
    with pytest.raises(TypeError, match="must return the record"):
        run(runner(tmp_path / "h", made("nothing", lambda call: {}, DERIVES)), "nothing")


def test_a_saved_record_pins_what_was_resolved_beside_what_was_asked(tmp_path: Path) -> None:
    def saves(call: Call, steps: int) -> EvidenceRecord:
        """Saves with a resolved argument and an artifact of its folder."""
        path = call.folder / "log.txt"
        path.write_text("text", encoding="utf-8")
        draft = Draft(kind="x", claim_class="derived", valid=None, summary="two\nlines",
                      parents=["a" * 64, "a" * 64])  # fmt: skip
        return call.save(draft, resolved={"steps": 7}, artifacts={"log.txt": (path, "text/plain")})

    record = run(runner(tmp_path, made("saves", saves, DERIVES, ARGS[1])), "saves")
    request = record.get("provenance", "request")
    assert request == {"operation": "saves", "args": {"steps": 7}, "requested": {"steps": 3}}
    assert record.get("provenance", "reproduce") == "ikit saves --steps 7"
    assert record.summary == "two lines" and record.get("provenance", "parents") == ["a" * 64]
    assert record.get("artifacts", 0, "bytes") == 4
    assert not list((tmp_path / "work").iterdir())


def test_an_inner_operation_may_do_no_more_than_the_outer_call_does(tmp_path: Path) -> None:
    def inner(call: Call, steps: int) -> EvidenceRecord:
        """Measures."""
        draft = Draft(kind="inner", claim_class="measured", valid=True, summary=f"{steps}")
        return call.save(draft)

    def outer(call: Call, deep: bool) -> EvidenceRecord:
        """Asks the inner one."""
        found = call.invoke("inner", {"steps": 5})
        draft = Draft(kind="outer", claim_class="derived", valid=True, summary=found.summary,
                      parents=[found.evidence_id])  # fmt: skip
        return call.save(draft)

    depends = Varying(MEASURES, lambda args: MEASURES if args["deep"] else DERIVES)
    which = runner(
        tmp_path, made("inner", inner, MEASURES, ARGS[1]), made("outer", outer, depends, ARGS[3])
    )
    assert run(which, "outer", deep=True).summary == "5"
    with pytest.raises(OpError, match="inner measures a device, and this may only do"):
        run(which, "outer", deep=False)


def test_a_read_only_runner_refuses_what_writes_and_says_how_to_get_it(tmp_path: Path) -> None:
    which = runner(tmp_path, made("writes", None, DERIVES), scope=READS)
    with pytest.raises(OpError) as refused:
        which.check("writes", {})
    assert "--read-only" in refused.value.next_step


def test_a_cancelled_call_stops_at_its_next_word(tmp_path: Path) -> None:
    cancel = threading.Event()

    def steps(call: Call) -> dict[str, Any]:
        """Goes on until it is told."""
        for number in range(1_000):
            call.progress(number, 1_000, "step")
            if number == 3:
                cancel.set()
        return {}

    which = runner(tmp_path, made("steps", steps))
    told: list[float] = []
    with pytest.raises(Cancelled):
        control = Control(report=lambda progress: told.append(progress.done), cancel=cancel)
        which.here(which.check("steps", {}), control)
    assert told == [0, 1, 2, 3]


def test_an_unknown_operation_and_one_that_cannot_be_asked_are_errors(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="unknown operation"):
        runner(tmp_path).check("nothing", {})
    lonely = Call(made("lonely", None), {}, Settings(tmp_path), READS)
    with pytest.raises(OpError, match="cannot ask"):
        lonely.invoke("other", {})


def test_the_home_follows_the_environment(tmp_path: Path) -> None:
    settings = Settings.from_environment({"IKIT_HOME": str(tmp_path), "IKIT_PLUGINS": "a"})
    assert (settings.home, settings.signing_key, settings.plugins) == (tmp_path, None, "a")
    data = Settings.from_environment({"XDG_DATA_HOME": "/data", "IKIT_SIGNING_KEY": "/k"})
    assert data.home == Path("/data/ikit") and data.signing_key == Path("/k")
    assert Settings.from_environment({"XDG_DATA_HOME": "relative"}).home.parts[-3:] == (
        ".local", "share", "ikit",
    )  # fmt: skip


def test_a_request_knows_whether_it_needs_the_device(tmp_path: Path) -> None:
    depends = Varying(MEASURES, lambda args: MEASURES if args["deep"] else DERIVES)
    op = made("outer", None, depends, ARGS[3])
    assert Request(op, {"deep": True}, MEASURES).needs_lock
    assert not Request(op, {"deep": False}, DERIVES).needs_lock


@pytest.mark.parametrize(
    ("done", "total", "part"),
    [(3, 7, "3 of 7"), (0, None, ""), (14_500_000, 29_000_000, "50 %"), (1.5, 2, "1.5 of 2")],
)
def test_progress_counts_few_steps_and_gives_a_share_of_many(
    done: float, total: float | None, part: str
) -> None:
    assert Progress(done, total, "reading").part == part
