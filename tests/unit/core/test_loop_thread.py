"""An event loop in a thread of its own: nobody who calls into it is left waiting, and nothing is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from wingbeat.core.errors import RequestError
from wingbeat.core.loop_thread import LoopPort, LoopThread


async def nothing() -> None:
    """Closes nothing."""


def test_who_waits_for_a_loop_that_ends_is_told() -> None:
    thread = LoopThread("loop")
    is_waiting = threading.Event()

    async def hang() -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        call = threads.submit(thread.port.call, hang())
        assert is_waiting.wait(5)
        thread.stop(nothing())
        with pytest.raises(concurrent.futures.CancelledError):
            call.result(5)
    with pytest.raises(RequestError, match="loop has ended"):
        thread.port.call(nothing())


class Interrupted(LoopPort):
    """Ctrl-C in the moment in which the first call was done."""

    is_interrupted = False

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        result = super().call(coroutine)
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return result


def test_a_block_that_was_entered_while_interrupted_is_left() -> None:
    seen = list[str]()

    @asynccontextmanager
    async def block() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            seen.append("left")

    thread = LoopThread("loop")
    port = Interrupted(thread._loop)
    with pytest.raises(KeyboardInterrupt), port.entered(block()):
        raise AssertionError("nobody may go on")
    assert seen == ["left"]
    thread.stop(nothing())
