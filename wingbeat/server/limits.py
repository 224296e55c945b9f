"""What one client may hold and ask for, so that none can take what others need (``[limits]``).

Everything counts against a client: the key of a request, where it is one of the key file, else what its caller calls
itself.  Those that say nothing share one account; so do all episodes that were begun without a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from wingbeat.core.config.limits import LimitsConfig
from wingbeat.core.errors import LimitReached, RequestError
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.metrics import ControlMetrics

BODY_UNIT = 64 * 1024
"""Bytes of a body that count as a request."""
MAX_BUCKETS = 4096
MAX_PAUSE_S = 0.5


class TooFast(LimitReached):
    """Too many requests of late.  Answered after a while: who waits for each answer then asks less."""

    @property
    def pause_s(self) -> float:
        """How long the refusal itself waits."""
        return min(MAX_PAUSE_S, self.retry_after_s)


def called(client: str) -> str:
    """A client, in messages."""
    return f"client {client!r}" if client else "the clients without a name (`client_id`)"


class Quota:
    """One thing that clients hold for a while."""

    def __init__(
        self,
        name: str,
        what: str,
        *,
        limit: int,
        total: int | None,
        refused: Callable[[str], None],
        help: str,
        section: str = "limits",
        total_name: str = "",
    ) -> None:
        """``name`` and ``total_name`` ("": ``total_`` before it) are keys of a section of the configuration; ``total``
        None sets no bound for all together."""
        self._name = name
        self.key = f"{section}.{name}"
        """In messages."""
        self._total_key = f"{section}.{total_name or f'total_{name}'}"
        self._what = what
        self.limit = limit
        self._total = total
        self._refused = refused
        self._help = help
        self._held: Counter[str] = Counter()
        self.num_held = 0
        """By all."""

    def held(self, client: str) -> int:
        return self._held[client]

    def room(self, client: str) -> int:
        """How many more this client may have.

        Where all together have too many, those that hold less than an equal part may still fill theirs up, until
        all have twice as much: many greedy clients must not shut the others out, nor fill the memory.
        """
        held = self.held(client)
        own = self.limit - held
        if self._total is None:
            return own
        left = self._total - self.num_held
        if own <= left:
            return own
        num_clients = len(self._held) + (client not in self._held)
        return min(own, max(left, min(self._total // num_clients - held, left + self._total)))

    def check(self, client: str, count: int = 1) -> None:
        """Raises LimitReached where the client may not have so many more, RequestError where nobody ever may."""
        room = self.room(client)
        if count <= room:
            return
        self._refused(self._name)
        if count > self.limit:
            raise RequestError(
                f"this takes {count} {self._what}, and one client may have {self.limit} ({self.key}):"
                " ask for less at once"
            )
        held = self.held(client)
        if held + count > self.limit:
            bound = f"{called(client)} has {held} of {self.limit} {self._what} ({self.key})"
        else:
            bound = (
                f"all clients together have {self.num_held} of {self._total} {self._what}"
                f" ({self._total_key}), {called(client)} {held} of them"
            )
        raise LimitReached(f"{bound}: {self._help}", retry_after_s=1.0)

    def take(self, client: str, count: int = 1) -> None:
        """Raises as :meth:`check`, and then nothing is taken."""
        self.check(client, count)
        self.add(client, count)

    def add(self, client: str, count: int = 1) -> None:
        """Take without asking: what was there before this process, or was asked for just now."""
        self._held[client] += count
        self.num_held += count

    def give(self, client: str, count: int = 1) -> None:
        """Give back."""
        self.num_held -= count
        left = self._held[client] - count
        if left:
            self._held[client] = left
        else:
            del self._held[client]

    @contextmanager
    def holding(self, client: str) -> Iterator[None]:
        """One, for the length of a block.  Raises LimitReached."""
        self.take(client)
        try:
            yield
        finally:
            self.give(client)


class BoundsBodies(Protocol):
    """A section with bounds for request bodies."""

    @property
    def body_bytes(self) -> int: ...
    @property
    def total_body_bytes(self) -> int: ...


def body_quota(config: BoundsBodies, *, refused: Callable[[str], None], section: str = "limits") -> Quota:
    """Of the bytes of request bodies, for any server of ours."""
    return Quota(
        "body_bytes",
        "bytes of request bodies under way",
        limit=config.body_bytes,
        total=config.total_body_bytes,
        refused=refused,
        help="send fewer or smaller ones at once",
        section=section,
    )


class Rate:
    """A token bucket for every client."""

    def __init__(
        self,
        *,
        per_s: float,
        burst: int,
        clock: Callable[[], float],
        refused: Callable[[str], None],
        section: str = "limits",
    ) -> None:
        self._key = f"{section}.requests_per_s"
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._refused = refused
        self._buckets: dict[str, tuple[float, float]] = {}
        """What is left, and when that was."""

    def spend(self, client: str, cost: float = 1.0) -> None:
        """Raises TooFast where the client has asked too much of late.

        Whoever has anything left may spend more than that, once: a request that costs more than a whole bucket would
        never be served otherwise.
        """
        now = self._clock()
        left, since = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        if left < 1.0:
            self._buckets[client] = (left, now)
            self._refused("requests_per_s")
            wait_s = (1.0 - left) / self._per_s
            raise TooFast(
                f"{called(client)} sends more than {self._per_s:g} requests per second ({self._key}):"
                f" wait {max(1.0, wait_s):.0f} s",
                retry_after_s=wait_s,
            )
        self._buckets[client] = (left - cost, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._forget(now)

    def owe(self, client: str, cost: float) -> None:
        """More of a request that was let in already, as it turns out."""
        left, since = self._buckets.get(client, (self._burst, self._clock()))
        self._buckets[client] = (left - cost, since)

    def _forget(self, now: float) -> None:
        """Full buckets say nothing; beyond those, the oldest go."""
        kept = [(c, b) for c, b in self._buckets.items() if b[0] + (now - b[1]) * self._per_s < self._burst]
        kept.sort(key=lambda entry: entry[1][1])
        self._buckets = dict(kept[-MAX_BUCKETS // 2 :])


class Limits:
    """All of them.  Runs on control's event loop."""

    def __init__(self, config: LimitsConfig, *, metrics: ControlMetrics, clock: Callable[[], float]) -> None:
        self.config = config

        def refused(name: str) -> None:
            metrics.refused.labels(name).inc()

        self.episodes = Quota(
            "open_episodes",
            "open episodes",
            limit=config.open_episodes,
            total=config.total_open_episodes,
            refused=refused,
            help="finish or abort some, and begin again",
        )
        self.leases = Quota(
            "leases",
            "leases that it has not begun",
            limit=config.leases,
            total=None,
            refused=refused,
            help="begin episodes under them, or let them lapse",
        )
        self.waiting = Quota(
            "waiting",
            "begin and lease calls that wait for work",
            limit=config.waiting,
            total=config.total_waiting,
            refused=refused,
            help="wait for their answers",
        )
        self.calls = Quota(
            "calls",
            "model calls that run or wait",
            limit=config.calls,
            total=config.total_calls,
            refused=refused,
            help="wait for answers before you send more",
        )
        self.bodies = body_quota(config, refused=refused)
        self.rate = Rate(per_s=config.requests_per_s, burst=config.request_burst, clock=clock, refused=refused)

    def began(self, episode: OpenEpisode) -> None:
        """An attempt holds a place of its client until it ends or is lost; asking for it came before."""
        if episode.give_place is not None:  # begun on trial, and confirmed
            return
        client = episode.client
        self.episodes.add(client)
        episode.give_place = lambda: self.episodes.give(client)
