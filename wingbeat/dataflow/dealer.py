"""Deals training tasks: every source epoch by epoch, sources mixed by ratio, or in proportion to their size.

Sources come, go and are replaced while a run goes on, so there is no single permutation.  Each source shuffles its own
epochs by a generator that only (seed, source, epoch) determines, and stride scheduling picks the source
(:mod:`wingbeat.dataflow.mixing`).  Ratios are shares of the groups that *count*: one that was dropped before it could
reach a batch gives its turn back to its source.  The state is a few numbers per source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import msgspec

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow import mixing
from wingbeat.dataflow.mixing import Claim
from wingbeat.dataflow.task_sources import SourceState, TrainSource, check_source, digest_of

MAX_REFUNDS = 64
"""Groups in a row of one source that get their turn back; after them it has its share of the groups *dealt* until one
counts.  Without this bound a source from which nothing can be learnt would take all the rollouts."""


class _DealerState(msgspec.Struct, frozen=True):
    seed: int
    sources: dict[str, SourceState]
    ratios: dict[str, float] = {}
    configured: dict[str, float] = {}
    """The ratios of the configuration at that time: where it has other ones since, they win."""
    removed: list[str] = []
    """Sources that were taken out: a restart does not wait for them."""


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where one training source stands."""

    ratio: float | None
    """None where sizes decide."""
    num_tasks: int
    """0 for a source that ratios name and that has not come."""
    epoch: int
    """From 0."""
    position: int
    """Tasks dealt in this epoch."""
    is_exhausted: bool
    dealt: int
    """Groups."""
    counted: int
    """Groups that a policy counted."""
    share: float
    """Of all groups that counted."""
    ahead: float
    """Groups ahead of its share; negative: behind."""


class TaskDealer:
    """The task sources of a run, by split."""

    def __init__(
        self,
        seed: int,
        *,
        ratios: Mapping[str, float] | None = None,
        epochs: int | None = None,
        slack: int = 1,
        expected: Sequence[str] = (),
    ) -> None:
        """``epochs`` is how often each task is dealt (None: without end), ``slack`` by how many groups the
        shares may be off where clients run only some of them, ``expected`` which sources are on their way."""
        self._seed = seed
        self._expected = set(expected)
        self._removed: set[str] = set()
        self._configured = dict(ratios or {})
        self._ratios = dict(self._configured)
        self._epochs = epochs
        self._slack = slack
        self._train: dict[str, TrainSource] = {}
        self._eval: dict[str, tuple[Task, ...]] = {}
        self._restored: dict[str, SourceState] = {}
        """States of sources that have not been added again since the restart."""

    # --- sources ------------------------------------------------------------------------------

    def join(self, source: str, ratio: float | None) -> None:
        """Give a new training source its share of the mix; one that has a share keeps it.

        A source of the configuration comes back with its configured share.  Raises RequestError where
        ratios are set and leave nothing for this source.
        """
        if ratio is None and source in self._configured and source not in self._ratios:
            if self._ratios or not self._train:  # else someone chose to mix by size
                self._ratios = mixing.with_configured(self._ratios, source, self._configured)
            return
        if not self._ratios:
            if ratio is not None:
                raise RequestError(
                    "no ratios are set, so that sources mix by their size; leave `ratio` out, or set the ratios of"
                    " all sources with PUT /api/mixing",
                    param="ratio",
                )
            return
        if source in self._ratios:
            return
        if ratio is None:
            shown = ", ".join(f"{name} = {value:g}" for name, value in self._ratios.items())
            raise RequestError(
                f"the ratios are {shown} and leave nothing for source {source!r}: send its `ratio` along (the others"
                " shrink in proportion)",
                param="ratio",
            )
        if not mixing.MIN_SHARE <= ratio <= 1 - mixing.MIN_SHARE:
            raise RequestError(
                f"`ratio` of source {source!r}: expected {mixing.MIN_SHARE:g} to {1 - mixing.MIN_SHARE:g}, got"
                f" {ratio:g}",
                param="ratio",
            )
        self._ratios = mixing.with_share(self._ratios, source, ratio)

    def add_source(self, source: str, split: Split, tasks: Sequence[Task]) -> None:
        """Add or replace a source.

        The same tasks again change nothing, so that every client may announce its source; other
        tasks start a new epoch.  Raises RequestError where the tasks are none, not of this source or
        share an id.
        """
        dealt = tuple(tasks)
        check_source(source, dealt)
        if split is Split.EVAL:
            self._eval[source] = dealt
            return
        self._removed.discard(source)
        digest = digest_of(dealt)
        current = self._train.get(source)
        if current is not None and current.digest == digest:
            return
        known = current.state() if current is not None else self._restored.pop(source, None)
        state = self._initial_state(source, known, digest=digest)
        self._train[source] = TrainSource(source, dealt, seed=self._seed, state=state)

    def _initial_state(self, source: str, known: SourceState | None, *, digest: str) -> SourceState:
        if known is not None and known.digest == digest:
            return known
        middle = self._mean_pass(without=source)
        if known is None:
            return SourceState(epoch=0, position=0, pass_=middle, digest=digest)
        first = known.epoch + 1
        was_last = self._epochs is not None and first - known.first_epoch >= self._epochs
        # one that comes back from exhaustion does not catch up on what it could not deal
        kept = max(known.pass_, middle) if was_last else known.pass_
        return msgspec.structs.replace(
            known, epoch=first, first_epoch=first, position=0, pass_=kept, digest=digest, returned=[]
        )

    def _mean_pass(self, *, without: str) -> float:
        """Where a source begins that is neither ahead of its share nor behind, however far others are behind."""
        claims = [claim for claim in self._claims() if claim.name != without]
        if self._ratios or not claims:  # the sizes of those that have not come back are unknown
            claims += [
                Claim(name, self._ratios.get(name, 0.0) if self._ratios else 1.0, state.pass_)
                for name, state in self._restored.items()
                if name != without
            ]
        return mixing.mean_pass(claims)

    def remove(self, source: str) -> None:
        """Forget a source, its eval tasks and its share; the others keep their proportions.  Raises NotFoundError."""
        known = {*self._train, *self._eval, *self._restored, *self.missing}
        if source not in known:
            raise NotFoundError(f"no source {source!r}; sources are: {', '.join(sorted(known)) or 'none'}")
        self._removed.add(source)
        for place in (self._train, self._eval, self._restored):
            place.pop(source, None)
        if source in self._ratios:
            self._ratios = mixing.without(self._ratios, source)

    @property
    def removed(self) -> frozenset[str]:
        """Sources that were taken out and have not come back."""
        return frozenset(self._removed)

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source with tasks of either split."""
        return tuple(sorted({*self._train, *self._eval}))

    def num_tasks(self, split: Split) -> int:
        """Tasks of all sources of a split."""
        if split is Split.EVAL:
            return sum(len(tasks) for tasks in self._eval.values())
        return sum(len(source.tasks) for source in self._train.values())

    # --- the mix ------------------------------------------------------------------------------

    @property
    def ratios(self) -> dict[str, float]:
        """The shares in force; {} where sizes decide."""
        return dict(self._ratios)

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """Mix by these shares from now on; {} mixes by size.

        Raises RequestError unless they are shares of exactly the sources that have training tasks.
        """
        if ratios:
            mixing.check_ratios(ratios, sources=list(self._train))
        self._ratios = dict(ratios)
        for source in self._train.values():
            source.pass_ = 0.0
        self._restored = {n: msgspec.structs.replace(s, pass_=0.0) for n, s in self._restored.items()}

    @property
    def missing(self) -> tuple[str, ...]:
        """Sources that ratios name, or that are on their way, without training tasks: nothing is dealt before."""
        named = {name for name, ratio in self._ratios.items() if ratio > 0} | (self._expected - self._removed)
        return tuple(sorted(named.difference(self._train)))

    @property
    def is_exhausted(self) -> bool:
        """Whether every source that takes part has dealt its tasks as often as it may."""
        shared = [source for source in self._train.values() if self._weight(source) > 0]
        return bool(shared) and not self.missing and all(source.is_exhausted(self._epochs) for source in shared)

    @property
    def has_no_share(self) -> bool:
        """Whether there are training tasks and the share of every source is 0, so that nothing is dealt."""
        return bool(self._train) and not self.missing and not any(map(self._weight, self._train.values()))

    def places(self) -> dict[str, SourcePlace]:
        """Every training source, also those that are missing."""
        leads = mixing.ahead(self._claims())
        total = sum(source.counted for source in self._train.values())
        places = {name: self._place(source, leads, total) for name, source in self._train.items()}
        waited = SourcePlace(None, 0, 0, 0, is_exhausted=False, dealt=0, counted=0, share=0.0, ahead=0.0)
        for name in self.missing:
            places[name] = replace(waited, ratio=self._ratios.get(name))
        return dict(sorted(places.items()))

    def _place(self, source: TrainSource, leads: Mapping[str, float], total: int) -> SourcePlace:
        return SourcePlace(
            ratio=self._ratios.get(source.name, 0.0) if self._ratios else None,
            num_tasks=len(source.tasks),
            epoch=source.epoch,
            position=source.position,
            is_exhausted=source.is_exhausted(self._epochs),
            dealt=source.dealt,
            counted=source.counted,
            share=source.counted / total if total else 0.0,
            ahead=leads.get(source.name, 0.0),
        )

    def held_back(self, sources: Collection[str]) -> tuple[str, ...]:
        """Whom a client of these sources waits for: those most behind their share, first; () where it need not wait."""
        claims = self._claims()
        own = [claim.name for claim in claims if claim.name in sources]
        if self.missing or not own or mixing.choose(claims, among=own, slack=self._bound()) is not None:
            return ()
        leads = mixing.ahead(claims)
        behind = [name for name, lead in leads.items() if lead < 0 and name not in sources]
        return tuple(sorted(behind, key=lambda name: (leads[name], name)))

    def _weight(self, source: TrainSource) -> float:
        return self._ratios.get(source.name, 0.0) if self._ratios else float(len(source.tasks))

    def _claims(self) -> list[Claim]:
        """The sources that take part: those with a share and with tasks left."""
        return [
            Claim(name, weight, source.pass_)
            for name, source in self._train.items()
            if (weight := self._weight(source)) > 0 and not source.is_exhausted(self._epochs)
        ]

    def _bound(self) -> int | None:
        return self._slack if self._ratios else None

    # --- dealing ------------------------------------------------------------------------------

    def next_task(self, sources: Collection[str] | None = None) -> Task | None:
        """The next training task, of one of these sources (None: of any); None where none may be dealt now."""
        claims = self._claims()
        among = [claim.name for claim in claims if sources is None or claim.name in sources]
        name = None if self.missing else mixing.choose(claims, among=among, slack=self._bound())
        if name is None:
            return None
        source = self._train[name]
        if not self._ratios:
            self._forfeit(claims, source.pass_)
        source.pass_ += 1 / self._weight(source)
        task = source.deal()
        self._keep_up()
        return task

    def _keep_up(self) -> None:
        """Exhausted sources do not fall behind: one that gets another epoch does not catch up on what it missed."""
        middle = mixing.mean_pass(self._claims())
        for source in self._train.values():
            if source.is_exhausted(self._epochs):
                source.pass_ = max(source.pass_, middle)

    def _forfeit(self, claims: Sequence[Claim], dealt_at: float) -> None:
        """Where sizes decide, nobody waits: a source for which no client asks keeps ``slack`` groups of its claim."""
        for claim in claims:
            source = self._train[claim.name]
            source.pass_ = max(source.pass_, dealt_at - self._slack / claim.weight)

    def refund(self, source: str) -> None:
        """A group that was dealt did not count: its source gets the turn back, ``MAX_REFUNDS`` times in a row."""
        found = self._train.get(source)
        if found is None:  # removed meanwhile
            return
        found.refunds += 1
        weight = self._weight(found)
        if found.refunds <= MAX_REFUNDS and weight > 0:
            found.pass_ -= 1 / weight

    def take_back(self, task: Task) -> None:
        """The group of a task was given up before it could count: the task is dealt again."""
        found = self._train.get(task.source)
        if found is not None:
            found.take_back(task)

    def skip(self, source: str) -> None:
        """A task was dealt and is not issued at all: it costs its source nothing."""
        found = self._train.get(source)
        if found is not None and self._weight(found) > 0:
            found.pass_ -= 1 / self._weight(found)
            found.dealt -= 1

    def counted(self, source: str) -> None:
        """A group that was dealt reached a buffer."""
        found = self._train.get(source)
        if found is not None:
            found.refunds = 0
            found.counted += 1

    # --- evaluation ---------------------------------------------------------------------------

    def eval_tasks(self, source: str | None = None, *, limit: int | None = None) -> tuple[Task, ...]:
        """The eval tasks of one source or of all, in the order given, equally many of each up to ``limit`` in all.

        Raises NotFoundError where there are none.
        """
        chosen = list(self._eval.values()) if source is None else [self._eval.get(source, ())]
        if not any(chosen):
            known = ", ".join(self._eval) or "none"
            raise NotFoundError(f"no eval tasks for source {source or 'any'!r}; sources with eval tasks: {known}")
        turns = chain.from_iterable(zip_longest(*chosen))
        first = [task for task in turns if task is not None][:limit]
        quota = {name: sum(task.source == name for task in first) for name in {task.source for task in first}}
        return tuple(task for tasks in chosen for task in tasks[: quota.get(tasks[0].source, 0) if tasks else 0])

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON data from which a new dealer, given the same sources, deals on without a skip or repeat."""
        sources = self._restored | {name: source.state() for name, source in self._train.items()}
        state: dict[str, Any] = msgspec.to_builtins(
            _DealerState(
                self._seed,
                sources,
                ratios=self._ratios,
                configured=self._configured,
                removed=sorted(self._removed),
            )
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` stood; sources may be added before or after.

        A source whose tasks have changed since starts its next epoch.  Ratios that were set while the
        run went on stay in force unless the configuration has other ones than then.  Raises ValueError
        for another seed's state, ``msgspec.ValidationError`` for anything that is no state.
        """
        loaded = msgspec.convert(state, _DealerState)
        if loaded.seed != self._seed:
            raise ValueError(f"expected the dealer state of seed {self._seed}, got seed {loaded.seed}; keep run.seed")
        self._restored = dict(loaded.sources)
        self._removed = set(loaded.removed).difference(self._train)
        if loaded.configured == self._configured:
            self._ratios = dict(loaded.ratios)
        else:
            self._restored = {n: msgspec.structs.replace(s, pass_=0.0) for n, s in self._restored.items()}
        added, self._train = self._train, {}
        for name, source in added.items():
            self.add_source(name, Split.TRAIN, source.tasks)
