"""A server on a real Ray cluster of several nodes on this machine: ``make test-ray``."""

from __future__ import annotations

import os
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

from harness import Server, children_of, cli, eventually_now, make_models, serving, train_config  # noqa: E402

from wingbeat.dataflow.audit import audit_run  # noqa: E402

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


def test_a_run_goes_on_when_a_node_is_killed_and_scales_while_it_runs(
    cluster: Cluster, models: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    config = train_config(tmp_path, models, run__steps=400, eval__at_end=False, engine__threads=1)
    more = ("--address", cluster.address, "--train")
    with serving(tmp_path, config, command="deploy ray", more=more) as server:
        eventually_now(lambda: trained(server) >= 3, what="three steps")
        nodes = {name: node_of(cluster, server.pid(name)) for name in ("engine-0", "trainer-solver")}
        assert nodes["engine-0"] is not nodes["trainer-solver"], "one CPU each: they cannot share a node"
        for name in ("trainer-solver", "engine-0"):
            lost = server.pid(name)
            cluster.remove_node(node_of(cluster, lost), allow_graceful=False)
            before = trained(server)
            cluster.add_node(num_cpus=1)
            has_moved = lambda name=name, lost=lost: server.pids().get(name) not in (None, lost)  # noqa: E731
            eventually_now(has_moved, what=f"a new {name}")
            goes_on = lambda before=before: trained(server) >= before + 3  # noqa: E731
            eventually_now(goes_on, what=f"steps after {name} was lost")
        cluster.add_node(num_cpus=1)
        scaled = cli("scale", "--server", server.url, "--engines", "2")
        assert scaled.returncode == 0, scaled.stderr
        eventually_now(lambda: "engine-1" in server.pids(), what="a second engine")
        assert cli("scale", "--server", server.url, "--engines", "1").returncode == 0
        eventually_now(lambda: "engine-1" not in server.pids(), what="the second engine to end")
    assert audit_run(server.run_dir) == []


def test_without_a_cluster_it_says_how_to_start_one(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(train_config(tmp_path, models), encoding="utf-8")
    done = cli("deploy", "ray", str(path), "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert "ray start --head" in done.stderr
    assert not list(tmp_path.glob("runs/*"))
