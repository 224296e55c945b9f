"""Heartbeats from a thread of their own: an agent that blocks its event loop is slow, not dead.

One daemon thread per client, started with the first episode, with its own loop and connections; all
running episodes share it.  State is owned by that loop; other threads only send it messages.

The begin promised heartbeats, so the server counts from it on, and an agent that is done within a period costs none.
A forked child of the process (a tool in a subprocess) has none of this: its parent reports.

Beats are told apart by their keys, which are of one attempt: a client that was slow may get the next attempt of an
episode that it still works at, and the end of the one must not silence the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import AuthenticationError, ConflictError, NotFoundError, WingbeatError
from wingbeat.core.protocol import HeartbeatReply

logger = logging.getLogger("wingbeat.client")

_ONE_TRY = RetryPolicy(budget_s=0)
GIVEN_UP = frozenset({"lost", "aborted", "superseded"})
"""States of an episode, as the server tells them, in which its agent works for nothing."""
_JOIN_S = 5.0
LEAST_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Beat:
    """Whom to report alive, how often, and whom to tell (in the heartbeat thread) if that ends it."""

    episode_id: str
    api_key: str
    every_s: float
    on_closed: Callable[[str], None]


class HeartbeatThread:
    """Reports episodes alive until they are removed."""

    def __init__(self, url: str, *, client_id: str = "", ca: str | os.PathLike[str] | None = None) -> None:
        self._url = url
        self._ca = ca
        self._client_id = client_id
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By API key."""
        self._closed = False
        self._pid = os.getpid()

    def add(self, beat: Beat) -> None:
        """Begin to report an episode; from any thread."""
        if self._is_copy:
            return
        with self._lock:
            if self._closed:
                return
            loop = self._loop if self._loop is not None else self._start()
        loop.call_soon_threadsafe(self._begin, beat)

    def remove(self, api_key: str) -> None:
        """Stop reporting the attempt of this key; from any thread, harmless if unknown."""
        if self._is_copy:
            return
        with self._lock:
            if self._loop is None or self._closed:
                return
            self._loop.call_soon_threadsafe(self._end, api_key)

    @property
    def _is_copy(self) -> bool:
        """Whether this is a forked child, in which the thread does not run (and the lock may never be free)."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Stop reporting everything and end the thread; twice is harmless.

        Blocks for a moment, so call it off the loop that runs agents.
        """
        if self._is_copy:
            return
        with self._lock:
            already, self._closed = self._closed, True
            loop, stop, thread = self._loop, self._stop, self._thread
        if already or loop is None or stop is None or thread is None:
            return
        loop.call_soon_threadsafe(stop.set)
        thread.join(_JOIN_S)

    def _start(self) -> asyncio.AbstractEventLoop:
        started = threading.Event()
        # here, not in the thread: what it raises is its caller's to hear, who would wait for a dead thread
        self._transport = Transport(
            self._url, key=None, timeout_s=10.0, retry=_ONE_TRY, client_id=self._client_id, ca=self._ca
        )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="wingbeat-heartbeats", daemon=True
        )
        self._thread.start()
        started.wait()
        assert self._loop is not None
        return self._loop

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        started.set()
        try:
            await self._stop.wait()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._transport.close()

    def _begin(self, beat: Beat) -> None:
        if beat.api_key not in self._tasks and self._stop is not None and not self._stop.is_set():
            task = asyncio.get_running_loop().create_task(self._report(beat), name=f"heartbeat-{beat.episode_id}")
            self._tasks[beat.api_key] = task

    def _end(self, api_key: str) -> None:
        task = self._tasks.pop(api_key, None)
        if task is not None:
            task.cancel()

    async def _report(self, beat: Beat) -> None:
        """Beat until cancelled or until the server says that the episode is over."""
        rng = random.Random(beat.episode_id)
        path, every_s = f"/api/episodes/{beat.episode_id}/heartbeat", beat.every_s
        while True:
            await asyncio.sleep(every_s * rng.uniform(0.6, 0.9))
            # an answer that hangs must not cost the next beat: the server waits for two periods after a restart
            call = Call("POST", path, key=beat.api_key, timeout_s=max(LEAST_TIMEOUT_S, 0.6 * every_s))
            try:
                reply = await self._transport.send(call, HeartbeatReply)
            except (NotFoundError, ConflictError, AuthenticationError) as error:
                self._over(beat, error.message)
                return
            except WingbeatError as error:
                logger.debug("heartbeat of %s: %s", beat.episode_id, error.message)
            else:
                every_s = reply.heartbeat_s  # a restart may have changed it
                if reply.state in GIVEN_UP:
                    self._over(beat, f"it is {reply.state}")
                    return

    def _over(self, beat: Beat, reason: str) -> None:
        """The server does not go on with the episode."""
        self._tasks.pop(beat.api_key, None)
        beat.on_closed(reason)
