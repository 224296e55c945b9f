"""Sampled tokens to the assistant's message.

The message is what the agent sees; training never reads it. So parsing may be forgiving but never
raises: a malformed tool call stays in the content, where agent and model can see it, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wingbeat.tracking.formats import BRACKET_THINK, MARKERS, PYTHON_TAG, THINK, ToolFormat
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing.calls import Extracted, NewId
from wingbeat.tracking.parsing.deepseek import extract_deepseek
from wingbeat.tracking.parsing.harmony import parse_harmony
from wingbeat.tracking.parsing.hermes import extract_hermes
from wingbeat.tracking.parsing.llama3 import extract_llama3
from wingbeat.tracking.parsing.mistral import extract_mistral
from wingbeat.tracking.template import ChatTemplate

__all__ = ["MARKERS", "PYTHON_TAG", "Reply", "parse_reply"]

EXTRACTORS: Mapping[ToolFormat, Callable[[str, NewId], Extracted]] = {
    ToolFormat.HERMES: extract_hermes,
    ToolFormat.LLAMA3: extract_llama3,
    ToolFormat.MISTRAL: extract_mistral,
    ToolFormat.DEEPSEEK: extract_deepseek,
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed reply."""

    message: Message
    tool_calls_malformed: int
    """Attempts at a tool call that could not be read; their text is part of the content."""


def parse_reply(template: ChatTemplate, token_ids: Sequence[int], *, tools_given: bool, new_id: NewId) -> Reply:
    """The assistant's message in these tokens; ``new_id`` names tool calls (unique per server).

    Without tools in the request nothing is read as a tool call. Never raises on what a model wrote.
    """
    ids = list(token_ids)
    if ids and ids[-1] in template.eos_token_ids:
        ids.pop()
    text = template.decode(template.drop_special(ids, keep=template.markers))
    if template.tool_format is ToolFormat.HARMONY:
        reasoning, found = parse_harmony(text, tools_given=tools_given, new_id=new_id)
    else:
        reasoning, text = _split_reasoning(text, template=template)
        found = EXTRACTORS[template.tool_format](text, new_id) if tools_given else Extracted(text)
    content = found.content.rstrip() if found.calls else found.content
    return Reply(Message("assistant", content, reasoning=reasoning, tool_calls=found.calls), found.malformed)


def _split_reasoning(text: str, *, template: ChatTemplate) -> tuple[str, str]:
    """(reasoning, rest). Unclosed reasoning is all there is; the prompt itself may have opened it."""
    begin, end = BRACKET_THINK if template.tool_format is ToolFormat.MISTRAL else THINK
    start = text.lstrip()
    if start.startswith(begin):
        start = start.removeprefix(begin)
    elif not template.opens_reasoning:
        return "", text
    reasoning, _, rest = start.partition(end)
    return reasoning.strip(), rest.lstrip("\n")
