"""Requests on engines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest

from wingbeat.core.errors import NoEngine, UnavailableError
from wingbeat.core.events import EventLog
from wingbeat.core.samples import INT_DTYPE
from wingbeat.core.signals import Changed
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.weight_protocol import Manifest, PinVersion, UnpinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, Abort, Failed, Generate, Register, TokenChunk
from wingbeat.server.workers.engines import EnginePool
from wingbeat.server.workers.sessions import EngineSession, SessionParts


class Flights:
    """The pool, with generations that run as tasks."""

    def __init__(self) -> None:
        self.activity: list[int] = []
        self.pool = EnginePool(wait_s=0.05, on_activity=self.activity.append)

    def generate(self, prompt: tuple[int, ...] = (1, 2), *, key: str = "ep", **more: Any) -> AsyncGenerator[TokenChunk]:
        sampling = more.pop("sampling", SamplingParams(max_tokens=8, stop_token_ids=(9,)))
        return self.pool.generate(
            "solver", prompt_ids=np.array(prompt, np.int32), sampling=sampling, cache_key=key, **more
        )

    async def start(self, **more: Any) -> asyncio.Task[list[TokenChunk]]:
        async def collect() -> list[TokenChunk]:
            return [chunk async for chunk in self.generate(**more)]

        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        return task


@pytest.fixture
def flights() -> Flights:
    return Flights()


def prompt_of(message: Generate) -> list[int]:
    return np.frombuffer(message.prompt_ids, INT_DTYPE).tolist()


async def test_a_request_reaches_an_engine_that_serves_and_its_chunks_come_back(
    flights: Flights, join_engine: Any
) -> None:
    engine = join_engine(flights.pool)
    task = await flights.start(stream=True)
    assert not engine.of(Generate) and flights.pool.waiting == 1
    engine.serve()
    (sent,) = engine.of(Generate)
    assert prompt_of(sent) == [1, 2]
    assert (sent.max_tokens, sent.stop_token_ids, sent.stream, sent.version) == (8, (9,), True, None)
    engine.say(sent.request_id, 5)
    engine.say(sent.request_id, 9, finish=FinishReason.STOP)
    chunks = await task
    assert [chunk.token_ids for chunk in chunks] == [(5,), (9,)]
    assert flights.activity == [1, 0]
    assert flights.pool.generated_tokens == 2


async def test_load_decides_between_engines_and_an_episode_stays_on_its_own(flights: Flights, join_engine: Any) -> None:
    engines = [join_engine(flights.pool, f"engine-{i}") for i in range(2)]
    for engine in engines:
        engine.serve()
    tasks = [await flights.start(key=key) for key in ("a", "b", "a", "a")]
    assert [[m.cache_key for m in engine.of(Generate)] for engine in engines] == [["a", "a", "a"], ["b"]]
    flights.pool.forget("a")
    tasks.append(await flights.start(key="a"))
    assert engines[1].of(Generate)[-1].cache_key == "a"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert flights.pool.in_flight == 0


async def test_an_engine_that_leaves_hands_its_requests_over_with_what_was_delivered(
    flights: Flights, join_engine: Any
) -> None:
    first = join_engine(flights.pool, "first")
    first.serve()
    task = await flights.start(stream=True)
    first.say(first.of(Generate)[0].request_id, 5, 6, version=3)
    first.leave()
    first.leave()  # told twice
    assert flights.pool.waiting == 1 and flights.pool.requeued == 1
    second = join_engine(flights.pool, "second")
    second.serve()
    (again,) = second.of(Generate)
    assert prompt_of(again) == [1, 2, 5, 6]
    assert again.max_tokens == 6
    second.say(again.request_id, 9, version=4, finish=FinishReason.STOP)
    chunks = await task
    assert [(chunk.token_ids, chunk.version) for chunk in chunks] == [((5, 6), 3), ((9,), 4)]


async def test_a_grammar_goes_along_and_knows_what_it_has_consumed_already(flights: Flights, join_engine: Any) -> None:
    first = join_engine(flights.pool, "first")
    first.serve()
    sampling = SamplingParams(max_tokens=8, grammar="start: /a+/")
    task = await flights.start(stream=True, sampling=sampling)
    (sent,) = first.of(Generate)
    assert (sent.grammar, sent.resumed_tokens) == ("start: /a+/", 0)
    first.say(sent.request_id, 5, 6)
    first.leave()
    second = join_engine(flights.pool, "second")
    second.serve()
    (again,) = second.of(Generate)
    assert (again.grammar, again.resumed_tokens, prompt_of(again)) == ("start: /a+/", 2, [1, 2, 5, 6])
    second.say(again.request_id, 9, finish=FinishReason.STOP)
    await task


async def test_what_another_engine_goes_on_with_is_drawn_with_another_seed(flights: Flights, join_engine: Any) -> None:
    first = join_engine(flights.pool, "first")
    first.serve()
    task = await flights.start(stream=True, sampling=SamplingParams(max_tokens=8, seed=7))
    (sent,) = first.of(Generate)
    first.say(sent.request_id, 5, 6)
    first.leave()
    second = join_engine(flights.pool, "second")
    second.serve()
    (again,) = second.of(Generate)
    assert (sent.seed, again.seed, again.max_tokens) == (7, 9, 6)
    second.say(again.request_id, 9, finish=FinishReason.STOP)
    await task


async def test_requests_that_lost_their_engine_go_before_younger_ones(flights: Flights, join_engine: Any) -> None:
    first = join_engine(flights.pool, "first")
    first.serve()
    tasks = [await flights.start(key=key) for key in ("a", "b")]
    ids = [message.request_id for message in first.of(Generate)]
    first.leave()
    tasks.append(await flights.start(key="c"))
    second = join_engine(flights.pool, "second")
    second.serve()
    assert [m.request_id for m in second.of(Generate)][:2] == ids
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_closing_a_generation_aborts_it_on_its_engine(flights: Flights, join_engine: Any) -> None:
    engine = join_engine(flights.pool)
    engine.serve()
    chunks = flights.generate(stream=True)
    reading = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    request_id = engine.of(Generate)[0].request_id
    engine.say(request_id, 5)
    assert (await reading).token_ids == (5,)
    await chunks.aclose()
    assert [m.request_id for m in engine.of(Abort)] == [request_id]
    engine.say(request_id, 6)  # was on its way
    assert flights.pool.generated_tokens == 1
    assert flights.activity == [1, 0]


async def test_a_cancelled_reader_is_cancelled_even_if_its_chunk_just_came(flights: Flights, join_engine: Any) -> None:
    engine = join_engine(flights.pool)
    engine.serve()
    task = await flights.start(stream=True)
    await asyncio.sleep(0)
    engine.say(engine.of(Generate)[0].request_id, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.of(Abort)


async def test_without_an_engine_the_wait_ends_and_says_for_which_version(flights: Flights, join_engine: Any) -> None:
    engine = join_engine(flights.pool)
    engine.serve(3)
    with pytest.raises(NoEngine, match="'solver' version 2"):
        await anext(flights.generate(version=2))
    assert flights.pool.waiting == 0 and flights.pool.in_flight == 0
    assert not engine.of(Abort)


async def test_an_engine_error_is_the_callers_error(flights: Flights, join_engine: Any) -> None:
    engine = join_engine(flights.pool)
    engine.serve()
    task = await flights.start()
    engine.say(engine.of(Generate)[0].request_id, finish=FinishReason.ERROR, error="too long")
    with pytest.raises(UnavailableError, match="too long"):
        await task
    assert not engine.of(Abort)


async def test_a_pinned_version_goes_only_to_engines_that_hold_it(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    engine = join_engine(flights.pool)
    engine.serve(3)
    flights.pool.pin(make_manifest(2))
    task = await flights.start(version=2)
    assert not engine.of(Generate)
    engine.serve(2, pinned=True)
    (sent,) = engine.of(Generate)
    assert sent.version == 2
    engine.say(sent.request_id, 9, version=2, finish=FinishReason.STOP)
    assert len(await task) == 1


def test_an_engine_that_joins_is_told_all_live_and_pinned_versions(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    pool = flights.pool
    early = join_engine(pool, "early")
    pool.publish(make_manifest(1))
    pool.publish(make_manifest(2))
    pool.publish(make_manifest(0, policy="judge"))
    pool.pin(make_manifest(1))
    pool.pin(make_manifest(2))
    pool.unpin("solver", 2)
    late = join_engine(pool, "late")
    assert [(m.manifest.policy, m.manifest.version) for m in late.of(UpdateWeights)] == [("solver", 2), ("judge", 0)]
    assert [m.manifest.version for m in late.of(PinVersion)] == [1]
    assert [m.manifest.version for m in early.of(UpdateWeights)] == [1, 0]  # the second of solver once it has the first
    early.serve(1)
    assert [m.manifest.version for m in early.of(UpdateWeights)] == [1, 0, 2]
    assert [m.version for m in early.of(UnpinVersion)] == [2]


def test_lowest_served_is_that_of_the_slowest_engine(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    pool = flights.pool
    assert pool.lowest_served("solver") is None
    engines = [join_engine(pool, f"engine-{i}") for i in range(3)]
    engines[1].serve(3)
    engines[0].serve(4)
    assert pool.lowest_served("solver") == (0, 3, "sum-3")
    engines[2].serve(5)
    engines[1].leave()
    assert pool.lowest_served("solver") == (0, 4, "sum-4")


async def test_an_engine_below_the_floor_of_a_group_is_given_nothing_of_it(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    pool = flights.pool
    pool.publish(make_manifest(1))
    first = join_engine(pool, "first")
    first.serve(1)
    late = join_engine(pool, "late")
    pool.publish(make_manifest(2))
    first.serve(2)  # from now on groups are admitted with floor 2
    late.serve(1)
    assert pool.lowest_served("solver") == (0, 1, "sum-1")  # and from now on with floor 1
    assert not pool.holds(make_manifest(1)) and late.of(UpdateWeights)[-1].manifest.version == 2
    tasks = [await flights.start(key=key, floor=2) for key in ("a", "b")]
    assert len(first.generated()) == 2 and late.generated() == []
    tasks.append(await flights.start(key="c", floor=1))
    assert len(late.generated()) == 1
    first.leave()
    assert len(late.generated()) == 1 and pool.waiting == 2
    late.serve(2)
    assert len(late.generated()) == 3 and pool.waiting == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_an_acknowledgement_of_a_pin_that_was_given_up_counts_no_more(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    pool = flights.pool
    engine = join_engine(pool)
    pool.pin(make_manifest(2))
    pool.unpin("solver", 2)
    engine.serve(2, pinned=True)
    assert not engine.link.serves("solver", 2)
    pool.pin(make_manifest(2, checksum="of the next lineage"))
    engine.serve(2, pinned=True)  # of the abandoned one
    assert not engine.link.serves("solver", 2)
    pool.served(engine.link, WeightsServed("solver", 2, "of the next lineage", pinned=True))
    assert engine.link.serves("solver", 2)


def test_a_policy_that_fails_on_an_engine_is_not_excused_by_another(
    flights: Flights, make_manifest: Callable[..., Manifest]
) -> None:
    parts = SessionParts(flights.pool, {}, EventLog(None), Changed())
    session = EngineSession(parts, Register(PROTOCOL_VERSION, "engine", "e", "host", 1), lambda message: None)
    (link,) = flights.pool.links
    session.receive(Failed("solver", "update_weights", "no memory"))
    session.receive(WeightsServed("checker", 1, "sum-1"))
    assert list(link.failures.values()) == ["engine e: update_weights of 'solver' failed: no memory"]
    session.receive(WeightsServed("solver", 2, "sum-2"))
    assert link.failures == {}


@pytest.mark.parametrize(("is_stopping", "told"), [(False, 1), (True, 0)])
def test_an_engine_that_was_told_to_end_is_not_lost(flights: Flights, is_stopping: bool, told: int) -> None:
    seen: list[str] = []
    events = EventLog(None)
    events.subscribe(lambda record: seen.append(record["event"]))
    parts = SessionParts(flights.pool, {}, events, Changed(), is_stopping=lambda: is_stopping)
    EngineSession(parts, Register(PROTOCOL_VERSION, "engine", "e", "host", 1), lambda message: None).closed()
    assert seen.count("engine_left") == told
    assert flights.pool.links == ()


def test_a_file_is_held_while_it_is_live_pinned_or_an_engine_is_behind(
    flights: Flights, join_engine: Any, make_manifest: Callable[..., Manifest]
) -> None:
    pool = flights.pool
    engine = join_engine(pool)
    pool.publish(make_manifest(1))
    engine.serve(1)
    assert pool.holds(make_manifest(1))
    pool.publish(make_manifest(2))
    assert not pool.holds(make_manifest(1))  # served by mapped memory: nobody opens the file again
    assert pool.holds(make_manifest(2))
    pool.pin(make_manifest(1))
    assert pool.holds(make_manifest(1))
    pool.unpin("solver", 1)
    pool.publish(make_manifest(3))
    assert pool.holds(make_manifest(2))  # the engine has yet to reach it
    engine.serve(3)
    assert not pool.holds(make_manifest(2))


async def test_request_ids_of_two_controls_never_meet(join_engine: Any) -> None:
    ids = []
    for _ in range(2):
        flights = Flights()
        engine = join_engine(flights.pool)
        engine.serve()
        task = await flights.start()
        ids.append(engine.of(Generate)[0].request_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert ids[0] != ids[1]
