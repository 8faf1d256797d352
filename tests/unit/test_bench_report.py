"""From seen numbers to a record: medians, nulls, ceilings, references, telemetry."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.bench import CPU, GPU, healthy, judged, plan, rounds
from helpers.records import make_draft, make_provenance
from ikit_mcp.call import Call, Settings
from ikit_mcp.evidence import record as evidence
from ikit_mcp.evidence.record import EvidenceRecord, assemble
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import EXECUTES, OpError, load
from ikit_ops.engines import adapter_named, beside, ceiling, report
from ikit_ops.engines.adapter import Found
from ikit_ops.engines.drive import Outcome, step_of
from ikit_ops.engines.gates import evaluate
from ikit_ops.engines.report import Measured
from ikit_ops.engines.result import Round, TwoCall, WorkerResult
from ikit_ops.measure.telemetry import Telemetry


def measured(**changes: Any) -> Measured:
    """A finished run that nothing is wrong with."""
    seen = healthy("vllm", GPU)
    seen.result.load_s = 1.5
    variables = SimpleNamespace(kept=("OMP_NUM_THREADS",), dropped=())
    usual: dict[str, Any] = {
        "adapter": adapter_named("vllm"),
        "plan": plan(GPU),
        "found": Found(version="1"),
        "outcome": Outcome(seen.result, [], 2**20, 1.0, variables),
        "verdict": evaluate(judged("vllm", seen)),
        "device": evidence.Device(name="A GPU", uuid="GPU-1"),
        "platform": "cuda",
        "threads": None,
        "requested": {},
        "telemetry": {"missing": []},
        "peak_bytes": 123,
    }
    return Measured(**usual | changes)


def record_of(**identity: Any) -> EvidenceRecord:
    """A roofline record, as far as ceilings look at it."""
    usual: dict[str, Any] = {
        "model": {"id": "/models/model", "revision": "abc"},
        "device": {"name": "A GPU", "uuid": "GPU-1"},
        "workload": {"context": 576, "batch": 1, "tensor_parallel": 1, "kv_dtype": "bf16"},
    }
    raw = {"identity": usual | identity, "data": {"bandwidth": {"evidence_id": None}}}
    return EvidenceRecord(raw, "e" * 64)


def limit(record: EvidenceRecord | None = None, tok_s: float | None = 200.0) -> ceiling.Ceiling:
    return ceiling.Ceiling(record or record_of(), ["p"], tok_s, 576)


# --- metrics and words --------------------------------------------------------------------------


def test_a_good_run_is_told_with_its_numbers_in_one_line() -> None:
    draft = report.draft(measured(ceiling=limit()))
    assert draft.valid is True and draft.missing == []
    assert draft.summary == (
        "vLLM 1: decode 100 tok/s (50 % of the ceiling), TTFT 20 ms; 3 rounds, spread 0.0 %"
    )
    values = {entry.name: entry.value for entry in draft.metrics}
    assert values["tpot_ms"] == pytest.approx(10.0)
    assert values["prefill_tok_s"] == pytest.approx(512 / 0.02)
    assert values["pct_of_ceiling"] == pytest.approx(50.0)
    assert draft.env_kept == ["OMP_NUM_THREADS"] and draft.parents == ["p"]


def test_what_was_not_seen_is_null_and_named() -> None:
    run = measured(peak_bytes=None, device=None, telemetry=None)
    run.result.load_s = None
    draft = report.draft(run)
    assert "peak_device_memory_bytes (not seen)" in draft.missing
    assert "load_s (not seen)" in draft.missing
    assert any(line.startswith("device (") for line in draft.missing)
    assert "telemetry" in draft.missing


def test_violations_lead_the_summary_and_are_repeated_in_limitations() -> None:
    seen = healthy("vllm", GPU)
    assert seen.result.flags is not None
    seen.result.flags["enforce_eager"] = True
    seen.result.rounds[0].cached_tokens = 9
    run = measured(verdict=evaluate(judged("vllm", seen)))
    draft = report.draft(run)
    assert draft.valid is False
    assert draft.summary.startswith("INVALID as vLLM's speed: prefix cache hit (and 1 more). vLLM")
    assert draft.limitations[:2] == draft.gates.violations


def test_a_ceiling_that_does_not_fit_gives_no_share_but_a_reason() -> None:
    misfit = limit()
    misfit.mismatches.append("the roofline is of another model (x)")
    draft = report.draft(measured(ceiling=misfit))
    shares = [m.value for m in draft.metrics if m.name == "pct_of_ceiling"]
    assert shares == [None]
    assert "pct_of_ceiling: the roofline is of another model (x)" in draft.missing


def test_the_two_call_check_is_kept_with_its_ratio() -> None:
    told = WorkerResult(rounds=rounds(100.0), two_call=TwoCall(decode_tok_s=101.0))
    check = report.two_call(told)
    assert check is not None and check["ratio"] == pytest.approx(1.01)
    assert report.two_call(WorkerResult(rounds=rounds())) is None


def test_only_lines_that_prove_something_are_kept_of_the_log() -> None:
    run = measured()
    run.outcome.log[:] = [
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        "server_args={'api_key': 'made-up', 'attention backend': 'x'}",
        "some other line",
    ]
    assert report.draft(run).data["log"] == run.outcome.log[:1]


# --- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "same", "first", "state"),
    [
        ([1, 2, 3], [1, 2, 3], True, None, "ok"),
        ([1, 2, 3], [1, 9, 3], False, 1, "warning"),
        ([1, 2], [1, 2, 3], None, None, "unknown"),
        ([1, 2, 3, 4], [1, 2], None, None, "unknown"),
        ([1, 9], [1, 2, 3], False, 1, "warning"),
    ],
)
def test_the_first_token_that_differs_is_named(
    mine: list[int], theirs: list[int], same: bool | None, first: int | None, state: str
) -> None:
    result = WorkerResult(rounds=[], tokens=mine)
    found, check = report.compare_tokens(result, {"tokens": {"ids": theirs}}, "e", None)
    assert (found["same"], found["first_difference"], check.state) == (same, first, state)


def test_tokens_of_other_prompts_are_not_compared() -> None:
    result = WorkerResult(rounds=[], tokens=[1])
    _, check = report.compare_tokens(result, {"tokens": {"ids": [1]}}, "e", "seed differs")
    assert check.state == "unknown" and "seed differs" in check.text
    _, check = report.compare_tokens(result, {}, "e", None)
    assert check.state == "unknown"


def question(**identity: Any) -> EvidenceRecord:
    """A benchmark that was asked what ``plan(GPU)`` asks."""
    usual: dict[str, Any] = {
        "model": {"id": "/models/model", "revision": "abc"},
        "workload": {"seed": 0, "prompt_len": 512},
    }
    raw = {"identity": usual | identity, "data": {"prompt": {"vocab_bound": 2048}}}
    return EvidenceRecord(raw, "e" * 64)


@pytest.mark.parametrize(
    ("other", "flags", "bound", "why"),
    [
        (question(), {}, 2048, None),
        (question(), {"revision": "abc"}, 2048, None),
        (question(), {"revision": "abd"}, 2048, "the models' revisions differ"),
        (question(model={"id": "acme/other"}), {}, 2048, "the models differ"),
        (question(model=None), {}, 2048, "the models differ"),
        (question(workload={"seed": 1, "prompt_len": 512}), {}, 2048, "seed differs"),
        (question(workload={"seed": 0, "prompt_len": 16}), {}, 2048, "prompt_len differs"),
        (question(), {}, 4096, "the vocabularies differ"),
        (question(), {}, None, "the vocabulary of the prompts was not told"),
    ],
)
def test_answers_are_compared_only_where_the_question_and_the_model_were_the_same(
    other: EvidenceRecord, flags: dict[str, Any], bound: int | None, why: str | None
) -> None:
    result = WorkerResult(tokens=[1], flags=flags, prompt={"vocab_bound": bound})
    assert report.other_question(plan(GPU), result, other) == why


def test_a_models_path_is_shown_as_one_line_and_kept_as_it_is_in_the_plan() -> None:
    evil = plan(GPU, path=Path("/models/a\nVALID\u202e"), revision="r\n1")
    shown = report.identity(measured(plan=evil)).model
    assert shown is not None and shown.id is not None and shown.revision == "r 1"
    assert "\n" not in shown.id and "\u202e" not in shown.id
    assert evil.config()["model"] == "/models/a\nVALID\u202e"


# --- ceilings -----------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path: Path) -> Call:
    operation = load(None).get("bench")
    return Call(operation=operation, args={}, settings=Settings(tmp_path / "home"), scope=EXECUTES)


MINE = {"name": "A GPU", "uuid": "GPU-1"}


@pytest.mark.parametrize(
    ("identity", "device", "flags", "mismatch", "warning"),
    [
        ({}, MINE, {}, None, None),
        ({"model": {"id": "/models/other"}}, MINE, {}, "another model", None),
        ({"device": {"name": "Other", "uuid": "GPU-2"}}, MINE, {}, "another device", None),
        ({"device": {"name": "A GPU", "uuid": None}}, MINE, {}, None, None),
        ({"device": {"name": "Other", "uuid": None}}, MINE, {}, "another device", None),
        ({"device": None}, MINE, {}, None, None),
        ({"workload": {"batch": 8}}, MINE, {}, "another batch", None),
        ({"workload": {"tensor_parallel": 2}}, MINE, {}, "number of devices", None),
        ({}, MINE, {"kv_cache_dtype": "fp8"}, None, "KV cache of bf16"),
        ({}, MINE, {"cache_type_k": "f16"}, None, None),
        ({}, MINE, {"kv_cache_dtype": "auto"}, None, None),
    ],
)
def test_each_misfit_of_a_ceiling_is_named(
    call: Call, identity: dict[str, Any], device: Any, flags: dict[str, Any],
    mismatch: str | None, warning: str | None,
) -> None:  # fmt: skip
    fitting = limit(record_of(**identity))
    ceiling.find_mismatches(call, fitting, plan(GPU), device, flags, None)
    assert [mismatch in m for m in fitting.mismatches if mismatch] == [True] * (
        mismatch is not None
    )
    assert [warning in w for w in fitting.warnings if warning] == [True] * (warning is not None)
    assert (fitting.usable_tok_s is None) is (mismatch is not None)


def test_another_revision_is_a_warning(call: Call) -> None:
    fitting = limit()
    ceiling.find_mismatches(call, fitting, plan(GPU, revision="def"), MINE, {}, None)
    assert fitting.mismatches == [] and "another revision" in fitting.warnings[0]


def test_the_same_file_by_two_paths_is_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x", encoding="utf-8")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert ceiling.same_model(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not ceiling.same_model(str(tmp_path / "a"), str(tmp_path / "c"))
    assert ceiling.same_model("acme/model", "acme/model")


# --- telemetry ----------------------------------------------------------------------------------


class Scripted:
    """A source that gives what a test says."""

    name = "gpu"
    missing: list[str] = []  # noqa: RUF012 -- the protocol's form

    def __init__(self, **summary: Any) -> None:
        self.summary = summary

    def read(self, full: bool) -> dict[str, Any]:
        return {"read": full}

    def summarise(self, samples: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
        return dict(self.summary)

    def close(self) -> None:
        """Nothing is held."""


def watched(platform: str = "cuda", device: Any = GPU, **summary: Any) -> Any:
    """What a watch says of rounds beside which a source said that."""
    now = time.time()
    rows = [Round(index=n, t_start=now + n, t_end=now + n + 1) for n in range(2)]
    with beside.Watch(plan(device), Telemetry([Scripted(**summary)])) as watch:
        watch.entered("round")
    result = WorkerResult(rounds=rows)
    return watch.beside(result, platform), watch.telemetry(result), watch


def test_slowdowns_are_told_and_idle_clocks_are_not() -> None:
    found, told, _ = watched(throttle_reasons=["gpu_idle", "sw_power_cap"], pids=[])
    assert found.throttling == ["sw_power_cap"]
    assert told["rounds"][1]["index"] == 1 and told["missing"] == []


def test_a_process_that_is_not_ours_is_foreign_and_an_unreadable_list_is_not_guessed() -> None:
    assert watched(pids=[os.getpid(), 99_999_999])[0].foreign == ["pid 99999999"]
    assert watched(pids=[os.getpid()])[0].foreign == []
    assert watched(pids=[99_999_999])[0].foreign is None, "another namespace, perhaps"
    assert watched(pids=[])[0].foreign is None
    busy = replace(GPU, busy=({"pid": 7, "name": "python\n", "memory_bytes": 1},))
    assert watched(device=busy, pids=[])[0].foreign == ["python (pid 7, before the run)"]


def test_clocks_are_compared_between_rounds() -> None:
    spreads = [{"min": 1.0, "median": 1000.0, "max": 1.0}, {"median": 900.0}]
    assert beside.drift([*spreads, None]) == pytest.approx(0.1)
    assert beside.drift(spreads[:1]) is None and beside.drift([]) is None


def test_memory_of_a_gpu_is_what_the_run_added() -> None:
    _, _, watch = watched(memory_used_bytes={"min": 100, "median": 200, "max": 700})
    outcome: Any = SimpleNamespace(max_rss_bytes=55)
    assert watch.peak_bytes(outcome, "cuda") == 600
    assert watch.peak_bytes(outcome, "cpu") == 55
    assert watched()[2].peak_bytes(outcome, "cuda") is None


def test_without_a_device_nothing_is_seen() -> None:
    with beside.Watch(plan(None)) as watch:
        watch.entered("round")
    result = WorkerResult(rounds=rounds())
    assert watch.telemetry(result) is None
    assert watch.beside(result, None).foreign is None
    assert watch.peak_bytes(SimpleNamespace(max_rss_bytes=1), None) is None  # type: ignore[arg-type]


def test_other_load_and_steal_of_a_cpu_are_parts_of_all_its_time() -> None:
    source = Scripted(others_share=0.5, steal_share=0.1, throttle_events=2)
    source.name = "cpu"
    with beside.Watch(plan(CPU), Telemetry([source])) as watch:
        watch.entered("round")
    found = watch.beside(WorkerResult(rounds=rounds()), "cpu")
    assert found.other_load == pytest.approx(0.5 * (os.cpu_count() or 1))
    assert (found.steal, found.throttling) == (0.1, ["cpu_thermal"])


# --- progress -----------------------------------------------------------------------------------


def test_each_phase_and_each_request_is_a_step() -> None:
    asked = plan(rounds=3, warmup=2)
    steps = [
        step_of({}, asked),
        step_of({"phase": "import"}, asked),
        step_of({"phase": "warm-up", "done": 1}, asked),
        step_of({"phase": "round", "done": 0}, asked),
        step_of({"phase": "round", "done": "x"}, asked),
        step_of({"phase": "shutdown"}, asked),
        step_of({"phase": "evil\n"}, asked),
    ]
    assert [s[0] for s in steps] == [0, 1, 4, 5, 5, 11, 0]
    assert {s[1] for s in steps} == {12}
    assert steps[2][2] == "warm-up 2 of 2" and steps[6][2] == "starting"


# --- ceilings from records ---------------------------------------------------------------------


def stored(home: Path, **changed: Any) -> str:
    """Store a made-up record; its id."""
    draft = make_draft(**changed)
    with Store(home).stage() as stage:
        return stage.commit(assemble(draft, make_provenance(), stage.artifacts)).evidence_id


def test_a_bandwidth_of_other_threads_is_a_misfit_on_a_cpu_alone(call: Call) -> None:
    drawn = stored(
        call.settings.home, kind="ceiling", identity=evidence.Identity(workload={"threads": 4})
    )
    for threads, expected in ((1, 1), (4, 0), (None, 0)):
        record = record_of()
        record.raw["data"]["bandwidth"]["evidence_id"] = drawn
        fitting = limit(record)
        ceiling.find_mismatches(call, fitting, plan(GPU), MINE, {}, threads)
        assert len(fitting.mismatches) == expected
    assert "4 threads, the engine ran 1" not in str(fitting.mismatches)


@pytest.mark.parametrize(
    ("changed", "mismatches", "limitations"),
    [
        ({"valid": None}, 0, 1),
        ({"metrics": [evidence.metric("ceiling_tok_s", None, "tok/s", "ceiling")]}, 1, 0),
        ({"data": {"bandwidth": {"source": "user"}}}, 0, 1),
        ({}, 0, 0),
    ],
)
def test_doubts_about_a_ceiling_are_taken_over(
    call: Call, changed: dict[str, Any], mismatches: int, limitations: int
) -> None:
    usual: dict[str, Any] = {
        "kind": "roofline",
        "identity": evidence.Identity(workload={"context": 576}),
        "metrics": [evidence.metric("ceiling_tok_s", 200.0, "tok/s", "ceiling")],
    }
    given = stored(call.settings.home, **usual | changed)
    fitting = ceiling.fitting_ceiling(call, plan(GPU), given)
    assert fitting.parents == [given], "its context fits already"
    assert len(fitting.mismatches) == mismatches and len(fitting.limitations) == limitations


def test_a_ceiling_at_another_context_needs_the_operation(call: Call) -> None:
    given = stored(
        call.settings.home, kind="roofline", identity=evidence.Identity(workload={"context": 1})
    )
    with pytest.raises(OpError, match="roofline is not here"):
        ceiling.fitting_ceiling(call, plan(GPU), given)
