"""From an HTTP reply to an error of :mod:`wingbeat.core.errors`, and which of them a retry can help."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from wingbeat.core.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    PayloadTooLarge,
    PermissionDenied,
    RequestError,
    UnavailableError,
    WingbeatError,
)
from wingbeat.core.protocol import ErrorReply

_BY_STATUS: dict[int, type[WingbeatError]] = {
    400: RequestError,
    401: AuthenticationError,
    403: PermissionDenied,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLarge,
    422: RequestError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
"""For codes that this client does not know and for replies of proxies, which have no error body."""


def _walk(kind: type[WingbeatError]) -> Iterator[type[WingbeatError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _walk(child)


_BY_CODE: dict[str, type[WingbeatError]] = {kind.code: kind for kind in reversed(list(_walk(WingbeatError)))}
"""Of classes with one code the most general: others refine it within one process, and no reply means them."""


def error_from_reply(status: int, body: bytes, *, retry_after_s: float | None, where: str) -> WingbeatError:
    """The error that a failed reply stands for; ``where`` ("POST /api/episodes") goes into the message
    only if the reply does not explain itself."""
    try:
        detail = ErrorReply.model_validate_json(body, extra="ignore").error
    except ValidationError:
        shown = body[:200].decode("utf-8", "replace").strip() or "an empty body"
        message = f"{where}: expected an answer of a Wingbeat server, got HTTP {status} with {shown!r}"
        return _build(_BY_STATUS.get(status, WingbeatError), message, param=None, retry_after_s=retry_after_s)
    kind = _BY_CODE.get(detail.code) or _BY_STATUS.get(status, WingbeatError)
    return _build(kind, detail.message, param=detail.param, retry_after_s=retry_after_s)


def _build(kind: type[WingbeatError], message: str, *, param: str | None, retry_after_s: float | None) -> WingbeatError:
    if issubclass(kind, OverloadedError):
        return kind(message, retry_after_s=1.0 if retry_after_s is None else retry_after_s)
    return kind(message, param=param)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header; None if absent or given as a date (servers here send seconds)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
