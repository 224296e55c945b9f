"""One call: whose fault its end is, how long it may take, and what is tried again."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from wingbeat.core.errors import ConfigError, NoEngine, OverloadedError
from wingbeat.resources import ResourceFailed, ResourceLost
from wingbeat.tools import Fault, Toolbox, ToolError, ToolResult, ToolUnavailable, tool
from wingbeat.tools.calls import read_call
from wingbeat.tools.results import MIN_OUTPUT_CHARS, shortened


@dataclass
class Row:
    name: str
    size: int


class Answer(BaseModel):
    value: float


async def outcome(function: Callable[..., Any], arguments: str = "", **options: Any) -> ToolResult:
    made = tool(name="f", description="F.", **options)(function)
    return await Toolbox([made]).call("f", arguments)


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (3, "3"),
        (True, "true"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ([Row("a", 1)], '[{"name":"a","size":1}]'),
        (Answer(value=0.5), '{"value":0.5}'),
        (float("inf"), "Infinity"),
        (ToolResult("told", data=1), "told"),
    ],
)
async def test_what_a_tool_returns_is_told_as_text(returned: Any, content: str) -> None:
    def f() -> Any:
        return returned

    async def g() -> Any:
        return returned

    for function in (f, g):
        result = await outcome(function)
        assert (result.content, result.is_error, result.fault) == (content, False, None)
        assert result.data == (1 if isinstance(returned, ToolResult) else returned)


async def test_errors_of_a_tools_own_code_are_observations(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ToolError("the door is locked")

    def broken() -> None:
        raise KeyError("door")

    def leave() -> None:
        raise SystemExit(2)

    def opaque() -> object:
        return object()

    async def cancelled_inside() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    async def own_timeout() -> None:
        raise TimeoutError

    told = [(await outcome(f)).content for f in (refuse, broken, leave, cancelled_inside, own_timeout)]
    assert told == [
        "error: the door is locked",
        "error: KeyError: 'door'",
        "error: SystemExit: 2",
        "error: CancelledError",
        "error: TimeoutError",
    ]
    assert "the tool returned a object, which is no JSON" in (await outcome(opaque)).content
    wrong: Any = tool(lambda: ToolResult(5), name="wrong", description="No text.")  # type: ignore[arg-type]
    assert "a ToolResult whose content is a int" in (await Toolbox([wrong]).call("wrong")).content
    result = await outcome(broken)
    assert result.is_error and result.fault is Fault.RAISED
    assert "Traceback" in caplog.text, "what may be a bug of the tool's is logged whole"


async def test_a_bug_is_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def f() -> None:
        "F."
        raise ValueError("no")

    toolbox = Toolbox([f])
    with caplog.at_level(logging.WARNING, "wingbeat.tools"):
        for _ in range(3):
            await toolbox.call("f")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [ResourceLost("the box is gone"), NoEngine("none"), ConfigError("no such field")])
async def test_infrastructures_errors_are_raised_and_never_told(error: Exception) -> None:
    async def direct() -> None:
        raise error

    def in_a_thread() -> None:
        raise error

    def wrapped() -> None:
        raise RuntimeError("it failed") from ResourceLost("the box is gone")

    for function in (direct, in_a_thread):
        with pytest.raises(type(error)) as caught:
            await outcome(function)
        assert caught.value is error
    with pytest.raises(RuntimeError, match="it failed"):
        await outcome(wrapped)


async def test_a_tool_error_is_an_observation_whatever_it_came_from() -> None:
    """Its author chose so."""

    def f() -> None:
        try:
            raise ResourceFailed("the search engine is down")
        except ResourceFailed:
            raise ToolError("nothing found") from None

    assert (await outcome(f)).content == "error: nothing found"


async def test_errors_that_the_author_lists_are_infrastructures() -> None:
    def f() -> None:
        raise ConnectionResetError("by peer")

    async def slow() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ToolUnavailable, match="tool f: ConnectionResetError: by peer") as caught:
        await outcome(f, infrastructure=(ConnectionError,))
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    with pytest.raises(ToolUnavailable, match=r"did not end within 0.01 s"):
        await outcome(slow, timeout_s=0.01, infrastructure=(TimeoutError,))


async def retried(error: Exception, *, retries: int) -> tuple[int, list[float], ToolResult | None]:
    """(tries, waits between them, the result or None) of a tool that fails twice."""
    tries, waits = 0, list[float]()

    @tool(retries=retries)
    async def f() -> str:
        "F."
        nonlocal tries
        tries += 1
        if tries < 3:
            raise error
        return "done"

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    toolbox = Toolbox([f], sleep=sleep, rng=random.Random(1))
    try:
        return tries, waits, await toolbox.call("f")
    except type(error):
        return tries, waits, None


async def test_only_infrastructure_that_may_be_tried_again_is() -> None:
    draw = random.Random(1)
    expected = [0.5 * draw.random(), 1.0 * draw.random()]  # full jitter below 0.5 * 2**n
    _, waits, result = await retried(NoEngine("not now"), retries=2)
    assert result is not None and result.content == "done"
    assert waits == expected
    _, waits, result = await retried(NoEngine("not now"), retries=1)
    assert result is None and len(waits) == 1
    _, waits, result = await retried(ResourceLost("gone"), retries=2)
    assert result is None and waits == [], "a lost resource is not marked as retryable"
    _, waits, result = await retried(ValueError("wrong"), retries=2)
    assert result is not None and result.is_error and waits == [], "an observation is told at once"


async def test_a_refusal_that_says_when_to_come_back_is_obeyed() -> None:
    _, waits, result = await retried(OverloadedError("busy", retry_after_s=7.0), retries=2)
    assert result is not None and all(7.0 <= wait <= 7.0 * 1.25 for wait in waits)


async def test_a_tool_out_of_time_is_told_so() -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    result = await outcome(slow, timeout_s=0.01)
    assert (result.content, result.fault) == ("error: the tool did not end within 0.01 s", Fault.TIMEOUT)


async def test_a_synchronous_tool_leaves_the_loop_free_and_sees_the_callers_context() -> None:
    ran, name = threading.Event(), contextvars.ContextVar("name", default="")

    def f() -> str:
        assert ran.wait(10), "only the loop sets it"
        return f"{name.get()} {threading.current_thread().name}"

    name.set("caller")
    call = asyncio.ensure_future(outcome(f))
    await asyncio.sleep(0)
    ran.set()
    assert (await call).content == "caller wingbeat-tool-f"


async def test_threads_that_hang_keep_their_places() -> None:
    release, running, most = threading.Event(), 0, 0
    lock = threading.Lock()

    @tool(timeout_s=0.05)
    def hang() -> None:
        "Hang."
        release.wait(10)

    @tool(timeout_s=10)
    def work() -> None:
        "Work."
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    toolbox = Toolbox([hang, work], max_threads=2)
    results = await asyncio.gather(toolbox.call("hang"), toolbox.call("hang"))
    assert [result.fault for result in results] == [Fault.TIMEOUT] * 2
    with pytest.raises(ToolUnavailable, match=r"all 2 threads .* were busy for 0.05 s; 2 of them run calls"):
        await toolbox.call("hang")
    waiting = [asyncio.ensure_future(toolbox.call("work")) for _ in range(8)]
    await asyncio.sleep(0)
    assert not any(call.done() for call in waiting), "no place is free"
    release.set()
    await asyncio.gather(*waiting)
    assert 1 <= most <= 2


def test_one_toolbox_serves_one_loop_after_another() -> None:
    @tool
    def f() -> str:
        "F."
        return "done"

    toolbox = Toolbox([f], max_threads=1)

    async def contended() -> None:
        results = await asyncio.gather(*(toolbox.call("f") for _ in range(4)))
        assert [result.content for result in results] == ["done"] * 4

    for _ in range(2):
        asyncio.run(contended())


async def test_a_cancelled_call_ends_at_once() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def f() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.ensure_future(outcome(f))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


@pytest.mark.parametrize("length", [99, 100, 101, 5000])
async def test_a_long_observation_loses_its_middle(length: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(length))

    def f() -> str:
        return text

    result = await outcome(f, max_output_chars=100)
    assert len(result.content) <= 100
    assert result.data == text
    if length <= 100:
        assert (result.content, result.omitted_chars) == (text, 0)
        return
    head, mark, tail = result.content.split("\n")
    assert mark == f"[... {result.omitted_chars} of {length} characters left out ...]"
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + len(tail) + result.omitted_chars == length


@given(st.text(max_size=400), st.integers(MIN_OUTPUT_CHARS, 300))
def test_no_observation_is_longer_than_its_limit(text: str, limit: int) -> None:
    result = shortened(ToolResult(text), limit=limit)
    sendable = text.encode("utf-8", "replace").decode()
    assert len(result.content) <= limit
    assert (result.content == sendable) == (len(sendable) <= limit)
    if result.omitted_chars:
        head, tail = result.content.split(
            f"\n[... {result.omitted_chars} of {len(sendable)} characters left out ...]\n"
        )
        assert sendable == head + sendable[len(head) : len(head) + result.omitted_chars] + tail


async def test_what_cannot_be_sent_as_utf8_is_replaced() -> None:
    def f() -> str:
        return "a\ud800b"

    assert (await outcome(f)).content == "a?b"


async def test_wrong_arguments_never_reach_the_tool() -> None:
    def f(a: int) -> None:
        raise AssertionError("not called")

    result = await outcome(f, '{"a": "x"}')
    assert result.content == 'error: wrong arguments for f\na: expected a valid integer, got "x"'
    assert (result.is_error, result.fault) == (True, Fault.ARGUMENTS)


def test_arguments_that_come_as_an_object_are_not_lost() -> None:
    def read(arguments: Any) -> Any:
        return read_call({"id": "c", "function": {"name": "f", "arguments": arguments}})

    assert read({"a": [1]}).arguments == '{"a": [1]}'
    assert (read(None).arguments, read(None).fault) == ("", "")
    assert read({"a": object()}).fault.startswith("expected the arguments as JSON text, got")
