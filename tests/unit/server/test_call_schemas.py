"""The OpenAPI description of model calls and the parsers, which are the authority, know the same fields."""

from __future__ import annotations

from collections.abc import Mapping, Set

import pytest

from wingbeat.server.calls.dialects import chat, completions
from wingbeat.server.calls.dialects.messages import parse as messages
from wingbeat.server.calls.dialects.responses import parse as responses
from wingbeat.server.calls.dialects.schemas import ANSWERS, BODIES
from wingbeat.server.calls.routes import DIALECTS, ROUTES

HONOURED: Mapping[str, Set[str]] = {
    "/v1/chat/completions": chat.HONOURED,
    "/v1/completions": completions.HONOURED,
    "/v1/responses": responses.HONOURED,
    "/v1/messages": messages.HONOURED,
    "/v1/messages/count_tokens": messages.HONOURED,
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_body_has_the_fields_that_its_parser_honours(path: str) -> None:
    body = BODIES[path]
    assert set(body["properties"]) == HONOURED[path]
    assert set(body["required"]) <= HONOURED[path]


def test_every_call_has_a_body_and_an_answer() -> None:
    assert set(BODIES) == set(DIALECTS)
    assert set(ANSWERS) == {route.path for route in ROUTES}
