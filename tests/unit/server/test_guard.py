"""Who may call a server by which name, and from which page."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.server.http.guard import Guard, host_name
from wingbeat.server.keys.ring import KeyRing


async def status_of(guard: Guard, **headers: str) -> int:
    """200 where the request gets through."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "path": "/api/status",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await guard(scope, receive, send)
    return sent[0]["status"]


async def through(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def guard_of(admin: str | None, allowed: list[str] | None) -> Guard:
    return Guard(through, KeyRing.of(admin, "worker"), allowed_hosts=allowed)


@pytest.mark.parametrize(
    ("admin", "allowed", "host", "status"),
    [
        (None, None, "localhost:8321", 200),
        (None, None, "127.0.0.1", 200),
        (None, None, "[::1]:8321", 200),
        (None, None, "evil.example:8321", 421),
        (None, None, "localhost.evil.example", 421),
        (None, None, "127.0.0.1.evil.example", 421),
        (None, None, "0.0.0.0:8321", 421),
        (None, None, "192.168.0.7", 421),
        (None, ["train.lan"], "Train.LAN.:8321", 200),
        (None, ["train.lan"], "other.lan", 421),
        ("a-key-of-an-admin", None, "anything.example", 200),
        ("a-key-of-an-admin", ["train.lan"], "train.lan", 200),
        ("a-key-of-an-admin", ["train.lan"], "localhost", 200),
        ("a-key-of-an-admin", ["train.lan"], "anything.example", 421),
    ],
)
async def test_names(admin: str | None, allowed: list[str] | None, host: str, status: int) -> None:
    assert await status_of(guard_of(admin, allowed), host=host) == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:1", 200), ("http://localhost:2", 403), ("null", 403), ("", 403), ("file://", 403)],
)
async def test_origins(origin: str, status: int) -> None:
    assert await status_of(guard_of("a-key-of-an-admin", None), host="localhost:1", origin=origin) == status


async def test_compressed_bodies_are_refused() -> None:
    guard = guard_of(None, None)
    for encoding, status in (("identity", 200), ("", 200), ("gzip", 415), ("ZSTD", 415), ("gzip, identity", 415)):
        assert await status_of(guard, host="localhost", content_encoding=encoding) == status


async def test_a_web_page_opens_no_socket_either() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/worker/v1", "headers": [(b"host", b"a"), (b"origin", b"http://b")]}
    await guard_of("a-key-of-an-admin", None)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": sent[0]["reason"]}]


def test_host_names() -> None:
    cases = {"A.b:1": "a.b", "a.b.": "a.b", "[::1]:8": "::1", "[::1]": "::1", "": "", ":80": ":80"}
    assert {given: host_name(given) for given in cases} == cases
