"""Boxes in actors on the nodes of a real Ray cluster on this machine: ``make test-ray``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # everything on loopback
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pytest
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "resources"))  # `conformance`: test folders are no packages

import conformance

from wingbeat.core.errors import ConfigError
from wingbeat.resources import (
    Budgets,
    Needs,
    RaySpec,
    ResourceLost,
    Resources,
    Reuse,
    SandboxSpec,
    SubprocessSpec,
    UnsupportedField,
)
from wingbeat.resources.backends.ray import RayBackend
from wingbeat.resources.boxes import Box

BOX = SubprocessSpec(network=True, files={"given.txt": "x"}, needs=Needs(cpus=1))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room, and two nodes with room for one box each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    ray.init(address=made.address, namespace="wingbeat", log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def num_boxes() -> int:
    """Processes of boxes on this machine, which all nodes are."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += b"sandbox_init" in path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_boxes_run_on_several_nodes_and_a_dead_actor_is_a_lost_resource(cluster: Cluster) -> None:
    spec = RaySpec(box=BOX, reuse=Reuse.AFTER_RESET)
    async with Resources(Budgets()) as pool, pool.lease_all({"one": spec, "two": spec}, owner="episode") as leases:
        boxes = [lease.value for lease in leases.values()]
        await asyncio.gather(*(box.write("mine.txt", str(n).encode()) for n, box in enumerate(boxes)))
        assert [await box.read("mine.txt") for box in boxes] == [b"0", b"1"]
        assert (await boxes[0].run(["cat", "given.txt"])).stdout == b"x"
        alive = [a for a in ray._private.state.actors().values() if a["State"] == "ALIVE"]
        assert len({actor["Address"]["NodeID"] for actor in alive if actor["ActorClassName"] == "BoxActor"}) == 2
        with pytest.raises(FileNotFoundError):
            await boxes[0].read("nothing")
        running = asyncio.create_task(boxes[0].run("touch begun; sleep 300"))
        async with asyncio.timeout(20):
            while "begun" not in await boxes[0].list():
                pass
        ray.kill(boxes[0]._actor)
        with pytest.raises(ResourceLost):
            await running
        with pytest.raises(ResourceLost):
            await boxes[0].run("true")
        assert (await boxes[1].run("echo on")).stdout == b"on\n"
    async with asyncio.timeout(20):
        while num_boxes():  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.05)


def test_what_a_lease_says_is_said_once() -> None:
    with pytest.raises(UnsupportedField, match=r"box\.limit"):
        RayBackend().check(RaySpec(box=SandboxSpec(limit=2)))
    with pytest.raises(UnsupportedField, match="client mode"):
        RayBackend().check(RaySpec(box=SandboxSpec(), address="ray://host:10001"))


async def test_another_cluster_than_that_of_this_process_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="the cluster that this process is in"):
        await RayBackend().start(RaySpec(box=BOX, address="10.0.0.1:6379"), started=lambda handle: None)


@pytest.mark.parametrize(
    "check",
    [c for c in conformance.ALL if conformance.name_of(c) != "cancel_during_start_leaks_nothing"],
    ids=conformance.name_of,
)
async def test_ray_conforms(cluster: Cluster, check: conformance.Check) -> None:
    async def kill(instance: conformance.Instance) -> None:
        await asyncio.to_thread(ray.kill, instance.value._actor)

    async def is_clean(box: Box) -> bool:
        return await box.list() == ["given.txt"]

    await check(
        conformance.Case(
            backend=RayBackend,
            spec=RaySpec(box=BOX, reuse=Reuse.AFTER_RESET),
            num_alive=num_boxes,
            refused=RaySpec(box=BOX, reuse=Reuse.SHARED),
            refused_field="reuse",
            kill=kill,
            is_clean=is_clean,
            is_box=True,
        )
    )


async def test_a_cancelled_start_leaves_nothing(cluster: Cluster) -> None:
    backend = RayBackend()
    spec = RaySpec(box=BOX)
    for delay_s in (0.0, 0.3, 1.5):
        start = asyncio.create_task(backend.start(spec, started=lambda handle: None))
        await asyncio.sleep(delay_s)
        start.cancel()
        (ended,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(ended, BaseException):
            await ended.close()
    async with asyncio.timeout(30):
        while num_boxes():  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.05)
