"""The gateway benchmark's instruments: the load generator, the conversations, the arithmetic."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest

from bench.conversations import LATER_TURNS, Conversation, replies
from bench.gateway_report import WARM_UP, Cell, Figures, report
from bench.http_load import Connection, http_request
from bench.machine import cpu_seconds


class PieceServer:
    """Answers every request with the given pieces, each sent by itself."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.heard = b""
        self.port = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.heard += data
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"Connection: close" in b"".join(self.pieces):
                    return
        finally:
            writer.close()


@pytest.fixture
async def piece_server() -> AsyncIterator[PieceServer]:
    pieces = PieceServer([])
    server = await asyncio.start_server(pieces.talk, "127.0.0.1", 0)
    pieces.port = server.sockets[0].getsockname()[1]
    async with server:
        yield pieces


async def test_replies_with_a_length_end_there_however_they_are_cut(piece_server):
    reply = b"HTTP/1.1 201 Created\r\nX: y\r\nContent-Length: 5\r\n\r\nhello"
    line = await Connection.open(piece_server.port)
    for cut in (1, 9, len(reply) - 5, len(reply) - 1, len(reply)):
        piece_server.pieces = [reply[:cut], reply[cut:]]
        answer = await line.send(http_request("POST", "/p", b"{}", headers="A: b\r\n"))
        assert (answer.status, answer.body) == (201, b"hello")
        assert 0 < answer.first_s <= answer.total_s
    line.close()
    assert piece_server.heard.startswith(
        b"POST /p HTTP/1.1\r\nHost: 127.0.0.1\r\nA: b\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    )


async def test_chunked_replies_end_with_the_empty_chunk(piece_server):
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    piece_server.pieces = [head + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n", b"\r\n"]
    line = await Connection.open(piece_server.port)
    answer = await line.send(http_request("GET", "/"))
    assert (answer.status, answer.body) == (200, b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    line.close()


async def test_closed_connection_is_an_error_and_not_a_short_answer(piece_server):
    piece_server.pieces = [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhe"]
    line = await Connection.open(piece_server.port)
    with pytest.raises(ConnectionError, match="closed the connection"):
        await line.send(http_request("GET", "/"))
    with pytest.raises(ConnectionError, match="is closed"):
        await line.send(http_request("GET", "/"))


@pytest.mark.parametrize("kb", [4, 400])
def test_conversations_extend_turn_by_turn_and_have_the_wanted_size(kb):
    conversation = Conversation.write(kb * 1024, seed=5)
    bodies = [json.loads(body) for body in conversation.bodies]
    assert len(bodies) == LATER_TURNS + 1
    for earlier, later, reply in zip(bodies, bodies[1:], replies(), strict=False):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert later["messages"][len(earlier["messages"])] == {"role": "assistant", "content": reply}
    mean = sum(map(len, conversation.bodies[1:])) / LATER_TURNS
    assert mean == pytest.approx(kb * 1024, rel=0.05)
    assert all(json.loads(body)["stream"] for body in conversation.streamed)
    assert conversation == Conversation.write(kb * 1024, seed=5)


def figures(latency_s: float, *, count: int = 100, elapsed_s: float = 1.0, cpu_s: float = 0.1) -> Figures:
    return Figures([latency_s] * count, [latency_s / 2] * count, elapsed_s, cpu_s, 0.01)


def test_report_takes_the_best_repeat_and_adds_to_direct():
    one, many = Cell(4, 1, False), Cell(4, 32, False)
    results = {
        (one, "direct", 0): figures(0.001),
        (one, "direct", 1): figures(0.002),
        (one, "ours", WARM_UP): figures(1e-9),
        (one, "ours", 0): figures(0.004),
        (one, "ours", 1): figures(0.0015),
        (many, "direct", 0): figures(0.001),
        (many, "ours", 0): figures(0.01, elapsed_s=0.1, cpu_s=0.02),
        (many, "ours", 1): figures(0.01, elapsed_s=0.2, cpu_s=0.01),
        (many, "litellm", 0): figures(0.1, elapsed_s=0.4),
    }
    result = report(results, {(4, "ours"): [0.002, 0.004, 0.003]}, quick=True, elapsed_s=1.0)
    assert result["c1"] == {"added_p50_ms": 0.5, "added_p99_ms": 0.5}
    assert (result["rps"], result["cpu_us_per_request"], result["rps_ratio_vs_litellm"]) == (1000.0, 100.0, 4.0)
    assert list(result["bars"].values()) == [True, True, False]
    assert result["first_turn_p50_ms"] == {"4kb": 3.0}
    assert result["all"]["4kb.c1.whole"]["ours"]["added_first_byte_p50_ms"] == 0.25
    assert result["all"]["4kb.c32.whole"]["ours"]["requests"] == 200


def test_without_litellm_there_is_no_ratio():
    cells = [Cell(4, n, False) for n in (1, 32)]
    results = {(cell, name, 0): figures(0.001) for cell in cells for name in ("direct", "ours")}
    result = report(results, {}, quick=True, elapsed_s=1.0)
    assert result["rps_ratio_vs_litellm"] is None and list(result["bars"].values())[2] is None


def test_cpu_seconds_are_those_of_the_process():
    before = cpu_seconds(os.getpid())
    while os.times().user + os.times().system < before + 0.05:
        sum(range(1000))
    assert cpu_seconds(os.getpid()) >= before + 0.03
