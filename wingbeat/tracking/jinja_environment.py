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
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from wingbeat.core.errors import ModelSourceError
from wingbeat.tracking.json_values import JsonObject, dump_json

DICT_ATTRIBUTES = frozenset(dir(dict))
PLAIN_TYPES = frozenset((dict, JsonObject))
OWN_TYPES = frozenset((LoopContext, Namespace))
"""Jinja's own helpers: none of their public attributes leads out of the sandbox."""


class GenerationTag(Extension):
    """Accepts ``{% generation %}…{% endgeneration %}``, which marks what a model wrote; renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a short way to what templates do most: reading the fields of a message."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, where methods of a dictionary go before its keys."""
        kind = cast("type[Any]", type(obj))
        if kind in PLAIN_TYPES and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in OWN_TYPES and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def compile_template(source: str, *, now: Callable[[], datetime]) -> Template:
    """A chat template ready to render; ``now`` is what ``strftime_now`` tells.

    Raises ModelSourceError where the source is no valid Jinja.
    """
    environment = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])

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
    if not ensure_ascii and separators is None and not sort_keys:
        return dump_json(value, indent=indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
