"""Many episodes at once, with random wishes and faults: whatever happens, everything is given back."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_backend import FakeBackend, Thing, fake
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import WingbeatError
from wingbeat.resources import Budgets, Needs, ResourceFailed, ResourceLost, Resources, Reuse, Spec

SPECS: list[Spec] = [
    fake(word="one at a time", limit=1),
    fake(word="small", needs=Needs(cpus=1), max_uses=3),
    fake(word="large", needs=Needs(cpus=3), reuse=Reuse.NEVER),
    fake(word="judge", reuse=Reuse.SHARED, needs=Needs(cpus=1)),
    fake(word="short of shared", reuse=Reuse.SHARED, max_uses=2),
]
FAULTS = ("start", "reset", "check", "close")


@dataclass(frozen=True)
class Episode:
    """What one owner does."""

    wishes: tuple[tuple[int, ...], ...]
    """Blocks one after the other, each of several at once."""
    fetches: tuple[int, ...]
    steps: int
    """How long it stays in each block."""
    ends: str
    cancelled_after: int | None


episodes = st.builds(
    Episode,
    wishes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True).map(tuple), max_size=3).map(tuple),
    fetches=st.lists(st.integers(0, 4), max_size=2, unique=True).map(tuple),
    steps=st.integers(0, 3),
    ends=st.sampled_from(["well", "well", "lost", "released", "raises"]),
    cancelled_after=st.none() | st.integers(0, 25),
)


class Tally:
    """Who has what now."""

    def __init__(self) -> None:
        self.users: dict[Thing, int] = {}

    def take(self, thing: Thing) -> None:
        users = self.users[thing] = self.users.get(thing, 0) + 1
        assert thing.num_closes == 0, "handed out although it was closed"
        if thing.spec.reuse is not Reuse.SHARED:
            assert users == 1, "handed out twice"
            assert thing.dirt == [], "handed out dirty"
            thing.dirt.append("dirt")

    def give_back(self, thing: Thing) -> None:
        self.users[thing] -= 1


async def play(pool: Resources, owner: str, episode: Episode, tally: Tally) -> None:
    try:
        if episode.fetches:
            pool.prefetch({str(n): SPECS[n] for n in episode.fetches}, owner=owner)
        for wish in episode.wishes:
            async with pool.lease_all({str(n): SPECS[n] for n in wish}, owner=owner) as leases:
                things: list[Thing] = [lease.value for lease in leases.values()]
                for thing in things:
                    tally.take(thing)
                try:
                    for _ in range(episode.steps):
                        await asyncio.sleep(0)
                    if episode.ends == "lost":
                        raise ResourceLost("for the test")
                    if episode.ends == "raises":
                        raise ValueError("for the test")
                finally:
                    for thing in things:
                        tally.give_back(thing)
                if episode.ends == "released":
                    await pool.release_owner(owner)
    finally:
        await asyncio.shield(pool.release_owner(owner))


async def scene(all_of_them: list[Episode], faults: list[tuple[str, int]], folder: Path) -> None:
    backend = FakeBackend()
    for name, after in faults:
        backend.at(name, *[lambda: None] * after, _fail)
    tally = Tally()
    async with Resources(Budgets(cpus=4, max_idle=2), backends={"fake": backend}, ledger=folder) as pool:
        tasks = [asyncio.create_task(play(pool, f"e{n}", e, tally)) for n, e in enumerate(all_of_them)]
        timers = [
            asyncio.create_task(_cancel(task, episode.cancelled_after))
            for task, episode in zip(tasks, all_of_them, strict=True)
            if episode.cancelled_after is not None
        ]
        async with asyncio.timeout(20):
            results: list[Any] = await asyncio.gather(*tasks, *timers, return_exceptions=True)
        allowed = (asyncio.CancelledError, WingbeatError, ValueError)
        assert all(result is None or isinstance(result, allowed) for result in results), results
        backend.steps.clear()
        async with asyncio.timeout(20):  # everything can be had again
            for spec in SPECS:
                async with pool.lease(spec):
                    pass
        num_leaked = sum(stats.leaked for stats in pool.snapshot())
    assert pool.num_leases == 0
    assert len(backend.alive) <= num_leaked, "what is left was counted"
    assert all(stats.live == stats.leased == stats.waiting == stats.idle == 0 for stats in pool.snapshot())
    assert all(budget.used == 0 and budget.waiting == 0 for budget in pool.budgets())
    assert num_leaked or os.listdir(folder) == []


def _fail() -> None:
    raise ResourceFailed("for the test")


async def _cancel(task: asyncio.Task[None], after: int) -> None:
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()


@given(
    st.lists(episodes, min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 4)), max_size=3, unique_by=lambda fault: fault[0]),
)
@settings(max_examples=40)
def test_whatever_happens_everything_is_given_back(all_of_them: list[Episode], faults: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scene(all_of_them, faults, Path(folder)))
