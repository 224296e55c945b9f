"""Which task the next training group gets, and whom a client of some sources waits for.

The dealer knows the shares, operators know which tasks teach something, and this module knows what clients ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from wingbeat.core.types import Task
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.episodes.client_groups import is_client_group

MAX_SKIPS = 1024
"""Tasks that are passed over for one group at most, should no operator's own guard end it."""
ASKED_S = 60.0
"""How long a client's question for a source counts after it was answered."""

Sources = frozenset[str] | None
"""What a client can run; None: every source."""


class AtWork(NamedTuple):
    """Where clients are."""

    running: frozenset[str]
    """Sources of the episodes that gave a sign of life lately."""
    unfinished: Mapping[str, int]
    """Open training groups, by source."""


class Issuer:
    """Runs on control's event loop."""

    def __init__(
        self,
        dealer: TaskDealer,
        *,
        ledger: Ledger,
        watch: Callable[[Future[Any]], None],
        should_issue: Callable[[Task], bool],
        at_work: Callable[[], AtWork],
        clock: Callable[[], float],
    ) -> None:
        """``should_issue`` says whether some policy wants a task, ``at_work`` what clients run now."""
        self._dealer = dealer
        self._ledger = ledger
        self._watch = watch
        self._should_issue = should_issue
        self._at_work = at_work
        self._clock = clock
        self._waiting: Counter[Sources] = Counter()
        """What is asked for right now."""
        self._asked: dict[Sources, float] = {}
        """When a question was last answered."""

    def next_task(self, sources: Sources) -> Task | None:
        """The next task of these sources that an operator does not pass over; None where none may be dealt now."""
        for _ in range(MAX_SKIPS):
            task = self._dealer.next_task(sources)
            if task is None or self._should_issue(task):
                return task
            self._dealer.skip(task.source)
        return self._dealer.next_task(sources)

    def settled(self, group: GroupSpec, counts: bool, again: bool = False) -> dict[str, Any] | None:
        """A training group closed; where no policy counts it, its source gets its turn back.

        ``again``: its task is dealt again.  Returns the dealer's state, to be saved with the closing; None where
        nobody dealt the group.
        """
        if is_client_group(group.id):
            return None
        (self._dealer.counted if counts else self._dealer.refund)(group.task.source)
        if again:
            self._dealer.take_back(group.task)
        return self._dealer.state_dict()

    def save(self) -> None:
        """Make what changed in the mix durable."""
        self._watch(self._ledger.save_dealer_state(self._dealer.state_dict()))

    # --- what clients ask for -----------------------------------------------------------------

    def ask(self, sources: Sources) -> None:
        """A client asks now; :meth:`answered` ends it."""
        self._waiting[sources] += 1

    def answered(self, sources: Sources) -> None:
        self._waiting[sources] -= 1
        if not self._waiting[sources]:
            del self._waiting[sources]
        now = self._clock()
        self._asked = {asked: at for asked, at in self._asked.items() if at >= now - ASKED_S} | {sources: now}

    @property
    def num_waiting(self) -> int:
        """Clients that ask now."""
        return self._waiting.total()

    def _has_client(self, source: str) -> bool:
        """Whether a client asked for it lately, or is busy with it."""
        horizon = self._clock() - ASKED_S
        asked = (*self._waiting, *(sources for sources, at in self._asked.items() if at >= horizon))
        return source in self._at_work().running or any(s is None or source in s for s in asked)

    # --- in words -----------------------------------------------------------------------------

    def blockers(self, evaluated: Iterable[str] = ()) -> list[str]:
        """What the mix waits for; ``evaluated`` are the sources of which evaluations have tasks left."""
        found = [
            f"source {name!r} has no training tasks yet, and dealing waits for it: PUT /api/tasks/{name}, or take it"
            " out with DELETE"
            for name in self._dealer.missing
        ]
        if self._dealer.is_exhausted:
            found.append("the tasks are exhausted (tasks.epochs): the run ends with the groups that are in flight")
        if self._dealer.has_no_share:
            without = ", ".join(self._dealer.ratios)
            found.append(f"nothing is dealt: the share of {without} is 0; give shares with PUT /api/mixing")
        waits = [(asked, self._dealer.held_back(asked)) for asked in self._waiting if asked is not None]
        for behind in dict.fromkeys(name for _, names in waits for name in names):
            ahead = sorted({name for asked, names in waits if behind in names for name in asked})
            who = ", ".join(ahead)
            if self._has_client(behind):
                found.append(f"source {behind!r} is behind its share: its clients are slower than those of {who}")
            else:
                found.append(f"source {behind!r} is behind its share: no client asks for it, and those of {who} wait")
        unasked = sorted(name for name in set(evaluated) if self._waiting and not self._has_client(name))
        return found + [f"an evaluation waits for a client of source {name!r}" for name in unasked]

    def absent_clients(self) -> list[str]:
        """What was begun and nobody goes on with, and what clients ask for in vain: why other things then wait."""
        at_work = self._at_work()
        found = [
            f"{count} open group{'s' if count > 1 else ''} of source {name!r} wait{'s' if count == 1 else ''} for a"
            " client: none asks for it"
            for name, count in sorted(at_work.unfinished.items())
            if self._waiting and not self._has_client(name)
        ]
        known = {*self._dealer.sources, *self._dealer.missing}
        asked = {name for sources in self._waiting for name in (known if sources is None else sources)}
        if asked and known and not asked & known and not at_work.running:
            found.append(f"clients ask only for what is not here: {self.reason(asked)}")
        return found

    def reason(self, sources: Collection[str]) -> str:
        """Why a client of just these sources gets nothing, or "" where that has other reasons."""
        places, known = self._dealer.places(), self._dealer.sources
        own = sorted(set(sources) & set(known))
        if not own:
            return f"no tasks of source {', '.join(sorted(sources))}; sources are: {', '.join(known) or 'none'}"
        train = [places[name] for name in own if name in places]
        if train and all(place.is_exhausted for place in train):
            return f"the tasks of {', '.join(own)} are exhausted"
        behind = self._dealer.held_back(sources)
        return f"{', '.join(own)} is ahead of its share and waits for {', '.join(behind)}" if behind else ""
