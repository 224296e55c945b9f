"""The arguments of a tool: their JSON schema, and what a model's text is under it.

Two kinds know their schema: :class:`SignatureArguments` (a Python signature, through pydantic) and
:class:`SchemaArguments` (a JSON schema that somebody else wrote, as MCP servers do).  Both are strict: what the
schema does not allow is refused with the field, what was expected and what came, so that a policy can learn from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from wingbeat.core.errors import DependencyMissing

MAX_SHOWN_CHARS = 80
"""Of a wrong value, in an observation."""
MAX_FAULTS = 8
"""Told at once."""
MAX_MESSAGE_CHARS = 300
"""Of one, where somebody else words it."""


class ArgumentsRejected(Exception):
    """The arguments of a call are wrong; the message is written for the model."""


class SchemaRefused(Exception):
    """A JSON schema cannot be that of a tool; the message says what is wrong with it."""


class Arguments(Protocol):
    """What a tool takes."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the object that holds them."""
        ...

    def read(self, given: str | Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the tool's function.  Raises ArgumentsRejected."""
        ...


class SignatureArguments:
    """Those of a Python function.

    ``model`` has one field per argument; its aliases are the arguments' names, since a field may not be called
    ``schema`` or ``_x`` and an argument may.
    """

    __slots__ = ("_model", "_names", "schema")

    def __init__(self, model: type[BaseModel], names: Mapping[str, str], schema: dict[str, Any]) -> None:
        self._model = model
        self._names = names
        """Field -> argument."""
        self.schema = schema

    def read(self, given: str | Mapping[str, Any]) -> dict[str, Any]:
        """Only what was given: the function has its own defaults.  Raises ArgumentsRejected."""
        text = given if isinstance(given, str) else json.dumps(dict(given))
        try:
            values = self._model.model_validate_json(text.strip() or "{}", strict=True)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
            raise ArgumentsRejected(_words_of(faults, self.schema["properties"])) from None
        return {name: getattr(values, field) for field, name in self._names.items() if field in values.model_fields_set}


class SchemaArguments:
    """Those of a JSON schema; checked with the ``jsonschema`` library, which comes with the extra ``mcp``."""

    __slots__ = ("_validator", "schema")

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises SchemaRefused, DependencyMissing."""
        try:
            from jsonschema import Draft202012Validator
            from jsonschema.exceptions import SchemaError
            from jsonschema.validators import validator_for
            from referencing import Registry
            from referencing.exceptions import Unresolvable
            from referencing.jsonschema import DRAFT202012
        except ModuleNotFoundError as error:
            raise DependencyMissing("tools of a JSON schema need jsonschema: pip install 'wingbeat[mcp]'") from error
        kind = validator_for(schema, default=Draft202012Validator)
        nowhere: Registry[Any] = Registry()  # by default a $ref is fetched from wherever it leads, file:// included
        try:
            kind.check_schema(schema)
            resolver = nowhere.resolver_with_root(DRAFT202012.create_resource(schema))
            for reference in _references(schema):
                resolver.lookup(reference)
        except SchemaError as error:
            raise SchemaRefused(f"its JSON schema is none: {error.json_path}: {error.message}") from error
        except Unresolvable as error:
            raise SchemaRefused(f"its JSON schema: expected a $ref to a part of it, got {error.ref!r}") from error
        self._validator = kind(schema, registry=nowhere)
        self.schema = schema

    def read(self, given: str | Mapping[str, Any]) -> dict[str, Any]:
        values = parse_object(given)
        try:
            lines = [_fault_line(path, message, value) for path, message, value in _unsendable((), values)]
            faults = sorted(self._validator.iter_errors(values), key=lambda fault: [str(part) for part in fault.path])
        except RecursionError:
            raise ArgumentsRejected(f"the arguments are nested too deeply: {shown(given)}") from None
        lines += [_fault_line(fault.absolute_path, _short(fault.message), fault.instance) for fault in faults]
        if lines:
            raise ArgumentsRejected(_first(lines))
        return values


def _unsendable(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
    """What Python reads as JSON and nobody can write as such: half a character, a number without bound."""
    if isinstance(value, str):
        if not _is_sendable(value):
            yield path, "expected text, got half a surrogate pair in it", value
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, "expected a finite number, got a larger one", value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if not _is_sendable(name):
                yield path, "expected names that are text, got half a surrogate pair in one", value
            yield from _unsendable((*path, name), part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _unsendable((*path, index), part)


def _is_sendable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _references(schema: Any) -> Iterator[str]:
    """Where a schema refers to."""
    if isinstance(schema, Mapping):
        for name, part in schema.items():
            if name in ("$ref", "$dynamicRef") and isinstance(part, str):
                yield part
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def parse_object(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object (none at all is an empty one).  Raises ArgumentsRejected."""
    if not isinstance(given, str):
        return dict(given)
    try:
        value = json.loads(given.strip() or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentsRejected(f"the arguments are no JSON: {error}; got {shown(given)}") from None
    if not isinstance(value, dict):
        raise ArgumentsRejected(f"the arguments: expected a JSON object, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value in an observation: as JSON, and short."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "replace").decode()  # no lone surrogates: they cannot be sent
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _words_of(faults: Iterable[ErrorDetails], properties: Mapping[str, Any]) -> str:
    """One line a field.  Alternatives of a union fail each for its own reason, which stand side by side."""
    return _first(list(dict.fromkeys(_words_of_one(fault, properties) for fault in faults)))


def _first(lines: Sequence[str]) -> str:
    more = f"\n(and {len(lines) - MAX_FAULTS} more)" if len(lines) > MAX_FAULTS else ""
    return "\n".join(lines[:MAX_FAULTS]) + more


def _short(message: str) -> str:
    """Of the ``jsonschema`` library, which writes a wrong value out in full, first."""
    return (
        message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_SHOWN_CHARS]}...{message[-MAX_SHOWN_CHARS:]}"
    )


def _words_of_one(fault: ErrorDetails, properties: Mapping[str, Any]) -> str:
    kind, value, where = fault["type"], fault["input"], fault["loc"]
    if kind == "json_invalid":
        return f"the arguments are no JSON: {fault['msg'].removeprefix('Invalid JSON: ')}; got {shown(value)}"
    if not where:
        return f"the arguments: expected a JSON object, got {shown(value)}"
    path = _path(where)
    if kind == "missing":
        wanted = _wanted(properties.get(str(where[0]), {})) if len(where) == 1 else ""
        return f"{path}: expected {wanted or 'a value'}, got nothing"
    if kind == "extra_forbidden":
        known = (
            f"arguments of this tool ({', '.join(properties) or 'there are none'})"
            if len(where) == 1
            else "known fields"
        )
        return f"{path}: expected only {known}, got this one"
    message = fault["msg"].removeprefix("Value error, ")
    wanted = message.removeprefix("Input should be ")
    return f"{path}: {message if wanted == message else f'expected {wanted}'}, got {shown(value)}"


def _wanted(schema: Mapping[str, Any]) -> str:
    """``integer or null``; "" where a schema says it in no simple way."""
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_wanted, schema["anyOf"])))
    return str(schema.get("type", ""))


def _fault_line(path: Iterable[str | int], message: str, value: Any) -> str:
    where = _path(tuple(path))
    return f"{where}: {message}" if where else f"the arguments: {message}, got {shown(value)}"


def _path(parts: tuple[int | str, ...]) -> str:
    """``rows[2].name``; pydantic adds the name of a union's alternative, which stays as a part."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
