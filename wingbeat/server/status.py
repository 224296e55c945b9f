"""What a run waits for, in plain words: the first thing people need when nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.core.types import Split
from wingbeat.dataflow.groups import SlotState
from wingbeat.server.policies import PolicyHost, TrainerState

if TYPE_CHECKING:
    from wingbeat.server.control import Control

EQUAL_GROUPS = 5


def blockers(control: Control) -> list[str]:
    """Everything that stands in the way, most important first; empty when work flows."""
    found: list[str] = []
    if control.error is not None:
        found.append(
            f"control failed: {control.error!r}; it ends itself and continues from the ledger when started again"
        )
    found += [link.failure for link in control.engines.links if link.failure]
    if not control.engines.links:
        found.append("no engine is connected")
    for host in control.policies.values():
        found += _policy_blockers(control, host)
    if control.complete:
        return found
    if control.dealer.num_tasks(Split.TRAIN) == 0 and control.dealer.num_tasks(Split.EVAL) == 0:
        found.append("no tasks: PUT /api/tasks/{source}, or begin episodes with a task of your own")
    return found + _group_blockers(control)


def _policy_blockers(control: Control, host: PolicyHost) -> list[str]:
    found: list[str] = []
    if host.halted:
        found.append(host.halted)
    if host.state is TrainerState.ABSENT and not host.complete:
        found.append(f"policy {host.name!r} has no trainer connected")
    if host.state is TrainerState.REPLAYING:
        found.append(f"the trainer of {host.name!r} repeats logged steps after a restart")
    if host.manifest is not None and control.engines.links and control.engines.lowest_served(host.name) is None:
        found.append(f"no engine serves policy {host.name!r} yet")
    if host.config.trainable and not host.complete:
        if not host.admits_group():
            found.append(f"admission of {host.name!r} is full: staleness bound {control.config.dataflow.max_staleness}")
        if host.equal_groups >= EQUAL_GROUPS:
            found.append(
                f"all rewards equal in the last {host.equal_groups} groups of {host.name!r}: nothing to learn from"
            )
    return found


def _group_blockers(control: Control) -> list[str]:
    """Names the oldest training group that is not complete, once nothing else can start."""
    if all(h.admits_group() for h in control.policies.values() if h.config.trainable):
        return []
    for group, num_finished in control.book.progress():
        if group.split is Split.TRAIN:
            running = control.book.counts(Split.TRAIN).slots[SlotState.RUNNING]
            return [f"group {group.id} has {num_finished} of {group.size} episodes; {running} are running"]
    return []
