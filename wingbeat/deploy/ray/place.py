"""A Ray cluster as the place where a server's processes run.

Each process has a placement group of its own, so that it can be added and taken away while the others run::

    control             {CPU: 1}                     on the node of the run directory, which is that of this command
    an engine           {CPU: threads * tensor_parallel, GPU: tensor_parallel}
    a trainer           {CPU: threads * processes, GPU: processes}
    a resources server  {CPU: resources.cpus, GPU: resources.gpus}
"""

from __future__ import annotations

import asyncio

import ray

from wingbeat.core.config import Config
from wingbeat.deploy.children import ChildSpec
from wingbeat.deploy.devices import Needs
from wingbeat.deploy.processes import Kept, OnChange
from wingbeat.deploy.ray.cluster import check_host, check_lending, check_own, live_nodes
from wingbeat.deploy.ray.kept import RayKept

CONTROL_GRACE_S = 12.0
"""Longer than control goes on without its actor, to close the ledger: another one could not open it."""
CONTROL_BUNDLE = {"CPU": 1.0}
NODE_LABEL = "ray.io/node-id"


class RayPlace:
    """The cluster that :func:`~wingbeat.deploy.ray.cluster.connect` found (``wingbeat.deploy.processes.Place``)."""

    is_remote = True

    def __init__(self, config: Config) -> None:
        """Raises SetupError where workers on other nodes could not reach the server, or control has no room."""
        nodes = live_nodes()
        own = next(node for node in nodes if node.id == ray.get_runtime_context().get_node_id())
        addresses = {node.address for node in nodes}
        check_host(config.server.host, own=own.address, addresses=addresses)
        check_lending(config, addresses=addresses)
        check_own(own, CONTROL_BUNDLE)
        self._own_node = own.id
        self._has_devices = any(node.resources.get("GPU") for node in nodes)

    def control(self, spec: ChildSpec, *, on_change: OnChange) -> Kept:
        here = {NODE_LABEL: self._own_node}
        return RayKept(spec, CONTROL_BUNDLE, on_change=on_change, selector=here, grace_s=CONTROL_GRACE_S)

    def worker(self, spec: ChildSpec, needs: Needs, *, on_change: OnChange) -> Kept:
        bundle = {"CPU": float(needs.threads * needs.ranks)}
        if needs.devices and (self._has_devices or needs.insists):
            bundle["GPU"] = float(needs.devices)
        return RayKept(spec, bundle, on_change=on_change, grace_s=needs.grace_s)

    async def close(self) -> None:
        await asyncio.to_thread(ray.shutdown)
