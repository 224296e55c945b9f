"""A server on a real Ray cluster of several nodes on this machine: ``make test-ray``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # everything on loopback
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pytest
import ray
from ray.cluster_utils import Cluster

INTEGRATION = Path(__file__).parents[1] / "integration"
sys.path.insert(0, str(INTEGRATION))  # `harness`: test folders are no packages

from harness import (  # noqa: E402
    PATIENCE_S,
    Server,
    children_of,
    cli,
    config_text,
    eventually,
    eventually_now,
    make_models,
    serving,
    train_config,
)

from wingbeat.client import AsyncSwarm  # noqa: E402
from wingbeat.client.plans import RolloutPlan, connect  # noqa: E402
from wingbeat.dataflow.audit import audit_run  # noqa: E402
from wingbeat.resources import ResourceFailed, ResourceLost, SubprocessSpec  # noqa: E402
from wingbeat.resources.boxes import Box  # noqa: E402

BOX = SubprocessSpec(network=True)

QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
"""Ray's own take half a minute to notice that a node is gone."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(INTEGRATION / "make_models.py", tmp_path_factory.mktemp("models"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head that has room for control only."""
    head = {"num_cpus": 1, "_system_config": QUICK_HEALTH_CHECKS}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def trained(server: Server) -> int:
    return len(server.events_named("step"))


def node_of(cluster: Cluster, pid: int) -> ray._private.node.Node:
    """The worker node on which a process runs: it descends from its raylet."""
    for node in cluster.worker_nodes:
        if pid in children_of(node.all_processes["raylet"][0].process.pid):
            return node
    raise AssertionError(f"process {pid} runs on no worker node")


def keeper_of(pid: int) -> int:
    """The actor that keeps a process: its parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def devices_of(pid: int) -> str | None:
    """Which GPUs a process sees."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    mark = "CUDA_VISIBLE_DEVICES="
    return next((entry.removeprefix(mark) for entry in entries if entry.startswith(mark)), None)


def left_on(cluster: Cluster) -> list[str]:
    """Actors and rooms that somebody still has."""
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        groups = ray.util.placement_group_table().values()
        actors = ray._private.state.actors().values()
        return [
            *(f"room of {group['name']}: {group['state']}" for group in groups if group["state"] != "REMOVED"),
            *(f"actor {actor['ActorClassName']}: {actor['State']}" for actor in actors if actor["State"] != "DEAD"),
        ]
    finally:
        ray.shutdown()


def test_a_run_goes_on_when_a_node_is_killed_and_scales_while_it_runs(
    cluster: Cluster, models: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1)  # as Ray is told: there need be none
    config = train_config(tmp_path, models, run__steps=400, eval__at_end=False, engine__threads=1)
    more = ("--address", cluster.address, "--train")
    with serving(tmp_path, config, command="deploy ray", more=more) as server:
        eventually_now(lambda: trained(server) >= 3, what="three steps")
        nodes = {name: node_of(cluster, server.pid(name)) for name in ("engine-0", "trainer-solver")}
        assert nodes["engine-0"] is not nodes["trainer-solver"], "one CPU each: they cannot share a node"
        head = cluster.head_node.all_processes["raylet"][0].process.pid
        assert server.pid("control") in children_of(head), "where the command runs, which joined the head"
        devices = {name: devices_of(server.pid(name)) for name in ("control", "engine-0", "trainer-solver")}
        assert devices == {"control": "", "engine-0": "0", "trainer-solver": "0"}
        for name in ("trainer-solver", "engine-0"):
            lost = server.pid(name)
            cluster.remove_node(node_of(cluster, lost), allow_graceful=False)
            before = trained(server)
            cluster.add_node(num_cpus=1, num_gpus=1)
            has_moved = lambda name=name, lost=lost: server.pids().get(name) not in (None, lost)  # noqa: E731
            eventually_now(has_moved, what=f"a new {name}")
            goes_on = lambda before=before: trained(server) >= before + 3  # noqa: E731
            eventually_now(goes_on, what=f"steps after {name} was lost")
        cluster.add_node(num_cpus=1, num_gpus=1)
        scaled = cli("scale", "--server", server.url, "--engines", "2")
        assert scaled.returncode == 0, scaled.stderr
        eventually_now(lambda: "engine-1" in server.pids(), what="a second engine")
        assert cli("scale", "--server", server.url, "--engines", "1").returncode == 0
        eventually_now(lambda: "engine-1" not in server.pids(), what="the second engine to end")
    assert audit_run(server.run_dir) == []
    assert left_on(cluster) == []


def test_resources_servers_lend_on_the_nodes_and_come_again_where_they_died(
    cluster: Cluster, models: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    lending = {"count": 2, "port": 0, "kinds": ["subprocess"], "network": True, "cpus": 1, "heartbeat_s": 0.5}
    settings = {f"resources__{key}": value for key, value in lending.items()}
    text = config_text(tmp_path, models, policies__solver__trainable=False, engine__count=0, **settings)
    config = "".join(line for line in text.splitlines(keepends=True) if ".trainer." not in line)
    with serving(tmp_path, config, command="deploy ray", more=("--address", cluster.address)) as server:
        asyncio.run(lends_and_comes_again(cluster, server))
        server.supervisor.send_signal(signal.SIGTERM)
        assert server.supervisor.wait(40) == 0
    assert left_on(cluster) == []


async def lends_and_comes_again(cluster: Cluster, server: Server) -> None:
    """One server's node is killed, the other one's keeper: the client finds both again, and has boxes of them."""
    names = {"resources-0", "resources-1"}
    plan = RolloutPlan("agent.py", server.url, resources="wingbeat.resources:of_process", resource_urls=("auto",))

    def lenders() -> set[str]:
        """Those that have a box: its processes are children of theirs."""
        return {name for name in names & server.pids().keys() if children_of(server.pid(name))}

    async def are_known() -> bool:
        async with AsyncSwarm(server.url) as asking:
            return len((await asking.resource_servers()).servers) == 2

    await eventually(are_known, what="two resources servers to announce themselves")
    async with connect(plan) as swarm:
        assert isinstance(swarm, AsyncSwarm) and swarm.resources is not None
        pool = swarm.resources

        async def lose(box: Box) -> None:
            with pytest.raises(ResourceLost):
                while True:  # its server ends in peace, which takes a moment
                    assert (await box.run("echo lent")).stdout == b"lent\n"

        async with pool.lease(BOX, owner="first") as first, pool.lease(BOX, owner="second") as second:
            assert lenders() == names
            lost = {name: server.pid(name) for name in names}
            nodes = [node_of(cluster, pid) for pid in lost.values()]
            assert nodes[0] is not nodes[1], "one CPU each: they cannot share a node"
            os.kill(keeper_of(lost["resources-1"]), signal.SIGKILL)
            cluster.remove_node(node_of(cluster, lost["resources-0"]), allow_graceful=False)
            cluster.add_node(num_cpus=1)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(lose(first.value), lose(second.value))

        async def lend_again() -> bool:
            if not names <= server.pids().keys() or set(lost.values()) & set(server.pids().values()):
                return False
            try:
                async with pool.lease(BOX), pool.lease(BOX):
                    return lenders() == names
            except ResourceFailed:
                return False

        await eventually(lend_again, what="boxes of both for the same client")


def test_without_a_cluster_it_says_how_to_start_one(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(train_config(tmp_path, models), encoding="utf-8")
    done = cli("deploy", "ray", str(path), "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert "ray start --head" in done.stderr
    assert not list(tmp_path.glob("runs/*"))
