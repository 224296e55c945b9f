"""What each turn of an episode earned by itself, and from which state it was sampled.

A turn's *state* is a digest of its whole prompt, so that turns of several episodes that were sampled from
exactly the same tokens can be compared (step groups). It is fed segment by segment along the tree: a long
chain of turns costs its tokens once, not once per turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from wingbeat.core.samples import TurnCredit
from wingbeat.tracking.graph import EpisodeGraph

_DIGEST_BYTES = 16


def turn_credits(
    graph: EpisodeGraph, *, policy: str, rewards: Mapping[str, float], train_superseded: bool = False
) -> dict[str, tuple[TurnCredit, ...]]:
    """The turns of ``policy`` by agent, in the order of their commit; ``rewards`` by turn id, 0 where none is named.

    Superseded turns are left out unless they train: they are no ends of what the agent did. What was reported
    for one is not lost, it stays in the agent's reward.
    """
    superseded = () if train_superseded else graph.superseded()
    whole: dict[str, hashlib.blake2b] = {}
    """Per turn, fed with its prompt and what was sampled."""
    found: dict[str, list[TurnCredit]] = {}
    for turn in graph.turns:
        if turn.policy != policy:
            continue
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES) if turn.parent_id is None else whole[turn.parent_id].copy()
        digest.update(turn.segment.data)
        state = digest.hexdigest()
        digest.update(turn.sampled.data)
        whole[turn.turn_id] = digest
        if turn.turn_id not in superseded:
            credit = TurnCredit(turn.turn_id, turn.parent_id or "", rewards.get(turn.turn_id, 0.0), state)
            found.setdefault(turn.agent, []).append(credit)
    return {agent: tuple(credits) for agent, credits in found.items()}
