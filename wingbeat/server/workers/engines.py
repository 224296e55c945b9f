"""The engines that are connected, what each serves, and the requests in flight on them.

A request never dies with its engine: it waits for another (or the restarted one) and continues from
the tokens that were already delivered.  Requests of one episode prefer the engine that holds their KV; others go where
they are expected to end first (:mod:`wingbeat.server.workers.rates`).

An engine that says how many generations it runs together is given little more than that; the others wait here,
where clients are served in turn (:mod:`wingbeat.server.calls.fairness`).  What runs is never pre-empted.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import numpy as np

from wingbeat.core.errors import NoEngine, UnavailableError
from wingbeat.core.samples import INT_DTYPE
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.weight_protocol import Manifest, UnpinVersion, WeightsServed
from wingbeat.core.worker_protocol import Abort, Generate, MovedOut, MoveOut, TokenChunk
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.server.calls.fairness import FairQueue
from wingbeat.server.calls.flights import EngineLink, Flight, Model, Served
from wingbeat.server.workers.rates import least_wait, rates, room_shares
from wingbeat.server.workers.served import ServedWeights


class EnginePool:
    """Routes generations.  All methods run on control's event loop."""

    def __init__(
        self,
        *,
        wait_s: float,
        on_activity: Callable[[int], None],
        max_lag: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_lag``: as of :class:`~wingbeat.server.workers.served.ServedWeights`."""
        self._wait_s = wait_s
        self._on_activity = on_activity
        """Told the number of requests in flight whenever it changes (overlap meter)."""
        self.weights = ServedWeights(max_lag=max_lag, clock=clock)
        self.on_quarantine: Callable[[EngineLink, str, str], None] = lambda link, policy, reason: None
        """Told of an engine that says what cannot be, with the policy and why; the reason is "" where that is over."""
        self._clock = clock
        self._waiting: dict[Model, FairQueue[Flight]] = {}
        self._sticky: dict[str, EngineLink] = {}
        self._moving: dict[str, EngineLink] = {}
        """By request id, where a generation goes once its engine has let it go."""
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)
        """An engine that outlives control must not take a new request for one it is still ending."""
        self._num_flights = 0
        self.generated_tokens = 0
        self.requeued = 0

    # --- membership and weights -------------------------------------------------------------

    def join(self, link: EngineLink) -> None:
        """A new engine: tell it everything it should serve."""
        self.weights.join(link)

    def leave(self, link: EngineLink) -> None:
        """An engine is gone: its requests wait for another, continuing from what was delivered."""
        if link not in self.weights.links:
            return
        self.weights.leave(link)
        for request_id in link.flights:
            self._moving.pop(request_id, None)
        self._go_on_without(link, tuple(link.flights.values()))

    def stop_sending(self, link: EngineLink) -> None:
        """An engine is about to leave: it ends what it has, and gets no more."""
        self.weights.stop_sending(link)
        self._go_on_without(link)

    def _go_on_without(self, link: EngineLink, lost: Sequence[Flight] = ()) -> None:
        """It gets no more; what is ``lost`` with it goes on elsewhere, perhaps at one that was too far behind it."""
        self._sticky = {key: other for key, other in self._sticky.items() if other is not link}
        self._take_back(link, lost)
        for queue in self._waiting.values():
            for flight in queue:
                self._limit_wait(flight)

    def served(self, link: EngineLink, message: WeightsServed) -> None:
        """An engine acknowledged what it now serves."""
        if link not in self.weights.links:
            return
        before = message.policy in link.quarantined
        if fault := self.weights.acknowledged(link, message):
            self._quarantined(link, message.policy, fault)
        elif before and message.policy not in link.quarantined:
            self.on_quarantine(link, message.policy, "")
        self._dispatch()

    def failed(self, link: EngineLink, policy: str) -> None:
        """An engine could not load what it was told: it serves what it served, and is told again later."""
        self.weights.failed(link, policy)

    def pin_failed(self, link: EngineLink, policy: str) -> None:
        """The same of a version that it was told to pin."""
        self.weights.pin_failed(link, policy)

    def beat(self, link: EngineLink) -> None:
        """An engine lives."""
        self.weights.beat(link)

    def _quarantined(self, link: EngineLink, policy: str, reason: str) -> None:
        """Nothing that it samples from now on is taken, and what it was sampling goes on elsewhere."""
        self.on_quarantine(link, policy, reason)
        lost = tuple(flight for flight in link.flights.values() if flight.policy == policy)
        for flight in lost:
            link.send(Abort(request_id=flight.request_id))
        self._take_back(link, lost)
        for flight in lost:
            self._limit_wait(flight)

    def _take_back(self, link: EngineLink, flights: Sequence[Flight]) -> None:
        """Generations that an engine will not end wait for another, before all others of their clients."""
        self.requeued += len(flights)
        for flight in reversed(flights):
            link.drop(flight.request_id)
            self._queue(flight.model).push_back(flight.client, flight)
        self._dispatch()

    def publish(self, manifest: Manifest) -> None:
        """Have every engine serve this version live."""
        self.weights.publish(manifest)

    def pin(self, manifest: Manifest) -> None:
        """Have every engine also keep this version until :meth:`unpin`."""
        self.weights.pin(manifest)

    def unpin(self, policy: str, version: int) -> None:
        self.weights.unpin(policy, version)
        for link in self.links:
            link.pinned.discard((policy, version))
            link.send(UnpinVersion(policy=policy, version=version))
        for flight in self._waiting.get((policy, version), ()):
            self._limit_wait(flight)

    def holds(self, manifest: Manifest) -> bool:
        """Whether an engine may still need the files of this version."""
        return self.weights.holds(manifest)

    def rolled_back(self, policy: str, ancestry: Ancestry) -> None:
        """From now on, what abandoned versions sampled counts as sampled by the last version that survives."""
        self.weights.rolled_back(policy, ancestry)

    def lower_floors(self, policy: str, *, highest: int) -> None:
        """No later version than ``highest`` counts any more: generations that wait for one go to what there is."""
        waiting = (flight for queue in self._waiting.values() for flight in queue)
        running = (flight for link in self.links for flight in link.flights.values())
        for flight in (*waiting, *running):
            if flight.policy == policy:
                flight.floor = min(flight.floor, highest)
        self._dispatch()

    @property
    def links(self) -> Sequence[EngineLink]:
        return tuple(self.weights.links)

    @property
    def in_flight(self) -> int:
        return self._num_flights

    @property
    def waiting(self) -> int:
        """Generations that no engine has."""
        return sum(len(queue) for queue in self._waiting.values())

    def lowest_served(self, policy: str) -> Served | None:
        """The oldest live version with which a new generation may be sampled."""
        return self.weights.lowest(policy)

    def served_by_all(self, policy: str) -> list[Served]:
        """What each engine that is given generations of the policy has live."""
        return self.weights.all(policy)

    def rates(self, policy: str) -> dict[str, float]:
        """Tokens per second of a generation on each engine, as routing expects them; 1 while nothing is known."""
        links = [link for link in self.weights.links if policy in link.acknowledged]
        return {link.worker_id: rate for link, rate in zip(links, self._rates(links, policy), strict=True)}

    def _rates(self, links: Sequence[EngineLink], policy: str) -> list[float]:
        return rates([link.meters[policy] for link in links], now_s=self._clock())

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
        floor: int = 0,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as they come; the last carries ``finish``.  Closing the iterator aborts.

        While no engine has room, ``client`` takes turns with the others.  ``floor`` is the lowest live version that may
        sample it.

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
            floor=floor,
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
        return any(self.weights.may_take(link, flight) for link in self.links)

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
            if misfit := self.weights.misfit(link, flight, chunk):
                self.weights.quarantine(link, flight.policy, misfit)
                self._quarantined(link, flight.policy, misfit)
                continue
            self.generated_tokens += len(chunk.token_ids)
            flight.delivered.extend(chunk.token_ids)
            if chunk.finish is not None:
                link.drop(chunk.request_id)
                now = self._clock()
                if num_tokens := len(flight.delivered) - flight.num_before:
                    link.meters[flight.policy].record(num_tokens, now - flight.sent_s, now_s=now)
            flight.put(chunk if flight.version is not None else self._rebased(flight.policy, chunk))
        if self._waiting:
            self._dispatch()

    def _rebased(self, policy: str, chunk: TokenChunk) -> TokenChunk:
        """An engine samples with abandoned weights until it has loaded the new lineage's."""
        ancestry = self.weights.ancestry(policy)
        if ancestry is None or chunk.lineage == ancestry.current:
            return chunk
        version = ancestry.effective(chunk.version, lineage=chunk.lineage)
        return msgspec.structs.replace(chunk, version=version, lineage=ancestry.current)

    def move(self, request_id: str, *, to: EngineLink, with_kv: bool) -> bool:
        """Have a running generation go on at another engine; False where it does not run, or cannot run there."""
        link = next((link for link in self.links if request_id in link.flights), None)
        if link is None or link is to or request_id in self._moving:
            return False
        flight = link.flights[request_id]
        if not self.weights.may_take(to, flight):
            return False
        self._moving[request_id] = to
        link.send(MoveOut(request_id=request_id, with_kv=with_kv))
        return True

    def moved_out(self, link: EngineLink, message: MovedOut) -> None:
        """An engine let a generation go; all tokens of it came before."""
        to, flight = self._moving.pop(message.request_id, None), link.drop(message.request_id)
        if flight is None:
            return  # it ended first, or goes on elsewhere already
        if to in self.weights.links and self.weights.may_take(to, flight):
            self._sticky[flight.cache_key] = to
            self._send(to, flight, kv=message.kv)
        else:
            self._queue(flight.model).push_back(flight.client, flight)
            self._limit_wait(flight)
        self._dispatch()

    def forget(self, cache_key: str) -> None:
        """The episode is over: no more turns to keep on one engine."""
        self._sticky.pop(cache_key, None)

    def _dispatch(self) -> None:
        """Hand waiting flights to engines that can serve them, as far as these have room.

        One whose turn it is waits for room; one that no engine may take, having lost the one that did, lets others by.
        """
        for model, queue in tuple(self._waiting.items()):
            stranded: list[Flight] = []
            while (flight := queue.peek()) is not None:
                link = self._choose(flight)
                if link is not None:
                    self._send(link, queue.pop())
                elif self._is_served(flight):
                    break
                else:
                    stranded.append(queue.pop())
            for flight in reversed(stranded):
                queue.push_back(flight.client, flight)
            if len(queue) == 0:
                del self._waiting[model]

    def _choose(self, flight: Flight) -> EngineLink | None:
        """The engine for a flight, if one has room: that of its episode's turns before, else which ends it first."""
        links = [link for link in self.weights.links if self.weights.may_take(link, flight)]
        found = self._rates(links, flight.policy)
        able = [link.has_room(flight.model, share=share) for link, share in zip(links, room_shares(found), strict=True)]
        sticky = self._sticky.get(flight.cache_key)
        if sticky is not None and sticky in links and able[links.index(sticky)]:
            return sticky
        index = least_wait([len(link.flights) for link in links], found, able)
        link = None if index is None else links[index]
        if link is not None:
            self._sticky[flight.cache_key] = link
        return link

    def _send(self, link: EngineLink, flight: Flight, *, kv: bytes = b"") -> None:
        link.take(flight, now_s=self._clock())
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
                kv=kv,
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
        for link in self.links:
            if link.drop(flight.request_id) is not None:
                link.send(Abort(request_id=flight.request_id))
                self._dispatch()

    def _count(self, change: int) -> None:
        self._num_flights += change
        self._on_activity(self._num_flights)
