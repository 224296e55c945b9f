"""Whose fault an unfinished episode is."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest

from wingbeat.client.blame import explain_failure
from wingbeat.core.errors import NoEngine, RequestError, VersionGone
from wingbeat.core.types import Cause

SERVER = "http://127.0.0.1:8321/v1"


def http_error(url: str, status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", url)
    error = httpx.HTTPStatusError("failed", request=request, response=httpx.Response(status, request=request))
    error.status_code = status  # type: ignore[attr-defined]  # as the SDKs of OpenAI and Anthropic have it
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, Cause.AGENT_UNFINISHED),
        (asyncio.CancelledError(), Cause.CLIENT_STOPPED),
        (ValueError("a bug"), Cause.AGENT_RAISED),
        (RequestError("wrong field"), Cause.AGENT_RAISED),
        (NoEngine("none"), Cause.INFRASTRUCTURE_ERROR),
        (VersionGone("released"), Cause.INFRASTRUCTURE_ERROR),
        (http_error(f"{SERVER}/chat/completions", 503), Cause.INFRASTRUCTURE_ERROR),
        (http_error(f"{SERVER}/chat/completions", 504), Cause.INFRASTRUCTURE_ERROR),
        (http_error(f"{SERVER}/chat/completions", 429), Cause.INFRASTRUCTURE_ERROR),
        (http_error(f"{SERVER}/chat/completions", 400), Cause.AGENT_RAISED),
        (http_error("https://search.example/query", 503), Cause.AGENT_RAISED),
        (httpx.ConnectError("refused", request=httpx.Request("POST", SERVER)), Cause.INFRASTRUCTURE_ERROR),
        (httpx.ConnectError("refused"), Cause.AGENT_RAISED),
        (ExceptionGroup("tools", [ValueError("x"), http_error(SERVER, 500)]), Cause.INFRASTRUCTURE_ERROR),
    ],
)
def test_the_cause_of_an_exception(error: BaseException | None, cause: Cause) -> None:
    assert explain_failure(error, server=SERVER)[0] is cause


def test_what_an_exception_came_from_counts() -> None:
    try:
        try:
            raise http_error(SERVER, 502)
        except httpx.HTTPError as failed:
            raise RuntimeError("the agent's wrapper") from failed
    except RuntimeError as error:
        cause, message = explain_failure(error, server=SERVER)
    assert cause is Cause.INFRASTRUCTURE_ERROR and "the agent's wrapper" in message
