"""A request of ``/v1/messages`` to a :class:`ModelCall`.

Every field that the API has is in exactly one of the tables below, which
``docs/reference/messages-fields.md`` publishes; a field in none of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.core.errors import RequestError, UnsupportedField
from wingbeat.server.calls.dialects import fields
from wingbeat.server.calls.dialects.blocks import as_object, as_text, shown, unsupported
from wingbeat.server.calls.dialects.messages.conversation import conversation
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, ToolChoice

HONOURED = frozenset(
    {"model", "messages", "system", "max_tokens", "tools", "tool_choice", "thread", "output_config", "stream"}
    | {"stop_sequences", "temperature", "top_p", "top_k"}
)
NO_EFFECT = frozenset(
    {"metadata", "service_tier", "cache_control", "thinking", "diagnostics", "speed", "inference_geo"}
    | {"user_profile_id", "workspace_id", "billing_policy"}
)
"""Accepted: they do not change what is sampled here."""
REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None, {}, {"edits": []}),
    "compaction": (None,),
    "mcp_servers": (None, []),
    "fallbacks": (None, []),
    "fallback_credit_token": (None,),
    "output_format": (None,),
}
"""Refused by name unless they have one of these values, with which they say nothing."""

TOOL_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (None, False),
    "allowed_callers": (None, ["direct"]),
    "input_examples": (None, []),
}
"""Parts of a tool that would change the prompt."""


def parse_messages_call(body: Any) -> ModelCall:
    """Raises RequestError (400) that names the field and the fix."""
    body = fields.body_object(body)
    if body.get("max_tokens") is None:
        raise RequestError("`max_tokens` is missing: send a number of 1 or more", param="max_tokens")
    return _parse(body)


def parse_count_call(body: Any) -> ModelCall:
    """A request of ``/v1/messages/count_tokens``: the same prompt, and nothing is generated."""
    return _parse(fields.body_object(body))


def _parse(body: Mapping[str, Any]) -> ModelCall:
    fields.check_fields(body, honoured=HONOURED, no_effect=NO_EFFECT, refused_unless=REFUSED_UNLESS)
    policy, agent = fields.policy_and_agent(body)
    previous = _previous_message(body.get("thread"))
    if previous:
        _check_thread_owns(body)
    tools = fields.flat_tools(body.get("tools"), _tool)
    choice, one_call = _tool_choice(body.get("tool_choice"))
    return ModelCall(
        policy=policy,
        agent=agent,
        prompt=ChatPrompt(
            conversation(body.get("messages"), system=body.get("system")),
            previous_turn_id=previous,
            keeps_tools=bool(previous),
        ),
        tools=tools,
        tool_choice=choice if previous else fields.check_choice(choice, tools),
        one_tool_call=one_call,
        schema=_schema(body.get("output_config")),
        stream=fields.flag(body, "stream"),
        include_usage=True,
        temperature=fields.number(body, "temperature", low=0.0, high=10.0),
        top_p=fields.top_p(body),
        top_k=fields.top_k(body),
        max_tokens=fields.integer(body, "max_tokens", low=1, high=fields.MAX_TOKENS),
        stop=fields.stop_strings(body.get("stop_sequences"), name="stop_sequences"),
    )


def _previous_message(value: Any) -> str:
    """The id of the reply that a thread goes on from; "" without a thread and for the first call of one."""
    if value is None:
        return ""
    thread = as_object(value, "thread")
    if thread.get("type") == "create":
        return ""
    if thread.get("type") == "continue":
        return as_text(thread.get("previous_message_id"), "thread.previous_message_id", empty=False)
    raise RequestError(
        f'`thread.type` must be "create" or "continue", got {shown(thread.get("type"))}', param="thread.type"
    )


def _check_thread_owns(body: Mapping[str, Any]) -> None:
    """A thread keeps the system prompt and the tools that it was created with."""
    for name in ("system", "tools"):
        if body.get(name) is not None:
            raise RequestError(
                f"`{name}` belongs to the call that created the thread: leave it out, or send the whole conversation"
                ' with thread {"type": "create"}',
                param=name,
            )


def _tool(value: Any, where: str) -> dict[str, Any]:
    tool = as_object(value, where)
    if tool.get("type") not in (None, "custom"):
        raise unsupported(tool["type"], where, known=("custom",))
    return fields.flat_function(
        tool, where, schema="input_schema", needs_schema=True, refused_unless=TOOL_REFUSED_UNLESS
    )


def _tool_choice(value: Any) -> tuple[ToolChoice, bool]:
    """The choice, and whether only one tool may be called."""
    if value is None:
        return ToolChoice(), False
    data = as_object(value, "tool_choice")
    match data.get("type"):
        case "auto":
            choice = ToolChoice()
        case "none":
            choice = ToolChoice("none")
        case "any":
            choice = ToolChoice("required")
        case "tool":
            choice = ToolChoice("required", (as_text(data.get("name"), "tool_choice.name", empty=False),))
        case kind:
            raise RequestError(
                f"`tool_choice.type` must be auto, any, tool or none, got {shown(kind)}", param="tool_choice.type"
            )
    return choice, fields.flag(data, "disable_parallel_tool_use")


def _schema(value: Any) -> dict[str, Any] | None:
    """The JSON schema of ``output_config.format``."""
    if value is None:
        return None
    config = as_object(value, "output_config")
    for name in config.keys() - {"format", "effort"}:
        raise UnsupportedField(f"unknown field `output_config.{name}`; leave it out", param=f"output_config.{name}")
    if config.get("effort") is not None:
        raise UnsupportedField(
            "`output_config.effort` would change what is sampled and is not supported; leave it out",
            param="output_config.effort",
        )
    if config.get("format") is None:
        return None
    wanted = as_object(config["format"], "output_config.format")
    if wanted.get("type") != "json_schema":
        raise unsupported(wanted.get("type"), "output_config.format", known=("json_schema",))
    return fields.check_schema(wanted.get("schema"), "output_config.format.schema")
