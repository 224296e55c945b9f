"""Which replies do not count, because the agent never had them or went on with another.

A turn with a child is never superseded: the agent continued from it, so it did have it. Of the others:

- ``undelivered``: the reply never reached the agent.
- ``resampled``: the agent repeated the request, and it had to be sampled anew.
- ``sibling continued``: another reply to exactly the same prompt was continued instead.

A last turn, a sub-agent's answer or votes of which none was continued are ordinary leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set

from wingbeat.tracking.turns import Turn

UNDELIVERED = "undelivered"
RESAMPLED = "resampled"
SIBLING = "sibling continued"

Prompt = tuple[str, str, str | None, int, bytes]


def find_superseded(
    turns: Sequence[Turn], *, continued: Set[str], undelivered: Set[str], resampled: Set[str]
) -> dict[str, str]:
    """Reason by turn id, in the order of ``turns``. ``continued``: the turns that have a child."""
    answered = {_prompt(turn) for turn in turns if turn.turn_id in continued}
    reasons: dict[str, str] = {}
    for turn in turns:
        if turn.turn_id in continued:
            continue
        if turn.turn_id in undelivered:
            reasons[turn.turn_id] = UNDELIVERED
        elif turn.turn_id in resampled:
            reasons[turn.turn_id] = RESAMPLED
        elif answered and _prompt(turn) in answered:
            reasons[turn.turn_id] = SIBLING
    return reasons


def _prompt(turn: Turn) -> Prompt:
    """Equal for turns of one agent that were sampled from exactly the same tokens."""
    digest = hashlib.blake2b(turn.segment.data, digest_size=16).digest()
    return turn.policy, turn.agent, turn.parent_id, len(turn.segment), digest
