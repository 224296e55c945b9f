"""The protocol of back-ends: what makes one kind of resource, and ends what a dead process left of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from wingbeat.resources.specs import Spec


class Instance(Protocol):
    """One resource that was started.  The pool calls one method at a time."""

    @property
    def value(self) -> Any:
        """What a lease hands out: an object, a box, an endpoint."""
        ...

    @property
    def handle(self) -> str | None:
        """A durable name by which :meth:`Backend.reap` ends it if its owner died; None: it dies with the process."""
        ...

    async def reset(self) -> None:
        """Make it as good as new.  Whatever it raises, it is quarantined and replaced."""
        ...

    async def check(self) -> None:
        """Raises ResourceLost if it is not fit for use."""
        ...

    async def close(self) -> None:
        """End it; idempotent, also after a failure.  The pool shields it from cancellation."""
        ...


@runtime_checkable
class Priced(Protocol):
    """An instance that costs money."""

    @property
    def cost(self) -> float:
        """Spent since it was started."""
        ...


@runtime_checkable
class Immediate(Protocol):
    """An instance whose reset and check seldom have anything to await: then giving it back costs no task.

    Both raise like :meth:`Instance.reset` and :meth:`Instance.check`.
    """

    def renew(self) -> Coroutine[Any, Any, None] | None:
        """Reset and check; what remains to be awaited, or None."""
        ...

    def verify(self) -> Coroutine[Any, Any, None] | None:
        """Check; what remains to be awaited, or None."""
        ...


class Backend(Protocol):
    """Makes one kind.

    One with an attribute ``meters`` is given the pool's :class:`wingbeat.resources.meters.Meters` before its first
    start, and draws requests, tokens and money from them.  One with an attribute ``late_s`` has things made by others
    at its request: so many seconds after who asked was killed, or gave up, something may still appear.
    """

    kind: ClassVar[str]

    def check(self, spec: Spec) -> None:
        """Raises UnsupportedField for what it cannot honour, ConfigError for what is wrong here; starts nothing."""
        ...

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> Instance:
        """One more.  Calls ``started(handle)`` as soon as there is something that would outlive this process.

        Cancelled or failing, it leaves nothing behind.  Raises ResourceFailed (other exceptions become one).
        """
        ...

    async def reap(self, handle: str) -> bool:
        """End what a dead owner left; False: nothing was there.  Must not end a stranger that took the name over."""
        ...

    async def close(self) -> None:
        """Free what all its instances share; no instance is left then."""
        ...


def late_s_of(backend: Backend) -> float:
    """After so long, what a back-end does not find will not appear any more."""
    late_s: float = getattr(backend, "late_s", 0.0)
    return late_s


Backends = Mapping[str, Backend]
"""By kind."""
