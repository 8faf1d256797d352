"""Rules that the source keeps, found by reading it: what one place forgets, no other test sees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ikit_mcp.call import expanded
from ikit_mcp.registry import OpError

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("ikit_mcp/**/*.py"), *ROOT.glob("ops/ikit_ops/**/*.py")])
# They run in other processes, which know no secret; whoever shows what they say redacts it.  What
# they cut must only be longer than what is shown.
CHILDREN = re.compile(r"/workers/|/clips/engine/|/clips/recorder\.py$")
REFUSED = re.compile(r"/engines/llamacpp\.py$")
"""Its words are a caller's ``engine_args``, which are refused when they hold a secret."""
PUBLIC = re.compile(r"(?:^|_)(?:id|digest|hexdigest|sha256|computed|uuid|commit)$|^i$")
"""Names of what is no text from outside: ids and digests."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.args[0] if node.args else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def cuts_in(path: Path) -> Iterator[str]:
    """Texts that are cut where they are put into another text: ``f"{name[:80]}"``."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.FormattedValue) or not isinstance(node.value, ast.Subscript):
            continue
        cut = node.value.slice
        if not isinstance(cut, ast.Slice) or not isinstance(cut.upper, ast.Constant) or cut.lower:
            continue
        if int(str(cut.upper.value)) >= 8 and not PUBLIC.search(name_of(node.value.value)):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.value)}"


def test_no_text_is_cut_for_an_error_before_it_is_redacted() -> None:
    """``excerpt`` and ``one_line`` redact before they cut: half of a secret is seen by nobody."""
    own = [p for p in SOURCES if not CHILDREN.search(p.as_posix())]
    own = [p for p in own if not REFUSED.search(p.as_posix())]
    assert len(own) > 100
    assert [cut for path in own for cut in cuts_in(path)] == []


def unguarded(path: Path) -> Iterator[str]:
    """Uses of ``expanduser`` outside of a ``try``: of nobody's home it raises RuntimeError."""
    tree = tree_of(path)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "expanduser"
            and id(node) not in guarded
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_a_home_of_nobody_is_an_error_and_no_bug() -> None:
    assert [place for path in SOURCES for place in unguarded(path)] == []
    with pytest.raises(OpError, match="~nobody-of-that-name/x: there is no such user"):
        expanded("~nobody-of-that-name/x")
    assert expanded("~") == Path.home() and expanded("a/../b").is_absolute()
