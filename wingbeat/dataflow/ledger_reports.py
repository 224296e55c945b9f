"""What became of the tokens, by length of the episode: nothing may look efficient by losing its long episodes."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from itertools import groupby

from wingbeat.dataflow.ledger_schema import AttemptState, SampleState

DECILES = 10


@dataclass(frozen=True, slots=True)
class TokenDecile:
    """A tenth of a policy's finished training episodes, the shortest first; in sampled tokens."""

    policy: str
    decile: int
    """1 to 10."""
    num_episodes: int
    longest: int
    """Tokens of its longest episode."""
    sampled: int
    trained: int
    masked: int
    """Of trained episodes: too old to train."""
    waiting: int
    """Finished or in a batch that is not trained yet."""
    discarded: dict[str, int] = field(default_factory=dict[str, int])
    """By reason."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Attempts that ended alike."""

    state: AttemptState
    outcome: str
    """"" where there is none."""
    cause: str
    num_attempts: int


@dataclass(frozen=True, slots=True)
class ClientCount:
    """What one client did."""

    client: str
    """"" where nobody said."""
    num_begun: int
    num_counted: int
    """Attempts that finished with the outcome ``agent``."""
    num_open: int
    num_tokens: int
    """Sampled, of finished attempts."""


def endings(db: sqlite3.Connection) -> tuple[Ending, ...]:
    """All attempts by how they ended, the most frequent first."""
    rows = db.execute(
        """SELECT state, COALESCE(outcome, ''), cause, COUNT(*) AS n FROM episodes GROUP BY 1, 2, 3
        ORDER BY n DESC, 1, 2, 3"""
    )
    return tuple(Ending(AttemptState(state), outcome, cause, n) for state, outcome, cause, n in rows)


def clients(db: sqlite3.Connection) -> tuple[ClientCount, ...]:
    """All clients, the busiest first."""
    rows = db.execute(
        """SELECT client, COUNT(*) AS n, SUM(state = 'finished' AND outcome = 'agent'),
            SUM(state IN ('running', 'prepared')), SUM(CASE WHEN state = 'finished' THEN num_sampled ELSE 0 END)
        FROM episodes GROUP BY client ORDER BY n DESC, client"""
    )
    return tuple(ClientCount(*row) for row in rows)


def token_deciles(db: sqlite3.Connection) -> tuple[TokenDecile, ...]:
    """Exact, over all attempts of training groups that finished, policy by policy."""
    rows = db.execute(
        f"""WITH ranked AS (
            SELECT policy, state, reason, num_tokens, masked,
                NTILE({DECILES}) OVER (PARTITION BY policy ORDER BY num_tokens, episode_id, attempt) AS decile
            FROM samples)
        SELECT policy, decile, state, COALESCE(reason, ''), COUNT(*), MAX(num_tokens), SUM(num_tokens), SUM(masked)
        FROM ranked GROUP BY 1, 2, 3, 4 ORDER BY 1, 2"""
    ).fetchall()
    return tuple(
        _decile(policy, decile, list(group))
        for (policy, decile), group in groupby(rows, key=lambda row: tuple(row[:2]))
    )


def _decile(policy: str, decile: int, rows: list[sqlite3.Row]) -> TokenDecile:
    waiting = trained = masked = 0
    discarded: dict[str, int] = {}
    for _, _, state, reason, _, _, tokens, hidden in rows:
        match SampleState(state):
            case SampleState.TRAINED:
                trained += tokens - hidden
                masked += hidden
            case SampleState.DROPPED:
                discarded[reason] = discarded.get(reason, 0) + tokens
            case _:
                waiting += tokens
    return TokenDecile(
        policy,
        decile,
        num_episodes=sum(row[4] for row in rows),
        longest=max(row[5] for row in rows),
        sampled=sum(row[6] for row in rows),
        trained=trained,
        masked=masked,
        waiting=waiting,
        discarded=discarded,
    )
