"""Continuing a run from its ledger: task sources and their order, versions, open and buffered groups.

Attempts that ran go on (:mod:`wingbeat.server.episodes.recovery`), evaluations end with the server.
Steps that were logged but not finished are taken by the policies' own step loops, and a trainer that
restored an older checkpoint is sent the logged batches that follow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.episodes.recovery import record_interruption, recover_episodes, take_up
from wingbeat.server.episodes.sources import load_sources
from wingbeat.server.variants.variants import told_apart

if TYPE_CHECKING:
    from wingbeat.server.control import Control


def restore_run(control: Control) -> None:
    """Bring a fresh control to where the ledger says the run stands (nothing to do for a new run)."""
    ledger = control.ledger
    for saved in load_sources(control.run_dir):
        control.dealer.add_source(saved.source, saved.split, saved.tasks)
    state = ledger.load_dealer_state()
    if state is not None:
        control.dealer.load_state_dict(state)
    trained = ledger.summary().trained_step
    for host in control.policies.values():
        if not host.config.trainable:
            continue
        host.restore(version=trained.get(host.name, 0))
    specs = {group.spec.id: group.spec for group in ledger.open_groups()}
    _close_evaluations(control, specs.values())
    recovery = recover_episodes(control, specs)
    open_groups = ledger.open_groups()  # as those that ended left them
    control.rollouts.client_groups.restore(group.spec.id for group in open_groups)
    for group in open_groups:
        control.book.restore(group.spec, slots=told_apart(group.spec, group.slots))
    take_up(control, recovery)
    control.rollouts.begins.restarted()
    control.teams.restore()
    if state is not None:
        control.events.emit("resumed", versions={h.name: h.version for h in control.policies.values()})


def _close_evaluations(control: Control, open_groups: Iterable[GroupSpec]) -> None:
    """Evaluations end with the server, and so do the attempts in their groups; a prepared finish keeps its group."""
    ledger = control.ledger
    attempts = ledger.running_attempts()
    waiting = {attempt.begin.group_id for attempt in attempts if attempt.state is AttemptState.PREPARED}
    ending = [group.id for group in open_groups if group.evaluation_id and group.id not in waiting]
    why = "its evaluation ended with the server"
    ends = [
        record_interruption(ledger, attempt.begin, why)
        for attempt in attempts
        if attempt.begin.group_id in ending and attempt.state is AttemptState.RUNNING
    ]
    closings = [ledger.close_group(group_id, reason="the evaluation ended with the server") for group_id in ending]
    for write in (*ends, *closings):
        write.result()  # before the attempts that still run are read
