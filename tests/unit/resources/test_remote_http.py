"""The way to a resources server: what is tried again, how long is waited, and what an answer stands for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lending import lender

from wingbeat.core.errors import AuthenticationError, ConfigError
from wingbeat.resources import ResourceFailed, ResourceLost, ResourceWait, SubprocessSpec, remote_pool, remote_values
from wingbeat.resources.remote import RemotePool
from wingbeat.resources.remote_http import Connection, fault_of

BOX = SubprocessSpec(network=True)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[str]:
    """A server that answers everything so."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(url: str, **more: Any) -> AsyncIterator[Connection]:
    connection = Connection(url, **{"key": None, "client_id": "c", "retry_budget_s": 0.0, **more})
    try:
        yield connection
    finally:
        await connection.close()


def held(request: web.Request, values: list[dict[str, str]]) -> web.Response:
    return web.json_response({"lease_id": "1" * 32, "state": "held", "heartbeat_s": 60.0, "values": values})


BOXES = [{"name": "", "kind": "box", "workdir": "/work"}]


# --- what is tried again


async def test_a_break_is_bridged_for_as_long_as_it_lasts_and_not_from_when_the_answer_was_asked_for() -> None:
    """An answer may be waited for much longer than a break may last."""
    count = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 1:
            await asyncio.sleep(0.5)
            assert request.transport is not None
            request.transport.close()
        return web.Response(body=b"here")

    async with scripted(answer) as url, connected(url, retry_budget_s=0.45) as connection:
        assert await connection.send("GET", "/status") == b"here"
    assert count == 2


async def test_where_an_address_leads_elsewhere_is_told_and_not_followed() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://evil.example/leases")

    async with scripted(answer) as url, connected(url, key="wb-client-1") as connection:
        with pytest.raises(ConfigError, match=r"leads elsewhere \(evil\.example\), and redirects are not followed"):
            await connection.send("POST", "/leases")


@pytest.mark.parametrize(
    "url",
    ["tools.example:8322", "localhost", "ftp://tools.example", "http://", "http://u:secret@h:1", "http://h:99999"],
)
def test_what_is_no_address_is_refused_at_once_and_without_its_key(url: str) -> None:
    with pytest.raises(ConfigError, match="expected the address of a resources server") as refusal:
        RemotePool(url)
    assert "secret" not in str(refusal.value)
    with pytest.raises(ConfigError, match="key: expected one"):
        RemotePool("http://tools.example:8322", "two\nlines")


async def test_another_server_at_that_address_is_named_as_such() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        error = {"message": "POST /resources/v1/leases: Not Found", "type": "x", "code": "not_found", "param": None}
        return web.json_response({"error": error}, status=404)

    async with scripted(answer) as url:
        pool = RemotePool(url, retry_budget_s=0)
        with pytest.raises(ResourceFailed, match="is that the address of `wingbeat resources`"):
            async with pool.lease(BOX):
                pass
        await pool.close()


# --- how long is waited


async def test_a_command_that_never_ends_there_is_a_loss_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_values, "OVERDUE_S", 0.05)
    ended: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/run"):
            await asyncio.sleep(0.01)
            return web.json_response({"state": "running"})
        if request.method == "DELETE":
            ended.append("call" if "/calls/" in request.path else request.query_string)
            return web.Response(status=204)
        if request.path.endswith("/heartbeat"):
            return web.json_response({"heartbeat_s": 60.0})
        return held(request, BOXES)

    async with scripted(answer) as url:
        pool = RemotePool(url, retry_budget_s=0)
        with pytest.raises(ResourceLost, match=r"a call did not end within 0\.1 s"):
            async with pool.lease(BOX) as lease:
                await lease.value.run("true", timeout_s=0.05)
        await pool.close()
    assert sorted(ended) == ["call", "lost=true"]


async def test_a_turn_of_which_nothing_is_said_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pool, "LATE_S", 0.05)

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return web.json_response({"lease_id": "1" * 32, "state": "waiting", "heartbeat_s": 60.0})

    spec = BOX.model_copy(update={"start_timeout_s": 0.01, "reset_timeout_s": 0.01, "close_timeout_s": 0.01})
    async with scripted(answer) as url:
        pool = RemotePool(url, retry_budget_s=0)
        with pytest.raises(ResourceWait):
            async with pool.lease(spec, wait_s=0.02):
                pass
        await pool.close()


async def test_a_key_that_is_revoked_is_a_failure_of_what_is_held_and_no_observation() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/leases"):
            return held(request, BOXES)
        error = {"message": "it was revoked", "type": "x", "code": "invalid_api_key", "param": None}
        return web.json_response({"error": error}, status=401)

    async with scripted(answer) as url:
        pool = RemotePool(url, retry_budget_s=0)
        async with pool.lease(BOX) as lease:
            with pytest.raises(ResourceFailed, match=r"it was revoked.*WINGBEAT_KEY_RESOURCES"):
                await lease.value.read("x")
        await pool.close()
    assert isinstance(fault_of(401, b'{"error": {"code": "x", "message": "y"}}', where="z"), AuthenticationError)


async def test_what_is_lost_here_is_not_kept_there_by_heartbeats() -> None:
    beats: asyncio.Queue[list[str]] = asyncio.Queue()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/heartbeat"):
            beats.put_nowait((await request.json())["leases"])
            return web.json_response({"heartbeat_s": 0.02})
        if request.path.endswith("/file"):
            assert request.transport is not None
            request.transport.close()
        return held(request, BOXES)

    async with scripted(answer) as url:
        pool = RemotePool(url, retry_budget_s=0)
        with pytest.raises(ResourceLost, match="lost with its server"):
            async with asyncio.timeout(10), pool.lease(BOX) as lease:
                assert len(await beats.get()) == 1
                with contextlib.suppress(ResourceLost):
                    await lease.value.read("x")
                while await beats.get():  # one may have been on its way
                    pass
                _ = lease.value
        await pool.close()


# --- what boxes say


async def test_files_are_named_as_they_are_and_errors_are_those_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with lender() as server:
        pool = RemotePool(server.url, retry_budget_s=0)
        async with pool.lease(BOX) as lease:
            box = lease.value
            await box.run(["sh", "-c", "printf '\\377 &=+%%41' | xargs -0 touch"])
            (name,) = await box.list()
            assert name == "\udcff &=+%41", "though that is no UTF-8"
            await box.write(name, b"text")
            assert await box.read(name) == b"text"
            for path, number in (("none", errno.ENOENT), (f"{name}/x", errno.ENOTDIR), ("x" * 300, errno.ENAMETOOLONG)):
                with pytest.raises(OSError, match=r"Errno") as error:
                    await box.read(path)
                assert (error.value.errno, error.value.filename) == (number, path)
            for wrong, words in (
                ("text", "write: expected bytes|data: expected bytes"),
                (None, "data: expected bytes"),
            ):
                with pytest.raises(TypeError, match=words):
                    await box.write("x", wrong)  # pyright: ignore[reportArgumentType]
            with pytest.raises(TypeError, match="stdin: expected bytes"):
                await box.run("cat", stdin="text")  # pyright: ignore[reportArgumentType]
            with pytest.raises(ValueError, match="timeout_s: expected a finite time above 0"):
                await box.run("true", timeout_s=float("inf"))
        await pool.close()
