"""What the parts that hand out work share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.core.signals import Changed
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.server.episodes.endings import Endings
from wingbeat.server.episodes.evaluations import Evaluations
from wingbeat.server.episodes.registry import EpisodeRegistry
from wingbeat.server.limits import Limits
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.host import PolicyHost
from wingbeat.server.variants.variants import Variants


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What handing out work needs."""

    config: Config
    policies: dict[str, PolicyHost]
    book: GroupBook
    dealer: TaskDealer
    ledger: Ledger
    registry: EpisodeRegistry
    evaluations: Evaluations
    events: EventLog
    metrics: ControlMetrics
    changed: Changed
    watch: Callable[[Future[Any]], None]
    is_complete: Callable[[], bool]
    is_stopping: Callable[[], bool]
    blockers: Callable[[], list[str]]
    clock: Callable[[], float]
    limits: Limits
    endings: Endings
    variants: Variants
