"""Ten ways in which resource systems of agent training are known to fail, each shown not to happen here."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fake_backend import FakeBackend, failing, fake, held

from wingbeat.core.errors import ConfigError
from wingbeat.resources import Budgets, LocalSpec, Needs, Resources, ResourceWait, Reuse, SandboxSpec, Spec
from wingbeat.resources.turns import Request


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def pool_of(backend: FakeBackend, folder: Path, budgets: Budgets | None = None, *, wait_s: float = 60.0) -> Resources:
    return Resources(budgets or Budgets(), backends={"fake": backend}, ledger=folder, wait_s=wait_s)


async def soon() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_1_two_specs_of_one_episode_never_get_one_instance(backend: FakeBackend, tmp_path: Path) -> None:
    async with pool_of(backend, tmp_path) as pool:
        async with (
            pool.lease(fake(word="A"), owner="episode") as first,
            pool.lease(fake(word="B"), owner="episode") as second,
        ):
            assert (first.value.spec.word, second.value.spec.word) == ("A", "B")
        async with pool.lease(fake(word="A"), name="env", owner="episode"):
            with pytest.raises(ConfigError, match="another spec"):
                async with pool.lease(fake(word="B"), name="env", owner="episode"):
                    raise AssertionError("asked for B, got A")


async def test_2_what_is_given_back_is_clean_and_alive_when_it_is_handed_out_again(
    backend: FakeBackend, tmp_path: Path
) -> None:
    async with pool_of(backend, tmp_path) as pool:
        async with pool.lease(fake()) as lease:
            lease.value.dirt.append("the first episode's state")
        async with pool.lease(fake()) as lease:
            assert (lease.value.number, lease.value.dirt) == (0, [])
        backend.made[0].is_alive = False  # dies while nobody has it
        async with pool.lease(fake()) as lease:
            assert (lease.value.number, lease.value.is_alive) == (1, True)


@pytest.mark.parametrize(
    "other",
    [
        {"env": {"MODE": "b"}},
        {"files": {"a.txt": "b"}},
        {"mounts": ({"source": "/data", "target": "/data"},)},
        {"memory_mb": 128},
        {"network": True},
        {"workdir": "/elsewhere"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_3_a_difference_in_any_field_is_another_pool(other: dict[str, object]) -> None:
    spec = SandboxSpec(env={"MODE": "a"}, files={"a.txt": "a"}, memory_mb=64)
    assert spec.key != spec.model_copy(update=other).key
    assert spec.key == SandboxSpec(memory_mb=64, files={"a.txt": "a"}, env={"MODE": "a"}).key


async def test_4_a_shared_one_lives_until_its_last_holder_leaves(backend: FakeBackend, tmp_path: Path) -> None:
    judge = fake(reuse=Reuse.SHARED)
    async with pool_of(backend, tmp_path) as pool:
        first, second = pool.lease(judge, owner="a"), pool.lease(judge, owner="b")
        one, two = await first.__aenter__(), await second.__aenter__()
        assert one.value is two.value
        await pool.release_owner("a")
        assert two.value.is_alive
        assert backend.alive
        assert backend.made[0].num_closes == 0
        await second.__aexit__(None, None, None)


async def test_5_a_cancelled_or_failed_start_gives_its_place_back(backend: FakeBackend, tmp_path: Path) -> None:
    spec = fake(limit=1)
    async with pool_of(backend, tmp_path) as pool:
        backend.at("start", held(asyncio.Event()), failing(OSError("no")))
        cancelled = asyncio.create_task(_use(pool, spec))
        await soon()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        with pytest.raises(Exception, match="no"):
            await _use(pool, spec)
        for number in range(4):
            pool.prefetch(fake(limit=4, word="four"), owner=f"e{number}")
            backend.at("start", failing(OSError("no")))
        await soon()
        for number in range(4):
            await pool.release_owner(f"e{number}")
        async with asyncio.timeout(5):
            await _use(pool, spec)
            await asyncio.gather(*(_use(pool, fake(limit=4, word="four")) for _ in range(4)))


async def test_6_waits_are_bounded_and_opposite_orders_do_not_deadlock(backend: FakeBackend, tmp_path: Path) -> None:
    a, b = fake(word="a", limit=1), fake(word="b", limit=1)

    async def one_after_the_other(pool: Resources, first: Spec, then: Spec) -> None:
        async with pool.lease(first):
            await soon()
            async with pool.lease(then):
                pass

    async with pool_of(backend, tmp_path, wait_s=0.05) as pool:
        async with asyncio.timeout(5):
            results = await asyncio.gather(
                one_after_the_other(pool, a, b), one_after_the_other(pool, b, a), return_exceptions=True
            )
        assert ResourceWait in {type(result) for result in results}, "taken one by one: the wait ends, and says so"
        async with asyncio.timeout(5):
            await asyncio.gather(_use_all(pool, a, b), _use_all(pool, b, a))  # taken together: nobody waits in vain


async def test_7_what_is_fetched_ahead_starts_at_the_same_time_and_when_the_episode_begins(
    backend: FakeBackend, tmp_path: Path
) -> None:
    go = asyncio.Event()
    async with pool_of(backend, tmp_path) as pool:
        backend.at("start", *[held(go)] * 10)
        for number in range(10):
            pool.prefetch(fake(), owner=f"episode {number}")
        await soon()
        assert backend.num_starting == 10
        go.set()
        await soon()
        async with pool.lease(fake(), owner="episode 3") as lease:
            assert lease.value.number == 3
        assert len(backend.made) == 10


async def test_8_pools_of_many_specs_shrink(backend: FakeBackend, tmp_path: Path) -> None:
    specs = [fake(word=str(number), needs=Needs(cpus=1)) for number in range(50)]
    async with pool_of(backend, tmp_path, Budgets(cpus=8)) as pool:
        for spec in specs:
            await asyncio.gather(*(_use(pool, spec) for _ in range(4)))
        assert len(backend.alive) == 8, "under the need of others, up to the budget of all"
    unneedy = [spec.model_copy(update={"needs": None}) for spec in specs]
    async with pool_of(backend, tmp_path, Budgets(max_idle=16)) as pool:
        for spec in unneedy:
            await asyncio.gather(*(_use(pool, spec) for _ in range(4)))
        await soon()
        assert pool.num_idle == 16, "what needs nothing is bounded in number"
    gone = asyncio.Event()
    async with pool_of(backend, tmp_path) as pool:
        backend.at("close", gone.set)
        await _use(pool, fake(idle_ttl_s=0.01))
        await asyncio.wait_for(gone.wait(), 5)
        assert pool.num_idle == 0, "and what nobody uses goes"


def test_9_it_works_in_one_asyncio_run_after_another_also_once_contended(tmp_path: Path) -> None:
    pool = Resources(Budgets(), ledger=tmp_path)
    spec = LocalSpec(factory=list, limit=1)

    async def contend() -> None:
        await asyncio.gather(*(_use(pool, spec) for _ in range(10)))

    asyncio.run(contend())
    asyncio.run(contend())


async def test_10_giving_one_back_wakes_exactly_the_one_whose_turn_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: `python -m bench.resources` times it."""
    wakes, looks = 0, 0
    wake = Request.wake

    def counted(request: Request) -> None:
        nonlocal wakes
        wakes += len(request.futures)
        wake(request)

    monkeypatch.setattr(Request, "wake", counted)
    spec = LocalSpec(factory=list, reuse=Reuse.AFTER_RESET, reset=list.clear, limit=8)

    def clock() -> float:
        nonlocal looks
        looks += 1
        return time.monotonic()

    async with Resources(Budgets(), ledger=tmp_path, clock=clock) as pool:
        await asyncio.gather(*(_use(pool, spec) for _ in range(512)))
    assert wakes == 512, "each that waited (for its turn, or for its start) once"
    assert looks < 512 * 16, "and no work that grows with the number of those who wait"


async def _use(pool: Resources, spec: Spec) -> None:
    async with pool.lease(spec):
        await asyncio.sleep(0)


async def _use_all(pool: Resources, *specs: Spec) -> None:
    async with pool.lease_all({str(number): spec for number, spec in enumerate(specs)}):
        await soon()
