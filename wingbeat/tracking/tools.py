"""Tool schemas as a value that can be compared, and printed cheaply."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from wingbeat.core.errors import RequestError
from wingbeat.tracking.json_values import remembering

Tools = Sequence[Mapping[str, Any]]


def digest_tools(tools: Tools | None) -> str:
    """Identifies the tool schemas of a request by meaning (key order is none); "" without tools.

    Raises RequestError where they are no JSON.
    """
    return share_tools(tools)[0]


def share_tools(tools: Tools | None) -> tuple[str, Tools | None]:
    """(their digest, the same tools as one object for all requests that spell them alike, for reading only).

    Raises RequestError where they are no JSON.
    """
    if not tools:
        return "", None
    try:
        return _share(msgspec.json.encode(tools))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools cannot be written as JSON: {error}", param="tools") from error


@lru_cache(maxsize=256)
def _share(data: bytes) -> tuple[str, Tools]:
    tools = msgspec.json.decode(data, type=list[dict[str, Any]])
    ordered = msgspec.json.encode(tools, order="sorted")
    return hashlib.blake2b(ordered, digest_size=16).hexdigest(), [remembering(tool) for tool in tools]
