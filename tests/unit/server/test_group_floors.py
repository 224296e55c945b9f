"""A call of a group waits for an engine that serves the group's floor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from wingbeat.core.types import Split, Task
from wingbeat.core.worker_protocol import Generate
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.dialects.chat import CHAT
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.tracking.graph import EpisodeGraph


async def test_a_call_waits_for_an_engine_that_serves_the_floor_of_its_group(open_desk: Any, join_engine: Any) -> None:
    desk = open_desk()
    desk.solver.version = 5
    engine = join_engine(desk.engines)
    engine.serve(2)
    group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 3})
    fields: Any = ("digest", 100.0, 0.0, 0.0)
    episode = OpenEpisode("ep", 1, group, {"solver": None}, "", *fields, graph=EpisodeGraph("ep"))
    body = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}
    prepared = desk.gateway.prepare(episode, CHAT.parse(body))
    call = asyncio.create_task(desk.gateway.complete(episode, prepared))
    for _ in range(5):
        await asyncio.sleep(0)
    assert desk.engines.waiting == 1 and not engine.of(Generate)
    engine.serve(3)
    (sent,) = engine.of(Generate)
    engine.say(sent.request_id, *desk.solver.template.encode("yes<|im_end|>"), version=3, finish="stop")
    await call
    desk.solver.version = 1  # a rollback: versions count anew, and nobody waits for one that was abandoned
    late = replace(group, floor_version={"solver": 9})
    again = OpenEpisode("ep2", 1, late, {"solver": None}, "", *fields, graph=EpisodeGraph("ep2"))
    call = asyncio.create_task(desk.gateway.complete(again, desk.gateway.prepare(again, CHAT.parse(body))))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(engine.of(Generate)) == 2
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
