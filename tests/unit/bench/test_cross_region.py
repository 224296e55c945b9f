"""The line that the cross-region benchmark emulates, and the benchmark itself at its smallest."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from bench.cross_region import Plan, run
from bench.shaping_proxy import Line, ShapingProxy


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
        await writer.wait_closed()


async def through(line: Line, payload: bytes) -> tuple[bytes, float, int]:
    """What comes back of a payload, after how long, and how often the line stalled."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    async with server, ShapingProxy(server.sockets[0].getsockname()[1], line) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        started = loop.time()
        writer.write(payload)
        writer.write_eof()
        got = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return got, loop.time() - started, proxy.num_stalls


async def test_a_line_has_its_delay_its_rate_and_its_losses() -> None:
    payload = bytes(range(256)) * 256
    slow = Line(round_trip_s=0.1, bits_per_s=8 * len(payload) / 0.2, loss=0.0, reset_every_s=0.0)
    got, seconds, stalls = await through(slow, payload)
    assert got == payload and stalls == 0
    assert seconds >= 0.1 + 0.1 + 0.2  # handshake, there and back, and its bytes
    got, _, stalls = await through(Line(0.01, 1e9, loss=0.5, reset_every_s=0.0), payload)
    assert got == payload and stalls > 0, "what is lost is sent again"


@pytest.mark.slow
def test_a_distant_engine_samples_and_no_episode_is_lost(tmp_path: Path) -> None:
    found = run(Plan(rounds=1, settle_s=0.3, window_s=2.0, fast_s=0.3), seed=1, folder=tmp_path)
    assert found["slow_engine_tokens"] > 0
    assert found["bars"]["no_episode_lost"] and found["bars"]["staleness"] and found["line"]["versions"] > 0
    assert found["throughput_ratio"] > 0.5  # a window of seconds judges no more
