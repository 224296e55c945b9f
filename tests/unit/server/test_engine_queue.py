"""Generations that wait for room in an engine: whose turn it is, and what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from wingbeat.core.errors import NoEngine
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.worker_protocol import Abort, Generate, TokenChunk
from wingbeat.server.workers.engines import EnginePool


class Queue:
    """A pool, its engines, and generations that run as tasks."""

    def __init__(self, join_engine: Any, *, capacity: int, engines: int = 1) -> None:
        self.pool = EnginePool(wait_s=0.02, on_activity=lambda count: None)
        self.engines = [join_engine(self.pool, f"engine-{i}") for i in range(engines)]
        for engine in self.engines:
            engine.link.capacity = capacity
            engine.serve()

    async def start(self, client: str, count: int = 1, **more: Any) -> list[asyncio.Task[list[TokenChunk]]]:
        async def collect(number: int) -> list[TokenChunk]:
            chunks = self.pool.generate(
                "solver",
                prompt_ids=np.array([1, 2], np.int32),
                sampling=SamplingParams(max_tokens=8),
                cache_key=f"{client}-{number}",
                client=client,
                **more,
            )
            return [chunk async for chunk in chunks]

        tasks = [asyncio.create_task(collect(i)) for i in range(count)]
        await asyncio.sleep(0)
        return tasks

    def sent(self, engine: int = 0) -> list[Generate]:
        return self.engines[engine].of(Generate)

    def finish(self, message: Generate, engine: int = 0) -> None:
        self.engines[engine].say(message.request_id, 5, finish=FinishReason.STOP)

    def owners(self) -> list[str]:
        return [message.cache_key.partition("-")[0] for message in self.sent()]


async def test_an_engine_gets_little_more_than_it_runs(join_engine: Any) -> None:
    queue = Queue(join_engine, capacity=8)
    tasks = await queue.start("a", 50)
    assert len(queue.sent()) == 9 and queue.pool.waiting == 41 and queue.pool.in_flight == 50
    queue.finish(queue.sent()[0])
    assert len(queue.sent()) == 10
    while queue.pool.waiting:
        queue.finish(queue.sent()[len(queue.sent()) - 9])
    for message in queue.sent()[-9:]:
        queue.finish(message)
    assert all(chunks[-1].finish is FinishReason.STOP for chunks in await asyncio.gather(*tasks))
    assert queue.pool.in_flight == queue.pool.waiting == 0


async def test_a_flooder_holds_up_another_client_by_its_share_only(join_engine: Any) -> None:
    queue = Queue(join_engine, capacity=4)
    flood = await queue.start("flooder", 500)
    good = await queue.start("good", 10)
    done = 0
    while "good" not in queue.owners() or queue.owners().count("good") < 10:
        queue.finish(queue.sent()[done])
        done += 1
    assert done <= 25  # each second turn is the good one's
    for task in (*flood, *good):
        task.cancel()
    await asyncio.gather(*flood, *good, return_exceptions=True)
    assert queue.pool.waiting == queue.pool.in_flight == 0
    assert len(queue.engines[0].of(Abort)) == len(queue.sent()) - done  # what the engine had is told to end
    assert sum(queue.engines[0].link.num_running.values()) == 0


async def test_a_full_engine_is_passed_over_also_by_its_own_episodes(join_engine: Any) -> None:
    queue = Queue(join_engine, capacity=1, engines=2)
    first = await queue.start("a", 1)
    for _ in range(3):
        first += await queue.start("a", 1)
    assert [len(queue.sent(0)), len(queue.sent(1))] == [2, 2]
    waiting = await queue.start("a", 1)
    assert queue.pool.waiting == 1
    for task in (*first, *waiting):
        task.cancel()
    await asyncio.gather(*first, *waiting, return_exceptions=True)


async def test_waiting_for_ones_turn_is_no_lack_of_engines_but_a_lost_engine_is(join_engine: Any) -> None:
    queue = Queue(join_engine, capacity=1)
    running = await queue.start("a", 2)
    waiting = await queue.start("a", 1)
    await asyncio.sleep(0.06)  # three times the patience
    assert not waiting[0].done()
    queue.engines[0].leave()
    for task in (*running, *waiting):
        with pytest.raises(NoEngine):
            await task
    assert queue.pool.waiting == queue.pool.in_flight == 0


async def test_what_a_lost_engine_had_goes_on_before_what_waited(join_engine: Any) -> None:
    queue = Queue(join_engine, capacity=1)
    running = await queue.start("a", 2)
    later = await queue.start("b", 3)
    queue.engines[0].leave()
    successor = join_engine(queue.pool, "engine-1")
    successor.link.capacity = 1
    successor.serve()
    served = [message.cache_key for message in successor.of(Generate)]
    assert served[0] == "a-0" and len(served) == 2
    for task in (*running, *later):
        task.cancel()
    await asyncio.gather(*running, *later, return_exceptions=True)


async def test_versions_do_not_wait_for_each_other(join_engine: Any, make_manifest: Any) -> None:
    queue = Queue(join_engine, capacity=1)
    queue.pool.pin(make_manifest(3))
    queue.engines[0].serve(3, pinned=True)
    live = await queue.start("a", 5)
    other = await queue.start("a", 1, version=3)
    assert queue.sent()[-1].version == 3
    for task in (*live, *other):
        task.cancel()
    await asyncio.gather(*live, *other, return_exceptions=True)
