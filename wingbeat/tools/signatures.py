"""From a Python signature to the schema that a model sees.

Refused with what to change, when the tool is declared and not when a model first calls it: an argument without
annotation, ``*args``, a type that JSON cannot say, a default that its own annotation does not allow, a docstring that
describes an argument that is not there.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticUndefined

from wingbeat.tools.arguments import SignatureArguments
from wingbeat.tools.docstrings import Description
from wingbeat.tools.results import ToolRefused

Refuse = Callable[[str], ToolRefused]

_PYDANTICS_FORMATS = frozenset({"path", "file-path", "directory-path", "binary"})
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class _Unwritable(Exception):
    """A default that JSON cannot say."""


class _Schema(GenerateJsonSchema):
    """Without the titles that only repeat a field's name: every token of a schema is paid for in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        raise _Unwritable(detail)


def derive_arguments(
    function: Callable[..., Any],
    *,
    is_method: bool,
    filled: Collection[str],
    injected: Callable[[Any], bool],
    description: Description,
    refuse: Refuse,
) -> tuple[SignatureArguments, tuple[str, ...]]:
    """The arguments that a model gives, and the names of those that the episode is put into.

    ``filled`` are parameters that get a resource; ``injected`` says of an annotation whether it stands for the episode.
    Raises ToolRefused.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    episode: list[str] = []
    parameters = dict(inspect.signature(function).parameters)
    if is_method:
        del parameters["self"]
    for name, parameter in parameters.items():
        if name in filled:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise refuse(f"parameter {parameter}: a model gives arguments by name, so expected plain named parameters")
        annotation = annotation_of(function, parameter, refuse)
        if injected(annotation):
            episode.append(name)
            continue
        field = f"argument_{len(names)}"
        names[field] = name
        fields[field] = _field(name, parameter, annotation, description.arguments, refuse)
    _check_described(description.arguments, parameters, refuse)
    if missing := set(filled) - set(parameters):
        raise refuse(f"expected a parameter for each of its resources, got none for {', '.join(sorted(missing))}")
    model = create_model("Arguments", __config__=_CONFIG, **fields)
    return SignatureArguments(model, names, _schema_of(model, names, refuse)), tuple(episode)


def annotation_of(function: Callable[..., Any], parameter: inspect.Parameter, refuse: Refuse) -> Any:
    """Evaluated alone, so that types which only a type checker knows may stand elsewhere in the signature."""
    if parameter.annotation is parameter.empty:
        raise refuse(f"parameter {parameter.name!r} has no annotation: write its type, as in `{parameter.name}: str`")
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        return typing.get_type_hints(holder, globalns=scope, include_extras=True)[parameter.name]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise refuse(
            f"the annotation {parameter.annotation!r} of parameter {parameter.name!r} cannot be resolved ({error}):"
            " define or import its types at the top level of the module"
        ) from error


def _field(
    name: str, parameter: inspect.Parameter, annotation: Any, described: Mapping[str, str], refuse: Refuse
) -> Any:
    """(annotation, field) for pydantic; a description in ``Annotated`` goes before the docstring's."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        raise refuse(
            f"parameter {name!r}: JSON has no type {_type_name(annotation)}: use str, int, float, bool, Literal, enums,"
            f" lists, dictionaries, dataclasses or pydantic models of them ({str(error).splitlines()[0]})"
        ) from error
    own = FieldInfo.from_annotation(annotation)
    field: Any = {"alias": name}
    if own.description is None and described.get(name):
        field["description"] = described[name]
    if parameter.default is parameter.empty:
        if own.default is not PydanticUndefined or own.default_factory is not None:
            raise refuse(f"parameter {name!r}: expected its default in the signature, got one in Field(...)")
        return annotation, Field(**field)
    try:
        adapter.validate_python(parameter.default, strict=True)
    except ValidationError as error:
        raise refuse(
            f"parameter {name!r}: its default {parameter.default!r} is no {_type_name(annotation)}"
            f" ({error.errors(include_url=False)[0]['msg']}): change one of them, as in `| None`"
        ) from error
    return annotation, Field(default=parameter.default, **field)


def _check_described(described: Mapping[str, str], parameters: Mapping[str, Any], refuse: Refuse) -> None:
    unknown = sorted(set(described) - set(parameters))
    if unknown:
        raise refuse(
            f"its docstring describes {', '.join(map(repr, unknown))}, which is none of its parameters"
            f" ({', '.join(parameters) or 'it has none'})"
        )


def _schema_of(model: type[BaseModel], names: Mapping[str, str], refuse: Refuse) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Schema)
    except _Unwritable as error:
        raise refuse(f"a default cannot be written as JSON ({error}): use None and fill it in inside") from error
    except PydanticUserError as error:
        raise refuse(f"its arguments have no JSON schema: {error.message}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    _simplify(schema)
    return schema


def _simplify(schema: Any) -> None:
    """Without what grammar libraries refuse and no model needs: formats of pydantic's own, and ``uniqueItems`` of sets,
    which take a value twice and hold it once."""
    if isinstance(schema, dict):
        if schema.get("type") == "array" and schema.get("uniqueItems") is True:
            del schema["uniqueItems"]
        if schema.get("type") == "string" and schema.get("format") in _PYDANTICS_FORMATS:
            del schema["format"]
        for part in schema.values():
            _simplify(part)
    elif isinstance(schema, list):
        for part in schema:
            _simplify(part)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
