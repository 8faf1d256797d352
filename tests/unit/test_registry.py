"""Operations are declared once, found by entry points, and cannot take the rest down."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ikit_mcp import registry
from ikit_mcp.registry import (
    DERIVES,
    EXECUTES,
    MEASURES,
    READS,
    Arg,
    OpError,
    Varying,
    operation,
)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts made-up distributions on the path: name, entry points, modules."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, entries: dict[str, str], metadata: bool = True, **modules: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
        lines = [f"{key} = {value}" for key, value in entries.items()]
        text = "\n".join([f"[{registry.ENTRY_POINT_GROUP}]", *lines])
        (info / "entry_points.txt").write_text(text + "\n", encoding="utf-8")
        for module, source in modules.items():
            path = tmp_path / f"{module}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")

    yield put
    for module in set(sys.modules) - before:
        del sys.modules[module]


HEAD = "from ikit_mcp.registry import *\nfrom ikit_mcp.registry import READS, Arg, operation\n"


def one(name: str, cli: str | None = None, args: str = "") -> str:
    """The source of a module with one operation."""
    path = cli or f"('acme', '{name.replace('_', '-')}')"
    names = "".join(f", {a}" for a in args.split())
    listed = ", ".join(f"Arg('{a}', 'string', 'x')" for a in args.split())
    return (
        f"@operation('{name}', {path}, 'Help.', [{listed}], effects=READS)\n"
        f"def {name}(call{names}):\n    return {{}}\n"
    )


def errors_of(found: registry.Registry) -> dict[str, str | None]:
    return {plugin.name: plugin.error for plugin in found.plugins}


def test_built_ins_alone_are_loaded_by_default(install: Install) -> None:
    install("acme", {"acme": "acme_a"}, acme_a=one("acme_a"))
    for setting in (None, "", "  ", ","):
        found = registry.load(setting)
        assert [p.name for p in found.plugins] == ["builtin"]
        assert "roofline" in found.operations and "acme_a" not in found.operations
    [plugin] = found.plugins
    assert plugin.distribution == "ikit-mcp" and plugin.version and plugin.error is None
    assert found.get("roofline").plugin == plugin


def test_none_loads_nothing(install: Install) -> None:
    install("acme", {"acme": "acme_a"}, acme_a=one("acme_a"))
    found = registry.load("none")
    assert (found.operations, found.plugins) == ({}, [])
    with pytest.raises(OpError, match="unknown operation 'roofline'"):
        found.get("roofline")


def test_a_listed_plug_in_is_loaded_after_the_built_ins_with_its_distribution(
    install: Install,
) -> None:
    install("acme-tools", {"acme": "acme_a", "other": "acme_b"},
            acme_a=one("acme_a"), acme_b=one("acme_b"))  # fmt: skip
    found = registry.load(" acme , ")
    assert [p.name for p in found.plugins] == ["builtin", "acme"]
    op = found.get("acme_a")
    assert op.plugin == registry.Plugin("acme", "acme-tools", "1.2")
    assert list(found.operations)[-1] == "acme_a" and "acme_b" not in found.operations


def test_public_submodules_of_a_package_are_searched_and_private_ones_are_not(
    install: Install,
) -> None:
    modules = {"__init__": "", "first": one("first_op"), "_hidden": one("hidden_op")}
    install("acme", {"acme": "acme_pkg"}, **{f"acme_pkg/{n}": s for n, s in modules.items()})
    found = registry.load("acme")
    assert errors_of(found)["acme"] is None
    assert "first_op" in found.operations and "hidden_op" not in found.operations


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import not_there_at_all", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("value = 1", "declares no operation"),
        ("raise RuntimeError('x' * 100_000)", "RuntimeError: xxx"),
        (one("Bad"), "operation name 'Bad' is not"),
        (one("ok_op", args="json"), "the argument name json is reserved"),
        (one("ok_op", args="help"), "the argument name help is reserved"),
        (one("job_status"), "the name is the server's own"),
        (one("ok_op", cli="('serve',)"), "the command serve is the command line's own"),
        (one("ok_op", cli="()"), "is not words"),
        (one("ok_op", cli="('Ev il',)"), "is not words"),
        (one("ok_op", cli="('evidence',)"), "is declared by ikit-mcp"),
        (one("ok_op", cli="('roofline', 'deep')"), "is declared by ikit-mcp"),
    ],
)
def test_a_broken_plug_in_stays_listed_with_its_error_and_the_rest_loads(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, told: str
) -> None:
    install("acme", {"broken": "acme_broken", "fine": "acme_fine"},
            acme_broken=source, acme_fine=one("fine_op"))  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = registry.load("broken,fine")
    errors = errors_of(found)
    assert told in (errors["broken"] or "") and len(errors["broken"] or "") <= 400
    assert errors["builtin"] is None and errors["fine"] is None
    assert {"roofline", "fine_op"} <= set(found.operations) and "ok_op" not in found.operations
    assert "plug-in broken" in caplog.text


def test_two_operations_of_one_name_or_command_name_both_distributions(install: Install) -> None:
    install("acme-one", {"one": "acme_one"}, acme_one=one("same_op"))
    install("acme-two", {"two": "acme_two"}, acme_two=one("same_op", cli="('acme', 'two')"))
    install("acme-three", {"three": "acme_three"},
            acme_three=one("other_op", cli="('acme', 'same-op')"))  # fmt: skip
    found = registry.load("one,two,three")
    errors = errors_of(found)
    assert errors["one"] is None
    assert "acme-two 1.2" in (errors["two"] or "") and "acme-one 1.2" in (errors["two"] or "")
    assert "as same_op" in (errors["three"] or "") and "other_op" not in found.operations


def test_a_third_party_cannot_take_the_name_of_a_built_in(install: Install) -> None:
    install("aaa", {"builtin": "acme_x", "roofline": "acme_x"}, acme_x=one("roofline"))
    found = registry.load("roofline,builtin")
    op = found.get("roofline")
    assert op.plugin is not None and op.plugin.distribution == "ikit-mcp"
    assert "ikit-mcp" in (errors_of(found)["roofline"] or "")


def test_nothing_of_a_plug_in_that_collides_is_loaded(install: Install) -> None:
    install("acme", {"acme": "acme_half"}, acme_half=one("first_op") + one("list_evidence"))
    found = registry.load("acme")
    assert "list_evidence" in (errors_of(found)["acme"] or "")
    assert "first_op" not in found.operations


def test_a_function_under_two_names_is_one_operation(install: Install) -> None:
    install("acme", {"acme": "acme_a"}, acme_a=one("acme_a") + "again = acme_a\n")
    assert errors_of(registry.load("acme"))["acme"] is None


def test_an_imported_operation_is_not_declared_again(install: Install) -> None:
    install("acme", {"acme": "acme_a", "user": "acme_user"}, acme_a=one("acme_a"),
            acme_user="from acme_a import acme_a\n" + one("user_op"))  # fmt: skip
    found = registry.load("acme,user")
    assert set(errors_of(found).values()) == {None} and "user_op" in found.operations


def test_an_entry_point_that_is_no_module_is_an_error(install: Install) -> None:
    install("acme", {"acme": "acme_a:acme_a"}, acme_a=one("acme_a"))
    assert "is not a module" in (errors_of(registry.load("acme"))["acme"] or "")


def test_a_plug_in_that_is_asked_for_but_not_installed_is_an_error(install: Install) -> None:
    found = registry.load("typo")
    assert errors_of(found) == {
        "builtin": None,
        "typo": "no installed distribution offers a plug-in of this name",
    }


def test_a_distribution_without_metadata_is_unknown_and_loaded(install: Install) -> None:
    install("acme", {"acme": "acme_a"}, metadata=False, acme_a=one("acme_a"))
    found = registry.load("acme")
    assert errors_of(found)["acme"] is None
    assert found.get("acme_a").plugin == registry.Plugin("acme", "unknown", "unknown")


# --- declarations --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "Bad"}, "argument name"),
        ({"name": "a" * 33}, "argument name"),
        ({"name": ""}, "argument name"),
        ({"type": "object"}, "type 'object' is not one of"),
        ({"type": "array"}, "arrays, and only arrays"),
        ({"items": "string"}, "arrays, and only arrays"),
        ({"type": "array", "items": "boolean"}, "items 'boolean'"),
        ({"type": "integer", "choices": ("1",)}, "choices are for strings"),
        ({"choices": ()}, "choices are texts"),
        ({"choices": (1, 2)}, "choices are texts"),
        ({"minimum": 1}, "minimum and maximum are for numbers"),
        ({"type": "number", "minimum": 2, "maximum": 1}, "finite, and in this order"),
        ({"type": "number", "maximum": float("nan")}, "finite, and in this order"),
        ({"required": True, "default": "x"}, "a required argument has no default"),
        ({"default": 5}, "the default 5 is not of type string"),
        ({"type": "integer", "default": 5.0}, "the default 5.0 is not of type integer"),
        ({"type": "integer", "default": True}, "the default True is not of type integer"),
        ({"type": "number", "default": float("inf")}, "the default inf is not of type number"),
        ({"type": "boolean", "default": 1}, "the default 1 is not of type boolean"),
        ({"type": "array", "items": "integer", "default": ["x"]}, "the default 'x'"),
        ({"type": "array", "items": "string", "default": "x"}, "the default of an array"),
        ({"choices": ("a", "b"), "default": "c"}, "is not one of the choices"),
        ({"type": "integer", "default": 0, "minimum": 1}, "is outside the limits"),
    ],
)
def test_an_argument_that_no_parser_could_keep_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Arg(**{"name": "arg", "type": "string", "help": "Help", **given})


def test_choices_given_as_a_list_become_a_tuple() -> None:
    choices: Any = ["a", "b"]
    assert Arg("arg", "string", "Help", choices=choices, default="a").choices == ("a", "b")


def test_a_function_that_does_not_take_what_is_declared_is_refused() -> None:
    declare = operation("acme_op", ("acme",), "Help.", [Arg("size", "string", "x")], effects=READS)

    def function(call: Any, length: str) -> None:
        """Takes another name."""

    with pytest.raises(ValueError, match="the function takes length, declared are size"):
        declare(function)


def test_an_argument_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        operation("acme_op", None, "Help.", [Arg("a", "string", "x")] * 2, effects=READS)


def declared(name: str = "acme_op", **given: Any) -> registry.Operation:
    """An operation as the decorator keeps it."""

    def function(call: Any, **arguments: Any) -> None:
        """Nothing."""

    options: dict[str, Any] = {"cli": ("acme",), "args": (), "effects": READS, **given}
    effects = options["effects"]
    strongest = effects.strongest if isinstance(effects, Varying) else effects
    of = effects.of if isinstance(effects, Varying) else lambda arguments: strongest
    return registry.Operation(
        name, options["cli"], "Help.", options["args"], strongest, function, of
    )


def test_options_that_would_be_one_on_the_command_line_are_refused() -> None:
    args = (Arg("cache", "boolean", "x"), Arg("no_cache", "string", "x"))
    with pytest.raises(ValueError, match="the options of the argument no_cache"):
        registry.Registry().add(declared(args=args))


def test_an_operation_outside_a_plug_in_is_of_this_process() -> None:
    found = registry.Registry()
    found.add(declared())
    with pytest.raises(ValueError, match="of this process is declared by this process too"):
        found.add(declared())
    found.add(declared("quiet_op", cli=None))
    found.add(declared("silent_op", cli=None))
    assert [op.name for op in found.commands()] == ["acme_op"]
    assert [op.name for op in found.tools()] == ["acme_op", "quiet_op", "silent_op"]


def test_an_unknown_operation_names_the_nearest_and_stays_short() -> None:
    found = registry.load()
    with pytest.raises(OpError) as caught:
        found.get("list_evidense")
    assert "list_evidence" in caught.value.next_step
    with pytest.raises(OpError) as caught:
        found.get("x" * 1_000_000)
    assert len(str(caught.value)) <= 2_000 and "roofline" in caught.value.next_step


def test_effects_are_ordered_and_decide_about_the_lock() -> None:
    assert READS < DERIVES < MEASURES < EXECUTES
    varying = Varying(MEASURES, lambda arguments: MEASURES if arguments.get("x") else DERIVES)
    op = declared(effects=varying)
    assert op.effects == MEASURES and op.needs_lock
    assert op.effects_of({}) == DERIVES and op.effects_of({"x": 1}) == MEASURES
    assert not declared(effects=DERIVES).needs_lock
    assert not declared(effects=MEASURES, cli=None).needs_lock


def test_an_error_says_what_to_do_next() -> None:
    assert str(OpError("what", "do this")) == "what\nNext: do this"
    assert str(OpError("what")) == "what"
