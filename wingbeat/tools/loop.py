"""The usual loop of an agent: ask the model, run the tools that it calls, until it answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from wingbeat.core.errors import RequestError
from wingbeat.tools.results import ToolResult
from wingbeat.tools.toolbox import EpisodeTools, Toolbox

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from wingbeat.client import Episode


class Stopped(StrEnum):
    """Why a loop ended."""

    ANSWERED = "answered"
    """The model called no tool."""
    MAX_TURNS = "max_turns"
    """Its last turn still called tools; they were run."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """What came of a loop."""

    answer: str
    """The text of the last reply; "" where it has none."""
    messages: list[dict[str, Any]]
    """The whole conversation, with what was given."""
    num_turns: int
    stopped: Stopped
    finish_reason: str
    """Of the last reply: ``length`` says that it was cut off."""
    results: list[ToolResult]
    """Of every tool call, in their order."""

    @property
    def num_errors(self) -> int:
        """Tool calls that went wrong."""
        return sum(result.is_error for result in self.results)


async def run_tools(
    client: AsyncOpenAI,
    episode: Episode,
    messages: Sequence[dict[str, Any]],
    toolbox: Toolbox,
    *,
    max_turns: int,
    **options: Any,
) -> ToolRun:
    """Let a model work with tools for at most ``max_turns`` calls of it.

    A toolbox is opened for the episode and closed at the end; open it yourself (``toolbox.for_episode``) where the
    reward looks at what the tools left behind.  ``options`` go to ``chat.completions.create``; ``model`` is
    ``episode.model`` unless given.  Errors of infrastructure pass through; see :meth:`Toolbox.call`.
    """
    if max_turns < 1:
        raise RequestError(f"max_turns: expected at least 1, got {max_turns}", param="max_turns")
    async with AsyncExitStack() as stack:
        tools = toolbox
        if not isinstance(toolbox, EpisodeTools):
            tools = await stack.enter_async_context(toolbox.for_episode(episode))
        return await _run(client, list(messages), tools, max_turns, {"model": episode.model, **options})


async def _run(
    client: Any, messages: list[dict[str, Any]], tools: Toolbox, max_turns: int, options: dict[str, Any]
) -> ToolRun:
    results: list[ToolResult] = []
    if len(tools):
        options = {"tools": tools.schemas(), **options}
    for turn in range(1, max_turns + 1):
        completion = await client.chat.completions.create(messages=messages, **options)
        choice = completion.choices[0]
        reply = choice.message
        messages.append(reply.model_dump(exclude_none=True))
        new = await tools.call_all(reply.tool_calls)
        results += new
        messages += [result.message for result in new]
        if not new or turn == max_turns:
            stopped = Stopped.MAX_TURNS if new else Stopped.ANSWERED
            return ToolRun(reply.content or "", messages, turn, stopped, choice.finish_reason or "", results)
    raise AssertionError("the loop ends by returning")
