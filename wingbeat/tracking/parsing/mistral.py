"""Mistral: ``text[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` per call.

Newer models put ``[CALL_ID]…`` between name and arguments. Ids that a model made up are not kept: they need
not be unique.
"""

from __future__ import annotations

from typing import cast

from wingbeat.tracking.formats import MISTRAL_ARGUMENTS, MISTRAL_CALL_ID, MISTRAL_CALLS
from wingbeat.tracking.messages import ToolCall
from wingbeat.tracking.parsing.calls import Extracted, NewId, make_call, parse_json, read_call


def extract_mistral(text: str, new_id: NewId) -> Extracted:
    """What stands before the first mark is content; after it all is calls, or stays as it is."""
    content, mark, rest = text.partition(MISTRAL_CALLS)
    if not mark:
        return Extracted(text)
    found: list[ToolCall | None] = []
    for part in rest.split(MISTRAL_CALLS):
        found += _read_part(part.strip(), new_id=new_id)
    calls = tuple(call for call in found if call is not None)
    if not calls or len(calls) < len(found):
        return Extracted(text, malformed=sum(call is None for call in found) or 1)
    return Extracted(content, calls)


def _read_part(part: str, *, new_id: NewId) -> list[ToolCall | None]:
    """The calls of one mark; None for each that is none."""
    head, mark, arguments = part.partition(MISTRAL_ARGUMENTS)
    if mark:
        name = head.partition(MISTRAL_CALL_ID)[0].strip()
        return [make_call(name, parse_json(arguments), new_id=new_id)]
    value = parse_json(part)
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [read_call(item, new_id=new_id) for item in values]
