"""Leases while there is less work than clients want; quotas of leases, of open episodes and of waiting calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import LimitReached
from wingbeat.core.protocol import AbortRequest, BeginReply, BeginRequest, LeaseReply, LeaseRequest, TaskModel
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.groups import SlotState

OpenDesk = Callable[..., Any]


def ask(desk: Any, client: str, *, count: int = 1, wait_s: float = 30.0) -> asyncio.Task[LeaseReply]:
    request = LeaseRequest(client_id=client, max_leases=count, splits=[Split.TRAIN], wait_s=wait_s)
    return asyncio.create_task(desk.rollouts.lease(request))


async def begin(desk: Any, client: str, key: str, *, split: Split = Split.EVAL) -> BeginReply:
    request = BeginRequest(client_id=client, idempotency_key=key, task=TaskModel(id="t"), split=split)
    return await desk.rollouts.begin(request, base_url="http://here/v1")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def clear_source(desk: Any) -> None:
    for name in desk.dealer.sources:
        desk.dealer.remove(name)


async def test_a_thousand_calls_of_one_client_get_what_one_call_of_another_gets(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"begin_wait_s": 30}, limits={"waiting": 1000}, group_size=4, groups_per_step=8)
    tasks = [Task("src", f"t{i}") for i in range(100)]
    clear_source(desk)
    flood = [ask(desk, "flooder", count=256) for _ in range(1000)]
    await settle()
    good = ask(desk, "good", count=16)
    await settle()
    assert not good.done()
    with pytest.raises(LimitReached, match=r"limits\.waiting"):
        await ask(desk, "flooder")
    desk.dealer.add_source("src", Split.TRAIN, tasks)
    desk.changed.notify()
    await settle()
    assert len((await good).leases) == 16
    granted = Counter(len(task.result().leases) for task in flood if task.done())
    total = sum(size * times for size, times in granted.items())
    assert total + 16 == desk.book.counts().slots[SlotState.LEASED] > 32  # and nothing was left over
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    desk.check_writes()


async def test_scarce_slots_go_round(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"begin_wait_s": 30}, group_size=8, groups_per_step=1, max_staleness=0)
    clear_source(desk)
    waiting = {name: [ask(desk, name, count=3) for _ in range(3)] for name in ("a", "b", "c", "d")}
    await settle()
    desk.dealer.add_source("src", Split.TRAIN, [Task("src", "t")])
    desk.changed.notify()
    await settle()
    served = {name: sum(len(t.result().leases) for t in tasks if t.done()) for name, tasks in waiting.items()}
    assert served == {"a": 2, "b": 2, "c": 2, "d": 2}
    for task in (task for tasks in waiting.values() for task in tasks):
        task.cancel()


async def test_what_was_handed_to_a_caller_that_left_goes_to_the_next(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"begin_wait_s": 30}, group_size=2, groups_per_step=1, max_staleness=0)
    clear_source(desk)
    gone, stays = ask(desk, "gone", count=2), ask(desk, "stays", count=2)
    await settle()
    desk.dealer.add_source("src", Split.TRAIN, [Task("src", "t")])
    desk.changed.notify()
    gone.cancel()  # in the same moment in which the others are served
    await settle()
    first = (await stays).leases
    second = (await ask(desk, "stays", count=2, wait_s=0)).leases
    assert len(first) + len(second) == 2 and desk.limits.leases.held("gone") == 0


async def test_a_client_that_begins_nothing_holds_so_many_leases_and_gets_them_back(
    open_desk: OpenDesk, clock: Any
) -> None:
    desk = open_desk(limits={"leases": 3}, group_size=8)
    desk.dealer.add_source("src", Split.TRAIN, [Task("src", "t")])
    assert len((await ask(desk, "hoarder", count=256)).leases) == 3
    with pytest.raises(LimitReached, match=r"client 'hoarder' has 3 of 3 leases .*limits\.leases"):
        await ask(desk, "hoarder")
    lease = (await ask(desk, "good")).leases[0]
    await desk.rollouts.begin(BeginRequest(idempotency_key="k", lease_id=lease.lease_id), base_url="")
    assert (desk.limits.leases.held("hoarder"), desk.limits.leases.held("good")) == (3, 0)
    clock.now += ServerConfig().lease_s + 1
    desk.rollouts.reap()
    assert desk.limits.leases.num_held == 0 and desk.rollouts.num_leased == 0
    assert desk.endings.counts["client/lease_expired"] == 3
    assert len((await ask(desk, "hoarder", count=256)).leases) == 3


async def test_a_call_whose_answer_was_lost_gets_it_again(open_desk: OpenDesk, clock: Any) -> None:
    desk = open_desk(group_size=8)
    desk.dealer.add_source("src", Split.TRAIN, [Task("src", "t")])
    request = LeaseRequest(client_id="me", max_leases=3, splits=[Split.TRAIN], wait_s=0, idempotency_key="call-1")
    leases = (await desk.rollouts.lease(request)).leases
    clock.now += 10
    again = (await desk.rollouts.lease(request)).leases
    assert [lease.lease_id for lease in again] == [lease.lease_id for lease in leases]
    assert (again[0].expires_s, desk.rollouts.num_leased) == (leases[0].expires_s - 10, 3)
    stranger = (await desk.rollouts.lease(request.model_copy(update={"client_id": "other"}))).leases
    assert {lease.lease_id for lease in stranger}.isdisjoint(lease.lease_id for lease in leases)
    await desk.rollouts.begin(BeginRequest(idempotency_key="k", lease_id=leases[0].lease_id), base_url="")
    assert desk.rollouts.release([leases[1].lease_id], client="me") == 1
    assert [lease.lease_id for lease in (await desk.rollouts.lease(request)).leases] == [leases[2].lease_id]
    clock.now += ServerConfig().lease_s
    desk.rollouts.reap()
    fresh = (await desk.rollouts.lease(request)).leases  # nothing is left of that answer
    assert len(fresh) == 3 and leases[2].lease_id not in {lease.lease_id for lease in fresh}


async def test_open_episodes_are_counted_until_they_end_or_are_lost(open_desk: OpenDesk, clock: Any) -> None:
    desk = open_desk(limits={"open_episodes": 2, "total_open_episodes": 3})
    first, second = await begin(desk, "a", "1"), await begin(desk, "a", "2")
    with pytest.raises(LimitReached, match=r"client 'a' has 2 of 2 open episodes \(limits\.open_episodes\)"):
        await begin(desk, "a", "3")
    assert (await begin(desk, "a", "2")).episode_id == second.episode_id  # a repeat asks for nothing new
    await begin(desk, "b", "4")
    with pytest.raises(LimitReached, match=r"have 3 of 3 open episodes \(limits\.total_open_episodes\)"):
        await begin(desk, "b", "5")
    await begin(desk, "c", "6")  # beyond the total, within its share
    desk.finishing.abort(desk.episode(first.episode_id), AbortRequest())
    assert desk.limits.episodes.held("a") == 1
    clock.now += 1000
    desk.rollouts.reap()
    assert desk.limits.episodes.num_held == 0
    await begin(desk, "a", "8")
    desk.check_writes()


async def test_begins_that_wait_for_room_are_bounded(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"begin_wait_s": 30}, limits={"waiting": 5, "total_waiting": 5}, max_staleness=0)
    while desk.solver.admits_group():
        await begin(desk, "a", f"k{desk.book.counts().num_groups}", split=Split.TRAIN)
    waiting = [asyncio.create_task(begin(desk, "a", f"w{i}", split=Split.TRAIN)) for i in range(5)]
    await settle()
    with pytest.raises(LimitReached, match=r"5 of 5 begin and lease calls that wait"):
        await begin(desk, "a", "one more", split=Split.TRAIN)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert desk.limits.waiting.num_held == 0


async def test_a_change_that_helps_nobody_costs_no_search_for_each_that_waits(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"begin_wait_s": 30})
    clear_source(desk)
    searches = Counter[str]()
    free_groups = desk.variants.free_groups
    desk.variants.free_groups = lambda variant: searches.update(["groups"]) or free_groups(variant)
    waiting = [ask(desk, f"client-{number}") for number in range(200)]
    await settle()
    before = searches["groups"]
    desk.changed.notify()
    await settle()
    assert 0 < searches["groups"] - before <= 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
