"""What is wrong with a configuration, in words: one line per key, and none of the validator's own names.

The validator reports a fault for every type that a key might have had, under a path that ends with that type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wingbeat.core.config.server import SECRETS
from wingbeat.core.suggestions import did_you_mean

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}
HIDDEN = tuple(f"server.{name}" for name in SECRETS)
"""What comes in these is shown to nobody."""
BOUNDS = {"gt": "above {:g}", "ge": "of at least {:g}", "lt": "below {:g}", "le": "of at most {:g}"}
LENGTHS = {str: "characters", list: "entries", dict: "entries"}
IN_OWN_WORDS = ("value_error", "string_pattern_mismatch")
"""Faults whose message says more than the type of the key."""


def explain(faults: Iterable[Mapping[str, Any]], *, root: type[BaseModel]) -> str:
    """All faults of a validation of ``root``, in one line."""
    lines: dict[str, str] = {}
    for fault in faults:
        path, kind = _locate(fault["loc"], root)
        lines.setdefault(path, _explain(fault, path, kind, root))
    inner = tuple(lines)  # of a list that is wrong in one entry, the entry is enough
    return "; ".join(line for path, line in lines.items() if not any(p.startswith(f"{path}[") for p in inner))


def _explain(fault: Mapping[str, Any], path: str, kind: Any, root: type[BaseModel]) -> str:
    if fault["type"] == "extra_forbidden":
        known = _known_keys(fault["loc"][:-1], root)
        hint = did_you_mean(str(fault["loc"][-1]), known) or f"known keys: {', '.join(known)}"
        return f"unknown key `{path}`; {hint}"
    if fault["type"] == "missing":
        return f"`{path}` is missing"
    got, words = _shown(path, fault.get("input")), _words(kind)
    if fault["type"] in IN_OWN_WORDS or not words:
        said = str(fault["msg"]).removeprefix("Value error, ")
        shown = "" if isinstance(got, dict) else f" (got {got!r})"
        return f"`{path}`: {said}{shown}" if path else f"{said}{shown}"
    shown = ("a table" if got else "an empty table") if isinstance(got, dict) else repr(got)
    near = did_you_mean(got, [c for c in _choices(kind) if isinstance(c, str)]) if isinstance(got, str) else ""
    return f"`{path}`: expected {words}, got {shown}" + (f"; {near}" if near else "")


def _shown(path: str, value: Any) -> Any:
    """What came, unless it is somebody's key."""
    return "a key that is not shown here" if path in HIDDEN and value is not None else value


def _locate(location: Sequence[Any], root: type[BaseModel]) -> tuple[str, Any]:
    """A key's path as people write it, and its type; None for a key that the schema does not have."""
    path, kind = "", cast(Any, root)
    for part in location:
        members = _members(kind)
        section = next((m for m in members if _is_section(m)), None)
        sequence = next((m for m in members if get_origin(m) in (list, tuple)), None)
        if section is not None:
            path, kind = f"{path}.{part}", _field_type(section, part)
        elif isinstance(part, int):
            types = get_args(sequence)
            path, kind = f"{path}[{part}]", types[min(part, len(types) - 1)] if types else None
        elif kind is None or get_origin(members[0]) is dict:
            path, kind = f"{path}.{part}", None if kind is None else get_args(members[0])[1]
        # else the name of one of the types of a union
    return path.removeprefix("."), kind


def _field_type(section: Any, key: Any) -> Any:
    field = cast(type[BaseModel], section).model_fields.get(key)
    return None if field is None else Annotated[field.annotation, field]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _known_keys(location: Sequence[Any], root: type[BaseModel]) -> list[str]:
    """The keys of the section at a location of the schema."""
    section = next((m for m in _members(_locate(location, root)[1]) if _is_section(m)), None)
    return [] if section is None else sorted(cast(type[BaseModel], section).model_fields)


def _members(kind: Any) -> list[Any]:
    """The types of a union without None, each without what is annotated."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(plain) in (Union, UnionType):
        return [member for option in get_args(plain) if option is not NoneType for member in _members(option)]
    return [plain]


def _choices(kind: Any) -> list[Any]:
    return [choice for member in _members(kind) if get_origin(member) is Literal for choice in get_args(member)]


def _words(kind: Any, around: tuple[Any, ...] = ()) -> str:
    """What a type takes: ``a number above 0 or 'unlimited'``; "" for one without words."""
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        return _words(kind, (*around, *notes))
    if get_origin(kind) in (Union, UnionType):
        options = [_words(option, around) for option in get_args(kind) if option is not NoneType]
        return " or ".join(options) if all(options) else ""
    if get_origin(kind) is Literal:
        *others, last = (repr(choice) for choice in get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    plain = dict if _is_section(kind) else get_origin(kind) or kind
    bounds = " and ".join(_bounds(around, plain))
    return " ".join(filter(None, (KINDS.get(plain, ""), bounds)))


def _bounds(notes: Iterable[Any], plain: Any) -> Iterator[str]:
    for note in notes:
        if isinstance(note, FieldInfo):
            yield from _bounds(note.metadata, plain)
            continue
        for name, words in BOUNDS.items():
            if (limit := getattr(note, name, None)) is not None:
                yield words.format(limit)
        if (length := getattr(note, "min_length", None)) is not None and plain in LENGTHS:
            yield f"with {length} {LENGTHS[plain]} or more" if length > 1 else "that is not empty"
