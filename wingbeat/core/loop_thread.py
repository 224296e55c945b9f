"""An event loop in a thread of its own, and calls into it, for synchronous code."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from wingbeat.core.errors import RequestError

T = TypeVar("T")

LEFT_S = 5.0
"""How long what still runs as its loop ends may take to be cancelled."""


class LoopPort:
    """Runs coroutines on a loop of another thread and waits for their results."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result.  Raises RequestError on the loop's own thread, where waiting would hang."""
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop or self._loop.is_closed():
            coroutine.close()
            raise RequestError(
                "a synchronous call on its own event loop would wait for ever; use the asynchronous class (AsyncSwarm,"
                " Resources) in async code"
                if on_loop
                else "its event loop has ended: this client or pool is closed, make a new one"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: do not leave the call behind
            raise

    @contextmanager
    def entered(self, block: AbstractAsyncContextManager[T, Any]) -> Generator[T]:
        """An asynchronous block around a synchronous one."""

        is_in = False

        async def enter() -> T:
            nonlocal is_in
            value = await block.__aenter__()
            is_in = True
            return value

        async def leave(error: BaseException | None) -> None:
            await block.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

        async def leave_if_in(error: BaseException) -> None:
            if is_in:
                await leave(error)

        try:
            value = self.call(enter())
        except (KeyboardInterrupt, SystemExit) as error:
            self.call(leave_if_in(error))  # interrupted just as it was entered, it would be nobody's
            raise
        try:
            yield value
        except BaseException as error:
            self.call(leave(error))
            raise
        else:
            self.call(leave(None))


class LoopThread:
    """A running loop in the background; :meth:`stop` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.port = LoopPort(self._loop)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:  # else the threads that wait for them would wait for ever
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=LEFT_S))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def stop(self, closing: Coroutine[Any, Any, None]) -> None:
        """Run ``closing`` in the loop, then end it; twice is harmless."""
        with self._lock:
            if not self._thread.is_alive():
                closing.close()
                return
            self.port.call(closing)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class Blocking:
    """An object whose coroutine functions are ordinary ones: each waits for its result."""

    def __init__(self, value: Any, port: LoopPort) -> None:
        self._value = value
        self._port = port

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*arguments: Any, **options: Any) -> Any:
            return self._port.call(found(*arguments, **options))

        return call

    def __repr__(self) -> str:
        return f"<blocking {self._value!r}>"
