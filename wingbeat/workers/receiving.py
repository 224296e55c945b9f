"""Receiving weights beside generating: another thread maps, pulls and verifies, the compute thread only swaps.

inbox    UpdateWeights ──▶ compute thread ──▶ Receiving.start ──▶ thread: map, or pull; verify
         WeightsReceived ◀───────────────────────────────────────────┘
               └──▶ compute thread: swap between two steps, WeightsServed
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wingbeat.core.weight_protocol import Manifest, PinVersion, UpdateWeights
from wingbeat.weights.receive import Received
from wingbeat.weights.receiver import WeightReceiver
from wingbeat.workers.link import Inbound, Own

AT_ONCE = 8
"""Versions that are received together: one per policy and one per pin."""


@runtime_checkable
class Prepares(Protocol):
    """A model host that gets weights ready beside its requests, before it is told to serve them live."""

    def prepare(self, manifest: Manifest, received: Received | None) -> bool:
        """Whether they are ready; asked between steps until they are.  Raises what ``serve`` raises."""
        ...


@dataclass(frozen=True, slots=True)
class WeightsReceived(Own):
    """A version's weights are here, or cannot be had."""

    job: int
    manifest: Manifest
    pinned: bool
    outcome: Future[Received | None]
    """None for the weights of the model folder itself; raises why there are none."""


class Receiving:
    """Driven by the compute thread."""

    def __init__(self, receiver: WeightReceiver, deliver: Callable[[Inbound], None]) -> None:
        self._receiver = receiver
        self._deliver = deliver
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="receive")
        self._jobs = itertools.count()
        self._wanted: dict[int, UpdateWeights | PinVersion] = {}
        """By job, what is on its way and still wanted."""

    @property
    def is_busy(self) -> bool:
        """Something that is wanted is on its way."""
        return bool(self._wanted)

    def start(self, message: UpdateWeights | PinVersion) -> None:
        """Answered by :class:`WeightsReceived`, unless :meth:`forget` comes before."""
        manifest, pinned, job = message.manifest, isinstance(message, PinVersion), next(self._jobs)
        self._wanted[job] = message
        if not manifest.path:  # of a frozen policy
            outcome: Future[Received | None] = Future()
            outcome.set_result(None)
            self._deliver(WeightsReceived(job, manifest, pinned, outcome))
            return

        def receive() -> Received | None:
            return self._receiver.receive(
                manifest, message.sources, pinned=pinned, is_wanted=lambda: job in self._wanted
            )

        received = self._threads.submit(receive)
        received.add_done_callback(lambda done: self._deliver(WeightsReceived(job, manifest, pinned, done)))

    def take(self, message: WeightsReceived) -> bool:
        """It has come; False where nobody wants it any more."""
        return self._wanted.pop(message.job, None) is not None

    def unpin(self, policy: str, version: int) -> None:
        """A pinned version is wanted no more, whether it is here or on its way."""
        for job, message in tuple(self._wanted.items()):
            manifest = message.manifest
            if isinstance(message, PinVersion) and (manifest.policy, manifest.version) == (policy, version):
                del self._wanted[job]
        self._receiver.unpin(policy, version)

    def forget(self) -> None:
        """Control is gone: what it asked for is not wanted any more."""
        self._wanted.clear()
        self._receiver.unpin_all()

    def close(self) -> None:
        """Give up what is on its way."""
        self.forget()
        self._threads.shutdown(cancel_futures=True)
        self._receiver.close()
