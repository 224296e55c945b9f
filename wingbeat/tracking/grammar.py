"""What a reply must match, as a grammar in llguidance's Lark dialect: forced tool calls and JSON content.

Pure: facts of a template and JSON schemas in, text out.  Engines compile the text over their tokenizer.
A grammar describes the reply's text up to its end; stop tokens are the engine's affair.

    start ─▶ thought? ─▶ body ─▶ calls   in the family's way of calling tools
                              └─▶ JSON   that matches the schema

Schemas are inlined whole, so that their ``$ref`` still start at their own root.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from llguidance import LLMatcher

from wingbeat.core.errors import InvalidToolSchema, RequestError
from wingbeat.tracking.grammar_families import COMPACT, FAMILIES, SPACED, Tool, inline, spells_token
from wingbeat.tracking.template import ChatTemplate

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a tool without ``parameters`` takes."""

EXCERPT = re.compile(r"\s*\d+ \| ")
"""How llguidance begins its excerpt of a grammar."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Text with no alternative is otherwise allowed in the tokenizer's own spelling only; where that is a marker's
token, the library forces what it then refuses."""


def build_grammar(
    template: ChatTemplate,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str] = (),
    required: bool = False,
    one_call: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of a reply; "" where nothing is asked of it.

    ``required``: one or more tool calls of ``names``, or of any of ``tools``; exactly one with ``one_call``, or
    where the template cannot show several.
    ``schema``: else JSON content that matches it, or calls where there are ``tools``; ``{}`` is any object.
    Arguments match the tool's schema; that of a call which nobody demanded may be beyond enforcing.
    Templates that know ``<think>`` may, and those that open it must, think before.

    Raises InvalidToolSchema or RequestError for what the grammar library cannot enforce, with its reason.
    """
    if not required and schema is None:
        return ""
    chosen = _choose(tools or (), names=names, required=required)
    if required and not chosen:
        raise RequestError("`tool_choice` demands a tool call, but the request has no `tools`", param="tool_choice")
    family = FAMILIES[template.tool_format]
    bodies: list[str] = []
    rules: list[str] = []
    if chosen:
        bodies.append("calls")
        rules += family.calls(template, chosen, one_call or bool(template.traits.refuses_parallel_calls))
    if schema is not None and not required:
        bodies.append("content")
        rules.append(f"content: {family.content(template, inline(schema or ANY_OBJECT, SPACED))}")
    grammar = "\n".join((*family.start(template), f"body: {' | '.join(bodies)}", *rules)) + "\n"
    if spells_token(template, grammar):
        grammar = UNFORCED + grammar
    fault = grammar_fault(grammar)
    if fault:
        raise _culprit(chosen, schema=None if required else schema) or RequestError(
            f"the reply cannot be kept to this request's schemas: {fault}; simplify them"
        )
    return grammar


@lru_cache(maxsize=128)
def grammar_fault(grammar: str) -> str:
    """What is wrong with a grammar, or "".  Remembered: agents send the same tools with every turn."""
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        return str(error)
    return _one_line(messages[0]) if failed else ""


def _one_line(fault: str) -> str:
    """A message without the excerpt of the grammar, which users never see, and its pointing carets."""
    lines = itertools.takewhile(lambda line: EXCERPT.match(line) is None, fault.splitlines())
    return " ".join(text for line in lines if (text := line.strip(" ^")))


def _choose(tools: Sequence[Mapping[str, Any]], *, names: Sequence[str], required: bool) -> list[Tool]:
    """The tools that may be called.  Raises RequestError for names of no tool, and as ``_tool`` if ``required``."""
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in tools]
    offered = [str(function["name"]) for function in functions]
    unknown = [name for name in names if name not in offered]
    if unknown:
        known = ", ".join(offered) or "none"
        raise RequestError(
            f"`tool_choice` names {unknown[0]!r}, which is none of the request's tools ({known})",
            param="tool_choice",
        )
    return [
        _tool(function, param=f"tools[{index}].function.parameters", required=required)
        for index, function in enumerate(functions)
        if not names or offered[index] in names
    ]


def _tool(function: Mapping[str, Any], *, param: str, required: bool) -> Tool:
    """Raises InvalidToolSchema where a ``required`` tool takes no object.

    Nothing is promised of calls that a model makes of its own accord: what cannot be enforced for them is not.
    """
    name, parameters = str(function["name"]), cast("object", function.get("parameters"))
    schema = dict(NO_PARAMETERS if parameters is None else cast("Mapping[str, Any]", parameters))
    kind: object = schema.get("type", "object")
    kinds = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    if "object" not in kinds and required:
        raise InvalidToolSchema(f"`{param}` must describe an object, got type {kind!r}", param=param)
    schema["type"] = "object"
    if not required and ("object" not in kinds or grammar_fault(f"start: {inline(schema, COMPACT)}")):
        return Tool(name, dict(ANY_OBJECT), param)
    return Tool(name, schema, param)


def _culprit(tools: Sequence[Tool], *, schema: Mapping[str, Any] | None) -> RequestError | None:
    """The error that names the schema at fault, where one alone is."""
    for tool in tools:
        fault = grammar_fault(f"start: {inline(tool.schema, COMPACT)}")
        if fault:
            return InvalidToolSchema(
                f"`{tool.param}` of {tool.name!r} cannot be enforced: {_reason(fault)}; change the schema, or let"
                " `tool_choice` be auto",
                param=tool.param,
            )
    fault = grammar_fault(f"start: {inline(schema or ANY_OBJECT, SPACED)}") if schema is not None else ""
    if fault:
        return RequestError(f"the JSON schema of the reply cannot be enforced: {_reason(fault)}; change the schema")
    return None


def _reason(fault: str) -> str:
    """Without the place in a grammar that users never see."""
    return fault.partition("): ")[2] or fault
