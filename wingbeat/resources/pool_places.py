"""Who has what: the places of a pool by owner, by name, and those fetched ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from wingbeat.resources.pool_leases import Holding
from wingbeat.resources.pots import TicketState


class Places:
    """Every holding that is not given back yet, let in or in line."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[Holding, None]] = defaultdict(dict)
        self._named: dict[tuple[str, str], Holding] = {}
        """Owner and name -> what they have."""
        self._fetched: dict[str, list[Holding]] = {}
        """By owner: asked for ahead and not yet leased."""

    def add(self, holding: Holding) -> None:
        owner = holding.owner
        self._by_owner[owner][holding] = None
        if owner and holding.name:
            self._named[owner, holding.name] = holding

    def remove(self, holding: Holding) -> None:
        owner = holding.owner
        owned = self._by_owner[owner]
        del owned[holding]
        if not owned:
            del self._by_owner[owner]
        if owner:
            if self._named.get((owner, holding.name)) is holding:
                del self._named[owner, holding.name]
            if owner in self._fetched:
                self._unfetch(holding)

    def of(self, owner: str) -> tuple[Holding, ...]:
        return tuple(self._by_owner.get(owner, ()))

    def all(self) -> Iterable[Holding]:
        return [holding for held in self._by_owner.values() for holding in held]

    def named(self, owner: str, name: str) -> Holding | None:
        return self._named.get((owner, name)) if name else None

    # --- fetched ahead

    @property
    def is_any_fetched(self) -> bool:
        return bool(self._fetched)

    def fetched(self, owner: str) -> tuple[Holding, ...]:
        return tuple(self._fetched.get(owner, ()))

    def fetch(self, owner: str, holdings: Sequence[Holding]) -> None:
        """They were asked for ahead."""
        self._fetched.setdefault(owner, []).extend(holdings)

    def take_over(self, holding: Holding, name: str) -> None:
        """It was fetched ahead and is leased now, by this name."""
        self._unfetch(holding)
        holding.name = name
        if name:
            self._named[holding.owner, name] = holding

    def is_waiting(self, owner: str) -> bool:
        """For a lease, that is, and not only for what it fetches ahead."""
        fetched = self._fetched.get(owner, ())
        return any(
            holding.request.state is TicketState.WAITING and holding not in fetched
            for holding in self._by_owner.get(owner, ())
        )

    def _unfetch(self, holding: Holding) -> None:
        left = [other for other in self._fetched[holding.owner] if other is not holding]
        if left:
            self._fetched[holding.owner] = left
        else:
            del self._fetched[holding.owner]
