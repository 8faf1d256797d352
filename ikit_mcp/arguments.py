"""Arguments: one list of ``Arg`` becomes a JSON schema, command-line options and a parser.

Models send what they like: ``"5"`` for 5, ``null`` for an optional argument, a list
as a JSON string, a misspelt name.  Clients, in turn, understand only a small part of
JSON Schema.  So the schema keeps to what every client accepts (one ``type`` a node,
no combinators, no references), and the parser does the real work: it takes whatever
can be converted without loss and refuses the rest, telling *all* errors at once with
the argument, what came and what is allowed, so that one retry is enough.

The command line goes through the same parser: argparse only collects strings.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ikit_mcp.registry import Arg, ArgumentError, excerpt

MAX_STRING = 8_192
MAX_ITEMS = 4_096
MAX_INTEGER = 2**53 - 1
MAX_LIST_TEXT = 1 << 20
MAX_ERRORS = 1_900
MAX_ONE_ERROR = 600
MAX_SUGGESTIONS = 20
SHOWN = 80
MAX_DIGITS = 30
ALIASES = {"id": "evidence_id"}
# A whole number as text: rounding a fraction or an exponent to one would lose something.
_WHOLE = re.compile(r"[+-]?\d+(\.0*|[eE]\+?\d+)?")


class _Bad(Exception):
    """A value that does not fit; the message says what is allowed."""


# --- schema ------------------------------------------------------------------


def schema(args: Iterable[Arg]) -> dict[str, Any]:
    """The JSON schema of an argument list: an object, in the safe core of all clients."""
    listed = list(args)
    root: dict[str, Any] = {
        "type": "object",
        "properties": {arg.name: _property(arg) for arg in listed},
        "additionalProperties": False,
    }
    required = [arg.name for arg in listed if arg.required]
    if required:
        root["required"] = required
    return root


def _property(arg: Arg) -> dict[str, Any]:
    """The schema of one argument."""
    node: dict[str, Any] = {"type": arg.type, "description": describe(arg)}
    if arg.choices:
        node["enum"] = list(arg.choices)
    if arg.default is not None:
        node["default"] = list(arg.default) if isinstance(arg.default, tuple) else arg.default
    for key, bound in (("minimum", arg.minimum), ("maximum", arg.maximum)):
        if bound is not None:
            node[key] = bound
    if arg.items:
        node["items"] = {"type": arg.items}
    return node


def describe(arg: Arg) -> str:
    """The help of an argument, with its unit."""
    return f"{arg.help} ({arg.unit})" if arg.unit else arg.help


# --- command line ------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, args: Iterable[Arg]) -> None:
    """Add an option (or a positional) for each argument; values are parsed by ``parse`` later."""
    for arg in args:
        text = describe(arg)
        if arg.default not in (None, False, [], ()):
            text += f" [{arg.default}]"
        text = text.replace("%", "%%")  # argparse formats the help
        if arg.positional:
            many = "*" if arg.type == "array" else None if arg.required else "?"
            parser.add_argument(arg.name, nargs=many, help=text, metavar=arg.name.upper())
        elif arg.type == "boolean":
            parser.add_argument(
                option(arg), dest=arg.name, action=argparse.BooleanOptionalAction, help=text
            )
        else:
            shown = "|".join(arg.choices) if arg.choices else _metavar(arg)
            kept = _Append if arg.type == "array" else _Store
            parser.add_argument(option(arg), dest=arg.name, action=kept, help=text, metavar=shown)


class _Store(argparse.Action):
    """Keep an option's text, ``--text=--`` too: argparse takes ``--`` out and hands over []."""

    def __call__(self, parser: object, namespace: object, values: Any, *_: object) -> None:
        """Set the attribute."""
        setattr(namespace, self.dest, "--" if values == [] else values)


class _Append(argparse.Action):
    """Collect the texts of an option that is given several times."""

    def __call__(self, parser: object, namespace: object, values: Any, *_: object) -> None:
        """Add to the attribute's list."""
        before = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*before, "--" if values == [] else values])


def option(arg: Arg) -> str:
    """The long option of an argument: ``gpu_bw`` is ``--gpu-bw``."""
    return "--" + arg.name.replace("_", "-")


def _metavar(arg: Arg) -> str:
    return {"integer": "N", "number": "X", "array": "ITEM"}.get(arg.type, "TEXT")


# --- the parser --------------------------------------------------------------


def parse(args: Iterable[Arg], raw: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The value of every argument, defaults filled in; OpError tells all errors at once.

    ``where`` names the operation in the error.  Null means absent; a value is
    converted when nothing is lost (``"5"`` to 5, 5.0 to 5, a number to its text, a
    JSON-encoded list to the list).
    """
    listed = list(args)
    if raw is not None and not isinstance(raw, Mapping):
        what = f"{where}: the arguments are a {type(raw).__name__}, not an object"
        raise ArgumentError(what, f"call {where} with named arguments")
    given, errors = _known(listed, raw or {})
    values: dict[str, Any] = {}
    for arg in listed:
        value = given.get(arg.name)
        if value is None:
            is_list = isinstance(arg.default, (list, tuple))
            values[arg.name] = list(arg.default) if is_list else arg.default
            if arg.required:
                errors.append(f"{arg.name}: required and missing; {_allowed(arg)}")
            continue
        try:
            values[arg.name] = _convert(arg, value)
        except _Bad as error:
            errors.append(f"{arg.name}: got {_shown(value)}; {error}")
    if errors:
        raise ArgumentError(
            _all_errors(where, errors), f"call {where} again with the arguments corrected"
        )
    return values


def _known(args: Sequence[Arg], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What was given under known names, and an error for each unknown one."""
    names = {arg.name for arg in args}
    aliases = {
        alias: name for name, alias in ALIASES.items() if name in names and alias not in names
    }
    given: dict[str, Any] = {}
    errors: list[str] = []
    for name, value in raw.items():
        known = aliases.get(name, name)
        if known not in names:
            # Comparing names is slow: nobody reads more than a few suggestions.
            near = _nearest(str(name), names) if len(errors) < MAX_SUGGESTIONS else ""
            errors.append(f"{_shown(name)}: unknown argument{near}")
        elif given.get(known) is not None and value is not None:
            errors.append(f"{known}: given twice (also as {ALIASES[known]})")
        elif value is not None:
            given[known] = value
    return given, errors


def _nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion of the nearest known name, or the list of them."""
    known = sorted(names)
    if not known:
        return "; it takes none"
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _all_errors(where: str, errors: Sequence[str]) -> str:
    """One message for all errors, inside the budget for an error."""
    if len(errors) == 1:
        return excerpt(f"{where}: {errors[0]}", MAX_ERRORS)
    text = f"{where}: {len(errors)} errors"
    for number, error in enumerate(errors):
        line = f"\n- {excerpt(error, MAX_ONE_ERROR)}"
        if len(text) + len(line) > MAX_ERRORS - 40:
            return f"{text}\n- and {len(errors) - number} more"
        text += line
    return text


def _shown(value: Any) -> str:
    """What came, short and printable, with its type where that is the point."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{excerpt(text, SHOWN)}… ({len(text)} characters)"


def _allowed(arg: Arg) -> str:
    """What an argument takes, in words."""
    if arg.choices:
        return "allowed: " + ", ".join(arg.choices)
    kinds = {"string": "a text", "integer": "a whole number", "number": "a number"}
    text = {**kinds, "boolean": "true or false"}.get(arg.type) or f"a list of {arg.items}s"
    if arg.minimum is not None and arg.maximum is not None:
        text += f" from {_exact(arg.minimum)} to {_exact(arg.maximum)}"
    elif arg.minimum is not None:
        text += f" of at least {_exact(arg.minimum)}"
    elif arg.maximum is not None:
        text += f" of at most {_exact(arg.maximum)}"
    return f"allowed: {text}" + (f", in {arg.unit}" if arg.unit else "")


def _exact(bound: float) -> str:
    """A bound with all its digits: 1234567, not 1.23457e+06."""
    return str(int(bound)) if abs(bound) < 1e16 and bound == int(bound) else repr(bound)


def _convert(arg: Arg, value: Any) -> Any:
    """The value in the argument's type, or _Bad."""
    if arg.type == "array":
        return _array(arg, value)
    converted = _SCALARS[arg.type](value)
    if converted is None:
        raise _Bad(_allowed(arg))
    return _bounded(arg, converted)


def _bounded(arg: Arg, value: Any) -> Any:
    """The value when it is inside the argument's choices and limits, or _Bad."""
    if arg.choices and value not in arg.choices:
        close = difflib.get_close_matches(str(value)[:64], arg.choices, n=1)
        raise _Bad(_allowed(arg) + (f" (did you mean {close[0]}?)" if close else ""))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = arg.minimum, arg.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            raise _Bad(_allowed(arg))
    return value


def _array(arg: Arg, value: Any) -> list[Any]:
    """A list of scalars, also from its JSON text; one scalar alone is not taken for a list."""
    if isinstance(value, str):
        if len(value) > MAX_LIST_TEXT:
            raise _Bad(f"allowed: a JSON list of at most {MAX_LIST_TEXT} characters")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _Bad(f"{_allowed(arg)} (a JSON list)") from None
    if not isinstance(value, (list, tuple)):
        raise _Bad(_allowed(arg))
    if len(value) > MAX_ITEMS:
        raise _Bad(f"allowed: at most {MAX_ITEMS} items, these are {len(value)}")
    convert = _SCALARS[arg.items or "string"]
    items = [convert(item) for item in value]
    for number, item in enumerate(items):
        if item is None:
            raise _Bad(f"item {number} is {_shown(value[number])}; {_allowed(arg)}")
    return items


def _string(value: Any) -> str | None:
    """A text; a number becomes its text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value) if abs(value) <= 10**MAX_DIGITS else None
    if not isinstance(value, str):
        return None
    if len(value) > MAX_STRING:
        raise _Bad(f"allowed: at most {MAX_STRING} characters, these are {len(value)}")
    if "\0" in value:
        raise _Bad("allowed: text without NUL characters")
    try:
        value.replace("\uffff", "\ud800").encode("utf-8")  # U+FFFF stands for one on the wire
    except UnicodeEncodeError:
        raise _Bad("allowed: text that is valid Unicode (this has lone surrogates)") from None
    return value


def _integer(value: Any) -> int | None:
    """A whole number that JSON can carry without loss."""
    if isinstance(value, str) and not _WHOLE.fullmatch(value.strip()):
        return None
    number = _number(value)
    if number is None or number != (whole := int(number)):
        return None
    if abs(whole) > MAX_INTEGER:
        raise _Bad(f"allowed: whole numbers up to {MAX_INTEGER}")
    return whole


def _number(value: Any) -> int | float | None:
    """A finite number, also from its text."""
    if isinstance(value, str):
        text = value.strip()
        if not text.isascii() or len(text) > MAX_DIGITS or "_" in text:
            return None
        try:
            value = int(text)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= 1e300 else None


def _boolean(value: Any) -> bool | None:
    """True or false, also as text or as 1 and 0."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else None
    if isinstance(value, str) and len(value) <= MAX_DIGITS:
        return {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    return None


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}
