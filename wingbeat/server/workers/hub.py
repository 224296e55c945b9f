"""Where workers dial in: authentication, registration, frames in and out, loss of life.

A link that falls silent for three heartbeats is closed; its owner is told exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from wingbeat.core.errors import AuthenticationError, PermissionDenied, WingbeatError
from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    REFUSAL_HEADER,
    ControlMessage,
    Refused,
    Register,
    Shutdown,
    Welcome,
    WorkerMessage,
    decode_from_worker,
    encode_frame,
    encode_frames,
)
from wingbeat.server.keys.principals import MAY_WORK
from wingbeat.server.keys.ring import KeyRing

logger = logging.getLogger(__name__)

SILENT_HEARTBEATS = 3
AUTH_FAILED = 4401
INVALID_DATA = 1007
POLICY_VIOLATION = 1008
UNEXPECTED = 1011


class WorkerSession(Protocol):
    """What control makes of one connected worker."""

    def receive(self, message: WorkerMessage) -> None: ...
    def closed(self) -> None: ...


Admit = Callable[[Register, Callable[[ControlMessage], None]], tuple[Welcome | Refused, WorkerSession | None]]
"""Control's answer to a registration: a welcome and a session, or a refusal."""


class WorkerHub:
    """Serves ``GET /worker/v1`` for every worker."""

    def __init__(self, keys: KeyRing, *, heartbeat_s: float, admit: Admit) -> None:
        self._keys = keys
        self._silence_s = heartbeat_s * SILENT_HEARTBEATS
        self._admit = admit
        self._outboxes: set[Outbox] = set()
        self._sockets: set[WebSocket] = set()

    async def serve(self, socket: WebSocket) -> None:
        """The whole life of one connection."""
        try:
            self._keys.require(socket.headers, MAY_WORK)
        except (AuthenticationError, PermissionDenied) as error:
            await _deny(socket, error.status, self._why(socket, error))
            return
        self._sockets.add(socket)
        has_ended = False
        try:
            await self._admitted(socket)
            has_ended = True
        finally:
            self._sockets.discard(socket)
            if not has_ended:  # a message that control cannot take: the worker has to know that nobody listens
                await _close(socket, UNEXPECTED, "an unexpected error in control")

    def _why(self, socket: WebSocket, error: WingbeatError) -> str:
        if isinstance(error, PermissionDenied) and not self._keys.principal(socket.headers).name:
            return "it is none that this server knows"  # an open server takes any caller for an admin
        return error.message

    async def drop_unwelcome(self) -> None:
        """Close the links whose key was revoked or has expired."""
        for socket in tuple(self._sockets):
            if not self._keys.is_worker(socket.headers):
                self._sockets.discard(socket)
                logger.warning("a worker's key is no longer good; closing its link")
                await _close(socket, AUTH_FAILED, "the worker key is no longer good")

    async def _admitted(self, socket: WebSocket) -> None:
        await socket.accept()
        outbox = Outbox()
        try:
            register = await self._first(socket)
        except WebSocketDisconnect:
            logger.warning("a worker left before it registered")
            return
        except (TimeoutError, msgspec.DecodeError, ValueError) as error:
            logger.warning("a worker did not register: %s", error or "nothing came in time")
            await _close(socket, POLICY_VIOLATION, "expected one register message")
            return
        answer, session = self._answer(register, outbox)
        if session is None:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await socket.send_bytes(encode_frame([answer]))
            await _close(socket)
            return
        try:
            await self._converse(socket, session, answer, outbox)
        finally:
            session.closed()

    async def _converse(
        self, socket: WebSocket, session: WorkerSession, answer: Welcome | Refused, outbox: Outbox
    ) -> None:
        """The welcome, then both directions until either side ends."""
        try:
            await socket.send_bytes(encode_frame([answer]))
        except (WebSocketDisconnect, RuntimeError):
            return
        self._outboxes.add(outbox)
        sender = asyncio.create_task(outbox.drain(socket), name="to-worker")
        try:
            await self._receive(socket, session)
        finally:
            self._outboxes.discard(outbox)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    def _answer(self, register: Register, outbox: Outbox) -> tuple[Welcome | Refused, WorkerSession | None]:
        if register.protocol != PROTOCOL_VERSION:
            return Refused(
                f"this server speaks worker protocol {PROTOCOL_VERSION}, the worker {register.protocol};"
                " install the same wingbeat version on both"
            ), None
        return self._admit(register, outbox.put)

    async def _first(self, socket: WebSocket) -> Register:
        async with asyncio.timeout(self._silence_s):
            (message,) = decode_from_worker(await _frame(socket))
        if not isinstance(message, Register):
            raise msgspec.ValidationError(f"expected register, got {type(message).__name__}")
        return message

    async def _receive(self, socket: WebSocket, session: WorkerSession) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._silence_s) as silence:
                while True:
                    frame = await _frame(socket)
                    silence.reschedule(clock() + self._silence_s)
                    for message in decode_from_worker(frame):
                        session.receive(message)
        except TimeoutError:
            logger.warning("a worker was silent for %.0f s; closing its link", self._silence_s)
            await _close(socket)
        except WebSocketDisconnect:
            return
        except msgspec.DecodeError as error:  # also where the message is another than was expected
            logger.error("a worker sent a frame that cannot be understood: %s", error)
            await _close(socket, INVALID_DATA, "a frame that cannot be understood")

    def shutdown(self, reason: str) -> None:
        """Ask every worker to end."""
        for outbox in self._outboxes:
            outbox.put(Shutdown(reason=reason))

    async def flush(self, deadline_s: float) -> None:
        """Wait until what was put has left, at most ``deadline_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for outbox in tuple(self._outboxes):
                    await outbox.empty.wait()


async def _frame(socket: WebSocket) -> bytes:
    """The next frame.  Raises WebSocketDisconnect, msgspec.DecodeError where it is text."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    frame = message.get("bytes")
    if frame is None:
        raise msgspec.DecodeError("a frame of text; workers send binary ones")
    return frame


async def _deny(socket: WebSocket, status: int, why: str) -> None:
    """Refuse a connection that has not been accepted, and say why."""
    words = why.encode("ascii", "replace").decode()
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_denial_response(Response(status_code=status, headers={REFUSAL_HEADER: words}))


async def _close(socket: WebSocket, code: int = 1000, reason: str = "") -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it is closing by itself
        await socket.close(code, reason)


class Outbox:
    """Messages to one worker: gathered while a frame is being sent, then sent as one."""

    def __init__(self) -> None:
        self._messages: list[ControlMessage] = []
        self._filled = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()

    def put(self, message: ControlMessage) -> None:
        self._messages.append(message)
        self.empty.clear()
        self._filled.set()

    async def drain(self, socket: WebSocket) -> None:
        """Send for as long as the connection lives (the receiver notices its end)."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while True:
                await self._filled.wait()
                self._filled.clear()
                batch, self._messages = self._messages, []
                for frame in encode_frames(batch):
                    await socket.send_bytes(frame)
                if not self._messages:
                    self.empty.set()
