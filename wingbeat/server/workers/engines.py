"""The engines that are connected, what each serves, and the requests in flight on them.

A request never dies with its engine: it waits for another (or the restarted one) and continues from
the tokens that were already delivered.  Requests of one episode prefer the engine that holds their KV.

An engine that says how many generations it runs together is given little more than that; the others wait here,
where clients are served in turn (:mod:`wingbeat.server.calls.fairness`).  What runs is never pre-empted.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import numpy as np

from wingbeat.core.errors import NoEngine, UnavailableError
from wingbeat.core.samples import INT_DTYPE
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.worker_protocol import (
    Abort,
    Generate,
    Manifest,
    PinVersion,
    TokenChunk,
    UnpinVersion,
    UpdateWeights,
    WeightsServed,
)
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.server.calls.fairness import FairQueue
from wingbeat.server.calls.flights import EngineLink, Flight, Model, Served


class EnginePool:
    """Routes generations.  All methods run on control's event loop."""

    def __init__(self, *, wait_s: float, on_activity: Callable[[int], None]) -> None:
        self._wait_s = wait_s
        self._on_activity = on_activity
        """Told the number of requests in flight whenever it changes (overlap meter)."""
        self._links: list[EngineLink] = []
        self._waiting: dict[Model, FairQueue[Flight]] = {}
        self._live: dict[str, Manifest] = {}
        self._pins: dict[tuple[str, int], Manifest] = {}
        self._ancestries: dict[str, Ancestry] = {}
        self._sticky: dict[str, EngineLink] = {}
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)
        """An engine that outlives control must not take a new request for one it is still ending."""
        self._num_flights = 0
        self.generated_tokens = 0
        self.requeued = 0

    # --- membership and weights -------------------------------------------------------------

    def join(self, link: EngineLink) -> None:
        """A new engine: tell it everything it should serve."""
        self._links.append(link)
        for manifest in self._live.values():
            link.send(UpdateWeights(manifest=manifest))
        for manifest in self._pins.values():
            link.send(PinVersion(manifest=manifest))

    def leave(self, link: EngineLink) -> None:
        """An engine is gone: its requests wait for another, continuing from what was delivered."""
        if link not in self._links:
            return
        self._links.remove(link)
        self._sticky = {key: other for key, other in self._sticky.items() if other is not link}
        self.requeued += len(link.flights)
        for flight in reversed(tuple(link.flights.values())):
            self._queue(flight.model).push_back(flight.client, flight)
        link.flights.clear()
        link.num_running.clear()
        self._dispatch()
        for queue in self._waiting.values():
            for flight in queue:
                self._limit_wait(flight)

    def served(self, link: EngineLink, message: WeightsServed) -> None:
        """An engine acknowledged what it now serves.

        One that joined while newer weights were published takes requests only once it has those, too: groups were
        admitted meanwhile whose floor is above what it loaded first.
        """
        if message.pinned:
            pin = self._pins.get((message.policy, message.version))
            if pin is not None and pin.checksum == message.checksum:  # else it was unpinned meanwhile
                link.pinned.add((message.policy, message.version))
        elif message.policy in link.served or (message.lineage, message.version) >= self._oldest(message.policy):
            link.served[message.policy] = Served(message.lineage, message.version, message.checksum)
        self._dispatch()

    def _oldest(self, policy: str) -> tuple[int, int]:
        """(lineage, version) of the oldest weights with which a group that is admitted now may be sampled."""
        lowest, live = self.lowest_served(policy), self._live.get(policy)
        if lowest is not None:
            return lowest.lineage, lowest.version
        return (0, 0) if live is None else (live.lineage, live.version)

    def publish(self, manifest: Manifest) -> None:
        """Have every engine serve this version live."""
        self._live[manifest.policy] = manifest
        for link in self._links:
            link.send(UpdateWeights(manifest=manifest))

    def pin(self, manifest: Manifest) -> None:
        """Have every engine also keep this version until :meth:`unpin`."""
        self._pins[(manifest.policy, manifest.version)] = manifest
        for link in self._links:
            link.send(PinVersion(manifest=manifest))

    def unpin(self, policy: str, version: int) -> None:
        self._pins.pop((policy, version), None)
        for link in self._links:
            link.pinned.discard((policy, version))
            link.send(UnpinVersion(policy=policy, version=version))
        for flight in self._waiting.get((policy, version), ()):
            self._limit_wait(flight)

    def holds(self, manifest: Manifest) -> bool:
        """Whether an engine may still need the file of this version."""
        live = self._live.get(manifest.policy)
        pinned = self._pins.get((manifest.policy, manifest.version))
        return any(held is not None and held.path == manifest.path for held in (live, pinned)) or not self.has_served(
            manifest
        )

    def has_served(self, manifest: Manifest) -> bool:
        """True once every connected engine serves this live version or a newer one."""
        found = [link.served.get(manifest.policy) for link in self._links if manifest.policy not in link.failures]
        return all(served is not None and served[:2] >= (manifest.lineage, manifest.version) for served in found)

    def rolled_back(self, policy: str, ancestry: Ancestry) -> None:
        """From now on, what abandoned versions sampled counts as sampled by the last version that survives."""
        self._ancestries[policy] = ancestry

    @property
    def links(self) -> Sequence[EngineLink]:
        return tuple(self._links)

    @property
    def in_flight(self) -> int:
        return self._num_flights

    @property
    def waiting(self) -> int:
        """Generations that no engine has."""
        return sum(len(queue) for queue in self._waiting.values())

    def lowest_served(self, policy: str) -> Served | None:
        """The oldest live version among the engines."""
        return min((link.served[policy] for link in self._links if policy in link.served), default=None)

    def served_by_all(self, policy: str) -> list[Served]:
        """What each engine that serves the policy has live."""
        return [link.served[policy] for link in self._links if policy in link.served]

    # --- generation -------------------------------------------------------------------------

    async def generate(
        self,
        policy: str,
        *,
        prompt_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        sampling: SamplingParams,
        cache_key: str,
        version: int | None = None,
        stream: bool = False,
        client: str = "",
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as they come; the last carries ``finish``.  Closing the iterator aborts.

        While no engine has room, ``client`` takes turns with the others.

        Raises NoEngine if none can serve within the configured wait, UnavailableError if the engine
        reports an error for this request.
        """
        flight = Flight(
            request_id=f"{self._prefix}-{next(self._ids)}",
            policy=policy,
            version=version,
            prompt_ids=prompt_ids,
            sampling=sampling,
            cache_key=cache_key,
            stream=stream,
            client=client,
        )
        self._count(+1)
        link = None if flight.model in self._waiting else self._choose(flight)
        if link is not None:
            self._send(link, flight)
        else:
            self._queue(flight.model).push(client, flight, cost=flight.cost)
            self._limit_wait(flight)
        finished = False
        try:
            while not finished:
                chunk = await flight.next()
                if chunk.finish is FinishReason.ERROR:
                    finished = True
                    raise UnavailableError(f"the engine could not serve this request: {chunk.error}")
                finished = chunk.finish is not None
                yield chunk
        finally:
            self._count(-1)
            if not finished:
                self._abandon(flight)

    def _queue(self, model: Model) -> FairQueue[Flight]:
        """Those that wait for this model; it is let go when it is empty."""
        return self._waiting.setdefault(model, FairQueue())

    def _limit_wait(self, flight: Flight) -> None:
        """A waiting flight fails when the wait is over, unless it waits for its turn on an engine that is there."""
        if flight.patience is None and not self._is_served(flight):
            flight.patience = asyncio.get_running_loop().call_later(self._wait_s, self._expire, flight)

    def _is_served(self, flight: Flight) -> bool:
        return any(link.serves(flight.policy, flight.version) for link in self._links)

    def _expire(self, flight: Flight) -> None:
        flight.patience = None
        if self._is_served(flight):  # one has come meanwhile, and others are before it
            return
        pinned = f" version {flight.version}" if flight.version is not None else ""
        flight.fail(
            NoEngine(
                f"no engine serves policy {flight.policy!r}{pinned} after {self._wait_s:.0f} s;"
                " see `blockers` in /api/status"
            )
        )

    def receive(self, link: EngineLink, chunks: Sequence[TokenChunk]) -> None:
        """Tokens from an engine."""
        for chunk in chunks:
            flight = link.flights.get(chunk.request_id)
            if flight is None:
                continue  # aborted here while they travelled
            self.generated_tokens += len(chunk.token_ids)
            flight.delivered.extend(chunk.token_ids)
            if chunk.finish is not None:
                link.drop(chunk.request_id)
            flight.put(chunk if flight.version is not None else self._rebased(flight.policy, chunk))
        if self._waiting:
            self._dispatch()

    def _rebased(self, policy: str, chunk: TokenChunk) -> TokenChunk:
        """An engine samples with abandoned weights until it has loaded the new lineage's."""
        ancestry = self._ancestries.get(policy)
        if ancestry is None or chunk.lineage == ancestry.current:
            return chunk
        version = ancestry.effective(chunk.version, lineage=chunk.lineage)
        return msgspec.structs.replace(chunk, version=version, lineage=ancestry.current)

    def forget(self, cache_key: str) -> None:
        """The episode is over: no more turns to keep on one engine."""
        self._sticky.pop(cache_key, None)

    def _dispatch(self) -> None:
        """Hand waiting flights to engines that can serve them, as far as these have room."""
        for model, queue in tuple(self._waiting.items()):
            while (flight := queue.peek()) is not None:
                link = self._choose(flight)
                if link is None:
                    break
                queue.pop()
                self._send(link, flight)
            if len(queue) == 0:
                del self._waiting[model]

    def _choose(self, flight: Flight) -> EngineLink | None:
        """The engine for a flight, if one has room: that of its episode's turns before, else the least busy."""
        sticky = self._sticky.get(flight.cache_key)
        if sticky is not None and sticky.serves(flight.policy, flight.version) and sticky.has_room(flight.model):
            return sticky
        able = [
            link for link in self._links if link.serves(flight.policy, flight.version) and link.has_room(flight.model)
        ]
        link = min(able, key=lambda candidate: len(candidate.flights), default=None)
        if link is not None:
            self._sticky[flight.cache_key] = link
        return link

    def _send(self, link: EngineLink, flight: Flight) -> None:
        link.take(flight)
        if flight.patience is not None:
            flight.patience.cancel()
            flight.patience = None
        prompt = flight.prompt_ids
        if flight.delivered:
            prompt = np.concatenate([prompt, np.asarray(flight.delivered, INT_DTYPE)])
        s = flight.sampling
        link.send(
            Generate(
                request_id=flight.request_id,
                policy=flight.policy,
                prompt_ids=np.asarray(prompt, INT_DTYPE).tobytes(),
                max_tokens=s.max_tokens - len(flight.delivered),
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                seed=None if s.seed is None else s.seed + len(flight.delivered),  # not the same draws again
                stop_token_ids=s.stop_token_ids,
                cache_key=flight.cache_key,
                version=flight.version,
                stream=flight.stream,
                grammar=s.grammar,
                resumed_tokens=s.resumed_tokens + len(flight.delivered),
            )
        )

    def _abandon(self, flight: Flight) -> None:
        if flight.patience is not None:
            flight.patience.cancel()
            flight.patience = None
        queue = self._waiting.get(flight.model)
        if queue is not None and queue.remove(flight.client, flight):
            if len(queue) == 0:
                del self._waiting[flight.model]
            return
        for link in self._links:
            if link.drop(flight.request_id) is not None:
                link.send(Abort(request_id=flight.request_id))
                self._dispatch()

    def _count(self, change: int) -> None:
        self._num_flights += change
        self._on_activity(self._num_flights)
