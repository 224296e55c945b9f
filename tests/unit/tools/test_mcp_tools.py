"""Tools of real MCP servers: processes that die, hang and answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from wingbeat.core.errors import ConfigError
from wingbeat.resources import ResourceFailed, ResourceLost
from wingbeat.tools import Fault, Toolbox, ToolRefused, mcp_links, mcp_tools
from wingbeat.tools.mcp_links import McpTarget, bare

SCRIPT = str(Path(__file__).with_name("small_mcp_server.py"))
COMMAND = (sys.executable, SCRIPT)
OLD = (sys.executable, "-S", str(Path(__file__).with_name("old_mcp_server.py")))
"""Without a library to load: enough where it matters that a server dies or hangs."""


LISTS = """
import json, runpy, sys
old = runpy.run_path(sys.argv[1])
answer, listed = old["answer"], json.loads(sys.argv[2])
old["reply"].__globals__["answer"] = lambda method, params: listed if method == "tools/list" else answer(method, params)
old["main"]()
"""
"""The same server, with what it answers to the question for its tools."""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_tools_of_a_server_over_its_standard_input_and_output() -> None:
    async with mcp_tools(command=COMMAND, prefix="small_", timeout_s=10) as tools:
        toolbox = Toolbox([*tools])
        assert toolbox.names == ("small_add", "small_pid", "small_wait", "small_stumble", "small_files_read")
        schema = toolbox.schemas()[0]["function"]
        assert schema["description"] == "Add two numbers." and schema["parameters"]["required"] == ["a", "b"]
        result = await toolbox.call("small_add", '{"a": 1, "b": 2}')
        assert (result.content, result.is_error, result.data) == ("3", False, {"result": 3})
        result = await toolbox.call("small_add", '{"a": "x", "b": 2}')
        assert result.fault is Fault.ARGUMENTS and "a: 'x' is not of type 'integer'" in result.content
        result = await toolbox.call("small_stumble")
        assert result.is_error and result.fault is Fault.RAISED and "bad day" in result.content
        assert (await toolbox.call("small_files_read")).content == "read"
        pid = (await toolbox.call("small_pid")).data["result"]
        waits = await asyncio.gather(*(toolbox.call("small_wait", '{"seconds": 0.01}') for _ in range(8)))
        assert {each.content for each in waits} == {"waited"}
        late = tools[0].function
    assert not is_alive(pid), "the server ends with the block"
    with pytest.raises(ConfigError, match="block has ended"):
        await late(a=1, b=2)


@pytest.mark.slow
async def test_a_server_that_dies_is_started_again_as_often_as_was_said_and_then_infrastructures_fault() -> None:
    async with mcp_tools(command=OLD, restarts=1, timeout_s=30, only=["pid", "wait"]) as tools:
        toolbox = Toolbox([*tools])
        first = int((await toolbox.call("pid")).content)
        os.kill(first, signal.SIGKILL)
        results = await asyncio.gather(*(toolbox.call("pid") for _ in range(4)))
        (second,) = {int(result.content) for result in results}
        assert second != first
        call = asyncio.ensure_future(toolbox.call("wait", '{"seconds": 60}'))
        await toolbox.call("pid")  # the other call is on its way by now
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ResourceLost, match=r"is gone; its last lines were:\n  old is there"):
            await call
        with pytest.raises(ResourceLost, match="old is there"):
            await toolbox.call("pid")


@pytest.mark.slow
async def test_a_slow_call_is_an_observation_and_a_hanging_server_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROCESS_TERMINATION_TIMEOUT", "FORCE_KILL_TIMEOUT"):
        monkeypatch.setattr(f"mcp.client.stdio.{name}", 0.1)
    async with mcp_tools(command=OLD, timeout_s=0.5) as tools:
        toolbox = Toolbox([*tools])
        result = await toolbox.call("wait", '{"seconds": 60}')
        assert (result.content, result.fault) == ("error: the tool did not end within 0.5 s", Fault.TIMEOUT)
        pid = int((await toolbox.call("pid")).content)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ResourceLost, match="does not answer any more"):
            await toolbox.call("echo", '{"text": "hi"}')
        assert not is_alive(pid)


@pytest.mark.slow
async def test_a_server_of_an_older_revision_serves_as_well() -> None:
    async with mcp_tools(command=OLD) as tools:
        toolbox = Toolbox([*tools])
        result = await toolbox.call("echo", '{"text": "hi"}')
        assert (result.content, result.is_error) == ("hi\n[image image/png]", False)
        result = await toolbox.call("echo", '{"text": "bad"}')
        assert (result.is_error, result.fault) == (True, Fault.RAISED)
        for _ in range(3):  # more than a pipe holds, and nobody waits for it
            result = await toolbox.call("flood")
            assert len(result.content) in (19_999, 20_000) and result.omitted_chars > 980_000
        result = await toolbox.call("greet", '{"name": "Ada", "self": "me"}')
        assert result.content == 'done {"name": "Ada", "self": "me"}', "an argument may have any name"


@pytest.mark.slow
async def test_a_server_that_prints_anything_is_understood_and_has_none_of_our_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_SECRET_KEY", "secret")
    async with mcp_tools(command=OLD, env={"MODE": "mild"}, timeout_s=30) as tools:
        toolbox = Toolbox([*tools])
        assert (await toolbox.call("babble")).content == "done {}"
        variables = (await toolbox.call("variables")).content.split()
        assert "MODE" in variables and "A_SECRET_KEY" not in variables
        with pytest.raises(ResourceFailed, match="answered nonsense against the protocol"):
            await toolbox.call("nonsense")
        assert (await toolbox.call("echo", '{"text": "hi"}')).content.startswith("hi")
    caplog.clear()  # what was no message is logged by the package, with its traceback


@pytest.mark.slow
async def test_a_cancelled_call_leaves_the_server_to_others() -> None:
    async with mcp_tools(command=OLD, timeout_s=60, only=["pid", "wait"]) as tools:
        toolbox = Toolbox([*tools])
        pid = (await toolbox.call("pid")).content
        call = asyncio.ensure_future(toolbox.call("wait", '{"seconds": 60}'))
        assert (await toolbox.call("pid")).content == pid  # the other call is on its way by now
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await toolbox.call("pid")).content == pid


@pytest.mark.slow
async def test_who_is_cancelled_over_a_lost_server_leaves_word_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, close = asyncio.Event(), mcp_links.Link.close

    async def close_slowly(link: mcp_links.Link) -> None:
        closing.set()
        try:
            await asyncio.Event().wait()
        finally:
            await close(link)

    async with mcp_tools(command=OLD, timeout_s=30, only=["pid"]) as tools:
        toolbox = Toolbox([*tools])
        os.kill(int((await toolbox.call("pid")).content), signal.SIGKILL)
        monkeypatch.setattr(mcp_links.Link, "close", close_slowly)
        call = asyncio.ensure_future(toolbox.call("pid"))
        await closing.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(ResourceLost, match=r"the MCP server .* is gone"):
            await toolbox.call("pid")


@pytest.mark.slow
@pytest.mark.parametrize("listed", ['{"tools": [{"name": 5}]}', '{"tools": null}'])
async def test_a_server_that_lists_nonsense_is_infrastructures_fault(listed: str) -> None:
    command = [sys.executable, "-S", "-c", LISTS, OLD[-1], listed]
    with pytest.raises(ResourceFailed, match="does not list its tools"):
        async with mcp_tools(command=command, start_timeout_s=10):
            raise AssertionError("never entered")


def test_a_message_names_a_server_without_its_keys() -> None:
    titles = [
        McpTarget((), "https://me:pw@mcp.example:8443/sk-1/mcp?apiKey=sk-2", {}, "", {}).title,
        McpTarget(("npx", "-y", "@x/server", "--api-key", "sk-3"), "", {}, "", {}).title,
        McpTarget(("env", "TOKEN=sk-4", "server"), "", {}, "", {}).title,
    ]
    assert titles == [f"the MCP server {w}" for w in ("https://mcp.example:8443", "npx -y @x/server ...", "env ...")]
    assert bare("HTTP 401 of 'https://mcp.example/sk-1?k=sk-2' (sorry)") == "HTTP 401 of 'https://mcp.example' (sorry)"


class Silent:
    """A server of an older revision over HTTP, which never lets go of a session."""

    def __init__(self) -> None:
        self.teams: set[str | None] = set()
        self.asked_to_end = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.teams.add(request.headers.get("x-team"))
        if request.method == "DELETE":
            self.asked_to_end.set()
            await asyncio.Event().wait()
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        info = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "s", "version": "1"},
        }
        result: dict[str, Any] = {"content": []}
        if asked["method"] == "initialize":
            result = info
        elif asked["method"] == "tools/list":  # one on each of two pages
            is_second = asked.get("params", {}).get("cursor") == "more"
            result = {"tools": [{"name": "g" if is_second else "f", "inputSchema": {"type": "object"}}]}
            result |= {} if is_second else {"nextCursor": "more"}
        reply = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
        return web.json_response(reply, headers={"mcp-session-id": "1"})


@pytest.mark.slow
async def test_a_block_ends_although_its_server_does_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_links, "GOODBYE_S", 0.05)
    silent = Silent()
    server = TestServer(_app_of(silent))
    async with asyncio.timeout(20):
        await server.start_server()
        async with mcp_tools(url=str(server.make_url("/mcp")), headers={"x-team": "blue"}) as tools:
            assert Toolbox([*tools]).names == ("f", "g")
            assert (await Toolbox([*tools]).call("f")).content == ""
        assert silent.asked_to_end.is_set()
        assert silent.teams == {"blue"}
        await server.close()


def _app_of(silent: Silent) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/mcp", silent.answer)
    return app


@contextlib.contextmanager
def http_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    process = subprocess.Popen([*COMMAND, "http"], stdout=subprocess.PIPE, env={**os.environ, "SMALL_CLASH": "1"})
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_tools_of_a_server_over_http() -> None:
    with http_server() as (url, process):
        async with mcp_tools(url=url, headers={"x-team": "blue"}, timeout_s=10, only=["add", "pid"]) as tools:
            toolbox = Toolbox([*tools])
            assert toolbox.names == ("add", "pid")
            assert (await toolbox.call("add", '{"a": 1, "b": 2}')).content == "3"
            with pytest.raises(ToolRefused, match="two of its tools would be called 'x_files_read'"):
                async with mcp_tools(url=url, prefix="x_"):
                    raise AssertionError("never entered")
            with pytest.raises(ToolRefused, match="has no tool subtract; it has add, pid"):
                async with mcp_tools(url=url, only=["add", "subtract"]):
                    raise AssertionError("never entered")
            process.kill()
            process.wait()
            with pytest.raises(ResourceLost, match="is gone"):
                await toolbox.call("add", '{"a": 1, "b": 2}')
        with pytest.raises(ResourceFailed, match="did not start"):
            async with mcp_tools(url=url):
                raise AssertionError("never entered")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "seconds", "words"),
    [
        (["no-such-program-here"], 30, "did not start .FileNotFoundError"),
        ([sys.executable, "-S", "-c", "import sys; sys.exit('no licence')"], 30, r"last lines were:\n  no licence"),
        ([sys.executable, "-S", "-c", "import sys; print('hello'); sys.stdin.read()"], 0.2, r"not start within 0\.2 s"),
    ],
)
async def test_a_server_that_does_not_start_is_infrastructures_fault(
    command: list[str], seconds: float, words: str
) -> None:
    with pytest.raises(ResourceFailed, match=words):
        async with mcp_tools(command=command, start_timeout_s=seconds):
            raise AssertionError("never entered")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either a command or a url"),
        ({"command": ["x"], "url": "http://x"}, "either a command or a url"),
        ({"command": "uvx server"}, "list of words"),
        ({"url": "http://x", "env": {"A": "b"}}, "env and cwd"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers"),
        ({"command": ["x"], "timeout_s": 0}, "timeouts above 0"),
        ({"command": ["x"], "restarts": -1}, "restarts of 0 or more"),
    ],
)
async def test_contradictory_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with mcp_tools(**options):
            raise AssertionError("never entered")
