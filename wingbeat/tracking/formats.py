"""How families of models write a reply: which tokens structure it, and which family a template is of."""

# ruff: noqa: RUF001 (marks are spelled as models spell them)
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum


class ToolFormat(StrEnum):
    """How models of a family write tool calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen and most others)."""
    LLAMA3 = "llama3"
    """The whole reply is ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    DEEPSEEK = "deepseek"
    """``<｜tool▁calls▁begin｜>`` and, for each call, its name and JSON between marks of its own."""
    HARMONY = "harmony"
    """The reply is a row of messages in channels: ``analysis`` reasons, ``commentary to=functions.NAME`` calls,
    ``final`` answers (gpt-oss)."""


PYTHON_TAG = "<|python_tag|>"
THINK = ("<think>", "</think>")
BRACKET_THINK = ("[THINK]", "[/THINK]")
HERMES_CALL = ("<tool_call>", "</tool_call>")
MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_CALL_ID = "[CALL_ID]"
MISTRAL_ARGUMENTS = "[ARGS]"
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
HARMONY_START = "<|start|>"
HARMONY_CHANNEL = "<|channel|>"
HARMONY_CONSTRAIN = "<|constrain|>"
HARMONY_MESSAGE = "<|message|>"
HARMONY_END = "<|end|>"
HARMONY_CALL = "<|call|>"
HARMONY_RETURN = "<|return|>"

MARKERS = frozenset((*THINK, *HERMES_CALL, PYTHON_TAG))
"""Tokens that structure any family's reply: kept in its text even where the tokenizer calls them special."""

OWN_MARKERS: Mapping[ToolFormat, frozenset[str]] = {
    ToolFormat.HERMES: frozenset(),
    ToolFormat.LLAMA3: frozenset(),
    ToolFormat.MISTRAL: frozenset((MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS, *BRACKET_THINK)),
    ToolFormat.DEEPSEEK: frozenset((*DEEPSEEK_CALLS, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR)),
    ToolFormat.HARMONY: frozenset(
        (HARMONY_START, HARMONY_CHANNEL, HARMONY_CONSTRAIN, HARMONY_MESSAGE, HARMONY_END, HARMONY_CALL, HARMONY_RETURN)
    ),
}
"""The same of one family only."""

SIGNATURES = (
    (ToolFormat.HARMONY, HARMONY_CHANNEL),
    (ToolFormat.DEEPSEEK, DEEPSEEK_CALLS[0]),
    (ToolFormat.MISTRAL, MISTRAL_CALLS),
    (ToolFormat.HERMES, HERMES_CALL[0]),
    (ToolFormat.LLAMA3, PYTHON_TAG),
)
"""What gives a family away, the least mistakable first."""


def find_tool_format(sources: Iterable[str], *, has_token: Callable[[str], bool]) -> ToolFormat:
    """The family of these template sources; where they mention no mark of any, what the vocabulary has decides."""
    source = "".join(sources)
    for family, mark in SIGNATURES:
        if mark in source:
            return family
    if '"parameters":' in source:
        return ToolFormat.LLAMA3
    return next((family for family, mark in SIGNATURES if has_token(mark)), ToolFormat.HERMES)
