"""Continuing a run from its ledger: task sources and their order, versions, open and buffered groups.

Steps that were logged but not finished are taken by the policies' own step loops, and a trainer that
restored an older checkpoint is sent the logged batches that follow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.core.types import Split
from wingbeat.server.sources import load_sources

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
    open_groups = ledger.open_groups()
    control.rollouts.restore_groups(g.spec.id for g in open_groups if g.spec.split is Split.TRAIN)
    for group in open_groups:
        if group.spec.split is Split.TRAIN:
            control.book.restore(group.spec, slots=group.slots)
        else:
            control.watch(ledger.close_group(group.spec.id, reason="the evaluation ended with the server"))
    if state is not None:
        control.events.emit("resumed", versions={h.name: h.version for h in control.policies.values()})
