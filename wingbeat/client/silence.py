"""An event loop that stands still: how the parent of a client process notices, and what becomes of the episodes.

Library code that computes without end, or blocks, in an asynchronous agent holds up its whole process: no deadline
there can fire, and the heartbeat thread goes on to report every episode alive.  Only the parent can end that.  So the
child's loop says once a second that it turns, and a parent that hears nothing for longer than any episode may take
kills the child, and aborts in its place what it ran::

    child    alive ── alive ── alive ── (an agent computes) ...................
    parent                              silent for episode_timeout_s + LEAVING_S ──▶ kill, abort, a fresh child

By then every episode of that process is overdue: none can have begun on a loop that stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from wingbeat.client.deadlines import LEAVING_S
from wingbeat.client.plans import RolloutPlan
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import ConflictError, NotFoundError, WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.core.protocol import AbortRequest
from wingbeat.core.types import OUTCOME_OF, Cause

logger = logging.getLogger("wingbeat.client")

ALIVE_EVERY_S = 1.0
"""Between two signs of life, and between two looks for them."""
STACK_BEFORE_S = 2 * ALIVE_EVERY_S
"""So long before it is killed a child writes where it hangs: time enough on a busy machine, too."""
_LONGEST_LOOK_S = 2 * ALIVE_EVERY_S
"""What counts at most between two looks: a parent that stood still itself (stopped, or starved) heard nothing, which
says nothing of the child."""
_ABORT_RETRY = RetryPolicy(budget_s=5.0)
"""An abort that does not arrive is only a slower reopening of the slot: heartbeats have stopped."""
_ABORT_TIMEOUT_S = 10.0

Parts = Mapping[str, Sequence[str]]
"""Of one episode: by server ("" where there is no team), its id and its key."""


def silence_limit_s(plan: RolloutPlan) -> float | None:
    """How long a process's loop may stand still; None: for ever, since its episodes have no limit either."""
    limit_s = plan.options.episode_timeout_s
    return None if limit_s is None else limit_s + LEAVING_S


class Silence:
    """How long a child has said nothing, in time that its parent saw pass."""

    def __init__(self, limit_s: float, *, clock: Clock) -> None:
        self.limit_s = limit_s
        self.seconds = 0.0
        self._clock = clock
        self._looked_at: float | None = None
        """None while nothing is expected."""

    def heard(self) -> None:
        """A sign of life; the first one begins the watch."""
        self.seconds, self._looked_at = 0.0, self._clock()

    def end(self) -> None:
        """No more signs of life are expected."""
        self._looked_at = None

    def look(self) -> bool:
        """Whether it has been silent for too long; to be asked every ``ALIVE_EVERY_S``."""
        if self._looked_at is None:
            return False
        now = self._clock()
        self.seconds += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self.seconds >= self.limit_s


async def abort_overdue(plan: RolloutPlan, episodes: Sequence[Parts], *, message: str) -> None:
    """End episodes of a process that was killed as their agent's time-out, with their own keys.

    What the servers do not take is told in the log, and ends there when the heartbeats are missed.
    """
    urls = plan.servers or {"": plan.url}
    transports = {
        name: Transport(url, key=None, timeout_s=_ABORT_TIMEOUT_S, retry=_ABORT_RETRY) for name, url in urls.items()
    }
    try:
        await asyncio.gather(
            *(
                _abort(transports[server], episode_id, key, message=message)
                for parts in episodes
                for server, (episode_id, key) in parts.items()
            )
        )
    finally:
        for transport in transports.values():
            await transport.close()


async def _abort(transport: Transport, episode_id: str, key: str, *, message: str) -> None:
    cause = Cause.AGENT_DEADLINE
    body = AbortRequest(outcome=OUTCOME_OF[cause], cause=cause, message=message)
    try:
        await transport.send_unread(Call("POST", f"/api/episodes/{episode_id}/abort", body=body, key=key))
    except (ConflictError, NotFoundError) as error:  # it has ended, or a transaction decides on it
        logger.debug("abort of %s: %s", episode_id, error.message)
    except WingbeatError as error:
        logger.warning("episode %s could not be aborted (the server will notice): %s", episode_id, error.message)
