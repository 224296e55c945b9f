"""What engines say of their weights: one told version at a time, laggards, quarantine, leaving, moving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import ConfigError
from wingbeat.core.events import EventLog
from wingbeat.core.signals import Changed
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.weight_protocol import Manifest, PinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    Abort,
    Failed,
    Generate,
    Heartbeat,
    Leave,
    MovedOut,
    MoveOut,
    Register,
    TokenChunk,
    Tokens,
)
from wingbeat.dataflow.lineages import Ancestry, Lineage
from wingbeat.server.workers.engines import EnginePool
from wingbeat.server.workers.report import engine_blockers, engine_replies
from wingbeat.server.workers.served import RETRY_S, lag_limit
from wingbeat.server.workers.sessions import EngineSession, SessionParts

Tasks = list[asyncio.Task[list[TokenChunk]]]


class Yard:
    """A pool with engines and generations."""

    def __init__(self, join: Any, clock: Any, **options: Any) -> None:
        self.pool = EnginePool(wait_s=5.0, on_activity=lambda count: None, clock=clock, **options)
        self.told: list[tuple[str, str, str]] = []
        self.pool.on_quarantine = lambda link, policy, reason: self.told.append((link.worker_id, policy, reason))
        self.tasks: Tasks = []
        self._join = join

    def engine(self, name: str, version: int | None = None) -> Any:
        engine = self._join(self.pool, name)
        if version is not None:
            engine.serve(version)
        return engine

    async def start(self, key: str, **more: Any) -> asyncio.Task[list[TokenChunk]]:
        async def collect() -> list[TokenChunk]:
            prompt = np.array([1, 2], np.int32)
            chunks = self.pool.generate(
                "solver", prompt_ids=prompt, sampling=SamplingParams(max_tokens=8), cache_key=key, **more
            )
            return [chunk async for chunk in chunks]

        self.tasks.append(asyncio.create_task(collect()))
        await asyncio.sleep(0)
        return self.tasks[-1]


@pytest.fixture
async def yard(join_engine: Any, clock: Any) -> AsyncIterator[Callable[..., Yard]]:
    yards: list[Yard] = []

    def make(**options: Any) -> Yard:
        yards.append(Yard(join_engine, clock, **options))
        return yards[-1]

    yield make
    for one in yards:
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)


def versions(engine: Any) -> list[int]:
    return [message.manifest.version for message in engine.of(UpdateWeights)]


def test_a_slow_engine_loads_the_newest_and_none_of_those_between(yard: Any, make_manifest: Any) -> None:
    here = yard()
    fast, slow = here.engine("fast"), here.engine("slow")
    for version in range(1, 6):
        here.pool.publish(make_manifest(version))
        fast.serve(version)
    assert versions(fast) == [1, 2, 3, 4, 5] and versions(slow) == [1]
    assert [here.pool.holds(make_manifest(v)) for v in range(1, 6)] == [True, False, False, False, True]
    slow.serve(1)
    assert versions(slow) == [1, 5] and not here.pool.holds(make_manifest(1))


@pytest.mark.parametrize(("configured", "staleness", "limit"), [(None, 0, 0), (None, 1, 0), (None, 4, 3), (7, 1, 7)])
def test_the_unset_limit_leaves_room_for_two_batches(configured: int | None, staleness: int, limit: int) -> None:
    assert lag_limit(configured, max_staleness=staleness) == limit


def test_a_limit_beyond_the_bound_is_refused() -> None:
    data: dict[str, Any] = {"policies": {"solver": {"model": "m"}}, "dataflow": {"max_staleness": 2}}
    assert validate_config({**data, "engine": {"max_lag": 2}}).engine.max_lag == 2
    with pytest.raises(ConfigError, match=r"engine\.max_lag: expected at most dataflow\.max_staleness = 2, got 3"):
        validate_config({**data, "engine": {"max_lag": 3}})


async def test_a_laggard_ends_what_it_runs_gets_nothing_new_and_holds_nobody_back(
    yard: Any, make_manifest: Any
) -> None:
    here = yard(max_lag=1)
    here.pool.publish(make_manifest(1))
    fast, slow = here.engine("fast", 1), here.engine("slow", 1)
    for key in "ab":
        await here.start(key)
    for version in (2, 3):
        here.pool.publish(make_manifest(version))
        fast.serve(version)
        assert here.pool.lowest_served("solver").version == {2: 1, 3: 3}[version]
    for key in ("b", "c"):  # also the episode that it had
        await here.start(key)
    assert len(fast.generated()) == 3 and len(slow.generated()) == 1
    assert here.pool.weights.lag(slow.link, "solver") == 2
    slow.say(slow.generated()[0], 5, version=1, finish=FinishReason.STOP)
    assert [chunk.version for chunk in await here.tasks[1]] == [1]
    slow.serve(2)  # near enough, and yet older than the groups that were admitted meanwhile
    await here.start("d", floor=3)
    assert len(slow.generated()) == 1 and here.pool.lowest_served("solver").version == 2
    await here.start("e", floor=2)
    assert len(slow.generated()) == 2


@pytest.mark.parametrize("how", ["dies", "leaves", "lies"])
async def test_a_laggard_is_what_there_is_once_the_fresher_ones_are_gone(
    yard: Any, make_manifest: Any, how: str
) -> None:
    here = yard(max_lag=0)
    here.pool.publish(make_manifest(1))
    fast, slow = here.engine("fast", 1), here.engine("slow", 1)
    here.pool.publish(make_manifest(2))
    fast.serve(2)
    await here.start("a", floor=2)
    await here.start("b", floor=1)
    assert len(fast.generated()) == 2 and slow.generated() == []
    if how == "dies":
        here.pool.leave(fast.link)
    elif how == "leaves":
        here.pool.stop_sending(fast.link)
        await here.start("c", floor=1)
    else:
        here.pool.served(fast.link, WeightsServed("solver", 2, "garbage"))
    assert len(slow.generated()) == 1, "not the one that was admitted with a later version, which lets it by"
    assert here.pool.lowest_served("solver").version == 1
    slow.serve(2)
    assert len(slow.generated()) == (1 if how == "leaves" else 2)


async def test_a_pinned_version_that_could_not_be_had_is_asked_for_again(
    yard: Any, make_manifest: Any, clock: Any
) -> None:
    here = yard()
    session, sent = session_of(here.pool)
    for version in (1, 2):
        here.pool.pin(make_manifest(version))
    session.receive(WeightsServed("solver", 2, "sum-2", pinned=True))
    session.receive(Failed("solver", "pin_version", "the link broke"))
    session.receive(Heartbeat())
    assert len(sent) == 2
    clock.now += RETRY_S
    for _ in range(2):
        session.receive(Heartbeat())
    assert [m.manifest.version for m in sent] == [1, 2, 1]
    session.receive(Failed("solver", "pin_version", "the link broke"))
    here.pool.unpin("solver", 1)
    clock.now += RETRY_S
    session.receive(Heartbeat())
    assert [m.manifest.version for m in sent if isinstance(m, PinVersion)] == [1, 2, 1]


def test_the_freshest_engine_is_never_a_laggard(yard: Any, make_manifest: Any) -> None:
    here = yard(max_lag=0)
    one = here.engine("one", 1)
    for version in range(2, 9):
        here.pool.publish(make_manifest(version))
    assert here.pool.lowest_served("solver").version == 1 and one.link.serves("solver", None)
    here.pool.rolled_back("solver", Ancestry.of([Lineage("solver", 1, 0, 1, "a test")]))
    back = msgspec.structs.replace(make_manifest(1, checksum="back"), lineage=1)
    here.pool.publish(back)
    other = here.engine("other")
    other.serve(1, lineage=1)
    assert [here.pool.weights.lag(link, "solver") for link in here.pool.links] == [0, 0], "an abandoned version counts"


async def test_a_wrong_checksum_quarantines_until_the_right_one_comes(
    yard: Any, make_manifest: Any, clock: Any
) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    good, bad = here.engine("good", 1), here.engine("bad", 1)
    for key in "ab":
        await here.start(key)
    bad.say(bad.generated()[0], 5, version=1)
    here.pool.publish(make_manifest(2))
    here.pool.served(bad.link, WeightsServed("solver", 2, "garbage"))
    ((name, policy, reason),) = here.told
    assert (name, policy) == ("bad", "solver") and "checksum garbage, and sum-2 was published" in reason
    (again,) = good.of(Generate)[1:]
    assert again.resumed_tokens == 1 and [m.request_id for m in bad.of(Abort)] == bad.generated()
    assert any("'bad' is quarantined" in text and "sum-2" in text for text in engine_blockers(here.pool))
    (reply,) = [reply for reply in engine_replies(here.pool) if reply.name == "bad"]
    assert reply.quarantined == {"solver": reason} and not reply.served["solver"].gets_calls
    await here.start("c")
    assert len(bad.generated()) == 1, "no more requests"
    here.pool.beat(bad.link)
    assert versions(bad) == [1, 2], "it is given time"
    clock.now += RETRY_S
    here.pool.beat(bad.link)
    assert versions(bad) == [1, 2, 2]
    bad.serve(2)
    assert here.told[1:] == [("bad", "solver", "")] and engine_blockers(here.pool) == []
    await here.start("d")
    await here.start("e")
    assert len(bad.generated()) > 1


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        ((0, 2), "it sampled with version 2, and had acknowledged version 3 before"),
        ((0, 4), "it sampled with version 4, and has acknowledged version 3"),
    ],
)
async def test_tokens_of_weights_that_it_does_not_serve_are_not_taken(
    yard: Any, make_manifest: Any, sampled: tuple[int, int], reason: str
) -> None:
    here = yard()
    for version in (2, 3):
        here.pool.publish(make_manifest(version))
    stale = here.engine("stale", 2)
    stale.serve(3)
    task = await here.start("a")
    (request_id,) = stale.generated()
    lineage, version = sampled
    here.pool.receive(stale.link, [TokenChunk(request_id, (7,), (-0.1,), version, lineage=lineage)])
    assert here.told == [("stale", "solver", reason)] and here.pool.generated_tokens == 0
    good = here.engine("good", 3)
    (again,) = good.generated()
    good.say(again, 8, version=3, finish=FinishReason.STOP)
    assert [chunk.token_ids for chunk in await task] == [(8,)]


def test_engines_in_doubt_load_what_they_serve_anew_and_once(yard: Any, make_manifest: Any) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    one, other = here.engine("one", 1), here.engine("other")
    for _ in range(2):
        here.pool.weights.doubt("solver", True)
    assert versions(one) == [1, 1] and versions(other) == [1], "the other one is loading it"
    one.serve(1)
    here.pool.weights.doubt("solver", False)
    here.pool.weights.doubt("solver", True)
    assert versions(one) == [1, 1, 1]
    here.pool.publish(make_manifest(2))
    one.serve(1)
    assert versions(one) == [1, 1, 1, 2]
    one.serve(1)
    assert versions(one) == [1, 1, 1, 2], "it is loading that, whatever it says of another"


async def test_an_engine_that_names_weights_that_were_never_published_is_quarantined(
    yard: Any, make_manifest: Any
) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    engine = here.engine("odd")
    engine.serve(7)
    assert "serves version 7, which was not published" in here.told[0][2] and not engine.link.serves("solver", None)


async def test_what_could_not_be_loaded_is_tried_again_and_a_newer_one_at_once(
    yard: Any, make_manifest: Any, clock: Any
) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    session, sent = session_of(here.pool)
    session.receive(Failed("solver", "update_weights", "the link broke"))
    here.pool.publish(make_manifest(2))
    assert [m.manifest.version for m in sent] == [1, 2]
    here.pool.publish(make_manifest(3))
    session.receive(Failed("solver", "update_weights", "the link broke"))
    assert [m.manifest.version for m in sent] == [1, 2, 3], "others came while it was tried"
    session.receive(Failed("solver", "update_weights", "the link broke"))
    session.receive(Heartbeat())
    assert len(sent) == 3
    clock.now += RETRY_S
    session.receive(Heartbeat())
    assert sent[-1].manifest.version == 3 and len(sent) == 4
    assert "update_weights of 'solver' failed: the link broke" in engine_blockers(here.pool)[0]
    session.receive(WeightsServed("solver", 3, "sum-3"))
    session.receive(Heartbeat())
    assert engine_blockers(here.pool) == [] and len(sent) == 4


def session_of(pool: EnginePool, name: str = "e", pid: int = 1, **fields: Any) -> tuple[EngineSession, list[Any]]:
    sent: list[Any] = []
    register = Register(PROTOCOL_VERSION, "engine", name, "host", pid, **fields)
    return EngineSession(SessionParts(pool, {}, EventLog(None), Changed()), register, sent.append), sent


async def test_an_engine_that_leaves_ends_what_it_has_and_hands_over_the_rest(yard: Any, make_manifest: Any) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    session, sent = session_of(here.pool)
    session.receive(WeightsServed("solver", 1, "sum-1"))
    first, second = await here.start("a"), await here.start("b")
    ids = [message.request_id for message in sent if isinstance(message, Generate)]
    stays = here.engine("stays", 1)
    session.receive(Leave(drain_s=5.0))
    assert here.pool.lowest_served("solver").version == 1 and engine_replies(here.pool)[0].state == "leaving"
    await here.start("a")
    assert len(stays.generated()) == 1, "not to the episode's own engine"
    here.pool.publish(make_manifest(2))
    stays.serve(2)
    assert len([m for m in sent if isinstance(m, UpdateWeights)]) == 1
    end = TokenChunk(ids[0], (5,), (-0.5,), 1, FinishReason.STOP)
    session.receive(Tokens((end, TokenChunk(ids[1], (6,), (-0.5,), 1))))
    assert (await first)[-1].finish is FinishReason.STOP
    session.closed()
    again = stays.of(Generate)[-1]
    assert (again.request_id, again.resumed_tokens) == (ids[1], 1) and not second.done()


async def test_an_engine_that_comes_back_takes_its_place_before_the_old_connection_is_noticed(
    yard: Any, make_manifest: Any
) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    old, _ = session_of(here.pool)
    old.receive(WeightsServed("solver", 1, "sum-1"))
    await here.start("a")
    new, sent = session_of(here.pool)
    new.receive(WeightsServed("solver", 1, "sum-1"))
    assert [m.cache_key for m in sent if isinstance(m, Generate)] == ["a"]
    old.receive(WeightsServed("solver", 1, "sum-1"))
    old.closed()
    assert len(here.pool.links) == 1


def test_an_engine_of_some_policies_is_told_of_no_others(yard: Any, make_manifest: Any) -> None:
    here = yard()
    _, sent = session_of(here.pool, policies=("judge",))
    here.pool.publish(make_manifest(1))
    here.pool.pin(make_manifest(1))
    here.pool.publish(make_manifest(4, policy="judge"))
    here.pool.pin(make_manifest(4, policy="judge"))
    assert [(type(m).__name__, m.manifest.policy) for m in sent] == [
        ("UpdateWeights", "judge"),
        ("PinVersion", "judge"),
    ]


async def test_a_running_generation_moves_with_its_tokens(yard: Any, make_manifest: Callable[..., Manifest]) -> None:
    here = yard()
    here.pool.publish(make_manifest(1))
    first, second = here.engine("first", 1), here.engine("second", 1)
    task = await here.start("a")
    (request_id,) = first.generated()
    assert not here.pool.move(request_id, to=first.link, with_kv=True)
    assert here.pool.move(request_id, to=second.link, with_kv=True)
    assert not here.pool.move(request_id, to=second.link, with_kv=True), "it is under way"
    assert first.of(MoveOut) == [MoveOut(request_id, True)]
    first.say(request_id, 5, version=1)
    here.pool.moved_out(first.link, MovedOut(request_id, b"kv"))
    (sent,) = second.of(Generate)
    assert (sent.kv, sent.resumed_tokens, sent.request_id) == (b"kv", 1, request_id)
    second.say(request_id, 6, version=1, finish=FinishReason.STOP)
    assert [chunk.token_ids for chunk in await task] == [(5,), (6,)]
    here.pool.moved_out(first.link, MovedOut(request_id))  # told twice
    await here.start("a")
    assert len(second.generated()) == 2, "its episode went along"
    moving = second.generated()[1]
    assert here.pool.move(moving, to=first.link, with_kv=False)
    second.leave()
    assert first.generated()[-1] == moving and first.of(Generate)[-1].kv == b""
