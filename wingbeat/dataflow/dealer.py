"""Deals training tasks: every source epoch by epoch, sources mixed in proportion to their size.

Sources come, go and are replaced while a run goes on, so there is no single permutation.  Each
source shuffles its own epochs by a generator that only (seed, source, epoch) determines, and stride
scheduling (Waldspurger and Weihl 1995) picks the source: a source of n tasks advances its pass by 1/n
per task dealt, the lowest pass deals next, and a new source starts at the lowest pass there is, so it neither
starves others nor waits.  The state is a few numbers per source.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.types import Split, Task


class _SourceState(msgspec.Struct, frozen=True):
    epoch: int
    position: int
    pass_: float
    digest: str


class _DealerState(msgspec.Struct, frozen=True):
    seed: int
    sources: dict[str, _SourceState]


class _TrainSource:
    """One source's place in its current epoch."""

    def __init__(self, name: str, tasks: tuple[Task, ...], *, seed: int, state: _SourceState) -> None:
        self.name = name
        self.tasks = tasks
        self.digest = state.digest
        self.pass_ = state.pass_
        self._seed = seed
        self._epoch = state.epoch
        self._position = state.position
        self._order: list[int] = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"{self._seed}:{self.name}:{self._epoch}").shuffle(order)
        return order

    def deal(self) -> Task:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        task = self.tasks[self._order[self._position]]
        self._position += 1
        self.pass_ += 1 / len(self.tasks)
        return task

    def state(self) -> _SourceState:
        return _SourceState(self._epoch, self._position, pass_=self.pass_, digest=self.digest)


class TaskDealer:
    """The task sources of a run, by split."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._train: dict[str, _TrainSource] = {}
        self._eval: dict[str, tuple[Task, ...]] = {}
        self._restored: dict[str, _SourceState] = {}
        """States of sources that have not been added again since the restart."""

    def add_source(self, source: str, split: Split, tasks: Sequence[Task]) -> None:
        """Add or replace a source.

        The same tasks again change nothing, so that every client may announce its source; other
        tasks start a new epoch.  Raises RequestError where the tasks are none, not of this source or
        share an id.
        """
        dealt = tuple(tasks)
        _check_source(source, dealt)
        if split is Split.EVAL:
            self._eval[source] = dealt
            return
        digest = _digest(dealt)
        current = self._train.get(source)
        if current is not None and current.digest == digest:
            return
        known = current.state() if current is not None else self._restored.pop(source, None)
        state = self._initial_state(known, digest=digest)
        self._train[source] = _TrainSource(source, dealt, seed=self._seed, state=state)

    def _initial_state(self, known: _SourceState | None, *, digest: str) -> _SourceState:
        if known is not None and known.digest == digest:
            return known
        if known is None:
            passes = [other.pass_ for other in (*self._train.values(), *self._restored.values())]
            return _SourceState(epoch=0, position=0, pass_=min(passes, default=0.0), digest=digest)
        return _SourceState(epoch=known.epoch + 1, position=0, pass_=known.pass_, digest=digest)

    def num_tasks(self, split: Split) -> int:
        """Tasks of all sources of a split."""
        if split is Split.EVAL:
            return sum(len(tasks) for tasks in self._eval.values())
        return sum(len(source.tasks) for source in self._train.values())

    def next_task(self) -> Task:
        """The next training task.  Raises NotFoundError while there is no training source."""
        if not self._train:
            raise NotFoundError("expected a training task source, got none; add one or configure [tasks]")
        return min(self._train.values(), key=lambda source: (source.pass_, source.name)).deal()

    def eval_tasks(self, source: str | None = None) -> tuple[Task, ...]:
        """The eval tasks of one source or of all, in the order given.  Raises NotFoundError where there are none."""
        if source is None:
            found = tuple(task for tasks in self._eval.values() for task in tasks)
        else:
            found = self._eval.get(source, ())
        if not found:
            known = ", ".join(self._eval) or "none"
            raise NotFoundError(f"no eval tasks for source {source or 'any'!r}; sources with eval tasks: {known}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON data from which a new dealer, given the same sources, deals on without a skip or repeat."""
        sources = self._restored | {name: source.state() for name, source in self._train.items()}
        state: dict[str, Any] = msgspec.to_builtins(_DealerState(self._seed, sources))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` stood; sources may be added before or after.

        A source whose tasks have changed since starts its next epoch.  Raises ValueError for another
        seed's state, ``msgspec.ValidationError`` for anything that is no state.
        """
        loaded = msgspec.convert(state, _DealerState)
        if loaded.seed != self._seed:
            raise ValueError(f"expected the dealer state of seed {self._seed}, got seed {loaded.seed}; keep run.seed")
        self._restored = dict(loaded.sources)
        added, self._train = self._train, {}
        for name, source in added.items():
            self.add_source(name, Split.TRAIN, source.tasks)


def _check_source(source: str, tasks: tuple[Task, ...]) -> None:
    if not tasks:
        raise RequestError(f"source {source!r}: expected at least one task, got none", param="tasks")
    foreign = next((task for task in tasks if task.source != source), None)
    if foreign is not None:
        raise RequestError(f"source {source!r}: task {foreign.id!r} names source {foreign.source!r}", param="tasks")
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = next(task_id for task_id in ids if ids.count(task_id) > 1)
        raise RequestError(f"source {source!r}: task ids must be unique, got {twice!r} twice", param="tasks")


def _digest(tasks: tuple[Task, ...]) -> str:
    """Content and order; changes in a payload make other tasks."""
    encoder = msgspec.json.Encoder(order="deterministic")
    return hashlib.sha256(encoder.encode([(task.id, task.payload) for task in tasks])).hexdigest()
