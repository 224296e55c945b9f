"""Counts how attempts end: by outcome, and by the cause that people look for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from wingbeat.core.errors import CallTimeout, NoEngine, WingbeatError
from wingbeat.core.types import OUTCOME_OF, Cause, Outcome, Split
from wingbeat.server.metrics import ControlMetrics

OUR_FAULT = 500
"""Statuses from here on are faults of the server or its engines, not of the caller."""


class Endings:
    """Since this process began."""

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._counts: Counter[Cause] = Counter()

    def note(self, split: Split, cause: Cause) -> None:
        """An attempt ended."""
        self._counts[cause] += 1
        self._metrics.attempts.labels(split, OUTCOME_OF[cause], cause).inc()

    @property
    def counts(self) -> Mapping[str, int]:
        """By ``outcome/cause``, the most frequent first."""
        return {f"{OUTCOME_OF[cause]}/{cause}": count for cause, count in self._counts.most_common()}


def fault_of_call(error: WingbeatError) -> Cause | None:
    """What to blame where an agent gives up after a model call ended so; None where that is not us."""
    if isinstance(error, CallTimeout):
        return Cause.CALL_DEADLINE
    if isinstance(error, NoEngine):
        return Cause.NO_ENGINE
    return Cause.MODEL_CALL_FAILED if error.status >= OUR_FAULT else None


def real_cause(outcome: Outcome, cause: Cause, *, fault: Cause | None) -> Cause:
    """The cause of an abort: an agent that raised because its last model call failed on our side is not to blame.

    What the client says otherwise is left as it is; it knows why it gave up.
    """
    blames_agent = outcome is Outcome.CLIENT and cause in (Cause.AGENT_RAISED, Cause.CLIENT_ABORTED)
    return fault if fault is not None and blames_agent else cause
