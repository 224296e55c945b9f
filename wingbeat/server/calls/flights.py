"""One generation under way, and one engine: what the pool keeps of each."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wingbeat.core.errors import UnavailableError
from wingbeat.core.types import SamplingParams
from wingbeat.core.weight_protocol import Manifest
from wingbeat.core.worker_protocol import ControlMessage, TokenChunk
from wingbeat.server.workers.rates import RateMeter


class Served(NamedTuple):
    """A live version as an engine acknowledged it; ordered by when it came to be served."""

    lineage: int
    version: int
    checksum: str


Model = tuple[str, int | None]
"""A policy and a pinned version, None for the live one: what an engine has room for or not."""


@dataclass(slots=True, eq=False)
class EngineLink:
    """One connected engine."""

    worker_id: str
    host_id: str
    send: Callable[[ControlMessage], None]
    pid: int = 0
    policies: tuple[str, ...] = ()
    """Those that it hosts; () means all."""
    software: Mapping[str, str] = field(default_factory=dict[str, str])
    relay_url: str = ""
    """Where it serves weights to others; "" where it does not."""
    receive_s: float = 0.0
    """How long its host took to pull a version lately; 0 where nobody knows."""
    parallelism: int = 1
    """Processes that share each model's weights there."""
    served: dict[str, Served] = field(default_factory=dict)
    """Per policy, what it samples with: only what is here is given new generations."""
    acknowledged: dict[str, Served] = field(default_factory=dict)
    """Per policy, what it said last that it serves, also while it is given none."""
    loading: dict[str, Manifest] = field(default_factory=dict)
    """Per policy, what it was told to serve and has not answered for yet."""
    pinned: set[tuple[str, int]] = field(default_factory=set)
    quarantined: dict[str, str] = field(default_factory=dict)
    """Per policy, why nothing that it says of it is believed."""
    leaving: bool = False
    flights: dict[str, Flight] = field(default_factory=dict)
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    capacity: int = 0
    """Generations that it runs together, per policy (and per pinned version); 0: it takes all at once."""
    num_running: Counter[Model] = field(default_factory=Counter["Model"])
    failures: dict[str, str] = field(default_factory=dict)
    """Per policy, the last command that it could not carry out, for the status; a later one that it could ends it."""
    meters: defaultdict[str, RateMeter] = field(default_factory=lambda: defaultdict(RateMeter))
    """Per policy, how fast it samples."""

    def hosts(self, policy: str) -> bool:
        return not self.policies or policy in self.policies

    def serves(self, policy: str, version: int | None) -> bool:
        """Whether it may be given a generation of this policy, live or of a pinned version."""
        if self.leaving or policy in self.quarantined:
            return False
        return policy in self.served if version is None else (policy, version) in self.pinned

    def has_room(self, model: Model, *, share: float = 1.0) -> bool:
        """A few more than run together are at hand in the engine, so that no slot of it waits for us.

        ``share`` of that is given to it.
        """
        room = self.capacity + max(1, self.capacity // 8)
        return not self.capacity or self.num_running[model] < math.ceil(room * share)

    def take(self, flight: Flight, *, now_s: float) -> None:
        flight.sent_s, flight.num_before = now_s, len(flight.delivered)
        served = self.served.get(flight.policy)
        flight.sent_with = (0, 0) if served is None else (served.lineage, served.version)
        self.flights[flight.request_id] = flight
        self.num_running[flight.model] += 1

    def drop(self, request_id: str) -> Flight | None:
        """The generation is over here; None where it was not here."""
        flight = self.flights.pop(request_id, None)
        if flight is not None:
            self.num_running[flight.model] -= 1
        return flight


@dataclass(slots=True, eq=False)
class Flight:
    """One generation."""

    request_id: str
    policy: str
    version: int | None
    prompt_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    sampling: SamplingParams
    cache_key: str
    stream: bool
    client: str = ""
    """Whose turn it takes."""
    floor: int = 0
    """The lowest live version that may sample it: the floor of its group."""
    delivered: list[int] = field(default_factory=list)
    """Tokens received so far: where another engine would continue."""
    sent_s: float = 0.0
    """When the engine that has it got it."""
    num_before: int = 0
    """Of :attr:`delivered`, those of engines before."""
    sent_with: tuple[int, int] = (0, 0)
    """(lineage, version) that the engine served when it got it: it samples with none that are older."""
    patience: asyncio.TimerHandle | None = None
    """Runs while no engine has it."""
    _chunks: deque[TokenChunk] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None
    _error: UnavailableError | None = None

    @property
    def model(self) -> Model:
        return self.policy, self.version

    @property
    def cost(self) -> float:
        """Tokens that it may take, of the prompt and of the reply."""
        return float(len(self.prompt_ids) + self.sampling.max_tokens)

    def put(self, chunk: TokenChunk) -> None:
        """A chunk for whoever reads :meth:`next`."""
        self._chunks.append(chunk)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: UnavailableError) -> None:
        """There will be no more chunks."""
        self._error = error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> TokenChunk:
        """The next chunk; waits for it without limit, or until :meth:`fail`."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._chunks.popleft()
