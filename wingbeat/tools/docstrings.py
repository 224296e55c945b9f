"""What a docstring says to a model: the description of the tool, and of each argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import docstring_parser

from wingbeat.tools.results import ToolRefused


@dataclass(frozen=True, slots=True)
class Description:
    """Of one function."""

    text: str
    """The docstring without its sections."""
    arguments: Mapping[str, str]


def read_docstring(function: Callable[..., object], *, refuse: Callable[[str], ToolRefused]) -> Description:
    """The description in a docstring of Google, numpy or reST style; all empty where there is none."""
    raw = inspect.getdoc(function) or ""
    try:
        parsed = docstring_parser.parse(raw)
    except docstring_parser.ParseError as error:
        raise refuse(f"its docstring cannot be read ({error}): write it in Google, numpy or reST style") from error
    paragraphs = [part.strip() for part in (parsed.short_description, parsed.long_description) if part]
    separator = "\n\n" if parsed.blank_after_short_description else "\n"
    arguments = {
        name.strip().lstrip("*"): " ".join((parameter.description or "").split())
        for parameter in parsed.params
        if "attribute" not in parameter.args[:1]
        for name in parameter.arg_name.split(",")  # numpy style: `x, y : float`
    }
    return Description(separator.join(paragraphs), arguments)
