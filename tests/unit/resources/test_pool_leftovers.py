"""What may appear after somebody looked for it, and what could not be ended at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_container
import pytest
from fake_backend import FakeBackend, failing, fake, held
from fake_docker import FakeDocker
from fake_kubernetes import FakeKubernetes
from test_ledger import DEAD, forge

from wingbeat.resources import (
    Budgets,
    LocalSpec,
    Reaped,
    ResourceFailed,
    Resources,
    Reuse,
    pool_leftovers,
    pool_tenants,
    reap,
)
from wingbeat.resources.backend import Backend
from wingbeat.resources.backends.docker import LATE_S, DockerBackend
from wingbeat.resources.backends.kubernetes import KubernetesBackend
from wingbeat.resources.reaper import look


class Late(FakeBackend):
    """As if somebody else made its things, at its request."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.late_s = late_s
        self.looks: asyncio.Queue[str] = asyncio.Queue()

    async def reap(self, handle: str) -> bool:
        self.looks.put_nowait(handle)
        return await super().reap(handle)


ENTRY = ("fake", "thing 7")


def appear(backend: FakeBackend) -> None:
    thing: Any = object()
    backend.alive["thing 7"] = thing


async def test_what_appears_after_the_first_look_is_ended_by_the_second(tmp_path: Path) -> None:
    path = forge(tmp_path, entries=[ENTRY], **DEAD)
    backend = Late(100.0)
    known = {"fake": backend}
    assert await look(tmp_path, backends=known, clock=lambda: 1000.0) == Reaped(again_s=100.0)
    assert await look(tmp_path, backends=known, clock=lambda: 1060.0) == Reaped(again_s=40.0)
    appear(backend)
    assert await look(tmp_path, backends=known, clock=lambda: 1099.0) == Reaped(ended=(ENTRY,), again_s=1.0)
    appear(backend)
    assert await look(tmp_path, backends=known, clock=lambda: 1100.0) == Reaped(ended=(ENTRY,))
    assert not path.exists()
    assert backend.alive == {}


async def test_a_clock_that_was_set_back_only_makes_it_wait_again(tmp_path: Path) -> None:
    forge(tmp_path, entries=[ENTRY], **DEAD)
    known = {"fake": Late(100.0)}
    for now, again_s in ((1000.0, 100.0), (10.0, 100.0), (50.0, 60.0)):
        assert await look(tmp_path, backends=known, clock=lambda now=now: now) == Reaped(again_s=again_s)
    assert await look(tmp_path, backends=known, clock=lambda: 110.0) == Reaped(gone=(ENTRY,))


async def test_reaping_by_hand_waits_for_what_may_come(tmp_path: Path) -> None:
    forge(tmp_path, entries=[ENTRY, ("fake", "thing 8")], **DEAD)
    backend = Late(0.02)
    appear(backend)
    assert await reap(tmp_path, backends={"fake": backend}) == Reaped(ended=(ENTRY,), gone=(("fake", "thing 8"),))
    assert os.listdir(tmp_path) == []


async def test_a_pool_looks_again_and_does_not_wait_for_it_to_close(tmp_path: Path) -> None:
    forge(tmp_path, entries=[ENTRY], **DEAD)
    backend = Late(0.02)
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path):
        assert await backend.looks.get() == "thing 7"
        appear(backend)
        assert await backend.looks.get() == "thing 7"
    assert backend.alive == {}
    assert os.listdir(tmp_path) == []
    forge(tmp_path, entries=[ENTRY], **DEAD)
    patient = Late(1000.0)
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": patient}, ledger=tmp_path):
        await patient.looks.get()
    assert len(os.listdir(tmp_path)) == 1, "the next one goes on with it"


async def test_a_start_that_failed_is_looked_for_again(tmp_path: Path) -> None:
    """A request that broke off may still be carried out."""
    backend = Late(0.1)
    backend.at("start", failing(TimeoutError("the daemon did not answer")))
    async with asyncio.timeout(10):
        async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
            with pytest.raises(ResourceFailed, match="did not answer"):
                async with pool.lease(fake()):
                    raise AssertionError("it did not start")
            assert await backend.looks.get() == "thing 0"
            backend.alive["thing 0"] = backend.made[0]
            assert await backend.looks.get() == "thing 0"
        assert backend.alive == {}
    assert os.listdir(tmp_path) == []


async def test_what_could_not_be_ended_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(Late):
        num_refusals = 3

        async def reap(self, handle: str) -> bool:
            if self.num_refusals:
                self.num_refusals -= 1
                raise ResourceFailed("the daemon is away")
            return await super().reap(handle)

    monkeypatch.setattr(pool_leftovers, "RETRY_S", 0.005)
    backend = Away(0.0)
    backend.at("close", failing(RuntimeError("the daemon is away")))
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
        async with pool.lease(fake(reuse=Reuse.NEVER)):
            pass
        assert pool.snapshot()[0].leaked == 1
        assert await backend.looks.get() == "thing 0"
    assert backend.alive == {}
    assert os.listdir(tmp_path) == []


async def test_a_pool_that_closes_does_not_wait_for_a_daemon_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = asyncio.Event()

    class Hanging(Late):
        async def reap(self, handle: str) -> bool:
            if not self.looks.empty():
                looking.set()
                await asyncio.Event().wait()
            self.looks.put_nowait(handle)
            raise ResourceFailed("the daemon is away")

    monkeypatch.setattr(pool_leftovers, "RETRY_S", 0.0)
    monkeypatch.setattr(pool_tenants, "UNWANTED_S", 0.01)
    backend = Hanging(0.0)
    backend.at("close", failing(RuntimeError("the daemon is away")))
    async with asyncio.timeout(10):
        async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
            async with pool.lease(fake(reuse=Reuse.NEVER)):
                pass
            await looking.wait()
    assert (await look(tmp_path, backends={"fake": FakeBackend()})).gone == (("fake", "thing 0"),)


async def test_what_is_left_as_the_pool_closes_is_the_next_ones(tmp_path: Path) -> None:
    """Of the same process, too: it may make a pool for each evaluation, for a week."""
    backend, descriptors = Late(1000.0), len(os.listdir("/proc/self/fd"))
    backend.at("start", failing(TimeoutError("the daemon did not answer")))
    known = {"fake": backend}
    async with asyncio.timeout(10), Resources(Budgets(), backends=known, ledger=tmp_path) as pool:
        with pytest.raises(ResourceFailed):
            async with pool.lease(fake()):
                raise AssertionError("it did not start")
        assert await look(tmp_path, backends=known) == Reaped(), "it is still this pool's"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (name,) = os.listdir(tmp_path)
    told = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert told[1:] == [{"started": ["fake", "thing 0"]}, {"closed": True}]
    assert await look(tmp_path, backends=known, clock=lambda: 0.0) == Reaped(again_s=1000.0)
    assert await look(tmp_path, backends=known, clock=lambda: 1000.0) == Reaped(gone=(("fake", "thing 0"),))


# --- hooks that swallow their cancellation


@pytest.mark.parametrize("hook", ["reset", "close", "health"])
async def test_a_hook_that_swallows_its_cancellation_keeps_nobody(hook: str, tmp_path: Path) -> None:
    over = asyncio.Event()

    async def stubborn(_: object) -> bool:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return True

    hooks: dict[str, Any] = {"reset": lambda _: None, hook: stubborn, "reset_timeout_s": 0.01, "close_timeout_s": 0.01}
    spec = LocalSpec(factory=object, reuse=Reuse.AFTER_RESET, limit=1, max_uses=2, **hooks)
    try:
        async with asyncio.timeout(10):
            async with Resources(Budgets(), ledger=tmp_path) as pool:
                for _ in range(3):
                    async with pool.lease(spec):
                        pass
            (stats,) = pool.snapshot()
            assert (stats.live, stats.leaked > 0, stats.quarantined > 0) == (0, hook == "close", hook != "close")
    finally:
        over.set()


async def test_a_start_that_goes_on_after_it_was_given_up_is_closed(tmp_path: Path) -> None:
    backend, over = FakeBackend(), asyncio.Event()

    async def stubborn() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    closed = asyncio.Event()
    backend.at("start", stubborn)
    backend.at("close", closed.set)
    spec = fake(start_timeout_s=0.01, close_timeout_s=0.01)
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
        with pytest.raises(ResourceFailed, match=r"took longer than 0\.01 s"):
            async with pool.lease(spec):
                raise AssertionError("it did not start")
        over.set()
        await closed.wait()
        async with pool.lease(fake()) as lease:
            assert lease.value.number == 1
    assert backend.alive == {}


async def test_one_that_came_after_it_was_given_up_and_cannot_be_closed_is_ended_by_its_name(tmp_path: Path) -> None:
    backend, over = Late(0.0), asyncio.Event()

    async def stubborn() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        backend.alive["thing 0"] = backend.made[0]

    backend.at("start", stubborn)
    backend.at("close", failing(RuntimeError("the daemon is away")))
    spec = fake(start_timeout_s=0.01, close_timeout_s=0.01)
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
        with pytest.raises(ResourceFailed, match=r"took longer than 0\.01 s"):
            async with pool.lease(spec):
                raise AssertionError("it did not start")
        assert await backend.looks.get() == "thing 0"
        over.set()
        assert await backend.looks.get() == "thing 0"
    assert backend.alive == {}


async def test_a_start_that_ends_as_it_is_cancelled_is_not_lost(tmp_path: Path) -> None:
    backend, begun, started = FakeBackend(), asyncio.Event(), asyncio.Event()
    backend.at("before start", begun.set)
    backend.at("start", held(started))
    async with asyncio.timeout(10), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool:
        waiting = asyncio.create_task(pool.lease(fake()).__aenter__())
        await begun.wait()
        started.set()
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert backend.alive == {}
    assert [thing.num_closes for thing in backend.made] in ([1], [0]), "closed, or never whole"


# --- against the fake daemon and the fake cluster

OWNER = """
import asyncio, sys
from pathlib import Path
from wingbeat.resources import {spec}, Resources
from wingbeat.resources.backends.{module} import {backend}
{more}

async def main():
    backends = {{"{module}": made()}}
    async with Resources(backends=backends, ledger=Path(sys.argv[1])) as pool, pool.lease({spec}({fields})):
        raise AssertionError("the request for it is held up")

asyncio.run(main())
"""


class Held:
    """A request that is held up in its server."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def hold(self) -> None:
        self.asked.set()
        self.released.wait(30)


async def _owner_killed_as_it_asks(
    folder: Path, source: str, request: Held, backend: Backend, num_there: Callable[[], int]
) -> None:
    """What its daemon makes of its last request, when it is dead and somebody has looked, is found nevertheless."""
    owner = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", source, str(folder)])
    try:
        assert await asyncio.to_thread(request.asked.wait, 30)
    finally:
        owner.kill()
        await asyncio.to_thread(owner.wait)
    known, now = {backend.kind: backend}, 1000.0
    first = await look(folder, backends=known, clock=lambda: now)
    assert (first.ended, first.gone, first.left, first.again_s) == ((), (), (), LATE_S)
    request.released.set()
    await asyncio.to_thread(_wait_for, num_there)
    second = await look(folder, backends=known, clock=lambda: now + LATE_S)
    assert (len(second.ended), second.again_s, num_there()) == (1, None, 0)
    assert await look(folder, backends=known) == Reaped()
    await backend.close()


def _wait_for(num_there: Callable[[], int]) -> None:
    until = time.monotonic() + 30
    while not num_there():
        assert time.monotonic() < until, "the server made nothing"
        time.sleep(0.002)


needs_containers = pytest.mark.skipif(bool(fake_container.WHY_NOT), reason=fake_container.WHY_NOT)


@pytest.mark.slow
@needs_containers
async def test_a_container_that_is_made_after_its_owners_death_is_removed(tmp_path: Path) -> None:
    request = Held()

    def hold(method: str, path: str) -> None:
        if path == "/containers/create":
            request.hold()

    with FakeDocker(on_request=hold) as daemon:
        fields = f"image='python:3.12-slim', host={daemon.url!r}"
        source = OWNER.format(
            spec="DockerSpec", module="docker", backend="DockerBackend", fields=fields, more="made = DockerBackend"
        )
        await _owner_killed_as_it_asks(tmp_path, source, request, DockerBackend(), lambda: len(daemon.containers))


@pytest.mark.slow
@needs_containers
async def test_a_pod_that_is_made_after_its_owners_death_is_deleted(tmp_path: Path) -> None:
    from kubernetes import client

    request = Held()
    with FakeKubernetes(before_create=request.hold) as cluster:
        backend = KubernetesBackend(client.Configuration(host=cluster.url))
        configuration = f"client.Configuration(host={cluster.url!r})"
        source = OWNER.format(
            spec="KubernetesSpec",
            module="kubernetes",
            backend="KubernetesBackend",
            fields="image='python:3.12-slim', network_policies=True",
            more=f"from kubernetes import client\nmade = lambda: KubernetesBackend({configuration})",
        )
        await _owner_killed_as_it_asks(tmp_path, source, request, backend, lambda: len(cluster.pods))
