"""The synchronous twin."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake

from wingbeat.core.errors import RequestError
from wingbeat.resources import Budgets, LocalSpec, ResourceLost, ResourceWait, SyncResources
from wingbeat.resources.backends.local import LocalBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def pool(backend: FakeBackend, tmp_path: Path) -> SyncResources:
    return SyncResources(Budgets(), backends={"fake": backend, "local": LocalBackend()}, ledger=tmp_path)


def test_leases_from_many_threads_take_turns(pool: SyncResources, backend: FakeBackend) -> None:
    def use(number: int) -> int:
        with pool.lease(fake(limit=2), owner=str(number)) as lease:
            lease.value.dirt.append("dirt")
            lease.value.check()  # a coroutine function of the value, called as an ordinary one
            return lease.value.number

    with pool, ThreadPoolExecutor(8) as threads:
        assert set(threads.map(use, range(40))) <= {0, 1}
        (stats,) = pool.snapshot()
        assert (stats.leased, stats.hold.count) == (0, 40)
    assert backend.alive == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "wingbeat-resources"]


def test_everything_has_its_twin(pool: SyncResources, backend: FakeBackend) -> None:
    with pool:
        with pool.lease_all({"a": fake(word="a"), "b": fake(word="b")}, owner="e") as leases:
            assert {name: lease.spec.title for name, lease in leases.items()} == {"a": "fake", "b": "fake"}
            assert pool.release_owner("e") == 2
            assert leases["a"].ended
            with pytest.raises(ResourceLost):
                _ = leases["a"].value
        pool.prefetch(fake(word="c"), owner="e")
        with pool.lease(fake(word="c"), name="c", owner="e") as lease:
            assert (lease.name, lease.owner, lease.value.number) == ("c", "e", 2)
        with pool.lease(fake(limit=1)), pytest.raises(ResourceWait), pool.lease(fake(limit=1), wait_s=0.01):
            raise AssertionError("there is only one")
        assert pool.budgets() == []
    with pytest.raises(RequestError, match="closed"):
        pool.release_owner("e")


def test_what_is_found_lost_is_not_used_again(pool: SyncResources, backend: FakeBackend) -> None:
    with pool:
        with pytest.raises(ResourceLost), pool.lease(fake()):
            raise ResourceLost("gone")
        assert backend.made[0].num_resets == 0


def test_an_object_of_this_process_comes_as_it_is(pool: SyncResources) -> None:
    with pool, pool.lease(LocalSpec(factory=list)) as lease:
        lease.value.append(1)
        assert lease.value == [1]
