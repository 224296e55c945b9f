"""Llama 3: the whole reply is ``{"name": …, "parameters": {…}}``, several parted by ``;``."""

from __future__ import annotations

import json
import re

from wingbeat.tracking.formats import PYTHON_TAG
from wingbeat.tracking.parsing.calls import Extracted, NewId, parse_json, read_call

SEPARATOR = re.compile(r"\s*(;?)\s*")

_decoder = json.JSONDecoder()


def extract_llama3(text: str, new_id: NewId) -> Extracted:
    """Other JSON is an answer, not a failed call."""
    tagged = text.strip().startswith(PYTHON_TAG)
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not tagged and not body.startswith("{"):
        return Extracted(text)
    values = _parse_json_sequence(body)
    calls = tuple(call for value in values if (call := read_call(value, new_id=new_id)) is not None)
    if calls and len(calls) == len(values):
        return Extracted("", calls)
    attempted = tagged or ('"name"' in body and ('"parameters"' in body or '"arguments"' in body))
    return Extracted(text, malformed=int(attempted))


def _parse_json_sequence(text: str) -> list[object]:
    """The values of ``a; b; c``, with None for the first that is none."""
    values: list[object] = []
    at = 0
    while at < len(text):
        try:
            _, end = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [*values, None]
        values.append(parse_json(text[at:end]))
        gap = SEPARATOR.match(text, end)
        at = end if gap is None else gap.end()
        if at < len(text) and (gap is None or not gap[1]):
            return [*values, None]
    return values
