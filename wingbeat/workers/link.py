"""A worker's connection to control: reconnecting I/O on one thread, compute on another.

The compute thread owns the model and never waits for the network; the I/O thread owns the WebSocket
and never touches the model.  They meet in two queues::

    WebSocket ──▶ inbox ──▶ compute          compute ──▶ outbox ──▶ WebSocket
                (thread-safe, blocking get)            (wakes the I/O loop)

When the connection breaks, the compute thread sees :class:`Disconnected` in its inbox (a worker
drops what it was doing for that control) and :class:`Connected` with a new ``Welcome`` later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from wingbeat.core.errors import SetupError
from wingbeat.core.tls import certificate_fault, client_context
from wingbeat.core.worker_protocol import (
    REFUSAL_HEADER,
    ControlMessage,
    Heartbeat,
    Refused,
    Register,
    Shutdown,
    Welcome,
    WorkerMessage,
    decode_from_control,
    encode_frame,
    encode_frames,
)

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
FAILURES_UNTIL_TOLD = 3
"""In a row: a second after the first, when it is no mere restart."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Control accepted this worker."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Control is gone; anything in flight for it is void."""


class Own:
    """What a worker tells its own compute thread, from another of its threads."""

    __slots__ = ()


@dataclass(frozen=True)
class DrainAsked(Own):
    """Somebody at this machine asks the worker to go; ``drain_s`` as in ``Drain``."""

    drain_s: float


Inbound = ControlMessage | Connected | Disconnected | Own


class RefusedForNow(ConnectionError):
    """Control is there, and does not take this worker yet."""


class WorkerLink:
    """Runs the I/O thread; used by the compute thread through :meth:`receive` and :meth:`send`."""

    def __init__(
        self,
        url: str,
        key: str,
        register: Register,
        *,
        give_up_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/") + "/worker/v1"
        self._key = key
        self._tls = client_context() if self._url.startswith("https://") else True
        self._register = register
        self._give_up_s = give_up_s
        self._clock = clock
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._outbox: deque[WorkerMessage] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._failures = 0
        self._lost_since = 0.0
        """Monotonic: since when there was no control."""
        self.failed = False
        """The link ended although nobody asked for it: the process should be started again."""
        self.error: SetupError | None = None
        """What has to be mended before that would help, where that is known."""
        self.heartbeat: Callable[[], Heartbeat] = Heartbeat
        """Called on the I/O thread every heartbeat; must only read."""
        self._thread = threading.Thread(target=self._run, name="worker-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def receive(self, *, block: bool) -> list[Inbound]:
        """All messages that have come; with ``block`` waits for the first."""
        messages: list[Inbound] = []
        if block:
            messages.append(self._inbox.get())
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def send(self, *messages: WorkerMessage) -> None:
        """Queue messages; they leave in order, coalesced, while connected (dropped on reconnect)."""
        if not messages:
            return
        self._outbox.extend(messages)
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop may just have closed
                loop.call_soon_threadsafe(wake.set)

    def deliver(self, message: Inbound) -> None:
        """Put a message into the inbox as if it had come from control (signal handlers use this)."""
        self._inbox.put(message)

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Flush what is queued and end the I/O thread."""
        self._stopping = True
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake.set)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        has_ended = False
        try:
            asyncio.run(self._serve())
            has_ended = True
        except SetupError as error:
            self.error = error
            logger.error("%s", error)
        finally:
            self.failed = not has_ended
            self._inbox.put(Shutdown(reason="link closed"))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._failures, self._lost_since = 0, self._clock()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as session:
            while not self._stopping:
                try:
                    async with session.ws_connect(
                        self._url, max_msg_size=MAX_FRAME_BYTES, compress=0, ssl=self._tls
                    ) as socket:
                        await self._converse(socket)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise SetupError(_refusal(self._url, error)) from error
                    self._give_up_after(error)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if fault := certificate_fault(error):
                        raise SetupError(
                            f"the certificate of control at {self._url} is not accepted: {fault}"
                        ) from error
                    self._give_up_after(error)
                if self._stopping:
                    return
                await asyncio.sleep(RECONNECT_S[min(self._failures, len(RECONNECT_S) - 1)])
                self._failures += 1

    def _give_up_after(self, error: Exception) -> None:
        has_waited = self._clock() - self._lost_since > self._give_up_s
        if isinstance(error, RefusedForNow):
            if has_waited:
                raise SetupError(str(error)) from error
            if self._failures == FAILURES_UNTIL_TOLD:
                logger.warning("%s; trying for %.0f s", error, self._give_up_s)
            return
        if has_waited:
            raise SetupError(f"no control at {self._url} for {self._give_up_s:.0f} s: {error}") from error
        if self._failures == FAILURES_UNTIL_TOLD:
            logger.warning(
                "no control at %s (%s): trying for %.0f s; is `wingbeat serve` running there? With TLS its address"
                " begins with https://",
                *(self._url, error, self._give_up_s),
            )

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await socket.send_bytes(encode_frame([self._register]))
        frame = await socket.receive()
        if frame.type is not aiohttp.WSMsgType.BINARY:
            raise ConnectionError(f"control closed the connection before it answered ({frame.type.name})")
        first = decode_from_control(frame.data)
        if isinstance(first[0], Refused) and first[0].for_now:
            raise RefusedForNow(f"control refuses this worker for now: {first[0].reason}")
        if isinstance(first[0], Refused):
            self._stopping = True
            raise SetupError(f"control refused this worker: {first[0].reason}")
        welcome = first[0]
        if not isinstance(welcome, Welcome):
            raise SetupError(f"expected a welcome from control, got {type(welcome).__name__}")
        logger.info("connected to %s as %s", self._url, self._register.worker_id)
        self._outbox.clear()
        self._inbox.put(Connected(welcome))
        for message in first[1:]:
            self._inbox.put(message)
        try:
            await self._pump(socket, welcome.heartbeat_s)
        finally:
            self._failures, self._lost_since = 0, self._clock()
            logger.info("the connection to %s has ended", self._url)
            self._inbox.put(Disconnected())

    async def _pump(self, socket: aiohttp.ClientWebSocketResponse, heartbeat_s: float) -> None:
        """Send and receive until either side ends."""
        sender = asyncio.create_task(self._send_loop(socket), name="link-send")
        beater = asyncio.create_task(self._beat_loop(heartbeat_s), name="link-beat")
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                for message in decode_from_control(frame.data):
                    self._inbox.put(message)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.error("control sent a frame this worker does not understand: %s", error)
        finally:
            for task in (sender, beater):
                task.cancel()
            await asyncio.gather(sender, beater, return_exceptions=True)

    async def _send_loop(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        assert self._wake is not None
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                batch = [self._outbox.popleft() for _ in range(len(self._outbox))]
                for frame in encode_frames(batch):
                    await socket.send_bytes(frame)
            if self._stopping:
                await socket.close()
                return

    async def _beat_loop(self, heartbeat_s: float) -> None:
        while True:
            await asyncio.sleep(heartbeat_s)
            self.send(self.heartbeat())


def _refusal(url: str, error: aiohttp.WSServerHandshakeError) -> str:
    """What a server says of a key that it does not take."""
    said = (error.headers or {}).get(REFUSAL_HEADER, "")
    return (
        f"control at {url} refused the worker key{f' ({said})' if said else ''}: make one on its machine with"
        " `wingbeat keys create worker`"
    )
