"""Whose fault it is that an episode ended without ``finish``: the agent's, or that of what it stands on.

Nothing of the kind trains, but people look for the cause, and a broken engine must not look like a broken agent.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.core.types import Cause

MAX_MESSAGE_CHARS = 4000
"""How much of a traceback's end an abort carries (the wire allows 10,000)."""


def explain_failure(error: BaseException | None, *, server: str) -> tuple[Cause, str]:
    """The cause and message of an episode that ended without ``finish``; ``server`` is where its model calls go."""
    if error is None:
        return Cause.AGENT_UNFINISHED, "the agent ended without calling episode.finish(reward)"
    if isinstance(error, asyncio.CancelledError):
        return Cause.CLIENT_STOPPED, "the episode was cancelled by its client"
    is_ours = any(_is_ours(link, server) for link in _chain(error))
    return (Cause.INFRASTRUCTURE_ERROR if is_ours else Cause.AGENT_RAISED), format_error(error)


def format_error(error: BaseException) -> str:
    """The end of an exception's traceback: the part that names the fault."""
    return tail("".join(traceback.format_exception(error)))


def tail(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else "... " + text[4 - MAX_MESSAGE_CHARS :]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it came from, and what it consists of."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [source for source in (link.__cause__, link.__context__) if source is not None]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _is_ours(error: BaseException, server: str) -> bool:
    """Whether the server, its engines or the way to them failed: not what answers from elsewhere.

    The SDKs of OpenAI and Anthropic, and httpx under them, say which request failed and with which status, if any.
    """
    if isinstance(error, WingbeatError):
        return error.retryable or isinstance(error, UnavailableError)  # a lost sandbox is not the agent's fault
    url = str(getattr(_request_of(error), "url", ""))
    if not url or urlsplit(url)[:2] != urlsplit(server)[:2]:
        return False
    status: object = getattr(error, "status_code", None)
    return not isinstance(status, int) or status >= 500 or status == 429


def _request_of(error: BaseException) -> Any:
    try:
        return getattr(error, "request", None)
    except RuntimeError:  # httpx: the request was never set
        return None
