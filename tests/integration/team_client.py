"""A client of two servers whose episodes stop for ever at chosen points of their finish, to be killed there.

python team_client.py EAST WEST JOURNAL|- POINT..., where POINT is

    preparing   the lead has prepared, the other server has not heard of it
    prepared    both have, and nobody has heard "commit"
    decided     the lead has committed, the other server has not heard of it

Prints a JSON object, POINT -> the episode's ids on both servers, once all have stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextvars import ContextVar
from typing import Any

from wingbeat.client import AsyncSwarm, AsyncTeam, Episode
from wingbeat.core.types import Task

POINT: ContextVar[str] = ContextVar("point")
stopped = asyncio.Queue[str]()


async def stop() -> None:
    stopped.put_nowait(POINT.get())
    await asyncio.Event().wait()


def stop_at_points(west: str) -> None:
    prepare, decide = Episode.prepare, AsyncSwarm.decide

    async def prepare_or_stop(self: Episode, *given: Any, **more: Any) -> Any:
        if POINT.get() == "preparing" and self.base_url.startswith(west):
            await stop()
        return await prepare(self, *given, **more)

    async def decide_or_stop(self: AsyncSwarm, *given: Any, **more: Any) -> Any:
        if POINT.get() == "prepared" or (POINT.get() == "decided" and self.url == west):
            await stop()
        return await decide(self, *given, **more)

    Episode.prepare, AsyncSwarm.decide = prepare_or_stop, decide_or_stop


async def main(east: str, west: str, journal: str, *points: str) -> None:
    stop_at_points(west)
    ids: dict[str, list[str]] = {}

    async def run(point: str) -> None:
        POINT.set(point)
        async with team.episode(task=Task("own", point)) as episode:
            ids[point] = [episode[server].id for server in episode.servers]
            await episode.finish(1.0)

    async with AsyncTeam({"east": east, "west": west}, journal=None if journal == "-" else journal) as team:
        running = [asyncio.create_task(run(point)) for point in points]
        for _ in points:
            await stopped.get()
        sys.stdout.write(json.dumps(ids) + "\n")
        sys.stdout.flush()
        await asyncio.gather(*running)


asyncio.run(main(*sys.argv[1:]))
