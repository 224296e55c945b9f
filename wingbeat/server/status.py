"""What a run waits for, in plain words: the first thing people need when nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.core.protocol import PolicyReply, StatusReply
from wingbeat.core.types import Split
from wingbeat.server.episodes.registry import EpisodeState
from wingbeat.server.policies.host import PolicyHost, TrainerState
from wingbeat.server.workers.report import engine_blockers, engine_replies

if TYPE_CHECKING:
    from wingbeat.server.control import Control

EQUAL_GROUPS = 5
NEVER_CALLED = (
    "; no finished episode has called it: let agents call it in every group, or set dataflow.barrier to false"
)
NO_TASKS = "no tasks: PUT /api/tasks/{source}, or begin episodes with a task of your own"

WAITING = "no tasks; collected conversations that wait for feedback: {}"


def blockers(control: Control) -> list[str]:
    """Everything that stands in the way, most important first; empty when work flows."""
    found: list[str] = []
    if control.error is not None:
        found.append(
            f"control failed: {control.error!r}; it ends itself and continues from the ledger when started again"
        )
    if control.ledger.blocked:
        found.append(control.ledger.blocked)
    found += engine_blockers(control.engines)
    if not control.engines.links:
        found.append("no engine is connected")
    if not control.complete:
        found += control.rollouts.issuer.absent_clients()
    for host in control.policies.values():
        found += _policy_blockers(control, host)
    if control.complete:
        return found
    if control.finishing.untrained.blocker:
        found.append(control.finishing.untrained.blocker)
    if control.finishing.lost_groups.blocker:
        found.append(control.finishing.lost_groups.blocker)
    found += control.rollouts.issuer.blockers(control.evaluations.waiting_sources)
    found += control.variants.blockers()
    if not _has_work(control):
        num_waiting = len(control.collecting.store.book)
        found.append(WAITING.format(num_waiting) if num_waiting else NO_TASKS)
    if not found and not control.registry.open_episodes() and not control.rollouts.num_waiting:
        found.append("no agent is running: wingbeat rollout agent.py --server URL")
    return found + _group_blockers(control)


def _has_work(control: Control) -> bool:
    """Tasks to deal out, or episodes on tasks of their clients' own that run or train.

    Groups that wait in a buffer and do not fill a batch are none: nothing would come of them.
    """
    hosts, needed = control.policies.values(), control.config.dataflow.groups_per_step
    return (
        any(control.dealer.num_tasks(split) for split in Split)
        or bool(control.registry.open_episodes() or control.book.progress())
        or any(len(host.buffer) >= needed or host.state is TrainerState.TRAINING for host in hosts)
    )


def _policy_blockers(control: Control, host: PolicyHost) -> list[str]:
    found: list[str] = []
    if host.halted:
        found.append(host.halted)
    if host.state is TrainerState.ABSENT and not host.complete:
        found.append(f"policy {host.name!r} has no trainer connected")
    if host.trainer.problem:
        found.append(host.trainer.problem)
    if host.state is TrainerState.ROLLING_BACK:
        found.append(f"the trainer of {host.name!r} begins a new lineage: {host.ancestry.current + 1}")
    if host.state is TrainerState.REPLAYING:
        found.append(f"the trainer of {host.name!r} repeats logged steps after a restart")
    if host.manifest is not None and control.engines.links and control.engines.lowest_served(host.name) is None:
        found.append(f"no engine serves policy {host.name!r} yet")
    if host.config.trainable and not host.complete and not control.complete:
        if host.chain.blocker:
            found.append(host.chain.blocker)
        found += _barrier_blockers(control, host)
        if not host.admits_group() and not control.ledger.blocked:
            found.append(f"admission of {host.name!r} is full: staleness bound {control.config.dataflow.max_staleness}")
        if host.equal_groups >= EQUAL_GROUPS:
            found.append(
                f"all rewards equal in the last {host.equal_groups} groups of {host.name!r}: nothing to learn from"
            )
    return found


def _barrier_blockers(control: Control, host: PolicyHost) -> list[str]:
    """Names the policies without a batch of their own that keep this one, which has one, from its next step."""
    needed = control.config.dataflow.groups_per_step
    if len(host.buffer) < needed:
        return []
    others = [control.policies[name] for name in control.barrier.waits_for(host.name, host.version)]
    return [
        f"barrier: {host.name!r} waits for {other.name!r}, which has {len(other.buffer)} of {needed} groups for step"
        f" {other.version + 1}" + ("" if other.buffer.was_called else NEVER_CALLED)
        for other in others
        if len(other.buffer) < needed and not other.in_step
    ]


def _group_blockers(control: Control) -> list[str]:
    """Names the oldest training group that is not complete, once nothing else can start."""
    if all(h.admits_group() for h in control.policies.values() if h.config.trainable):
        return []
    for group, num_finished in control.book.progress():
        if group.split is Split.TRAIN:
            running = sum(
                episode.group.id == group.id and episode.state is EpisodeState.OPEN
                for episode in control.registry.open_episodes()
            )
            return [f"group {group.id} has {num_finished} of {group.size} episodes; {running} are running"]
    return []


def status_reply(control: Control) -> StatusReply:
    """For ``GET /api/status``."""
    counts = control.book.counts(Split.TRAIN)
    state = "complete" if control.complete else "stopping" if control.stopping else "running"
    if state == "running" and any(h.manifest is None for h in control.policies.values()):
        state = "starting"
    elif state == "running" and control.evaluations.running:
        state = "evaluating"
    return StatusReply(
        state=state,
        blockers=blockers(control),
        warnings=[
            *control.ledger_watch.warnings,
            *control.admission.warnings(control.engines.links),
            *_trainer_warnings(control),
            *control.health.warnings,
            *(w for h in control.policies.values() for w in h.trainer.warnings),
            *(w for h in control.policies.values() for w in h.chain.warnings),
            *control.teams.warnings(),
        ],
        ended=control.director.ended,
        policies=[policy_reply(control, h) for h in control.policies.values()],
        engines=engine_replies(control.engines),
        resources=control.metrics.pools.classes(),
        open_episodes=len(control.registry.open_episodes()),
        endings=dict(control.endings.counts),
        groups_in_flight=counts.num_groups,
        groups_buffered=sum(len(h.buffer) for h in control.policies.values()),
        train_steps=max((h.version for h in control.policies.values()), default=0),
        total_steps=control.config.run.steps,
        metrics={k: float(v) for k, v in control.summary().items()},
    )


def _trainer_warnings(control: Control) -> list[str]:
    """Of trainers that run another release, once each: one may train several policies."""
    trainers = {h.trainer.worker_id: h.trainer.software for h in control.policies.values() if h.has_trainer}
    found = (control.admission.trainer_warning(name, software) for name, software in trainers.items())
    return [warning for warning in found if warning]


def policy_reply(control: Control, host: PolicyHost) -> PolicyReply:
    """One policy for the API, with the proof of what is served."""
    served = control.engines.lowest_served(host.name)
    return PolicyReply(
        name=host.name,
        model=host.config.model,
        version=host.version,
        context_tokens=host.spec.context_tokens,
        trainer=host.state,
        engines=sum(host.name in link.served for link in control.engines.links),
        served_version=served.version if served else None,
        served_checksum=served.checksum if served else None,
        published_checksum=host.manifest.checksum if host.manifest else None,
    )
