"""How each family of models writes a reply, as rules of a grammar in llguidance's Lark dialect.

A family gives three parts: ``start``, what may stand before ``body``; ``calls``; and ``content``, which is JSON.
Markers that are tokens of their own are referred to by id, since that is how a model learnt them; others are
spelt out.  Stop tokens are never named: a grammar is about the text up to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wingbeat.core.errors import RequestError
from wingbeat.tracking.formats import (
    BRACKET_THINK,
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
    HERMES_CALL,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    PYTHON_TAG,
    THINK,
    ToolFormat,
)
from wingbeat.tracking.probes import CALL, RESULT, USER
from wingbeat.tracking.template import ChatTemplate

COMPACT = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
"""How arguments are spaced: as ``json.dumps`` does by default, or not at all."""

SPACED = {"whitespace_pattern": "[ \\n\\r\\t]{1,64}"}
"""Content may be pretty-printed, but a model that falls in love with spaces must come to an end."""

BARE_NAME = re.compile(r"[\w.-]+")
LIKE_A_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
FENCE = "```"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called; ``schema`` describes an object, ``param`` is where the request has it."""

    name: str
    schema: dict[str, Any]
    param: str


@dataclass(frozen=True, slots=True)
class Family:
    """The rules of one way of writing."""

    start: Callable[[ChatTemplate], list[str]]
    calls: Callable[[ChatTemplate, Sequence[Tool], bool], list[str]]
    """The last argument: one call only."""
    content: Callable[[ChatTemplate, str], str]


def inline(schema: Mapping[str, Any], spacing: Mapping[str, Any]) -> str:
    """A schema as a nonterminal.  Spacing is ours to decide: a request's own ``x-guidance`` is overwritten."""
    return "%json " + json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)


# --- parts --------------------------------------------------------------------------------------


def spells_token(template: ChatTemplate, grammar: str) -> bool:
    """Whether a schema or name spells what the tokenizer has as a token of its own, as ``<think>``."""
    return any(_token(template, text) for text in frozenset(LIKE_A_TOKEN.findall(grammar)))


def _text(text: str) -> str:
    """A string literal, which JSON and the grammar spell alike."""
    return json.dumps(text, ensure_ascii=False)


def _token(template: ChatTemplate, text: str) -> str:
    """A marker's token, or "" where it is none."""
    ids = [index for index in template.encode(text) if template.decode([index]) == text]
    return f"<[{ids[0]}]>" if ids else ""


def _mark(template: ChatTemplate, text: str) -> str:
    return _token(template, text) or _text(text)


def _without(*marks: str) -> str:
    """Any text that does not spell one of these: the parser would take it for the mark itself."""
    spelt = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
    return rf"/(?s:.*)/ & ~/(?s:.*)({spelt})(?s:.*)/"


def _more(item: str, *, one: bool) -> str:
    return "" if one else f" ({item})*"


def _alternatives(tools: Sequence[Tool], spell: Callable[[Tool, str], str]) -> list[str]:
    """``tool``: one of the tools, as ``spell(tool, rule of its arguments)`` has it."""
    rules = ["tool: " + " | ".join(f"tool_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        rules.append(f"tool_{index}: {spell(tool, f'arguments_{index}')}")
        rules.append(f"arguments_{index}: {inline(tool.schema, COMPACT)}")
    return rules


def _objects(tools: Sequence[Tool], *, key: str, after: str = "") -> list[str]:
    """``tool``: a JSON object of the name and, under ``key``, the arguments."""

    def spell(tool: Tool, arguments: str) -> str:
        opening = f'{{"name": {_text(tool.name)}, "{key}": '
        return f"{_text(opening)} {arguments} {after}{_text('}')}"

    return _alternatives(tools, spell)


def _bare(tool: Tool) -> str:
    """A name that stands in the open.  Raises RequestError for one that could not be told from what follows."""
    if not BARE_NAME.fullmatch(tool.name):
        param = tool.param.replace(".parameters", ".name")
        raise RequestError(
            f"`{param}` {tool.name!r} cannot be forced on models of this family: use letters, digits, _, . and -",
            param=param,
        )
    return tool.name


@lru_cache(maxsize=32)
def _shown_call(template: ChatTemplate) -> str:
    """A conversation with a call as the template writes it; "" where it cannot."""
    for messages in ((USER, CALL, RESULT), (USER, CALL)):
        try:
            return template.render(messages, add_generation_prompt=False)
        except RequestError:
            continue
    return ""


# --- families -----------------------------------------------------------------------------------


def _think(template: ChatTemplate, marks: tuple[str, str]) -> list[str]:
    """Reasoning: may come first where the vocabulary has the marks, must where the prompt has opened it."""
    opening, closing = _token(template, marks[0]), _token(template, marks[1])
    gap = r'"\n"? "\n"?'
    thought = f"THOUGHT: {_without(marks[1])}"
    if template.opens_reasoning:
        if closing:
            return [f"start: THOUGHT {closing} {gap} body", thought]
        spelt = re.escape(marks[1]).replace("/", r"\/")
        return [f"start: thought {gap} body", f"thought[lazy]: /(?s:.*){spelt}/"]
    if opening and closing:
        return [f"start: ({opening} THOUGHT {closing} {gap})? body", thought]
    return ["start: body"]


def _hermes_calls(template: ChatTemplate, tools: Sequence[Tool], one_call: bool) -> list[str]:
    r"""``<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>``, one after another; line ends may lack."""
    opening, closing = (_mark(template, mark) for mark in HERMES_CALL)
    return [
        "calls: call" + _more(r'"\n"? call', one=one_call),
        rf'call: {opening} "\n"? tool "\n"? {closing}',
        *_objects(tools, key="arguments"),
    ]


def _llama3_calls(template: ChatTemplate, tools: Sequence[Tool], one_call: bool) -> list[str]:
    """``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``; several parted by ``; ``."""
    tag = _token(template, PYTHON_TAG)
    return [
        f"calls: {f'{tag}? ' if tag else ''}tool" + _more('"; " tool', one=one_call),
        *_objects(tools, key="parameters"),
    ]


def _mistral_calls(template: ChatTemplate, tools: Sequence[Tool], one_call: bool) -> list[str]:
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    mark = _mark(template, MISTRAL_CALLS)
    if MISTRAL_ARGUMENTS in _shown_call(template):
        between = _mark(template, MISTRAL_ARGUMENTS)
        return [
            "calls: call" + _more("call", one=one_call),
            f"call: {mark} tool",
            *_alternatives(tools, lambda tool, arguments: f"{_text(_bare(tool))} {between} {arguments}"),
        ]
    more = _more('", " tool', one=one_call)
    call_id = r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")? '
    return [f'calls: {mark} " "? "[" tool{more} "]"', *_objects(tools, key="arguments", after=call_id)]


def _deepseek_calls(template: ChatTemplate, tools: Sequence[Tool], one_call: bool) -> list[str]:
    """Between marks: ``function``, a separator, the name and fenced JSON, or (newer) name, separator and bare JSON."""
    opening, closing = (_mark(template, mark) for mark in DEEPSEEK_CALLS)
    begin, end = (_mark(template, mark) for mark in DEEPSEEK_CALL)
    between = _mark(template, DEEPSEEK_SEPARATOR)

    def fenced(tool: Tool, arguments: str) -> str:
        before, after = _text(f"{_bare(tool)}\n{FENCE}json\n"), _text(f"\n{FENCE}")
        return f'"function" {between} {before} {arguments} {after}'

    def bare(tool: Tool, arguments: str) -> str:
        return f"{_text(_bare(tool))} {between} {arguments}"

    more = _more(r'"\n"? call', one=one_call)
    shown = _shown_call(template)
    return [
        f"calls: {opening} call{more} {closing}",
        f"call: {begin} tool {end}",
        *_alternatives(tools, bare if shown and FENCE not in shown else fenced),
    ]


def _harmony_start(template: ChatTemplate) -> list[str]:
    """The prompt ends with ``<|start|>assistant``; one message of analysis may come first."""
    channel, message, end, start = (
        _mark(template, mark) for mark in (HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_END, HARMONY_START)
    )
    marks = (HARMONY_START, HARMONY_CHANNEL, HARMONY_CONSTRAIN, HARMONY_MESSAGE, HARMONY_END)
    return [
        f'start: ({channel} "analysis" {message} THOUGHT {end} {start} "assistant")? body',
        f"THOUGHT: {_without(*marks, HARMONY_CALL, HARMONY_RETURN)}",
    ]


def _harmony_calls(template: ChatTemplate, tools: Sequence[Tool], one_call: bool) -> list[str]:
    """``commentary to=functions.NAME``, with the recipient in either place; the call's end ends the reply."""
    channel, message = _mark(template, HARMONY_CHANNEL), _mark(template, HARMONY_MESSAGE)
    kind = _harmony_kind(template)

    def spell(tool: Tool, arguments: str) -> str:
        recipient = f" to=functions.{_bare(tool)}"
        by_role = f"{_text(recipient)} {channel} {_text('commentary')}"
        by_channel = f"{channel} {_text(f'commentary{recipient}')}"
        return f"({by_role} | {by_channel}) {kind} {message} {arguments}"

    return ["calls: tool", *_alternatives(tools, spell)]


def _harmony_content(template: ChatTemplate, schema: str) -> str:
    channel, message = _mark(template, HARMONY_CHANNEL), _mark(template, HARMONY_MESSAGE)
    return f'{channel} "final" {_harmony_kind(template)} {message} {schema}'


def _harmony_kind(template: ChatTemplate) -> str:
    """What may say that a message is JSON."""
    return f'(" json" | " "? {_mark(template, HARMONY_CONSTRAIN)} "json")?'


def _plain(template: ChatTemplate, schema: str) -> str:
    return schema


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.HERMES: Family(lambda template: _think(template, THINK), _hermes_calls, _plain),
    ToolFormat.LLAMA3: Family(lambda template: _think(template, THINK), _llama3_calls, _plain),
    ToolFormat.MISTRAL: Family(lambda template: _think(template, BRACKET_THINK), _mistral_calls, _plain),
    ToolFormat.DEEPSEEK: Family(lambda template: _think(template, THINK), _deepseek_calls, _plain),
    ToolFormat.HARMONY: Family(_harmony_start, _harmony_calls, _harmony_content),
}
