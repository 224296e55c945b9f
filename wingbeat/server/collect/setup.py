"""Puts the parts of passive collection together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wingbeat.server.collect.collecting import Collecting
from wingbeat.server.collect.conversation_files import FOLDER, ConversationFiles
from wingbeat.server.collect.conversation_store import ConversationStore
from wingbeat.server.collect.ends import CollectParts
from wingbeat.server.collect.groups import CollectedGroups
from wingbeat.server.keys.ring import KeyRing

if TYPE_CHECKING:
    from wingbeat.server.control import Control


def make_collecting(control: Control, keys: KeyRing, *, wall: Callable[[], float]) -> Collecting:
    """Of a control that has everything else."""
    metrics = control.metrics.collect
    files = ConversationFiles(control.run_dir / FOLDER)
    files.prepare()
    store = ConversationStore(
        files,
        control.policies,
        control.config.collect,
        metrics=metrics,
        events=control.events,
        on_idle=control.engines.forget,
        clock=control.clock,
        wall=wall,
    )
    return Collecting(
        CollectParts(
            config=control.config.collect,
            keys=keys,
            store=store,
            policies=control.policies,
            ledger=control.ledger,
            finishing=control.finishing,
            groups=CollectedGroups(control.policies, control.ledger, watch=control.watch),
            endings=control.endings,
            events=control.events,
            metrics=control.metrics,
            collect_metrics=metrics,
            replays=control.registry.replays,
            watch=control.watch,
            notify=control.changed.notify,
            clock=control.clock,
        )
    )
