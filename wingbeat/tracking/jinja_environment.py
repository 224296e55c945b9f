"""Compiles chat templates in the dialect that model folders are written for.

Hugging Face templates assume more than Jinja's defaults: trimmed blocks, loop controls, a ``tojson``
that leaves ``<`` and non-ASCII letters alone, ``raise_exception``, ``strftime_now`` and the
``generation`` tag. Templates come with models from anywhere, so they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wingbeat.core.errors import ModelSourceError


class GenerationTag(Extension):
    """Accepts ``{% generation %}…{% endgeneration %}``, which marks what a model wrote; renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str, *, now: Callable[[], datetime]) -> Template:
    """A chat template ready to render; ``now`` is what ``strftime_now`` tells.

    Raises ModelSourceError where the source is no valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )

    def strftime_now(layout: str) -> str:
        return now().strftime(layout)

    cast("Any", environment).filters["tojson"] = _tojson
    helpers = {"raise_exception": _raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source, globals=helpers)
    except TemplateError as error:
        raise ModelSourceError(f"the chat template is no valid Jinja: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
