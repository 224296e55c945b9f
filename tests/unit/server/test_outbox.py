"""Messages to a worker: gathered while a frame is on its way; and the life of a connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    REFUSAL_HEADER,
    Abort,
    ControlMessage,
    Heartbeat,
    Refused,
    Register,
    Shutdown,
    Welcome,
    WorkerMessage,
    decode_from_control,
    encode_frame,
)
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.workers.hub import Outbox, WorkerHub

REGISTER = Register(PROTOCOL_VERSION, "engine", "engine-0", "host", 1)
WELCOME = Welcome("engine-0", 1.0, (), "run", 0)


class FakeSocket:
    """A server-side socket: frames go in and out of queues; sending waits while ``blocked``."""

    def __init__(self, *, key: str = "worker-key") -> None:
        self.headers = {"authorization": f"Bearer {key}"}
        self.frames: list[list[ControlMessage]] = []
        self.incoming: asyncio.Queue[bytes | str | None] = asyncio.Queue()
        self.open = asyncio.Event()
        self.open.set()
        self.sending = asyncio.Event()
        self.is_gone = False
        self.close_code: int | None = None
        self.denied: tuple[int, str] | None = None

    async def accept(self) -> None: ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.close_code = code

    async def send_denial_response(self, response: Response) -> None:
        self.denied = response.status_code, response.headers[REFUSAL_HEADER]

    async def send_bytes(self, frame: bytes) -> None:
        self.sending.set()
        await self.open.wait()
        if self.is_gone:
            raise WebSocketDisconnect(1006)
        self.frames.append(decode_from_control(frame))

    async def receive(self) -> dict[str, Any]:
        frame = await self.incoming.get()
        if frame is None:
            return {"type": "websocket.disconnect", "code": 1006}
        return {"type": "websocket.receive", "text" if isinstance(frame, str) else "bytes": frame}

    def say(self, *messages: WorkerMessage) -> None:
        self.incoming.put_nowait(encode_frame(messages))

    def hang_up(self) -> None:
        self.incoming.put_nowait(None)


class FakeSession:
    def __init__(self) -> None:
        self.received: list[WorkerMessage] = []
        self.num_closed = 0
        self.fault: Exception | None = None

    def receive(self, message: WorkerMessage) -> None:
        if self.fault is not None:
            raise self.fault
        self.received.append(message)

    def closed(self) -> None:
        self.num_closed += 1


class FakeControl:
    def __init__(self, *, refuse: str = "") -> None:
        self.session = FakeSession()
        self.send: Any = None
        self._refuse = refuse
        self.hub = WorkerHub(KeyRing.of(None, "worker-key"), heartbeat_s=0.02, admit=self.admit)

    def admit(self, register: Register, send: Any) -> tuple[Welcome | Refused, FakeSession | None]:
        self.send = send
        return (Refused(self._refuse), None) if self._refuse else (WELCOME, self.session)

    async def serve(self, socket: FakeSocket) -> None:
        async with asyncio.timeout(10):
            await self.hub.serve(cast(WebSocket, socket))


async def test_what_gathers_while_a_frame_is_sent_leaves_as_one() -> None:
    socket, outbox = FakeSocket(), Outbox()
    socket.open.clear()
    drain = asyncio.create_task(outbox.drain(cast(WebSocket, socket)))
    outbox.put(Abort("a"))
    await socket.sending.wait()
    for name in "bcd":
        outbox.put(Abort(name))
    assert not outbox.empty.is_set()
    socket.open.set()
    await outbox.empty.wait()
    assert socket.frames == [[Abort("a")], [Abort("b"), Abort("c"), Abort("d")]]
    outbox.put(Abort("e"))
    await outbox.empty.wait()
    assert socket.frames[2:] == [[Abort("e")]]
    drain.cancel()


async def test_draining_ends_with_the_connection() -> None:
    socket, outbox = FakeSocket(), Outbox()
    socket.is_gone = True
    outbox.put(Abort("a"))
    await outbox.drain(cast(WebSocket, socket))
    assert not outbox.empty.is_set()


async def test_a_worker_is_welcomed_heard_and_missed_once() -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(REGISTER)
    socket.say(Heartbeat(1.0), Heartbeat(2.0))
    socket.hang_up()
    await control.serve(socket)
    assert socket.frames[0] == [WELCOME]
    assert control.session.received == [Heartbeat(1.0), Heartbeat(2.0)]
    assert control.session.num_closed == 1


async def test_a_worker_that_leaves_before_its_welcome_is_missed_too() -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(REGISTER)
    socket.is_gone = True
    await control.serve(socket)
    assert control.session.num_closed == 1  # else its successor would be refused for ever


async def test_a_silent_worker_is_let_go() -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(REGISTER)
    await control.serve(socket)
    assert control.session.num_closed == 1
    assert socket.close_code == 1000


@pytest.mark.parametrize(
    "frame", [b"\xff", b"", "text", encode_frame([Heartbeat()]), encode_frame([REGISTER, REGISTER])]
)
async def test_whoever_does_not_register_gets_no_session(frame: bytes | str) -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.incoming.put_nowait(frame)
    await control.serve(socket)
    assert control.send is None and socket.frames == [] and socket.close_code == 1008


@pytest.mark.parametrize("frame", [b"\xff", b"", "text"])
async def test_a_frame_that_is_none_ends_the_link(frame: bytes | str) -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(REGISTER)
    socket.incoming.put_nowait(frame)
    await control.serve(socket)
    assert control.session.num_closed == 1 and socket.close_code == 1007


async def test_a_worker_hears_of_it_when_control_cannot_take_its_message() -> None:
    control, socket = FakeControl(), FakeSocket()
    control.session.fault = KeyError("batch")
    socket.say(REGISTER)
    socket.say(Heartbeat())
    with pytest.raises(KeyError):
        await control.serve(socket)
    assert control.session.num_closed == 1 and socket.close_code == 1011, "else it would wait for ever"


async def test_a_refusal_is_told() -> None:
    control, socket = FakeControl(refuse="no room"), FakeSocket()
    socket.say(REGISTER)
    await control.serve(socket)
    assert socket.frames == [[Refused("no room")]]
    assert control.session.num_closed == 0


async def test_another_protocol_version_is_refused_with_the_fix() -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(Register(PROTOCOL_VERSION + 1, "engine", "engine-0", "host", 1))
    await control.serve(socket)
    ((refused,),) = socket.frames
    assert isinstance(refused, Refused) and "install the same wingbeat version" in refused.reason
    assert control.send is None


async def test_a_wrong_key_is_turned_away_before_anything_is_read() -> None:
    control, socket = FakeControl(), FakeSocket(key="guess")
    socket.say(REGISTER)
    await control.serve(socket)
    assert socket.denied == (403, "it is none that this server knows") and socket.frames == []


async def test_shutdown_reaches_every_worker_before_flush_returns() -> None:
    control, socket = FakeControl(), FakeSocket()
    socket.say(REGISTER)
    serving = asyncio.create_task(control.serve(socket))
    await socket.sending.wait()
    control.send(Abort("a"))
    await asyncio.sleep(0)
    control.hub.shutdown("stopping")
    await control.hub.flush(5.0)
    assert [m for frame in socket.frames[1:] for m in frame] == [Abort("a"), Shutdown("stopping")]
    socket.hang_up()
    await serving
