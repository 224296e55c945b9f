"""What a pool hands out, and the blocks that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any

from wingbeat.resources.admission import Slot
from wingbeat.resources.pots import TicketState
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Spec
from wingbeat.resources.turns import Request

if TYPE_CHECKING:
    from wingbeat.resources.pool import Resources


class Holding:
    """One place of a request, and who has it: all leases of one owner and name have the same."""

    __slots__ = ("count", "fault", "index", "leases", "name", "owner", "request", "since", "spec")

    def __init__(self, request: Request, index: int, spec: Spec, name: str, owner: str) -> None:
        self.request = request
        self.index = index
        self.spec = spec
        self.name = name
        self.owner = owner
        self.count = 1
        """Leases, those that wait too."""
        self.leases: tuple[Lease, ...] = ()
        self.since = 0.0
        """When it was let in."""
        self.fault: ResourceFailed | None = None
        """Why it was ended under its holders."""

    @property
    def slot(self) -> Slot:
        """Once it is let in."""
        return self.request.slots[self.index]

    def is_ready(self) -> bool:
        """Let in, started and checked.  Raises what prevented it."""
        if self.fault is not None:
            raise self.fault.with_traceback(None)
        if self.request.fault is not None:
            raise self.request.fault.with_traceback(None)
        return self.request.state is TicketState.LET_IN and self.request.slots[self.index].tenant.work is None


class Lease:
    """A held resource, and the block that holds it."""

    __slots__ = ("_holding", "_pool", "_value", "_wait_s", "ended", "name", "owner", "spec")

    def __init__(self, pool: Resources, spec: Spec, *, name: str, owner: str, wait_s: float | None) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._holding: Holding | None = None
        self._value: Any = None
        self.spec = spec
        self.name = name
        self.owner = owner
        self.ended = False

    @property
    def value(self) -> Any:
        """What its back-end hands out.  Raises ResourceLost once the lease ended: it may serve someone else by now."""
        if self.ended or self._holding is None:
            if self._holding is not None and self._holding.fault is not None:
                raise self._holding.fault.with_traceback(None)
            raise ResourceLost(
                f"the lease {self.name!r} of {self.owner!r} has ended; take a new one"
                if self.ended
                else "this lease has not begun: async with pool.lease(...) as lease"
            )
        return self._value

    def begin(self, holding: Holding, value: Any) -> None:
        """The pool has handed it out."""
        self._holding = holding
        self._value = value
        holding.leases += (self,)

    def end(self) -> Holding | None:
        """No more; what it held, the first time."""
        if self.ended:
            return None
        self.ended = True
        self._value = None
        holding = self._holding
        if holding is not None:
            holding.leases = tuple(lease for lease in holding.leases if lease is not self) if holding.count > 1 else ()
        return holding

    def __aenter__(self) -> CoroutineType[Any, Any, Lease]:
        if self._holding is not None:
            raise RuntimeError("this lease was entered before; call lease(...) for each block")
        return self._pool.enter(self, wait_s=self._wait_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        work = self._pool.end(self, is_lost=error is not None and isinstance(error, ResourceLost))
        if work is not None:
            await self._pool.finished([work])


class ManyLeases:
    """The block of :meth:`Resources.lease_all`."""

    __slots__ = ("_leases", "_owner", "_pool", "_specs", "_wait_s")

    def __init__(self, pool: Resources, specs: Mapping[str, Spec], *, owner: str, wait_s: float | None) -> None:
        self._pool = pool
        self._specs = dict(specs)
        self._owner = owner
        self._wait_s = wait_s
        self._leases: dict[str, Lease] = {}

    async def __aenter__(self) -> dict[str, Lease]:
        if self._leases:
            raise RuntimeError("these leases were entered before; call lease_all(...) for each block")
        self._leases = await self._pool.enter_all(self._specs, owner=self._owner, wait_s=self._wait_s)
        return dict(self._leases)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        is_lost = isinstance(error, ResourceLost)
        works = [self._pool.end(lease, is_lost=is_lost) for lease in self._leases.values()]
        await self._pool.finished([work for work in works if work is not None])
