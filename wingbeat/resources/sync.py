"""The synchronous twin of :class:`wingbeat.resources.Resources`, for plain scripts and threads.

with SyncResources() as pool, pool.lease(spec, owner="me") as lease:
    lease.value.run("make test")
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wingbeat.core.loop_thread import Blocking, LoopPort, LoopThread
from wingbeat.resources.backend import Backends
from wingbeat.resources.budgets import Budgets
from wingbeat.resources.pool import WAIT_S, Resources
from wingbeat.resources.pool_leases import Lease
from wingbeat.resources.specs import Spec
from wingbeat.resources.stats import BudgetStats, ClassStats


class SyncLease:
    """A held resource; the coroutine functions of its value (``run`` of a box) are ordinary ones here."""

    def __init__(self, lease: Lease, port: LoopPort) -> None:
        self._lease = lease
        self._port = port

    @property
    def name(self) -> str:
        return self._lease.name

    @property
    def owner(self) -> str:
        return self._lease.owner

    @property
    def spec(self) -> Spec:
        return self._lease.spec

    @property
    def ended(self) -> bool:
        return self._lease.ended

    @property
    def value(self) -> Any:
        """As :attr:`Lease.value`; an in-process object comes as it is."""
        value = self._lease.value
        return value if self.spec.kind == "local" else Blocking(value, self._port)


class SyncResources:
    """:class:`Resources` for synchronous code; usable from many threads.

    Its event loop runs in a thread of its own, where the hooks of in-process objects are called, too.
    """

    def __init__(
        self,
        budgets: Budgets | None = None,
        *,
        backends: Backends | None = None,
        ledger: Path | None = None,
        wait_s: float | None = WAIT_S,
    ) -> None:
        self._pool = Resources(budgets, backends=backends, ledger=ledger, wait_s=wait_s)
        self._thread = LoopThread("wingbeat-resources")
        self._port = self._thread.port

    def close(self) -> None:
        """As :meth:`Resources.close`; ends the thread."""
        self._thread.stop(self._pool.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> Generator[SyncLease]:
        """As :meth:`Resources.lease`, with ``with``."""
        with self._port.entered(self._pool.lease(spec, name=name, owner=owner, wait_s=wait_s)) as lease:
            yield SyncLease(lease, self._port)

    @contextmanager
    def lease_all(
        self, specs: Mapping[str, Spec], *, owner: str = "", wait_s: float | None = None
    ) -> Generator[dict[str, SyncLease]]:
        """As :meth:`Resources.lease_all`, with ``with``."""
        with self._port.entered(self._pool.lease_all(specs, owner=owner, wait_s=wait_s)) as leases:
            yield {name: SyncLease(lease, self._port) for name, lease in leases.items()}

    def prefetch(self, specs: Spec | Mapping[str, Spec], *, owner: str) -> None:
        """As :meth:`Resources.prefetch`."""

        async def fetch() -> None:
            self._pool.prefetch(specs, owner=owner)

        self._port.call(fetch())

    def release_owner(self, owner: str) -> int:
        """As :meth:`Resources.release_owner`."""
        return self._port.call(self._pool.release_owner(owner))

    def snapshot(self) -> list[ClassStats]:
        """As :meth:`Resources.snapshot`."""

        async def look() -> list[ClassStats]:
            return self._pool.snapshot()

        return self._port.call(look())

    def budgets(self) -> list[BudgetStats]:
        """As :meth:`Resources.budgets`."""

        async def look() -> list[BudgetStats]:
            return self._pool.budgets()

        return self._port.call(look())
