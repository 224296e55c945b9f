"""The course of a run: evaluation before, during and after training, export, completion.

before ──▶ (training; evaluations every N steps) ──▶ after ──▶ export ──▶ complete

Training ends with its last step, or earlier, once the tasks are exhausted and what is buffered fills no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import EvaluationRequest
from wingbeat.core.signals import Changed
from wingbeat.core.types import Split
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook
from wingbeat.server.episodes.evaluations import Evaluations
from wingbeat.server.policies.host import PolicyHost, TrainerState


@dataclass(frozen=True, slots=True)
class DirectorParts:
    """What a run's course needs."""

    config: Config
    run_dir: Path
    policies: Mapping[str, PolicyHost]
    dealer: TaskDealer
    book: GroupBook
    evaluations: Evaluations
    events: EventLog
    changed: Changed
    summary: Callable[[], dict[str, Any]]


class Director:
    """Decides when to evaluate and when the run is complete."""

    def __init__(self, parts: DirectorParts) -> None:
        self._parts = parts
        self._trainable = [h for h in parts.policies.values() if h.config.trainable]
        self.complete = False
        self.ended = ""
        """Why training ended before its last step, where the tasks were exhausted."""

    async def run(self) -> None:
        """Returns when the run is complete; at once for a server that only hosts frozen policies."""
        config = self._parts.config
        if not self._trainable or (config.run.steps == 0 and not config.eval.at_start):
            return  # a server for others to use: it never completes by itself
        if config.eval.at_start:
            await self._evaluate_before()
        await self._until(lambda: self._has_trained_all() and not self._parts.evaluations.running)
        if config.eval.at_end and config.run.steps and self._parts.dealer.num_tasks(Split.EVAL):
            await self._evaluate_after()
        await self._export()
        self.complete = True
        self._parts.events.emit("complete", **self._parts.summary(), **({"ended": self.ended} if self.ended else {}))
        self._parts.changed.notify()

    async def after_step(self, host: PolicyHost) -> None:
        """Evaluate every so many steps, at the version that just came to be; its next step waits for its weights."""
        every, version = self._parts.config.eval.every, host.version
        if not every or version % every or version >= self._parts.config.run.steps:
            return
        await host.until_published(version)
        if host.newest == version and self._can_evaluate():
            self._evaluate(host, "during")
        else:
            self._parts.events.emit("evaluation_skipped", policy=host.name, version=version)

    async def _evaluate_before(self) -> None:
        """At version 0; skipped where the eval tasks come only after the first step, or never."""
        await self._until(
            lambda: (
                (self._can_evaluate() and not self._parts.dealer.missing) or self._has_trained() or self._is_cut_off()
            )
        )
        if self._can_evaluate() and not self._has_trained():
            for host in self._trainable:
                self._evaluate(host, "before")

    async def _evaluate_after(self) -> None:
        # after a restart, a trainer has yet to tell of its weights; meanwhile the last eval source may be removed
        await self._until(
            lambda: self._can_evaluate_all() or self._is_cut_off() or not self._parts.dealer.num_tasks(Split.EVAL)
        )
        for host in self._trainable if self._can_evaluate_all() else ():
            if not host.halted:
                self._evaluate(host, "after")
        await self._until(lambda: not self._parts.evaluations.running)

    async def _export(self) -> None:
        for host in self._trainable:
            if host.halted or not self._parts.config.run.steps:
                continue
            await self._until(
                lambda host=host: (host.complete or bool(self.ended)) and host.state is TrainerState.READY
            )
            try:
                done = await host.export(self._parts.run_dir / "export" / host.name)
                self._parts.events.emit("exported", policy=host.name, path=done.path)
            except (RuntimeError, ConnectionError) as error:
                self._parts.events.emit("export_failed", policy=host.name, error=str(error))

    def _has_trained_all(self) -> bool:
        """Whether every policy has taken its last step, or none can take another one for want of tasks."""
        if all(h.complete for h in self._trainable):
            return True
        if not self._parts.dealer.is_exhausted or self._parts.book.counts(Split.TRAIN).num_groups:
            return False
        open_ones = [h for h in self._trainable if not h.complete]
        if any(h.in_step or h.state is not TrainerState.READY for h in open_ones):
            return False
        dataflow = self._parts.config.dataflow
        fills = [len(h.buffer) >= dataflow.groups_per_step for h in open_ones]
        if all(fills) if dataflow.barrier else any(fills):
            return False
        self.ended = self._exhausted(open_ones)
        return True

    def _exhausted(self, hosts: list[PolicyHost]) -> str:
        """The end of a run without tasks, in words; what fills no batch stays in the ledger."""
        steps = self._parts.config.run.steps
        where = ", ".join(f"{h.name!r} at step {h.version} of {steps}" for h in hosts)
        rest = sum(len(h.buffer) for h in hosts)
        size = self._parts.config.dataflow.groups_per_step
        left = f"; {rest} groups are left, which fill no batch of {size}" if rest else ""
        return f"the tasks are exhausted (tasks.epochs = {self._parts.config.tasks.epochs}): {where} ends{left}"

    def _has_trained(self) -> bool:
        return any(h.version for h in self._trainable)

    def _can_evaluate(self) -> bool:
        return self._parts.dealer.num_tasks(Split.EVAL) > 0 and all(
            h.manifest_of(h.newest) is not None for h in self._parts.policies.values()
        )

    def _can_evaluate_all(self) -> bool:
        """Every policy, at its last version."""
        return self._can_evaluate() and all(h.newest == h.version for h in self._parts.policies.values())

    def _is_cut_off(self) -> bool:
        """Whether the last weights of a policy will never be served."""
        return any(h.trainer.is_cut_off for h in self._trainable)

    def _evaluate(self, host: PolicyHost, name: str) -> None:
        config = self._parts.config.eval
        self._parts.evaluations.start(
            EvaluationRequest(
                policy=host.name, name=name, samples_per_task=config.samples_per_task, max_tasks=config.max_tasks
            )
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._parts.changed.wait()
