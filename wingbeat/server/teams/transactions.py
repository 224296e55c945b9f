"""Episodes that several servers share: all of them count it, or none does.

One server's part in a two-phase commit (Gray, "Notes on Data Base Operating Systems", 1978), as a state machine
without I/O; ``teams.py`` drives it.  One of the servers decides; its durable word is the decision.

::

    UNKNOWN ──prepare──▶ PREPARED ──commit──▶ COMMITTED
       │                    └──────abort───▶ ABORTED
       └──────abort───────────────────────▶ ABORTED      (a finish that arrives later is refused)

Who has prepared has given up the right to decide alone, except the deciding server itself: where nobody
committed in time, it aborts (presumed abort).  The others tell it by asking::

    the decider      waits, then aborts
    an allowed peer  asks it now and then; once the time is up, asks it to abort unless it has committed
    anyone else      waits for the client, for its successor with the team's journal, or for an admin
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from wingbeat.core.errors import ConflictError, NotFoundError

FIRST_ASK_S = 5.0
"""A client decides within moments: until then nobody is asked."""
MAX_ASK_S = 60.0


class TransactionState(StrEnum):
    """Where a transaction stands, as one server knows it."""

    UNKNOWN = "unknown"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionEvent(StrEnum):
    """What may happen to it."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


TRANSITIONS: Mapping[tuple[TransactionState, TransactionEvent], TransactionState] = {
    (TransactionState.UNKNOWN, TransactionEvent.PREPARE): TransactionState.PREPARED,
    (TransactionState.UNKNOWN, TransactionEvent.ABORT): TransactionState.ABORTED,
    (TransactionState.PREPARED, TransactionEvent.PREPARE): TransactionState.PREPARED,
    (TransactionState.PREPARED, TransactionEvent.COMMIT): TransactionState.COMMITTED,
    (TransactionState.PREPARED, TransactionEvent.ABORT): TransactionState.ABORTED,
    (TransactionState.COMMITTED, TransactionEvent.COMMIT): TransactionState.COMMITTED,
    (TransactionState.ABORTED, TransactionEvent.ABORT): TransactionState.ABORTED,
}
"""A second episode of the same server may join a prepared transaction; a decision may be repeated."""


def after(transaction_id: str, state: TransactionState, event: TransactionEvent) -> TransactionState:
    """The state that follows.  Raises NotFoundError for a commit of nothing, ConflictError against a decision."""
    target = TRANSITIONS.get((state, event))
    if target is not None:
        return target
    if state is TransactionState.UNKNOWN:
        raise NotFoundError(
            f"transaction {transaction_id!r}: no episode of this server is prepared under it, so it cannot commit;"
            " finish the episode with this `transaction` first, at the server that decides before the others"
        )
    raise ConflictError(f"transaction {transaction_id!r} is {state} here, and stays so: {event} is not possible")


class Move(Enum):
    """What a server does about a transaction that it waits for."""

    WAIT = "wait"
    ASK = "ask"
    """Has the decider decided?"""
    PRESUME = "presume"
    """Ask the decider to abort, unless it has committed."""
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Doubt:
    """How long, and in whose hands, a prepared transaction waits."""

    waiting_s: float
    is_decider: bool
    may_ask: bool
    """The decider is one of ``server.peers``."""
    num_asked: int = 0
    since_asked_s: float = 0.0


def next_move(doubt: Doubt, *, timeout_s: float) -> Move:
    """Never an abort by anyone but the decider."""
    is_over = doubt.waiting_s >= timeout_s
    if doubt.is_decider:
        return Move.ABORT if is_over else Move.WAIT
    if not doubt.may_ask:
        return Move.WAIT
    pause = min(FIRST_ASK_S * 2 ** min(doubt.num_asked, 8), MAX_ASK_S)
    if not is_over:
        due = doubt.waiting_s if doubt.num_asked == 0 else doubt.since_asked_s
        return Move.ASK if due >= pause else Move.WAIT
    return Move.PRESUME if doubt.num_asked == 0 or doubt.since_asked_s >= min(pause, FIRST_ASK_S) else Move.WAIT


def after_answer(move: Move, answer: TransactionState) -> TransactionEvent | None:
    """What the decider's answer means here; None: nothing yet.

    A decider that knows nothing of it had never prepared, so it cannot have committed, and will not: it was asked to
    presume the abort.
    """
    if answer is TransactionState.COMMITTED:
        return TransactionEvent.COMMIT
    if answer is TransactionState.ABORTED or (answer is TransactionState.UNKNOWN and move is Move.PRESUME):
        return TransactionEvent.ABORT
    return None
