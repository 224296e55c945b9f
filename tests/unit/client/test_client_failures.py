"""Replies become the errors they name."""

from __future__ import annotations

import pytest

from wingbeat.client.failures import error_from_reply, parse_retry_after
from wingbeat.core import errors
from wingbeat.core.protocol import ErrorBody, ErrorReply

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WingbeatError)]


class Refined(errors.RequestError):
    """As the server's own packages define them, without a code."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_code_maps_back_to_its_class(kind: type[errors.WingbeatError]) -> None:
    body = ErrorReply(error=ErrorBody(message="expected a, got b", type="x", code=kind.code, param="p"))
    error = error_from_reply(kind.status, body.model_dump_json().encode(), retry_after_s=7.0, where="GET /")
    assert type(error) is kind
    assert error.message == "expected a, got b"
    if isinstance(error, errors.OverloadedError):
        assert error.retry_after_s == 7.0
    else:
        assert error.param == "p"


def test_unknown_code_falls_back_to_the_status() -> None:
    body = b'{"error": {"message": "new", "type": "t", "code": "from_the_future", "hint": 1}}'
    error = error_from_reply(409, body, retry_after_s=None, where="GET /")
    assert type(error) is errors.ConflictError
    assert error.message == "new"


@pytest.mark.parametrize(
    ("status", "kind"), [(502, errors.UnavailableError), (404, errors.NotFoundError), (500, errors.WingbeatError)]
)
def test_a_proxy_s_page_is_shown_with_the_call(status: int, kind: type[errors.WingbeatError]) -> None:
    error = error_from_reply(status, b"<html>bad gateway", retry_after_s=None, where="GET /api/status")
    assert type(error) is kind
    assert "GET /api/status" in error.message
    assert "bad gateway" in error.message


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("2", 2.0), ("0.5", 0.5), ("-1", None), ("inf", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds
