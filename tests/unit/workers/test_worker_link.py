"""The worker's side of the connection, against a local WebSocket server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    Abort,
    ControlMessage,
    Heartbeat,
    Refused,
    Register,
    Shutdown,
    Tokens,
    Welcome,
    WorkerMessage,
    decode_from_worker,
    encode_frame,
)
from wingbeat.workers import link as link_module
from wingbeat.workers.link import Connected, Disconnected, Inbound, WorkerLink

REGISTER = Register(PROTOCOL_VERSION, "engine", "engine-0", "host", 1)
WELCOME = Welcome("engine-0", 60.0, (), "run", 0)


class FakeControl:
    """Answers registrations as told; hands every connection and every frame to the test."""

    def __init__(self) -> None:
        self.answer: list[ControlMessage] | bytes | int = [WELCOME]
        self.sockets: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.frames: asyncio.Queue[list[WorkerMessage]] = asyncio.Queue()
        self.num_tries = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_tries += 1
        if isinstance(self.answer, int):
            return web.Response(status=self.answer)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert decode_from_worker((await socket.receive()).data) == [REGISTER]
        await socket.send_bytes(self.answer if isinstance(self.answer, bytes) else encode_frame(self.answer))
        await self.sockets.put(socket)
        async for frame in socket:
            assert frame.type is WSMsgType.BINARY
            await self.frames.put(decode_from_worker(frame.data))
        return socket

    async def next_frame(self) -> list[WorkerMessage]:
        return await asyncio.wait_for(self.frames.get(), 20)

    async def next_socket(self) -> web.WebSocketResponse:
        return await asyncio.wait_for(self.sockets.get(), 20)


@pytest.fixture
async def control() -> AsyncIterator[FakeControl]:
    fake = FakeControl()
    app = web.Application()
    app.router.add_get("/worker/v1", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}/"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def connect(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(link_module, "RECONNECT_S", (0.01,))
    links: list[WorkerLink] = []

    def start(**options: Any) -> WorkerLink:
        link = WorkerLink(control.url, "worker-key", REGISTER, **options)
        links.append(link)
        link.start()
        return link

    yield start
    for link in links:
        await asyncio.to_thread(link.close)
    assert not [t for t in threading.enumerate() if t.name == "worker-link"]


class Inbox:
    """What the compute thread would see, one by one."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._seen: list[Inbound] = []

    async def next(self) -> Inbound:
        if not self._seen:
            overdue = asyncio.get_running_loop().call_later(10, self._link.deliver, Shutdown("nothing came"))
            self._seen = await asyncio.to_thread(self._link.receive, block=True)
            overdue.cancel()
        return self._seen.pop(0)


async def test_messages_travel_both_ways_and_close_flushes(control: FakeControl, connect: Any) -> None:
    control.answer = [WELCOME, Abort("with the welcome")]
    link = connect()
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    assert await inbox.next() == Abort("with the welcome")
    socket = await control.next_socket()
    await socket.send_bytes(encode_frame([Abort("a"), Abort("b")]))
    assert [await inbox.next(), await inbox.next()] == [Abort("a"), Abort("b")]
    assert link.receive(block=False) == []
    link.send()
    link.send(Heartbeat(1.0), Heartbeat(2.0))
    await asyncio.to_thread(link.close)
    assert await control.next_frame() == [Heartbeat(1.0), Heartbeat(2.0)]
    assert [await inbox.next(), await inbox.next()] == [Disconnected(), Shutdown("link closed")]
    assert not link.failed


async def test_messages_sent_in_one_breath_leave_as_few_frames_in_order(control: FakeControl, connect: Any) -> None:
    link = connect()
    assert await Inbox(link).next() == Connected(WELCOME)
    sent = [Heartbeat(float(i)) for i in range(2000)]
    for message in sent:
        link.send(message)
    received: list[WorkerMessage] = []
    num_frames = 0
    while len(received) < len(sent):
        received += await control.next_frame()
        num_frames += 1
    assert received == sent
    assert num_frames < len(sent) / 4


async def test_after_a_loss_it_connects_again_and_drops_what_was_meant_for_the_old_control(
    control: FakeControl, connect: Any
) -> None:
    link = connect()
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    control.answer = 503
    await (await control.next_socket()).close()
    assert await inbox.next() == Disconnected()
    link.send(Tokens(()))
    control.answer = [WELCOME]
    assert await inbox.next() == Connected(WELCOME)
    link.send(Heartbeat(3.0))
    assert await control.next_frame() == [Heartbeat(3.0)]


async def test_a_refused_worker_fails_with_the_reason(
    control: FakeControl, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    control.answer = [Refused("the server is stopping")]
    link = connect()
    assert await Inbox(link).next() == Shutdown("link closed")
    assert link.failed and control.num_tries == 1
    assert "control refused this worker: the server is stopping" in caplog.text


async def test_what_is_refused_for_now_is_tried_again(
    control: FakeControl, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    control.answer = [Refused("an engine named 'engine-0' is connected already", for_now=True)]
    link = connect()
    for _ in range(5):
        await control.next_socket()
    control.answer = [WELCOME]
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    assert caplog.text.count("control refuses this worker for now: an engine named 'engine-0'") == 1


async def test_a_wrong_key_is_not_tried_again(
    control: FakeControl, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    control.answer = 403
    link = connect()
    assert await Inbox(link).next() == Shutdown("link closed")
    assert link.failed and control.num_tries == 1
    assert "refused the worker key" in caplog.text


async def test_it_gives_up_on_a_control_that_stays_away(
    control: FakeControl, connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wingbeat.workers.link.RECONNECT_S", (0.001,))
    control.answer = 503
    link = connect(give_up_s=0.2)
    assert await Inbox(link).next() == Shutdown("link closed")
    assert link.failed and control.num_tries > 4
    assert caplog.text.count("is `wingbeat serve` running there?") == 1, "told early, and once"


async def test_the_patience_begins_anew_with_every_connection(control: FakeControl, connect: Any) -> None:
    now = 1000.0
    link = connect(give_up_s=50.0, clock=lambda: now)
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    now = 9000.0  # connected for hours
    control.answer = 503
    await (await control.next_socket()).close()
    assert await inbox.next() == Disconnected()
    control.answer = [WELCOME]
    assert await inbox.next() == Connected(WELCOME)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("answer", [b"\xff\xff", [Abort("no welcome")]])
async def test_an_answer_that_is_no_welcome_is_a_failure_and_never_a_clean_end(
    control: FakeControl, connect: Any, answer: Any
) -> None:
    control.answer = answer
    link = connect()
    assert await Inbox(link).next() == Shutdown("link closed")
    await asyncio.to_thread(link.close)
    assert link.failed  # else its supervisor would not start it again


async def test_a_frame_that_makes_no_sense_ends_the_connection_only(control: FakeControl, connect: Any) -> None:
    link = connect()
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    await (await control.next_socket()).send_bytes(b"\xff")
    assert await inbox.next() == Disconnected()
    assert await inbox.next() == Connected(WELCOME)
    assert not link.failed


async def test_heartbeats_come_by_themselves(control: FakeControl, connect: Any) -> None:
    control.answer = [Welcome("engine-0", 0.01, (), "run", 0)]
    beats = iter(range(1, 1000))
    link = WorkerLink(control.url, "worker-key", REGISTER)
    link.heartbeat = lambda: Heartbeat(float(next(beats)))
    link.start()
    assert await control.next_frame() == [Heartbeat(1.0)]
    assert await control.next_frame() == [Heartbeat(2.0)]
    await asyncio.to_thread(link.close)


async def test_a_delivered_message_reaches_the_compute_thread(control: FakeControl, connect: Any) -> None:
    link = connect()
    inbox = Inbox(link)
    assert await inbox.next() == Connected(WELCOME)
    link.deliver(Shutdown("SIGTERM"))
    assert await inbox.next() == Shutdown("SIGTERM")
