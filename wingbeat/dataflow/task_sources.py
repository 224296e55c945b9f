"""One task source: its tasks, its place in the current epoch, its claim to be dealt."""

from __future__ import annotations

import hashlib
import random

import msgspec

from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import source_fault
from wingbeat.core.types import Task


class SourceState(msgspec.Struct, frozen=True):
    """A source's place, as it is saved."""

    epoch: int
    position: int
    pass_: float
    digest: str
    first_epoch: int = 0
    """The epoch in which these tasks were dealt first: replaced tasks begin their epochs anew."""
    dealt: int = 0
    """Groups dealt of this source."""
    counted: int = 0
    """Groups of it that a policy counted."""
    refunds: int = 0
    """Groups in a row that did not count."""
    returned: list[str] = []
    """Ids of tasks that are dealt again, before others: their groups were given up for no fault of theirs."""


class TrainSource:
    """The training tasks of one source, each once per epoch, in an order that (seed, source, epoch) determines."""

    def __init__(self, name: str, tasks: tuple[Task, ...], *, seed: int, state: SourceState) -> None:
        self.name = name
        self.tasks = tasks
        self.digest = state.digest
        self.pass_ = state.pass_
        self.dealt = state.dealt
        self.counted = state.counted
        self.refunds = state.refunds
        self.epoch = state.epoch
        self.first_epoch = state.first_epoch
        self.position = state.position
        self._returned = list(state.returned)
        self._seed = seed
        self._order: list[int] = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"{self._seed}:{self.name}:{self.epoch}").shuffle(order)
        return order

    def is_exhausted(self, epochs: int | None) -> bool:
        """Whether every task was dealt ``epochs`` times."""
        is_at_end = self.position == len(self.tasks) and not self._returned
        return epochs is not None and self.epoch - self.first_epoch + is_at_end >= epochs

    def deal(self) -> Task:
        """The next task: one that came back, else in order; after the last one of an epoch, the first of the next."""
        if self._returned:
            returned = self._returned.pop(0)
            self.dealt += 1
            return next(task for task in self.tasks if task.id == returned)
        if self.position == len(self.tasks):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        task = self.tasks[self._order[self.position]]
        self.position += 1
        self.dealt += 1
        return task

    def take_back(self, task: Task) -> None:
        """Deal a task again; one that is none of these any more is forgotten."""
        if task in self.tasks:
            self._returned.append(task.id)

    def state(self) -> SourceState:
        return SourceState(
            epoch=self.epoch,
            position=self.position,
            pass_=self.pass_,
            digest=self.digest,
            first_epoch=self.first_epoch,
            dealt=self.dealt,
            counted=self.counted,
            refunds=self.refunds,
            returned=list(self._returned),
        )


def check_source(source: str, tasks: tuple[Task, ...]) -> None:
    """Raises RequestError where the name cannot stand in a path, or the tasks are none, not of it or share an id."""
    if fault := source_fault(source):
        raise RequestError(fault, param="source")
    if not tasks:
        raise RequestError(f"source {source!r}: expected at least one task, got none", param="tasks")
    foreign = next((task for task in tasks if task.source != source), None)
    if foreign is not None:
        raise RequestError(f"source {source!r}: task {foreign.id!r} names source {foreign.source!r}", param="tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise RequestError(f"source {source!r}: task ids must be unique, got {task.id!r} twice", param="tasks")
        seen.add(task.id)


def digest_of(tasks: tuple[Task, ...]) -> str:
    """Content and order; changes in a payload make other tasks."""
    encoder = msgspec.json.Encoder(order="deterministic")
    return hashlib.sha256(encoder.encode([(task.id, task.payload) for task in tasks])).hexdigest()
