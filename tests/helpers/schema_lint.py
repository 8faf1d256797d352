"""The part of JSON Schema that every MCP client understands, as a check.

Clients hand a tool's input schema to models of several vendors.  What they have in common
is small: one ``type`` a node, no combinators, no references, enums of strings, arrays with
items, objects that are closed.  A schema outside of it makes one client drop the tool and
another misread it, so each is linted.
"""

from __future__ import annotations

from typing import Any

ROOT_KEYS = {"type", "properties", "required", "additionalProperties"}
NODE_KEYS = {"type", "description", "enum", "default", "minimum", "maximum", "items"}
SCALARS = {"string", "integer", "number", "boolean"}
MAX_HELP = 60


def lint(schema: dict[str, Any]) -> list[str]:
    """What is outside the safe core, a line each; empty when nothing is."""
    found = []
    if schema.get("type") != "object" or schema.get("additionalProperties") is not False:
        found.append("the root is not a closed object")
    found += [f"the root has {key}" for key in sorted(set(schema) - ROOT_KEYS)]
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return [*found, "there are no properties"]
    for name in schema.get("required", []):
        if name not in properties:
            found.append(f"required {name} is not a property")
    for name, node in properties.items():
        found += [f"{name}: {problem}" for problem in _lint_node(node)]
    return found


def _lint_node(node: dict[str, Any]) -> list[str]:
    found = [f"has {key}" for key in sorted(set(node) - NODE_KEYS)]
    kind = node.get("type")
    if not isinstance(kind, str) or kind not in SCALARS | {"array"}:
        found.append(f"type {kind!r} is not one of the safe ones")
    if not isinstance(node.get("description"), str) or not node["description"].strip():
        found.append("has no description")
    elif len(node["description"]) > MAX_HELP + 12:
        found.append(f"description of {len(node['description'])} characters")
    if "enum" in node and not (node["enum"] and all(isinstance(v, str) for v in node["enum"])):
        found.append("enum is not a list of strings")
    if (kind == "array") != ("items" in node):
        found.append("arrays, and only arrays, have items")
    if "items" in node and (set(node["items"]) != {"type"} or node["items"]["type"] not in SCALARS):
        found.append("items are not of one scalar type")
    if ("minimum" in node or "maximum" in node) and kind not in ("integer", "number"):
        found.append("limits are for numbers")
    return found
