"""A Ray cluster as the place where a server's processes run.

Each process has a placement group of its own, so that it can be added and taken away while the others run::

    control     {CPU: 1}                     on the node of the run directory, which is that of this command
    an engine   {CPU: threads * tensor_parallel, GPU: tensor_parallel}
    a trainer   {CPU: threads * processes, GPU: processes}

Every kept process is followed by its own task, which asks its actor how it is::

    reserve ──▶ STARTING ──▶ RUNNING ──▶ STOPPED            (control ended, or we stopped it)
                   ▲            │ └────▶ FAILED             (the process cannot be kept running)
                   └─ BACKOFF ◀─┘                           (its node or its actor died: Ray starts it anew, or we do)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wingbeat.core.config import Config
from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import SetupError
from wingbeat.core.tls import CA_VARIABLE
from wingbeat.deploy.checks import EVERY_ADDRESS
from wingbeat.deploy.children import TRANSITIONS, ChildSpec, ChildState, Deaths
from wingbeat.deploy.devices import Needs
from wingbeat.deploy.processes import Kept, OnChange
from wingbeat.deploy.ray.keeper import Keeper, Order, Report

logger = logging.getLogger(__name__)

NAMESPACE = "wingbeat"
CONNECT_S = 5.0
POLL_S = 0.25
"""Between looks at a process."""
REPORT_S = 5.0
"""How long an actor may take to answer; one that takes longer is on a node that is gone, or frozen."""
ROOM_TOLD_S = 10.0
"""After so long without room for a process, the log says so."""
STOP_S = 30.0
"""For a process to end in peace."""
CONTROL_GRACE_S = 12.0
"""Longer than control goes on without its actor, to close the ledger: another one could not open it."""
ERROR_CHARACTERS = 600
NODE_LABEL = "ray.io/node-id"
ENDED = frozenset({ChildState.FAILED, ChildState.STOPPED})
USUAL_NEXT: Mapping[ChildState, ChildState] = {
    ChildState.STARTING: ChildState.RUNNING,
    ChildState.RUNNING: ChildState.BACKOFF,
    ChildState.BACKOFF: ChildState.STARTING,
}
"""What lies between two states that no transition joins."""


def connect(address: str) -> None:
    """Become a driver of a running cluster, on one of its nodes.  Raises SetupError where that cannot be."""
    if "://" in address:
        raise SetupError(
            f"--address {address}: Ray's client mode is not supported, as control runs on a node of the cluster: call"
            " this command on one, with `auto` or HOST:PORT"
        )
    how = (
        "start one (`ray start --head`, on other nodes `ray start --address=HEAD:6379`), or name its address with"
        " --address"
    )
    if address != "auto":  # Ray itself would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise SetupError(f"no Ray cluster at {address!r} ({error}): {how}") from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SetupError(f"no Ray cluster at {address!r} ({error}): {how}") from error


class RayPlace:
    """The cluster that :func:`connect` found (``wingbeat.deploy.processes.Place``)."""

    is_remote = True

    def __init__(self, config: Config) -> None:
        """Raises SetupError where workers on other nodes could not reach the server."""
        own = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        check_host(config.server.host, own=addresses[own], addresses=set(addresses.values()))
        if config.resources.count and is_loopback(config.resources.host) and len(set(addresses.values())) > 1:
            raise SetupError(
                f"resources.host is {config.resources.host}, by which clients cannot call resources servers on the"
                " cluster's other nodes: set it to 0.0.0.0, with keys and TLS"
            )
        self._own_node = own
        self._has_devices = any(node["Resources"].get("GPU") for node in nodes)

    def control(self, spec: ChildSpec, *, on_change: OnChange) -> Kept:
        here = {NODE_LABEL: self._own_node}
        return RayKept(spec, {"CPU": 1.0}, on_change=on_change, selector=here, grace_s=CONTROL_GRACE_S)

    def worker(self, spec: ChildSpec, needs: Needs, *, on_change: OnChange) -> Kept:
        bundle = {"CPU": float(needs.threads * needs.ranks)}
        if needs.devices and (self._has_devices or needs.insists):
            bundle["GPU"] = float(needs.devices)
        return RayKept(spec, bundle, on_change=on_change)

    async def close(self) -> None:
        await asyncio.to_thread(ray.shutdown)


def check_host(host: str, *, own: str, addresses: Collection[str]) -> None:
    """Raises SetupError where workers on other nodes could not call the server by ``server.host``."""
    if host in EVERY_ADDRESS or (is_loopback(host) and len(addresses) > 1):
        raise SetupError(
            f"server.host is {host}, by which workers on the cluster's other nodes cannot call the server: set it to"
            f" this node's address, {own}, with keys and TLS"
        )


class RayKept:
    """A process on some node of the cluster, kept running until :meth:`stop`."""

    def __init__(
        self,
        spec: ChildSpec,
        bundle: Mapping[str, float],
        *,
        on_change: OnChange,
        selector: Mapping[str, str] | None = None,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``bundle``: what it needs of a node; ``selector``: labels that the node must have; ``grace_s``: after its
        actor died, the process may live on for so long, and another one must not begin before (None: Ray may start
        the actor again at once)."""
        self.spec = spec
        self.state = ChildState.STARTING
        self.error = ""
        self.pid: int | None = None
        """On its node."""
        self._bundle = dict(bundle)
        self._selector = dict(selector or {})
        self._grace_s = grace_s
        self._on_change = on_change
        self._deaths = Deaths(clock)
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()
        """Nothing of it is on the cluster."""
        self._over.set()

    async def run(self) -> None:
        """Place, follow and place again until stopped, ended or failed."""
        self._over.clear()
        try:
            while not self._stopping.is_set() and self.state not in ENDED:
                if await self._reserve():
                    self._start()
                    await self._follow()
            await self._end()
        except RayError as error:
            if not self._stopping.is_set():
                self._fail(error)
        finally:
            try:
                await self._release()
            finally:
                self._over.set()
        self.pid = None
        if self.state not in ENDED:
            self._become(ChildState.STOPPED)

    async def stop(self) -> None:
        """Have the process end in peace; returns once it has, and its room is given back."""
        self._stopping.set()
        await self._over.wait()

    async def _reserve(self) -> bool:
        """Wait for a node with room; False where it was stopped meanwhile."""
        make: Callable[..., PlacementGroup] = placement_group
        selector = [self._selector] if self._selector else None
        self._group = await asyncio.to_thread(
            make, [self._bundle], strategy="PACK", name=self.spec.name, bundle_label_selector=selector
        )
        ready = asyncio.ensure_future(_awaited(self._group.ready()))
        stopped = asyncio.ensure_future(self._stopping.wait())
        is_told = False
        try:
            while not (ready.done() or stopped.done()):
                await asyncio.wait({ready, stopped}, timeout=ROOM_TOLD_S, return_when=asyncio.FIRST_COMPLETED)
                if not (ready.done() or stopped.done() or is_told):
                    logger.warning("%s waits for a node with %s free", self.spec.name, self._bundle)
                    is_told = True
            if ready.done():
                ready.result()
            return not self._stopping.is_set()
        finally:
            ready.cancel()
            stopped.cancel()

    def _start(self) -> None:
        passed_on = {CA_VARIABLE: os.environ[CA_VARIABLE]} if CA_VARIABLE in os.environ else {}
        order = Order(self.spec.name, self.spec.command[1:], {**passed_on, **self.spec.environment}, self.spec.log)
        assert self._group is not None, "a node was reserved"
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=0)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "max_restarts": -1 if self._grace_s is None else 0,
            "scheduling_strategy": strategy,
        }
        self._actor = ray.remote(Keeper).options(**options).remote(order)  # pyright: ignore[reportAttributeAccessIssue]

    async def _follow(self) -> None:
        """Mirror what the actor says, until the process is over, the actor is gone for good, or we are to stop."""
        while not self._stopping.is_set():
            try:
                report: Report = await asyncio.wait_for(_awaited(self._actor.report.remote()), REPORT_S)
            except ActorDiedError as error:  # it never lived, or somebody ended it: another one takes its place
                await self._mourn(error)
                return
            except (ActorUnavailableError, TimeoutError):  # Ray starts it again
                self._lost("its node or its actor does not answer; Ray starts it again where there is room")
            else:
                self.pid, self.error = report.pid, report.error
                self._become(report.state)
                if report.state in ENDED:
                    return
            await self._pause(POLL_S)

    async def _mourn(self, error: ActorDiedError) -> None:
        """Give an actor that is gone for good up, and wait before there is another one."""
        self._deaths.count()
        self._lost(last_words(error))
        await self._release()
        if self._deaths.are_too_many:
            self._fail(error)
        else:
            await self._pause(max(self._deaths.pause_s, self._grace_s or 0.0))

    async def _end(self) -> None:
        """Have the process end by itself; one that cannot be told ends with its actor."""
        if self._actor is not None and self.state not in ENDED:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_awaited(self._actor.stop.remote()), STOP_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _lost(self, why: str) -> None:
        self.pid = None
        if self.state is not ChildState.RUNNING:  # it is known already, or the node is still preparing it
            return
        logger.warning("%s is lost: %s", self.spec.name, why)
        self._become(ChildState.BACKOFF)

    def _fail(self, error: RayError) -> None:
        self.error = f"{self.spec.name} cannot be kept running on the cluster: {last_words(error)}"
        self._become(ChildState.FAILED)

    def _become(self, state: ChildState) -> None:
        """As :class:`~wingbeat.deploy.children.Child` would, whatever was missed between two looks."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            self._become(USUAL_NEXT[self.state])
            self._become(state)
            return
        self.state = state
        self._on_change(self)

    async def _release(self) -> None:
        """Give the node's room back."""
        actor, self._actor = self._actor, None
        group, self._group = self._group, None
        try:
            if actor is not None:
                await asyncio.to_thread(ray.kill, actor)
            if group is not None:
                await asyncio.to_thread(remove_placement_group, group)
        except RayError as error:  # a cluster that is gone holds nothing
            logger.warning("the room of %s may still be taken: %s", self.spec.name, error)


def last_words(error: RayError) -> str:
    """The end of what Ray says, in one line: traces of other processes may come before."""
    return " ".join(str(error).split())[-ERROR_CHARACTERS:]


async def _awaited(reference: Any) -> Any:
    """A coroutine, which asyncio can wait for and cancel."""
    return await reference
