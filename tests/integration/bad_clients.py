"""Clients as one does not wish for, against the server at ``argv[1]`` until standard input closes.

raise   an agent that raises in every episode
hang    an agent that never returns, while its heartbeats go on
leak    takes leases and begins episodes, and never comes back to them
flood   begins, leases and model calls by the hundred, bodies of a megabyte and more
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import threading
from typing import Any

import aiohttp

from wingbeat.client import AsyncSwarm, Runner, RunnerOptions
from wingbeat.client.episode import Episode
from wingbeat.core.errors import SetupError

NUMBERS = itertools.count()


async def raises(episode: Episode) -> float:
    raise ValueError("a bug")


async def hangs(episode: Episode) -> float:
    await asyncio.Event().wait()
    return 0.0


async def run_agent(url: str, agent: Any) -> None:
    """Again and again: a runner ends by itself where every episode fails."""
    while True:
        async with AsyncSwarm(url) as swarm:
            with contextlib.suppress(SetupError):
                await Runner(swarm, agent, 8, options=RunnerOptions(grace_s=0)).run()


async def post(session: aiohttp.ClientSession, path: str, body: Any, *, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    data = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with session.post(path, headers=headers, **data) as answer:
        return answer.status, await answer.json(content_type=None)


async def begin(session: aiohttp.ClientSession, client: str) -> dict[str, Any]:
    body = {
        "idempotency_key": f"{os.getpid()}-{next(NUMBERS)}",
        "task": {"id": "t"},
        "split": "eval",
        "client_id": client,
        "idle_timeout_s": 1,
    }
    return (await post(session, "/api/episodes", body))[1]


async def leak(session: aiohttp.ClientSession) -> None:
    while True:
        await post(session, "/api/tasks/lease", {"max_leases": 256, "client_id": "leaker", "wait_s": 1})
        await begin(session, "leaker")


async def flood(session: aiohttp.ClientSession, number: int) -> None:
    """One of many; each does one of four things."""
    key, status = "", 409
    calls = {"model": "solver", "messages": [{"role": "user", "content": "go"}]}
    while True:
        if status in (401, 409):  # its episode is over
            key, status = (await begin(session, "flooder")).get("api_key", ""), 0
        if number % 4 == 0:
            await post(session, "/api/tasks/lease", {"max_leases": 256, "client_id": "flooder", "wait_s": 5})
        elif number % 4 == 1:
            await begin(session, "flooder")
        elif number % 16 == 2:
            await post(session, "/api/episodes", b'{"label": "' + b"x" * 900_000 + b'"}')
        elif number % 16 == 6:
            await post(session, "/v1/chat/completions", b"[" * 2_000_000, key=key)
        else:
            status, _ = await post(session, "/v1/chat/completions", calls, key=key)
        await asyncio.sleep(0.005)


async def keep_on(work: Any, *arguments: Any) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            await work(*arguments)


async def main(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=20)
    own = {"x-wingbeat-client": "flooder"}
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as leaking,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=own) as flooding,
    ):
        await asyncio.gather(
            run_agent(url, raises),
            run_agent(url, hangs),
            keep_on(leak, leaking),
            *(keep_on(flood, flooding, i) for i in range(32)),
        )


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(main(sys.argv[1]))
