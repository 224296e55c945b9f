"""What a tool call gives back: text for the model, data for the reward, and whether it went wrong.

wrong arguments, the tool's own exception, its time-out  ─▶  ToolResult(is_error=True): the model reads it
a broken sandbox, a dead server, a spent budget          ─▶  raised: the episode ends as infrastructure's fault
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pydantic_core

from wingbeat.core.errors import SetupError
from wingbeat.resources import ResourceFailed

MIN_OUTPUT_CHARS = 100
"""Below it, the mark of what was left out would leave no room for what is kept."""


class Fault(StrEnum):
    """What kind of error an observation tells of."""

    UNKNOWN_TOOL = "unknown_tool"
    ARGUMENTS = "arguments"
    """They are no JSON object, or do not match the tool's schema."""
    RAISED = "raised"
    """The tool's own code refused or failed."""
    TIMEOUT = "timeout"


class ToolError(Exception):
    """Raise it in a tool to tell the model what went wrong; the message is the observation, as it stands."""


class ToolRefused(SetupError):
    """A tool cannot be offered to a model as it is; the message says what to change."""

    code = "tool_refused"


class ToolUnavailable(ResourceFailed):
    """What a tool stands on failed: an error that its author declared as ``infrastructure``."""

    code = "tool_unavailable"
    retryable = True


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The end of one call."""

    content: str
    """The observation."""
    is_error: bool = False
    data: Any = None
    """What the tool returned, for rewards and logs; the model never sees it."""
    fault: Fault | None = None
    """Set where the call itself went wrong."""
    omitted_chars: int = 0
    """Left out of ``content`` because of the tool's ``max_output_chars``."""
    call_id: str = ""
    """Of the model's tool call that it answers."""

    @property
    def message(self) -> dict[str, Any]:
        """As the ``role: tool`` message of a chat completion."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.content}


def failed(fault: Fault, content: str, *, data: Any = None) -> ToolResult:
    """An error that the model reads."""
    return ToolResult(f"error: {content}", is_error=True, data=data, fault=fault)


def to_result(returned: Any) -> ToolResult:
    """What a tool's return value becomes: text as it is, nothing as "", any other value as JSON.

    Raises ToolError where it cannot be written as JSON.
    """
    if isinstance(returned, ToolResult):
        if not isinstance(returned.content, str):
            raise ToolError(f"the tool returned a ToolResult whose content is a {type(returned.content).__name__}")
        return returned
    if returned is None:
        return ToolResult("")
    if isinstance(returned, str):
        return ToolResult(returned, data=returned)
    try:
        text = pydantic_core.to_json(returned, inf_nan_mode="constants").decode()
    except (ValueError, TypeError, RecursionError) as error:  # PydanticSerializationError is a ValueError
        raise ToolError(f"the tool returned a {type(returned).__name__}, which is no JSON: {error}") from error
    return ToolResult(text, data=returned)


def shortened(result: ToolResult, *, limit: int) -> ToolResult:
    """At most ``limit`` characters: the beginning and the end, with a mark that counts what is missing between.

    Errors tend to stand at the end of an output and what it is at its beginning, so both are kept.
    """
    text = result.content.encode("utf-8", "replace").decode("utf-8")  # no lone surrogates: they cannot be sent
    if len(text) <= limit:
        return result if text == result.content else replace(result, content=text)
    mark = f"\n[... {len(text)} of {len(text)} characters left out ...]\n"  # the longest that it can get
    head = (limit - len(mark) + 1) // 2
    tail = limit - len(mark) - head
    omitted = len(text) - head - tail
    mark = f"\n[... {omitted} of {len(text)} characters left out ...]\n"
    return replace(result, content=text[:head] + mark + text[len(text) - tail :], omitted_chars=omitted)


def checked_limit(limit: int, *, refuse: Callable[[str], ToolRefused]) -> int:
    """``max_output_chars`` as an author gave it."""
    if limit < MIN_OUTPUT_CHARS:
        raise refuse(f"max_output_chars: expected at least {MIN_OUTPUT_CHARS}, got {limit}")
    return limit
