"""Lines that nothing else held: what a pool and its ledger do where two of them, or two owners, meet."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake, held

from wingbeat.resources import ResourceLost, Resources, Reuse, SandboxSpec, Spec, SubprocessSpec
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.sandbox_process import Handle
from wingbeat.resources.backends.subprocess import SubprocessBackend
from wingbeat.resources.ledger import Ledger, Owner
from wingbeat.resources.reaper import reap


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def pool(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Resources]:
    async with Resources(backends={"fake": backend}, ledger=tmp_path) as resources:
        yield resources


async def soon() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def use(pool: Resources, spec: Spec, owner: str) -> None:
    async with pool.lease(spec, owner=owner):
        await asyncio.sleep(0)


async def test_an_owner_that_ends_waits_no_longer_for_a_start_that_it_shares(
    pool: Resources, backend: FakeBackend
) -> None:
    go = asyncio.Event()
    backend.at("start", held(go))
    shared = fake(reuse=Reuse.SHARED)
    ends, stays = (asyncio.create_task(use(pool, shared, owner)) for owner in ("ends", "stays"))
    await soon()
    await pool.release_owner("ends")
    async with asyncio.timeout(5):
        with pytest.raises(ResourceLost, match="'ends' were released"):
            await ends
    assert not stays.done()
    go.set()
    await stays
    assert len(backend.made) == 1


async def test_several_held_together_that_are_found_lost_are_not_used_again(
    pool: Resources, backend: FakeBackend
) -> None:
    specs = {"a": fake(word="a"), "b": fake(word="b")}
    with pytest.raises(ResourceLost, match="one of them"):
        async with pool.lease_all(specs, owner="e"):
            raise ResourceLost("one of them, who knows which")
    assert pool.snapshot()[0].quarantined == 2
    async with pool.lease_all(specs, owner="e") as leases:
        assert {lease.value.number for lease in leases.values()} == {2, 3}


async def test_a_reaper_that_may_end_a_part_leaves_the_rest_noted(tmp_path: Path, backend: FakeBackend) -> None:
    """Numbers of processes mean others in another container; names of what a daemon runs are the same everywhere."""
    ledger = Ledger(tmp_path)
    ledger.started("fake", "thing 7")
    ledger.started("fake", "pid 4711 start 1")
    assert ledger.path is not None
    text = ledger.path.read_text()
    here = Owner.this_process()
    elsewhere = replace(here, space="pid:[another]")
    path = tmp_path / "left.jsonl"
    path.write_text(text.replace(_json(here), _json(elsewhere)))
    assert "another" in path.read_text()
    ledger.ended("fake", "thing 7")
    ledger.ended("fake", "pid 4711 start 1")
    ledger.close()
    await reap(tmp_path, backends={"fake": backend})
    assert backend.reaped == ["thing 7"]
    assert "pid 4711 start 1" in path.read_text(), "whoever may end it still finds it"
    await reap(tmp_path, backends={"fake": backend})
    assert backend.reaped == ["thing 7"] and path.exists()


def _json(owner: Owner) -> str:
    return json.dumps({"owner": asdict(owner)})


BOXES = {
    "sandbox": (SandboxBackend, SandboxSpec()),
    "subprocess": (SubprocessBackend, SubprocessSpec(network=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOXES)
async def test_no_command_gains_what_its_box_was_not_given(kind: str) -> None:
    if kind == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    make, spec = BOXES[kind]
    backend = make()
    instance = await backend.start(spec, started=lambda _: None)
    try:
        status = (await instance.value.run("cat /proc/self/status; id -G")).stdout.decode().splitlines()
        assert "NoNewPrivs:\t1" in status
        assert kind != "sandbox" or status[-1] == "1000"
    finally:
        await instance.close()
        await backend.close()


GROUPS = """
import asyncio, os
from wingbeat.resources import SandboxSpec
from wingbeat.resources.backends.sandbox import SandboxBackend

async def main():
    os.setgroups([0, 4, 15])
    backend = SandboxBackend()
    instance = await backend.start(SandboxSpec(), started=lambda _: None)
    print((await instance.value.run("id -G")).stdout.decode())
    await instance.close()
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("bwrap") is None, reason="needs root and bubblewrap")
def test_a_sandbox_has_no_group_of_its_owners() -> None:
    """What only they may read could be bound into it; outside, its processes would be of those groups."""
    command = [sys.executable, "-c", GROUPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1000"]


FORKS = """
import asyncio, os, signal, time
from wingbeat.resources import SubprocessSpec
from wingbeat.resources.backends.subprocess import SubprocessBackend

async def main():
    instance = await SubprocessBackend().start(SubprocessSpec(network=True), started=lambda _: None)
    await instance.value.run("(setsid sleep 1000 &)")
    child = os.fork()
    if child == 0:  # has the socket, too
        time.sleep(60)
        os._exit(0)
    print(child, instance.handle, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_box_ends_with_its_owner_though_somebody_else_has_its_socket() -> None:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child, _, text = owner.stdout.readline().partition(" ")
        handle = Handle.parse(text.strip())
        try:
            until = time.monotonic() + 20
            while handle.is_alive or Path(handle.folder).exists():
                assert time.monotonic() < until, "the box outlives its owner"
                time.sleep(0.01)
        finally:
            os.kill(int(child), signal.SIGKILL)
