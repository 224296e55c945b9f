"""The configuration reference, written from the schema so that it cannot fall behind it.

``python -m wingbeat.core.config.reference > docs/configuration.md`` (``make docs``) writes the page,
and a test compares the two.  Everything shown (type, bounds, default, meaning) is what pydantic
validates with; nothing is said twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, cast

from wingbeat.core.config.schema import Config

Schema = dict[str, Any]
"""A node of a JSON schema document."""

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from wingbeat/core/config: change the schema, not this page. -->

A run is configured by one TOML file, `wingbeat train config.toml`. Each section below is a table of
that file. Everything has a default except the policies, of which there must be at least one, each
with a `model`:

```toml
[policies.solver]
model = "path/to/model"
```

- Any value can be set on the command line: `--dataflow.group_size=16`,
  `--policies.solver.trainer.learning_rate=1e-5`.
- An unknown key or a wrong type stops with one line that says where, and names the nearest known key.
- `NAME` stands for a name of your choice: the `model` that an agent asks for.
- `--dry-run` prints the resolved configuration and exits.
"""

BOUNDS = (("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"), ("exclusiveMaximum", "< {}"))
LENGTHS = {"string": "characters", "array": "items", "object": "entries"}
TYPE_NAMES = {"boolean": "true or false", "object": "table", "array": "list", "null": "unset"}


def reference_markdown() -> str:
    """The whole page: an introduction, then one table per section in the order of the schema."""
    document: Schema = Config.model_json_schema()
    definitions = cast(dict[str, Schema], document["$defs"])
    sections = "\n".join(_section(*entry, definitions) for entry in _sections(document, "", definitions))
    return f"{INTRODUCTION}\n{sections}"


def _sections(node: Schema, path: str, definitions: dict[str, Schema]) -> Iterator[tuple[str, Schema, Schema]]:
    """Every section below ``node``, depth first: its dotted path, its schema and the field that holds it."""
    for key, field in cast(dict[str, Schema], node["properties"]).items():
        name, suffix = _section_reference(field)
        if name:
            child = f"{path}.{key}".lstrip(".") + suffix
            yield child, definitions[name], field
            yield from _sections(definitions[name], child, definitions)


def _section_reference(field: Schema) -> tuple[str, str]:
    """The definition a field points at ("" for a plain value), and what its path ends with.

    A table of such sections ends with ``.NAME``; each entry of a list of them has the path of the list.
    """
    candidates: list[Schema] = [field, *cast(list[Schema], field.get("anyOf", []))]
    for candidate in candidates:
        if "$ref" in candidate:
            return _definition_name(candidate), ""
        for key, suffix in (("additionalProperties", ".NAME"), ("items", "")):
            entries = candidate.get(key)
            if isinstance(entries, dict) and "$ref" in entries:
                return _definition_name(cast(Schema, entries)), suffix
    return "", ""


def _definition_name(node: Schema) -> str:
    return str(node["$ref"]).rsplit("/", 1)[-1]


def _section(path: str, section: Schema, field: Schema, definitions: dict[str, Schema]) -> str:
    required = cast(list[str], section.get("required", []))
    purpose = " ".join(str(node["description"]) for node in (section, field) if "description" in node)
    lines = [f"## `[{path}]`", "", purpose, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, value in cast(dict[str, Schema], section["properties"]).items():
        if not _section_reference(value)[0]:
            default = "required" if key in required else _default(value.get("default"))
            cells = (f"`{key}`", _type(value, definitions), default, str(value["description"]))
            lines.append(f"| {' | '.join(_escape(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _type(node: Schema, definitions: dict[str, Schema]) -> str:
    """A type and its bounds in words: ``integer (>= 1)``."""
    if "anyOf" in node:
        return " or ".join(_type(option, definitions) for option in cast(list[Schema], node["anyOf"]))
    if "enum" in node or "const" in node:
        choices: list[Any] = node.get("enum", [node.get("const")])
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    kind = str(node.get("type", "any"))
    text = TYPE_NAMES.get(kind, kind)
    if "prefixItems" in node:
        parts = (_type(item, definitions) for item in cast(list[Schema], node["prefixItems"]))
        return f"[{', '.join(parts)}]"
    if kind == "array" and "items" in node:
        text = f"list of {_type(cast(Schema, node['items']), definitions)}"
    bounds = ", ".join(_bounds(node, kind))
    return f"{text} ({bounds})" if bounds else text


def _bounds(node: Schema, kind: str) -> Iterator[str]:
    for key, words in BOUNDS:
        if key in node:
            yield words.format(f"{node[key]:g}" if abs(node[key]) < 1e6 else f"{node[key]:,}")
    for key, words in (("minLength", "at least"), ("maxLength", "at most"), ("minItems", "at least")):
        if key in node and "prefixItems" not in node:
            yield f"{words} {node[key]} {LENGTHS[kind]}"
    if "pattern" in node:
        yield f"matches `{node['pattern']}`"


def _default(value: Any) -> str:
    return "unset" if value is None else f"`{json.dumps(value)}`"


def _escape(cell: str) -> str:
    """Keep a cell on one line and inside its column."""
    return " ".join(cell.split()).replace("|", r"\|")


if __name__ == "__main__":
    sys.stdout.write(reference_markdown())
