"""One process that is kept running on a Ray cluster, wherever there is room.

Its own task asks its keeper, the actor beside it, how it is::

    reserve ──▶ STARTING ──▶ RUNNING ──▶ STOPPED            (control ended, or we stopped it)
                   ▲            │ └────▶ FAILED             (the process, or its keeper, cannot be kept running)
                   └─ BACKOFF ◀─┘                           (its node or its keeper died: another one is made)

Ray itself would start an actor again without limit and without a pause: one that its memory monitor kills at each
start, say.  So it may not, and :class:`~wingbeat.core.deaths.Deaths` rules here as it does for processes of one
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    RayError,
    RayTaskError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wingbeat.core.deaths import Deaths
from wingbeat.core.tls import CA_VARIABLE
from wingbeat.deploy.children import TRANSITIONS, ChildSpec, ChildState, tail
from wingbeat.deploy.devices import VARIABLE
from wingbeat.deploy.processes import OnChange
from wingbeat.deploy.ray.cluster import live_nodes, room_words
from wingbeat.deploy.ray.keeper import Keeper, Order, Report

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Between looks at a process."""
REPORT_S = 5.0
"""How long a keeper may take to answer; one that takes longer is on a node that is gone, or frozen."""
SILENT_S = 60.0
"""A keeper that answered before and is silent for so long is ended, and replaced."""
START_S = 300.0
"""For a keeper's first answer: a node may import from a slow disk."""
ROOM_TOLD_S = 10.0
"""After so long without room for a process, the log says so."""
STOP_S = 30.0
"""For a process to end in peace."""
ERROR_CHARACTERS = 600
REMOVED = (ActorPlacementGroupRemoved, ActorUnschedulableError, TaskPlacementGroupRemoved, TaskUnschedulableError)
"""Somebody took its room away."""
DIED_PREAMBLE = re.compile(r"^The actor died unexpectedly.* ip: (\S+) ")
"""Ids of Ray's own, which help nobody; the address does."""
ENDED = frozenset({ChildState.FAILED, ChildState.STOPPED})
USUAL_NEXT: Mapping[ChildState, ChildState] = {
    ChildState.STARTING: ChildState.RUNNING,
    ChildState.RUNNING: ChildState.BACKOFF,
    ChildState.BACKOFF: ChildState.STARTING,
}
"""What lies between two states that no transition joins."""


class RayKept:
    """A process on some node of the cluster, kept running until :meth:`stop`."""

    def __init__(
        self,
        spec: ChildSpec,
        bundle: Mapping[str, float],
        *,
        on_change: OnChange,
        selector: Mapping[str, str] | None = None,
        grace_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``bundle``: what it needs of a node; ``selector``: labels that the node must have; ``grace_s``: after its
        keeper died, the process may live on for so long, and another one must not begin there before."""
        self.spec = spec
        self.state = ChildState.STARTING
        self.error = ""
        """Why it failed, or what it waits for."""
        self.pid: int | None = None
        """On its node."""
        self._bundle = dict(bundle)
        self._selector = dict(selector or {})
        self._grace_s = grace_s
        self._on_change = on_change
        self._clock = clock
        self._deaths = Deaths(clock)
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._report: Report | None = None
        """The last one of this keeper."""
        self._last_log: Report | None = None
        """The last one of any, which says where the log is."""
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()
        """Nothing of it is on the cluster."""
        self._over.set()

    async def run(self) -> None:
        """Place, follow and place again until stopped, ended or failed."""
        self._over.clear()
        try:
            while not self._stopping.is_set() and self.state not in ENDED:
                await self._live_once()
            await self._end()
        finally:
            try:
                await self._release()
            finally:
                self._over.set()
        self.pid = None
        if self.state not in ENDED:
            self._become(ChildState.STOPPED)

    async def _live_once(self) -> None:
        try:
            if await self._reserve():
                self._start()
                await self._follow()
        except ActorDiedError as error:
            await self._mourn(words_of(error), has_begun=not error.actor_init_failed)
        except RayError as error:
            await self._mourn(words_of(error), lost_room=isinstance(error, REMOVED))

    async def stop(self) -> None:
        """Have the process end in peace; returns once it has, and its room is given back."""
        self._stopping.set()
        await self._over.wait()

    # --- room ---------------------------------------------------------------------------------

    async def _reserve(self) -> bool:
        """Wait for a node with room, or for Ray to move what a dead node had; False where it was stopped meanwhile."""
        if self._group is None:
            make: Callable[..., PlacementGroup] = placement_group
            selector = [self._selector] if self._selector else None
            self._group = await asyncio.to_thread(
                make, [self._bundle], strategy="PACK", name=self.spec.name, bundle_label_selector=selector
            )
        ready = asyncio.ensure_future(_awaited(self._group.ready()))
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            while not (ready.done() or stopped.done()):
                await asyncio.wait({ready, stopped}, timeout=ROOM_TOLD_S, return_when=asyncio.FIRST_COMPLETED)
                if not (ready.done() or stopped.done() or self.error):
                    self.error = f"{self.spec.name} waits for {await asyncio.to_thread(self._room)}"
                    logger.warning("%s", self.error)
            if ready.done():
                ready.result()
            self.error = ""
            return not self._stopping.is_set()
        finally:
            ready.cancel()
            stopped.cancel()

    def _room(self) -> str:
        nodes = live_nodes()
        if self._selector:  # control
            own = ray.get_runtime_context().get_node_id()
            nodes = [node for node in nodes if node.id == own]
        return room_words(self._bundle, nodes, ray.available_resources())

    async def _release(self, *, with_room: bool = True) -> None:
        """End the keeper, and give the node's room back."""
        actor, self._actor = self._actor, None
        self._report = None
        try:
            if actor is not None:
                await asyncio.to_thread(ray.kill, actor)
            if with_room and self._group is not None:
                group, self._group = self._group, None
                await asyncio.to_thread(remove_placement_group, group)
        except RayError as error:  # a cluster that is gone holds nothing
            logger.warning("the room of %s may still be taken: %s", self.spec.name, words_of(error))

    # --- its keeper ---------------------------------------------------------------------------

    def _start(self) -> None:
        passed_on = {CA_VARIABLE: os.environ[CA_VARIABLE]} if CA_VARIABLE in os.environ else {}
        if "GPU" not in self._bundle:  # Ray hides none from those that asked for none
            passed_on[VARIABLE] = ""
        order = Order(self.spec.name, self.spec.command[1:], {**passed_on, **self.spec.environment}, self.spec.log)
        assert self._group is not None, "a node was reserved"
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=0)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        self._actor = ray.remote(Keeper).options(**options).remote(order)  # pyright: ignore[reportAttributeAccessIssue]

    async def _follow(self) -> None:
        """Mirror what the keeper says, until the process is over, the keeper is silent for good, or we are to stop.

        Raises RayError where the keeper never lived, died, or was ended by somebody.
        """
        heard_at = self._clock()
        while not self._stopping.is_set():
            try:
                report: Report = await asyncio.wait_for(_awaited(self._actor.report.remote()), REPORT_S)
            except (ActorUnavailableError, TimeoutError):
                if self.state is ChildState.RUNNING:  # else it is known already, or still being prepared
                    logger.warning("%s is lost: its node or its keeper does not answer", self.spec.name)
                    self._lost()
                if self._clock() - heard_at > (START_S if self._report is None else SILENT_S):
                    await self._mourn(f"its keeper gave no answer for {self._clock() - heard_at:.0f} s")
                    return
            else:
                heard_at = self._clock()
                self._take(report)
                if report.state in ENDED:
                    return
            await self._pause(POLL_S)

    def _take(self, report: Report) -> None:
        if self._report is not None and report.restarts > self._report.restarts:
            logger.warning("%s ended and was started again; its log: %s", self.spec.name, self._where(report))
        self._report = self._last_log = report
        self.pid, self.error = report.pid, report.error
        self._become(report.state)

    async def _mourn(self, words: str, *, has_begun: bool = True, lost_room: bool = False) -> None:
        """Give a keeper up, and wait before there is another one.

        The room is kept, for nobody else should take it; Ray moves it where its node is gone.  A keeper that never
        answered had better try elsewhere.
        """
        self._deaths.count()
        logger.warning("%s is lost, and begins anew: %s", self.spec.name, words)
        self._lost()
        grace_s = self._grace_s if has_begun and await asyncio.to_thread(self._has_its_node) else 0.0
        await self._release(with_room=lost_room or (self._report is None and not self._selector))
        if self._deaths.are_too_many:
            self._fail(f"its keeper died {self._deaths.words()}, at last so: {words}")
        else:
            await self._pause(max(self._deaths.pause_s, grace_s))

    def _has_its_node(self) -> bool:
        """Whether the process may still be there."""
        return self._report is None or any(node.id == self._report.node for node in live_nodes())

    async def _end(self) -> None:
        """Have the process end by itself; one that cannot be told ends with its keeper."""
        if self._actor is not None and self.state not in ENDED:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_awaited(self._actor.stop.remote()), STOP_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    # --- state --------------------------------------------------------------------------------

    def _lost(self) -> None:
        self.pid = None
        if self.state is ChildState.RUNNING:
            self._become(ChildState.BACKOFF)

    def _fail(self, words: str) -> None:
        self.error = f"{self.spec.name} cannot be kept running on the cluster: {words}{self._log_words()}"
        self._become(ChildState.FAILED)

    def _log_words(self) -> str:
        """The end of the process's own log, where it can be read here."""
        report = self._last_log
        if report is None:
            return ""
        if report.log.exists():
            return f"; the end of its log: {tail(report.log)[-ERROR_CHARACTERS:] or '(empty)'}"
        return f"; its log: {self._where(report)}"

    @staticmethod
    def _where(report: Report) -> str:
        return f"{report.log} on {report.address}"

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


def words_of(error: RayError) -> str:
    """What Ray says, in one line: of a fault of ours the end, since traces come before, else the beginning."""
    text = " ".join(str(error).split())
    if isinstance(error, RayTaskError) or (isinstance(error, ActorDiedError) and error.actor_init_failed):
        return text[-ERROR_CHARACTERS:]
    return DIED_PREAMBLE.sub(r"on \1: ", text)[:ERROR_CHARACTERS]


async def _awaited(reference: Any) -> Any:
    """A coroutine, which asyncio can wait for and cancel."""
    return await reference
