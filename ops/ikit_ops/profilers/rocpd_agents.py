"""Agents of a rocpd file: which are devices, and which of several runs are the same.

Each run numbers the agents of its machine for itself.  Two processes on one machine see the
same agents under the same numbers, so what they did on one is added up; where the identities
that the file tells (the device's uuid, the machine) differ, the same number means two devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.profilers.sqlite_input import Database, quoted

NOWHERE = -1
"""The device of a copy between two places of the host: none."""
_STEP = 1_000_000
MAX_AGENTS = 10_000


@dataclass(frozen=True)
class _Identity:
    uuid: str | None
    node: str | None

    def contradicts(self, other: _Identity) -> bool:
        """Whether both are told, and differ."""
        pairs = ((self.uuid, other.uuid), (self.node, other.node))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


@dataclass
class AgentsOfRun:
    """The agents of one run: its numbers of devices, and those that are the host."""

    renumbered: dict[int, int] = field(default_factory=dict)
    hosts: set[int] = field(default_factory=set)

    def device(self, target: int | None, source: int | None) -> int | None:
        """The device that a copy keeps busy; NOWHERE for one inside of the host."""
        agent = source if target in self.hosts and source is not None else target
        if agent is None:
            return None
        return NOWHERE if agent in self.hosts else self.renumbered.get(agent, agent)

    def expression(self, agent: str) -> str:
        """The SQL expression of a dispatch's device, from that of its agent."""
        if not self.renumbered:
            return agent
        cases = " ".join(f"WHEN {own} THEN {number}" for own, number in self.renumbered.items())
        return f"(CASE {agent} {cases} ELSE {agent} END)"


class Agents:
    """The agents of all runs."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.names: dict[int, str] = {}
        self._known: dict[int, _Identity] = {}

    def own_id(self, device: int | None) -> int | None:
        """The number that a device has in its own run."""
        return device % _STEP if device is not None and device in self._known else device

    def of_run(self, suffix: str) -> AgentsOfRun:
        """Read the agents of one run."""
        found = AgentsOfRun()
        rows = self._rows(f"rocpd_info_agent{suffix}", (
            "id", "type", "uuid", "nid", "name", "model_name", "product_name",
        ))  # fmt: skip
        nodes = self._nodes(suffix)
        for own, kind, uuid, node, *names in rows:
            if type(own) is not int or not 0 <= own < _STEP:
                continue
            if isinstance(kind, str) and kind.upper() == "CPU":
                found.hosts.add(own)
                continue
            told = str(uuid or "0")
            identity = _Identity(None if told == "0" else told, nodes.get(str(node)))
            number = own
            while number in self._known and self._known[number].contradicts(identity):
                number += _STEP
            self._known.setdefault(number, identity)
            if number != own:
                found.renumbered[own] = number
            for name in names:
                if isinstance(name, str) and name:
                    self.names[number] = excerpt(name, 100)
        return found

    def _nodes(self, suffix: str) -> Mapping[str, str]:
        """What tells the machines apart, by their number in the run."""
        rows = self._rows(f"rocpd_info_node{suffix}", ("id", "machine_id", "hostname"))
        told = ((str(n), "/".join(str(text) for text in words if text)) for n, *words in rows)
        return {number: text for number, text in told if text}

    def _rows(self, table: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """The rows of a small table, columns that it lacks as None."""
        if table not in self.database.tables:
            return []
        found = [self.database.columns(table, column) for column in columns]
        parts = [f"substr({one[0]}, 1, 200)" if one and n > 1 else one[0] if one else "NULL"
                 for n, one in enumerate(found)]  # fmt: skip
        query = f"SELECT {', '.join(parts)} FROM {quoted(table)} LIMIT {MAX_AGENTS}"  # noqa: S608 -- quoted names of the schema
        return list(self.database.rows(query))
