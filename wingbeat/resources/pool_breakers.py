"""What cannot be started is not started again and again: a breaker for all specs that start alike.

A missing image, a full disk, a daemon that is down fail every start, in milliseconds or after a minute, for as long as
they last.  Without a pause that is hundreds of starts a minute, each of them an episode that ends as a failure of
infrastructure.  So after :data:`MAX_FAILURES` in a row a lease that would need another start waits, outside of all
lines, until one of them tries: a second after the last failure, then two, four, up to :data:`MAX_COOL_S`.  All that
wait are let go if that succeeds, and told why if it fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.resources.backends.breaker import Breaker, BreakerState
from wingbeat.resources.specs import ResourceFailed, ResourceWait, Spec

logger = logging.getLogger("wingbeat.resources")

MAX_FAILURES = 5
COOL_S, MAX_COOL_S = 1.0, 60.0
TRY_S = 1.0
"""How long others wait for who went to try, until one of them goes, too: it may have got in line behind many."""
MAX_KEPT = 256
"""Kinds of starts whose last one failed that are remembered."""


class _Broken:
    """Specs of one start whose last start failed."""

    def __init__(self, clock: Clock) -> None:
        self.breaker = Breaker(max_failures=MAX_FAILURES, cool_s=COOL_S, max_cool_s=MAX_COOL_S, clock=clock)
        self.fault = ""
        self.waiting: dict[asyncio.Future[None], tuple[str, Spec]] = {}
        """Those who wait for the next try: whose, and for what."""
        self.trying_until = 0.0
        """Somebody went to try, and has so long to begin."""

    @property
    def next_try(self) -> float:
        """When somebody may go and try; never while somebody does, since its end wakes all."""
        if self.breaker.state is BreakerState.HALF_OPEN and not self.breaker.may_send():
            return math.inf
        return max(self.breaker.opens_at, self.trying_until)

    def words(self, spec: Spec, now: float) -> str:
        left_s = max(0.0, self.breaker.opens_at - now)
        when = f"the next try is in {left_s:.2g} s" if left_s else "it is being tried again"
        return f"the last {self.breaker.num_failures} starts of a {spec.title} failed, {when}: {self.fault}"

    def wake(self, words: str = "") -> None:
        """To look again; with ``words`` to be told so, each by an error of its own."""
        waiting, self.waiting = self.waiting, {}
        for future in waiting:
            if not future.done():
                _ = future.set_exception(ResourceFailed(words)) if words else future.set_result(None)


class StartBreakers:
    """Those of one pool."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._broken: OrderedDict[Hashable, _Broken] = OrderedDict()

    @property
    def is_any_broken(self) -> bool:
        """Whether any start failed of late: else there is nothing to ask."""
        return bool(self._broken)

    @property
    def waiting(self) -> Iterator[Spec]:
        """What is waited for, once for each who waits."""
        return (spec for broken in self._broken.values() for _, spec in broken.waiting.values())

    # --- those who ask

    async def ready(self, spec: Spec, *, owner: str, wait_s: float | None, is_there: Callable[[], bool]) -> None:
        """Wait until a start of this spec is worth a try, or ``is_there`` says that none is needed.

        Raises ResourceFailed when somebody's try failed meanwhile, ResourceWait after ``wait_s``.
        """
        until = None if wait_s is None else self._clock() + wait_s
        while (broken := self._broken.get(spec.start_key)) is not None and not is_there():
            now = self._clock()
            if until is not None and now >= until:
                raise ResourceWait(f"{spec.title}: waited for {wait_s:.3g} s; {broken.words(spec, now)}")
            if broken.breaker.may_send() and now >= broken.trying_until:
                if broken.breaker.state is not BreakerState.CLOSED:
                    broken.trying_until = now + TRY_S
                return
            await self._change_of(broken, owner, spec, min(broken.next_try, math.inf if until is None else until) - now)

    @staticmethod
    async def _change_of(broken: _Broken, owner: str, spec: Spec, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        broken.waiting[future] = owner, spec
        # a moment later, so that it is certainly due
        timer = loop.call_later(within_s + 1e-3, _wake, future) if within_s < math.inf else None
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()
            broken.waiting.pop(future, None)

    def there_is_one(self, spec: Spec) -> None:
        """An instance waits for its next lease: whoever waits looks again."""
        broken = self._broken.get(spec.start_key)
        if broken is not None:
            broken.wake()

    def cut(self, owner: str | None, fault: ResourceFailed) -> None:
        """Those of an owner (None: of all) wait no longer."""
        for broken in self._broken.values():
            for future, (whose, _) in list(broken.waiting.items()):
                if owner in (None, whose) and not future.done():
                    future.set_exception(type(fault)(fault.message))

    # --- what comes of starts

    def begin(self, spec: Spec) -> bool:
        """A start begins; whether its end decides for others.  Raises ResourceFailed where it must not begin."""
        broken = self._broken.get(spec.start_key) if self._broken else None
        if broken is None:
            return False
        if not broken.breaker.may_send():
            raise ResourceFailed(broken.words(spec, self._clock()))
        return broken.breaker.sent()

    def ended(self, spec: Spec, *, fault: WingbeatError | None, is_there: bool, is_probe: bool) -> None:
        """What came of a start that began; neither there nor a fault: nobody waited for its end."""
        if fault is not None:
            self._failed(spec, fault, is_probe=is_probe)
        elif self._broken:
            if is_there:
                self._succeeded(spec, is_probe=is_probe)
            else:
                self._abandoned(spec, is_probe=is_probe)

    def _succeeded(self, spec: Spec, *, is_probe: bool) -> None:
        broken = self._broken.get(spec.start_key)
        if broken is not None:
            broken.breaker.succeeded(is_probe=is_probe)
            if broken.breaker.state is BreakerState.CLOSED:
                del self._broken[spec.start_key]
                broken.wake()

    def _failed(self, spec: Spec, fault: WingbeatError, *, is_probe: bool) -> None:
        broken = self._broken.get(spec.start_key)
        if broken is None:
            self._forget_oldest()
            broken = self._broken[spec.start_key] = _Broken(self._clock)
        self._broken.move_to_end(spec.start_key)
        broken.fault = fault.message
        was_open = broken.breaker.state is BreakerState.OPEN
        broken.breaker.failed(is_probe=is_probe)
        is_open = broken.breaker.state is BreakerState.OPEN
        if is_probe or (is_open and not was_open):
            logger.warning("%s", words := broken.words(spec, self._clock()))
            broken.trying_until = 0.0
            broken.wake(words)

    def _abandoned(self, spec: Spec, *, is_probe: bool) -> None:
        broken = self._broken.get(spec.start_key)
        if broken is not None:
            broken.breaker.abandoned(is_probe=is_probe)
            if is_probe:
                broken.trying_until = 0.0
                broken.wake()

    def _forget_oldest(self) -> None:
        if len(self._broken) >= MAX_KEPT:
            key = next((key for key, broken in self._broken.items() if not broken.waiting), None)
            if key is not None:
                del self._broken[key]


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
