"""Evaluations in progress: a pinned version, its groups, its result in ledger, events and metrics."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from wingbeat.core.errors import NoEngine, NotFoundError, RequestError, VersionGone
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import EvaluationReply, EvaluationRequest, ScoreReply
from wingbeat.core.signals import Changed
from wingbeat.core.types import Variant
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.evaluation import Evaluation, EvaluationResult, EvaluationSpec
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.records import ClosedGroup, GroupSpec
from wingbeat.server.episodes.client_groups import spell
from wingbeat.server.policies.host import PolicyHost

REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What evaluations need."""

    policies: dict[str, PolicyHost]
    dealer: TaskDealer
    ledger: Ledger
    events: EventLog
    changed: Changed
    watch: Callable[[Future[Any]], None]


class Evaluations:
    """The evaluations of this control, running and done."""

    def __init__(self, parts: EvaluationParts) -> None:
        self._parts = parts
        self._all: dict[str, Evaluation] = {}
        """Oldest first: all that run, and the last ``REMEMBERED`` that are done."""
        self._pins: dict[str, list[tuple[PolicyHost, int]]] = {}
        self._scores: dict[str, dict[str, float]] = {}

    @property
    def running(self) -> list[Evaluation]:
        return [e for e in self._all.values() if not e.done]

    def start(self, request: EvaluationRequest) -> str:
        """Pin the version and queue one group per task; returns the evaluation's id.

        Without one it is the newest that is published.  Every other trainable policy of the team is pinned at its
        newest, too, so that the score belongs to one state of all.  Raises RequestError, NotFoundError or VersionGone.
        """
        host = self._host(request.policy)
        for member in self._parts.policies.values():
            if missing := member.missing(member.newest):
                raise NoEngine(missing)
        version = host.newest if request.version is None else request.version
        if missing := host.missing(version):
            raise NoEngine(missing) if host.versions.is_taken(version, host.ancestry) else VersionGone(missing)
        tasks = self._parts.dealer.eval_tasks(request.source, limit=request.max_tasks)
        team = [(h, h.newest) for h in self._parts.policies.values() if h is not host]
        evaluation_id = f"{spell(request.name)}-{spell(host.name)}-{version}-{secrets.token_hex(3)}"
        spec = EvaluationSpec(
            id=evaluation_id,
            policy=host.name,
            version=version,
            name=request.name,
            samples_per_task=request.samples_per_task,
            team=tuple(f"{h.name}@{v}" for h, v in team),
        )
        self._all[evaluation_id] = Evaluation(spec, tasks)
        self._pins[evaluation_id] = [(host, version), *team]
        for pinned, at in self._pins[evaluation_id]:
            pinned.pin(at)
        self._parts.events.emit("evaluation_started", id=evaluation_id, policy=host.name, version=version)
        self._parts.changed.notify()
        return evaluation_id

    def _host(self, name: str | None) -> PolicyHost:
        if name is None:
            trainable = [h for h in self._parts.policies.values() if h.config.trainable]
            if len(trainable) != 1:
                raise RequestError(
                    f"expected `policy`, one of {', '.join(self._parts.policies)}, since there is not exactly one",
                    param="policy",
                )
            return trainable[0]
        host = self._parts.policies.get(name)
        if host is None:
            raise RequestError(f"no policy {name!r}; this server has {', '.join(self._parts.policies)}", param="policy")
        return host

    @property
    def waiting_sources(self) -> frozenset[str]:
        """Task sources of which running evaluations have tasks left to hand out."""
        return frozenset().union(*(evaluation.waiting_sources for evaluation in self.running))

    def scores(self, policy: str) -> dict[str, float]:
        """``eval/SOURCE/mean``: a policy's last evaluation of each task source; {} before the first."""
        return dict(self._scores.get(policy, {}))

    def next_group(self, sources: Collection[str] | None = None, *, variant: Variant | None = None) -> GroupSpec | None:
        """The next task, of these sources (None: of any), of the oldest evaluation that has one left.

        An evaluation belongs to the version of the agent that ran its first task; ``variant`` None is any.
        """
        for evaluation in self.running:
            group = evaluation.next_group(sources) if _may_run(evaluation, variant) else None
            if group is not None:
                evaluation.variant = variant
                return group
        return None

    def admits(self, group: GroupSpec, variant: Variant | None) -> bool:
        """Whether this version of the agent (None: any) may take a slot of an evaluation's group that was opened."""
        evaluation = self._all.get(group.evaluation_id or "")
        return evaluation is not None and evaluation.is_pending(group.id) and _may_run(evaluation, variant)

    def taken(self, group: GroupSpec, variant: Variant | None) -> None:
        """This version of the agent (None: any) took a slot of such a group: the evaluation is its own."""
        evaluation = self._all.get(group.evaluation_id or "")
        if evaluation is not None:
            evaluation.variant = variant

    def replace_variant(self, evaluation: Evaluation) -> tuple[str, ...]:
        """The version of the agent that ran it is gone.  Returns the groups that do not count any more."""
        before = evaluation.variant
        given_up = evaluation.replace_variant()
        self._parts.events.emit(
            "evaluation_begins_anew" if given_up is not None else "evaluation_mixes_agents",
            id=evaluation.spec.id,
            agent=str(before),
        )
        self._parts.changed.notify()
        return given_up or ()

    def withdraw(self, source: str) -> None:
        """A source is gone: nobody may be left who could run what was not handed out of it."""
        for evaluation in self.running:
            evaluation.withdraw(source)
            if evaluation.done:
                self._finish(evaluation)

    def collect(self, group: ClosedGroup) -> None:
        """A group of an evaluation closed; with the last one its result is recorded."""
        evaluation_id = group.spec.evaluation_id
        evaluation = self._all.get(evaluation_id) if evaluation_id is not None else None
        if evaluation is None:
            return  # an eval episode that a client began by itself
        evaluation.collect(group)
        if evaluation.done:
            self._finish(evaluation)

    def _finish(self, evaluation: Evaluation) -> None:
        for host, version in self._pins.pop(evaluation.spec.id):
            host.unpin(version)
        done = [key for key, other in self._all.items() if other.done]
        for key in done[:-REMEMBERED]:
            del self._all[key]
        result = evaluation.result()
        self._parts.watch(self._parts.ledger.record_evaluation(result))
        known = self._scores.setdefault(evaluation.spec.policy, {})
        known |= {f"eval/{name}/mean": score.mean for name, score in result.sources.items() if score.mean is not None}
        self._parts.events.emit(
            "evaluation_done",
            id=evaluation.spec.id,
            name=evaluation.spec.name,
            policy=evaluation.spec.policy,
            version=evaluation.spec.version,
            mean=result.mean,
            stderr=result.stderr,
            num_finished=result.num_finished,
            num_missing=result.num_missing,
            sources={source: score.mean for source, score in result.sources.items()},
            agents=dict(result.agents),
        )
        self._parts.changed.notify()

    def reply(self, evaluation_id: str) -> EvaluationReply:
        """Where an evaluation stands.  Raises NotFoundError."""
        evaluation = self._all.get(evaluation_id)
        if evaluation is None:
            raise NotFoundError(f"no evaluation {evaluation_id!r} on this server")
        return _reply(evaluation.result())


def _may_run(evaluation: Evaluation, variant: Variant | None) -> bool:
    return variant is None or evaluation.variant in (None, variant)


def _reply(result: EvaluationResult) -> EvaluationReply:
    return EvaluationReply(
        evaluation_id=result.spec.id,
        policy=result.spec.policy,
        version=result.spec.version,
        state="done" if result.done else "running",
        num_expected=result.num_expected,
        num_finished=result.num_finished,
        mean_reward=result.mean,
        stderr=result.stderr,
        rewards={task: list(rewards) for task, rewards in result.rewards.items()},
        sources={
            source: ScoreReply(mean_reward=score.mean, stderr=score.stderr, num_tasks=score.num_tasks)
            for source, score in result.sources.items()
        },
        agents=dict(result.agents),
    )
