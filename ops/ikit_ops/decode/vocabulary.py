"""A set of names, written as one text: most tables of this room are lists of names."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())
