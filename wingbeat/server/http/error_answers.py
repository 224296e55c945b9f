"""Errors as HTTP answers, in OpenAI's shape: that of ``/api`` and of every dialect that has no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from wingbeat.core.errors import OverloadedError, WingbeatError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
HTTP_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_encoding",
    421: "wrong_host",
    431: "head_too_large",
    503: "too_many_connections",
}
"""Of faults of HTTP itself, which have no class."""


def error_body(error: WingbeatError) -> dict[str, Any]:
    """The one error shape (``ErrorReply``)."""
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(error.status, "server_error"),
            "code": error.code,
            "param": error.param,
        }
    }


def error_headers(error: WingbeatError) -> dict[str, str]:
    """When to come back; SDKs that would repeat any 409 or 5xx are told where that cannot help."""
    if isinstance(error, OverloadedError):
        return {"retry-after": f"{max(1, round(error.retry_after_s))}"}
    return {"retry-after": "1"} if error.retryable else {"x-should-retry": "false"}


def error_response(error: WingbeatError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer of an error."""
    return Response(orjson.dumps(error_body(error)), error.status, headers, media_type="application/json")


def http_fault(status: int, message: str) -> WingbeatError:
    """An error of HTTP itself, such as a path or method that does not exist."""
    error = WingbeatError(message)
    error.status = status
    error.code = HTTP_CODES.get(status, "http_error")
    return error


def error_answer_bytes(error: WingbeatError) -> tuple[bytes, bytes]:
    """Headers and body of an error that no route answers: the request did not come so far."""
    body = orjson.dumps(error_body(error))
    fields = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode(), body
