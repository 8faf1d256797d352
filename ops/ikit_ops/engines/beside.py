"""What happens on the device while an engine's rounds run, as far as anybody can see it."""

from __future__ import annotations

from typing import Any

from ikit_ops.engines.adapter import Plan
from ikit_ops.engines.drive import Outcome
from ikit_ops.engines.gates import Beside
from ikit_ops.engines.result import WorkerResult


class Watch:
    """Looks at the device from before the engine starts until it has ended."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None: ...

    def started(self, pid: int) -> None:
        """The engine's worker runs: what is below it is ours."""

    def beside(self, result: WorkerResult, platform: str | None) -> Beside:
        """What was seen during the rounds."""
        return Beside()

    def telemetry(self) -> dict[str, Any] | None:
        """The samples, for the record; None: nothing could be seen."""
        return None

    def peak_bytes(self, outcome: Outcome, platform: str | None) -> int | None:
        """The most memory of the device that the engine held, in bytes."""
        return outcome.max_rss_bytes if platform == "cpu" else None
