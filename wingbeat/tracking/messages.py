"""Chat messages as canonical values, so that a history is recognised by meaning and not by spelling.

Real clients resend what they were told in many shapes: arguments re-dumped with other spacing, content
as ``null``, absent or a list of parts, extra keys and nulls, reasoning dropped. All of these become one
frozen :class:`Message`; two messages are equal exactly if they mean the same. The raw request is not
kept: tokens are the truth, messages only select a lineage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

import msgspec

from wingbeat.core.errors import RequestError, UnsupportedField

Role = Literal["system", "user", "assistant", "tool"]

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""OpenAI's roles; ``developer`` is the newer word for ``system``, which is what chat templates know."""

TALKING_ROLES = ROLES.keys() - {"tool"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
REFUSED_KEYS = ("function_call", "prefix")
"""Keys that would change the prompt if obeyed. Other unknown keys are echoes and decorations of clients."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; equality compares the arguments as JSON (key order, spacing, 1.0 = 1)."""

    id: str
    name: str
    arguments_text: str = field(compare=False)
    """Verbatim: JSON if the caller kept to the contract."""
    arguments_key: str
    """Canonical spelling of the arguments, or the text itself where it is no JSON."""

    @classmethod
    def of(cls, call_id: str, *, name: str, arguments: str) -> ToolCall:
        """A call from its wire form; an empty text means no arguments (``{}``)."""
        text = arguments if arguments.strip() else "{}"
        key = _remembered_json(text) if len(text) <= MAX_REMEMBERED else _canonical_json(text)
        return cls(call_id, name, text, key)

    @property
    def arguments(self) -> Any:
        """The parsed arguments, or the raw text where it is no JSON."""
        try:
            return msgspec.json.decode(self.arguments_text)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return self.arguments_text


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; hashable, compared by meaning."""

    role: Role
    content: str = ""
    """Text; null, absent and "" are one and the same."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Which call a ``tool`` message answers."""
    name: str = ""

    def to_template_dict(self) -> dict[str, Any]:
        """What chat templates read: absent fields are left out, arguments are objects where they parse."""
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            data["reasoning_content"] = data["thinking"] = self.reasoning
        if self.tool_calls:
            data["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            data["tool_call_id"] = self.tool_call_id
        if self.name:
            data["name"] = self.name
        return data


def parse_messages(value: object, *, param: str = "messages") -> tuple[Message, ...]:
    """The canonical conversation of a request body's ``messages``.

    Raises RequestError whose ``param`` names the place (``messages[3].content``), and UnsupportedField
    for content that cannot be shown to a text model.
    """
    if not isinstance(value, list):
        raise RequestError(f"{param} must be a list of messages, got {kind_of(value)}", param=param)
    items = cast(list[object], value)
    if not items:
        raise RequestError(f"{param} is empty: send at least one message", param=param)
    return tuple([_plain_message(item) or parse_message(item, param=f"{param}[{i}]") for i, item in enumerate(items)])


def parse_message(value: object, *, param: str = "message") -> Message:
    """One canonical message. Raises as :func:`parse_messages`."""
    data = _mapping(value, param=param)
    role = _role(data.get("role"), param=f"{param}.role")
    for key in REFUSED_KEYS:
        if data.get(key) not in (None, False):
            raise UnsupportedField(
                f"{param}.{key} is not supported; use tool_calls and whole messages", param=f"{param}.{key}"
            )
    tool_call_id = _text(data.get("tool_call_id"), param=f"{param}.tool_call_id")
    if role == "tool" and not tool_call_id:
        raise RequestError(
            f"{param}.tool_call_id is missing: a message of role 'tool' must name the call that it answers",
            param=f"{param}.tool_call_id",
        )
    if role != "tool" and tool_call_id:
        raise RequestError(
            f"{param}.tool_call_id belongs to role 'tool', not {role!r}: remove it", param=f"{param}.tool_call_id"
        )
    return Message(
        role=role,
        content=_content(data.get("content"), param=f"{param}.content"),
        reasoning=_reasoning(data, param=param) if role == "assistant" else "",
        tool_calls=_tool_calls(data.get("tool_calls"), role=role, param=f"{param}.tool_calls"),
        tool_call_id=tool_call_id,
        name=_text(data.get("name"), param=f"{param}.name"),
    )


def _plain_message(value: object) -> Message | None:
    """The short way for what most messages are: a role, a text, and perhaps the call that it answers."""
    if type(value) is not dict:
        return None
    data = cast("dict[str, object]", value)
    role, content = data.get("role"), data.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not content.isascii():
        return None
    if role in TALKING_ROLES:
        return Message(ROLES[role], content) if len(data) == 2 else None
    answers = data.get("tool_call_id")
    if role == "tool" and len(data) == 3 and isinstance(answers, str) and answers.isascii() and answers:
        return Message("tool", content, tool_call_id=answers)
    return None


def _role(value: object, *, param: str) -> Role:
    role = ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise RequestError(f"{param} must be one of {', '.join(ROLES)}, got {_shown(value)}", param=param)
    return role


def _content(value: object, *, param: str) -> str:
    if not isinstance(value, list):
        return _text(value, param=param, expected="text or a list of text parts")
    parts: list[str] = []
    for index, item in enumerate(cast(list[object], value)):
        place = f"{param}[{index}]"
        part = _mapping(item, param=place)
        if part.get("type") != "text":
            raise UnsupportedField(
                f"{place} has type {_shown(part.get('type'))}: only parts of type 'text' are supported", param=place
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}.text must be text, got {kind_of(part.get('text'))}", param=f"{place}.text")
        parts.append(_text(part["text"], param=f"{place}.text"))
    return "".join(parts)


def _reasoning(data: Mapping[str, object], *, param: str) -> str:
    for key in REASONING_KEYS:
        if data.get(key) is not None:
            return _text(data[key], param=f"{param}.{key}")
    return ""


def _tool_calls(value: object, *, role: Role, param: str) -> tuple[ToolCall, ...]:
    if value is None or value == []:
        return ()
    if role != "assistant":
        raise RequestError(f"{param} belongs to role 'assistant', not {role!r}: remove it", param=param)
    if not isinstance(value, list):
        raise RequestError(f"{param} must be a list, got {kind_of(value)}", param=param)
    items = cast(list[object], value)
    calls = tuple([_plain_call(item) or _tool_call(item, param=f"{param}[{i}]") for i, item in enumerate(items)])
    if len(calls) == 1:
        return calls
    seen: set[str] = set()
    for index, call in enumerate(calls):
        if call.id in seen:
            raise RequestError(
                f"{param}[{index}].id {_shown(call.id)} occurs twice in one message: ids must be unique",
                param=f"{param}[{index}].id",
            )
        seen.add(call.id)
    return calls


def _plain_call(value: object) -> ToolCall | None:
    """The short way for calls as most clients send them."""
    if type(value) is not dict:
        return None
    data = cast("dict[str, object]", value)
    function = data.get("function")
    if type(function) is not dict or data.get("type") != "function":
        return None
    fields = cast("dict[str, object]", function)
    call_id, name, arguments = data.get("id"), fields.get("name"), fields.get("arguments")
    if isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str) and call_id and name:
        plain = call_id.isascii() and name.isascii() and arguments.isascii()
        return ToolCall.of(call_id, name=name, arguments=arguments) if plain else None
    return None


def _tool_call(value: object, *, param: str) -> ToolCall:
    data = _mapping(value, param=param)
    if data.get("type", "function") not in ("function", None):
        raise UnsupportedField(
            f"{param}.type {_shown(data['type'])} is not supported: only 'function' is", param=f"{param}.type"
        )
    function = _mapping(data.get("function"), param=f"{param}.function")
    call_id = _text(data.get("id"), param=f"{param}.id")
    name = _text(function.get("name"), param=f"{param}.function.name")
    for what, place in ((call_id, f"{param}.id"), (name, f"{param}.function.name")):
        if not what:
            raise RequestError(f"{place} is missing: expected a non-empty text", param=place)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = _dump_json(cast(Mapping[str, object], arguments), param=f"{param}.function.arguments")
    return ToolCall.of(call_id, name=name, arguments=_text(arguments, param=f"{param}.function.arguments"))


def _mapping(value: object, *, param: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} must be an object, got {kind_of(value)}", param=param)
    return cast(Mapping[str, object], value)


def _text(value: object, *, param: str, expected: str = "text") -> str:
    """The text, "" for null; refused where it has no bytes."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{param} must be {expected}, got {kind_of(value)}", param=param)
    place = lone_surrogate(value)
    if place is not None:
        raise RequestError(f"{param} contains a lone surrogate at character {place}: send valid Unicode", param=param)
    return value


def lone_surrogate(text: str) -> int | None:
    """Where the first one stands. JSON can spell them, but they have no bytes and hence no tokens."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _dump_json(value: object, *, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param=param) from error


MAX_REMEMBERED = 1024
"""Arguments up to this many characters are worth remembering."""
LONG_NUMBER = re.compile(r"[0-9]{16}")
EXACT_BELOW = 2**53
"""From here on not every integer has a floating point number of its own."""


@lru_cache(maxsize=4096)
def _remembered_json(text: str) -> str:
    """As :func:`_canonical_json`: histories come again and again."""
    return _canonical_json(text)


def _canonical_json(text: str) -> str:
    """One spelling per JSON value: sorted keys, no spaces, one form of each number; else the text itself."""
    try:
        value = msgspec.json.decode(text)
        if "." in text or "e" in text or "E" in text or LONG_NUMBER.search(text):
            value = _numbers(value)
        return msgspec.json.encode(value, order="sorted").decode()
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return text


def _numbers(value: Any) -> Any:
    """Numbers as clients in JavaScript spell them: 1.0 as 1, and integers that do not fit a float as the nearest."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_BELOW:
        return int(value)
    if isinstance(value, int) and abs(value) >= EXACT_BELOW:
        return float(value)
    if isinstance(value, list):
        return [_numbers(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in cast(Mapping[str, Any], value).items()}
    return value


def kind_of(value: object) -> str:
    """A JSON value's type in words."""
    names: dict[type, str] = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _shown(value: object) -> str:
    """A client's value in an error message, which must stay short whatever was sent."""
    return repr(value if len(value) <= 60 else value[:59] + "…") if isinstance(value, str) else kind_of(value)
