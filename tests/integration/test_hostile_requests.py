"""Raw bytes against a real server: what is no HTTP, too large, too slow, too many, or from a web page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
from harness import eventually

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import ConfigError
from wingbeat.server.http.protocol import RESERVED

TIMEOUT_S = 1.0
MAX_CONNECTIONS = 24
MAX_BODY = 200_000
HOST = b"Host: localhost\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    settings = {
        "server.request_timeout_s": TIMEOUT_S,
        "server.max_connections": MAX_CONNECTIONS,
        "server.max_body_bytes": MAX_BODY,
    }
    with scripted_server(tmp_path_factory.mktemp("hostile"), ["hello"], settings=settings) as running:
        yield running


async def talk(server: ScriptedServer, *pieces: bytes, every_s: float = 0.0) -> tuple[int, str, float]:
    """Send pieces and read until the server closes or has answered: its status (0: none), its answer, the seconds."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    started = time.monotonic()
    answer = asyncio.create_task(_answer(reader))
    for piece in pieces:
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            break
        if every_s:
            await asyncio.wait({answer}, timeout=every_s)
        if answer.done():
            break
    async with asyncio.timeout(20):
        data = await answer
    writer.close()
    status = int(data.split(b" ", 2)[1]) if data else 0
    return status, data.decode("latin-1"), time.monotonic() - started


async def _answer(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        return head + await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str, host: str | None = "localhost", version: str = "1.1") -> bytes:
    lines = [f"GET {path} HTTP/{version}", *([] if host is None else [f"Host: {host}"]), *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


LEASE = "/api/tasks/lease"
REFUSED: dict[str, tuple[bytes, int, str]] = {
    # what is no request
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_request"),
    "binary path": (b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
    "no number as length": (
        b"POST /api/stop HTTP/1.1\r\n" + HOST + b"Content-Length: ten\r\n\r\n",
        400,
        "invalid_request",
    ),
    "length and chunks": (
        b"POST /api/stop HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "invalid_request",
    ),
    "header in two lines": (get("/healthz", "x-a: b\r\n c"), 400, "invalid_request"),
    "two at once": (get("/healthz") + get("/healthz"), 400, "invalid_request"),
    # too large
    "huge header": (get("/healthz", "x-filler: " + "a" * 70_000), 431, "head_too_large"),
    "many headers": (get("/healthz", *(f"x-{i}: y" for i in range(10_000))), 431, "head_too_large"),
    "huge path": (get("/" + "a" * 70_000), 431, "head_too_large"),
    "declared body": (
        f"POST {LEASE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n".encode(),
        413,
        "payload_too_large",
    ),
    "chunked body": (
        b"POST /api/tasks/lease HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"fffff\r\n"
        + b"a" * 0xFFFFF,
        413,
        "payload_too_large",
    ),
    "chunks of nothing": (
        b"POST /api/tasks/lease HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + (b"1;" + b"x" * 60_000 + b"\r\na\r\n") * 40,
        400,
        "invalid_request",
    ),
    "deep JSON": (post(LEASE, b"[" * 50_000), 400, "invalid_request"),
    "deep JSON, closed": (post(LEASE, b'{"a":' * 30_000 + b"1" + b"}" * 30_000), 400, "invalid_request"),
    # compressed: what a small body unpacks to has no bound
    "gzip body": (post(LEASE, b"\x1f\x8b\x08", "Content-Encoding: gzip"), 415, "unsupported_encoding"),
    "gzip model call": (
        post("/v1/chat/completions", b"\x1f\x8b\x08", "Content-Encoding: GZIP"),
        415,
        "unsupported_encoding",
    ),
    # the last of two equal keys counts, for every reader of ours
    "a key twice": (post("/api/episodes", b'{"lease_id":"a","lease_id":"b","idempotency_key":"k"}'), 404, "not_found"),
    # web pages
    "foreign origin": (post("/api/stop", b"{}", "Origin: https://evil.example"), 403, "permission_denied"),
    "no origin": (post("/api/stop", b"{}", "Origin: null"), 403, "permission_denied"),
    "foreign origin of a read": (get("/api/status", "Origin: http://localhost:1"), 403, "permission_denied"),
    "foreign origin of a model call": (
        post("/v1/chat/completions", b"{}", "Origin: https://evil.example"),
        403,
        "permission_denied",
    ),
    "preflight": (
        b"OPTIONS /api/stop HTTP/1.1\r\n"
        + HOST
        + b"Origin: https://evil.example\r\nAccess-Control-Request-Method: POST\r\n\r\n",
        403,
        "permission_denied",
    ),
    "name that leads here": (get("/api/status", host="evil.example"), 421, "wrong_host"),
    "name that leads here, its own origin": (
        get("/api/status", "Origin: http://evil.example:8321", host="evil.example:8321"),
        421,
        "wrong_host",
    ),
    "every address": (get("/api/status", host="0.0.0.0:8321"), 421, "wrong_host"),
    "name that begins as ours": (get("/v1/models", host="localhost.evil.example"), 421, "wrong_host"),
    # paths
    "path out of the routes": (get("/../../etc/passwd"), 404, "not_found"),
    "encoded path out": (get("/api/evaluations/..%2f..%2fledger.sqlite"), 404, "not_found"),
    "episode with a path": (get("/api/episodes/..%2F..%2Fx"), 404, "not_found"),
    "no method of ours": (b"PATCH /api/status HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_with_a_reason(server: ScriptedServer, name: str) -> None:
    request, status, code = REFUSED[name]
    got, answer, _ = await talk(server, request)
    assert got == status, answer
    head, _, body = answer.partition("\r\n\r\n")
    assert json.loads(body)["error"]["code"] == code
    assert "access-control" not in head.lower()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:8321", "127.0.0.1:1", "127.8.9.10", "[::1]:8321", None])
async def test_names_of_this_machine_are_served(server: ScriptedServer, host: str | None) -> None:
    request = get("/healthz", "Connection: close", host=host, version="1.1" if host else "1.0")
    assert (await talk(server, request))[0] == 200


async def test_a_source_named_like_a_path_stays_in_its_folder(server: ScriptedServer) -> None:
    before = set(server.run_dir.parent.rglob("*"))
    for name in ("..%2F..%2Fevil", "%2Fetc%2Fevil", "C:%5Cevil"):
        body = json.dumps({"tasks": [{"id": "1", "payload": {}}]}).encode()
        got, answer, _ = await talk(server, post(f"/api/tasks/{name}", body).replace(b"POST", b"PUT", 1))
        assert got == 200, answer
    for path in set(server.run_dir.parent.rglob("*")) - before:
        assert path.parent in (server.run_dir, server.run_dir / "tasks"), path


async def test_whoever_is_slow_is_given_up_and_whoever_is_not_is_served(server: ScriptedServer) -> None:
    head = f"POST {LEASE} HTTP/1.1\r\nHost: localhost\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    slow = {
        "says nothing": talk(server),
        "half a head": talk(server, head),
        "a head that never ends": talk(server, head, *([b"x-a: b\r\n"] * 100), every_s=0.1),
        "no body": talk(server, head + b"Content-Length: 100\r\n\r\n"),
        "a body that never ends": talk(server, chunked, *([b"1\r\na\r\n"] * 100), every_s=0.1),
        "a second request": talk(server, get("/healthz"), head),
    }
    answers = dict(zip(slow, await asyncio.gather(*slow.values()), strict=True))
    assert answers.pop("a second request")[0] == 200
    for name, (status, answer, seconds) in answers.items():
        assert (status, "request_timeout" in answer) == (408, True), (name, answer)
        assert TIMEOUT_S <= seconds < TIMEOUT_S + 15, name
    # 150 kB in 1.5 s: longer than the time for a body to begin, and fast enough
    pieces = [b'{"client_id": "', *([b"a" * 10_000] * 15), b'"}']
    length = sum(map(len, pieces))
    got, answer, _ = await talk(server, head + f"Content-Length: {length}\r\n\r\n".encode(), *pieces, every_s=0.1)
    assert got == 400 and "client_id" in answer, answer


async def test_connections_are_counted_and_come_back(server: ScriptedServer) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def full() -> str:
        """On a slow machine the first may be given up before the last has come."""
        new = [asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS + RESERVED)]
        idle.extend(await asyncio.gather(*new))
        status, answer, _ = await talk(server)
        return answer if status == 503 else ""

    answer = await eventually(full, what="a connection too many")
    assert "503" in answer and "server.max_connections = 24" in answer and "too_many_connections" in answer

    async def served() -> bool:
        return (await talk(server, get("/healthz", "Connection: close")))[0] == 200

    await eventually(served, what="idle connections to be closed", timeout_s=15)
    for _, writer in idle:
        writer.close()


async def test_the_server_is_none_the_worse(server: ScriptedServer) -> None:
    """The last test of this server."""
    status, answer, _ = await talk(server, get("/api/status", "Connection: close"))
    assert status == 200 and json.loads(answer.partition("\r\n\r\n")[2])["state"] == "running"
    log = (server.run_dir / "control.log").read_text()
    assert "Traceback" not in log and "Invalid HTTP" not in log, log[-3000:]


def test_names_that_become_folders_are_no_paths() -> None:
    for name in ("../x", "a/b", "", ".hidden", "a\\b"):
        with pytest.raises(ConfigError, match="run\\.name"):
            validate_config({"policies": {"solver": {"model": "m"}}, "run": {"name": name}})
    for name in ("..", "../x", ".hidden", "a/b", "a\\b", ""):
        with pytest.raises(ConfigError, match="policy name"):
            validate_config({"policies": {name: {"model": "m"}}})
