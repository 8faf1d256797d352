"""Several columns of a row as one integer, made by SQL and taken apart again in Python.

What SQLite hands to Python costs by the value: a row of three integers costs half of a row of
eight.  The columns that identify a launch are small numbers, so they fit side by side into 63
bits: a name's id, the grid, the block, the device.  Bits for a part are what nearly all rows
need; a part with no bits is as a rule 1.  A row with a part that does not fit, or that is no
whole number, is written as text instead, part by part, so that any row keeps its identity.
(A fraction, which no tool writes, is cut off: looking for one costs a tenth of the reading.)

Numbers of the first table are 0 or more, of all others they are below 0, with the table's
number in them.
"""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = "NULL"
"""The expression of a part that the table does not have."""


class Packing:
    """The fields of one of several tables: ``[(expression, bits), ...]``."""

    def __init__(self, fields: Sequence[tuple[str, int]], number: int, count: int) -> None:
        self._fields = list(fields)
        self._number = number
        self._count = count

    def sql(self) -> str:
        """The expression that makes a row's key."""
        there = [(name, bits) for name, bits in self._fields if name != ABSENT]
        place, terms, tests = 0, [], []
        for name, bits in there:
            if not bits:
                tests.append(f"{name} = 1")
                continue
            # Text and blobs are greater than any number, NULL is no answer: none is between.
            tests.append(f"{name} BETWEEN 0 AND {(1 << bits) - 1}")
            terms.append(f"({name} << {place})" if place else f"({name} | 0)")
            place += bits
        packed = " | ".join(terms) or "0"
        if self._number:
            packed = f"-1 - (({packed}) * {self._count} + {self._number})"
        test = " AND ".join(tests) or "1"
        return f"CASE WHEN {test} THEN {packed} ELSE {self._text(there)} END"

    def _text(self, there: Sequence[tuple[str, int]]) -> str:
        parts = (f"CASE WHEN {n} = ({n} | 0) THEN ({n} | 0) ELSE '' END" for n, _ in there)
        return " || ',' || ".join([str(self._number), *(f"({part})" for part in parts)])

    def number_of(self, key: int | str) -> int:
        """Which table a key is of; any packing of the tables can tell."""
        if isinstance(key, str):
            return int(key.partition(",")[0])
        return 0 if key >= 0 else (-1 - key) % self._count

    def unpack(self, key: int | str) -> list[int | None]:
        """The fields of a key; None for what is no whole number, or is not in the table."""
        if isinstance(key, str):
            texts = iter(key.split(",")[1:])
            return [
                None if name == ABSENT or not (text := next(texts)) else int(text)
                for name, _ in self._fields
            ]
        value = key if key >= 0 else (-1 - key) // self._count
        found: list[int | None] = []
        for name, bits in self._fields:
            if name == ABSENT:
                found.append(None)
            elif bits:
                found.append(value & ((1 << bits) - 1))
                value >>= bits
            else:
                found.append(1)
        return found
