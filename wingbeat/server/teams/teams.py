"""Drives the transactions of episodes that several servers share (the state machine is in ``transactions.py``).

Prepare and decision are durable before they are answered.  A commit goes the way of every finish; an abort
reopens the slots.  What a restart finds prepared waits on; what it finds decided was settled in the same write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from wingbeat.core.addresses import server_address
from wingbeat.core.errors import OverloadedError, RequestError, WingbeatError
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import FinishReply, FinishRequest, TransactionReply
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import InDoubt
from wingbeat.dataflow.records import EpisodeRecord, finish_digest
from wingbeat.server.episodes.durable import until_durable
from wingbeat.server.episodes.finish_records import credit_of
from wingbeat.server.episodes.finishing import Finishing, cancel_calls
from wingbeat.server.episodes.registry import EpisodeRegistry, EpisodeState, OpenEpisode
from wingbeat.server.episodes.rewards import uncalled_policies
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.teams.transactions import (
    Doubt,
    Move,
    TransactionEvent,
    TransactionState,
    after,
    after_answer,
    next_move,
)
from wingbeat.tracking.serialize import load_graph

logger = logging.getLogger(__name__)

REMEMBERED = 20_000
ABORTED = "the episode does not count on all of its servers: its transaction was aborted"
TELL_S = 30.0
"""In doubt for so long, a transaction is told in the status."""

AskDecider = Callable[[str, str, bool], Awaitable[TransactionState | None]]
"""(decider, transaction id, presume abort) -> what it says; None where it says nothing."""


@dataclass(frozen=True, slots=True)
class TeamParts:
    """What the second phase needs."""

    policies: Collection[str]
    finishing: Finishing
    book: GroupBook
    ledger: Ledger
    registry: EpisodeRegistry
    events: EventLog
    metrics: ControlMetrics
    watch: Callable[[Future[Any]], None]
    peers: frozenset[str]
    timeout_s: float
    ask: AskDecider
    clock: Callable[[], float]


@dataclass(slots=True, eq=False)
class Transaction:
    """One that is not decided, or whose decision is being written."""

    id: str
    decider: str
    since: float
    """Monotonic."""
    state: TransactionState = TransactionState.UNKNOWN
    members: list[tuple[OpenEpisode, Sequence[str]]] = field(default_factory=list[tuple[OpenEpisode, Sequence[str]]])
    """Episodes, with the policies that their rewards name and nobody called."""
    num_asked: int = 0
    asked_at: float = 0.0
    asking: asyncio.Task[None] | None = None
    settled: asyncio.Task[TransactionReply] | None = None
    """Ends when the decision is durable."""


class Teams:
    """Runs on control's event loop."""

    def __init__(self, parts: TeamParts) -> None:
        self._parts = parts
        self._open: dict[str, Transaction] = {}
        self._presumed: set[str] = set()
        """Unknown here, and told a peer to be aborted."""

    # --- phase 1 ------------------------------------------------------------------------------

    async def prepare(self, episode: OpenEpisode, request: FinishRequest) -> FinishReply:
        """Make a finish durable without counting it.  The same body again gets the state that holds then.

        Raises RequestError, InvalidReward, EpisodeClosed or ConflictError; then nothing has changed, and the other
        servers must not count the episode.
        """
        assert request.transaction is not None
        if request.outcome is not Outcome.AGENT or episode.split is Split.EVAL:
            what = "of an evaluation" if episode.split is Split.EVAL else f"with outcome {request.outcome}"
            raise RequestError(
                f"a finish {what} trains nothing and needs no transaction: leave `transaction` out",
                param="transaction",
            )
        digest = finish_digest(request)
        if self._parts.finishing.is_repeated(episode, digest):
            return await episode.finished()
        transaction = self._join(request.transaction.id, _normal(request.transaction.decider))
        record = self._parts.finishing.record(episode, request, digest)
        uncalled = uncalled_policies(request.rewards, credit_of(episode))
        # Book and ledger in one breath, as for every finish.
        self._parts.book.prepare(episode.episode_id, episode.attempt, record)
        episode.become(EpisodeState.PREPARED)
        episode.finish_digest = digest
        cancel_calls(episode)
        write = self._parts.ledger.prepare_finish(record, transaction_id=transaction.id, decider=transaction.decider)
        self._parts.watch(write)
        self._wait_for(transaction, episode, uncalled)
        episode.finishing = asyncio.create_task(_prepared(episode, record, write), name=f"prepare-{episode.episode_id}")
        return await episode.finished()

    def _join(self, transaction_id: str, decider: str) -> Transaction:
        """The transaction that an episode may be prepared under.  Raises ConflictError once it is decided."""
        transaction = self._open.get(transaction_id)
        after(transaction_id, self._state(transaction_id), TransactionEvent.PREPARE)
        if transaction is None:
            return Transaction(transaction_id, decider, self._parts.clock())
        if transaction.decider != decider:
            raise RequestError(
                f"transaction {transaction_id!r} is decided by {transaction.decider or 'this server'!r} here; got"
                f" another `decider`, {decider!r}",
                param="transaction",
            )
        return transaction

    def _wait_for(self, transaction: Transaction, episode: OpenEpisode, uncalled: Sequence[str]) -> None:
        transaction.state = TransactionState.PREPARED
        transaction.members.append((episode, uncalled))
        self._open[transaction.id] = transaction
        self._parts.metrics.transactions_in_doubt.set(self.num_in_doubt)

    def restore(self) -> None:
        """After a restart: what the ledger holds prepared waits on, in the slots of its attempts."""
        broken: list[InDoubt] = []
        for found in self._parts.ledger.in_doubt():
            record = found.record
            episode = self._parts.registry.current(record.episode_id)
            if episode is None or episode.attempt != record.attempt:
                broken.append(found)
                continue
            episode.become(EpisodeState.PREPARED)
            episode.graph = load_graph(record.graph)
            episode.finish_digest = record.finish_digest
            self._parts.book.prepare(record.episode_id, record.attempt, record)
            write: Future[bool] = Future()
            write.set_result(True)
            episode.finishing = asyncio.get_running_loop().create_task(_prepared(episode, record, write))
            self._wait_for(self._join(found.transaction_id, found.decider), episode, ())
            if not set(episode.policies) <= set(self._parts.policies):
                broken.append(found)
        for found in broken:
            self._break_off(found)

    def _break_off(self, found: InDoubt) -> None:
        """An attempt that this server cannot count any more, whatever is decided; people must know."""
        record = found.record
        logger.error(
            "episode %s attempt %d is prepared in transaction %s, and cannot be restored: aborted here; if the other"
            " servers commit, they count it without this one",
            record.episode_id,
            record.attempt,
            found.transaction_id,
        )
        transaction = self._open.get(found.transaction_id)
        if transaction is None:
            self._parts.watch(self._parts.ledger.decide(found.transaction_id, commit=False))
        elif transaction.settled is None:
            self._settle(transaction, TransactionState.ABORTED)
        self._parts.events.emit(
            "transaction_broken", episode_id=record.episode_id, attempt=record.attempt, decider=found.decider
        )

    # --- phase 2 ------------------------------------------------------------------------------

    async def decide(self, transaction_id: str, *, commit: bool) -> TransactionReply:
        """Settle a transaction for good; returns once that is durable.  The same decision again is harmless.

        Raises NotFoundError for a commit of nothing, ConflictError against an earlier decision.
        """
        event = TransactionEvent.COMMIT if commit else TransactionEvent.ABORT
        transaction = self._open.get(transaction_id)
        state = self._state(transaction_id)
        target = after(transaction_id, state, event)
        if transaction is None:
            if state is not TransactionState.UNKNOWN:  # decided before
                return TransactionReply(transaction_id=transaction_id, state=state)
            transaction = self._open[transaction_id] = Transaction(transaction_id, "", self._parts.clock())
        if transaction.settled is None:
            self._settle(transaction, target)
            assert transaction.settled is not None
        return await asyncio.shield(transaction.settled)  # a caller that hangs up does not undo its decision

    async def look(self, transaction_id: str, *, presume: bool = False) -> TransactionReply:
        """Where it stands.  ``presume`` asks the server that decides to abort, unless it has committed."""
        transaction = self._open.get(transaction_id)
        if transaction is not None and transaction.settled is not None:
            return await asyncio.shield(transaction.settled)  # nobody hears of a decision before it is durable
        if transaction is None:
            state = self._state(transaction_id)
            if state is TransactionState.UNKNOWN and presume:
                self._presume(transaction_id)
                state = TransactionState.ABORTED
            return TransactionReply(transaction_id=transaction_id, state=state)
        if presume and not transaction.decider:
            logger.warning(
                "transaction %s: a peer waits for it and its client does not decide: aborted", transaction_id
            )
            return await self.decide(transaction_id, commit=False)
        return self._in_doubt(transaction)

    def _presume(self, transaction_id: str) -> None:
        """Nothing of it will be committed here.  Raises OverloadedError rather than forget what was said before.

        In memory only: who prepares at the server that decides first, as clients must, has left it no such question.
        """
        if len(self._presumed) >= REMEMBERED and transaction_id not in self._presumed:
            raise OverloadedError(
                f"asked about {REMEMBERED} transactions that were never prepared here: no more are presumed aborted"
                " before a restart",
                retry_after_s=60.0,
            )
        self._presumed.add(transaction_id)

    def in_doubt(self) -> list[TransactionReply]:
        """All that wait for a decision, the oldest first."""
        return [self._in_doubt(t) for t in self._open.values() if t.settled is None]

    @property
    def num_in_doubt(self) -> int:
        return sum(t.settled is None for t in self._open.values())

    def _in_doubt(self, transaction: Transaction) -> TransactionReply:
        return TransactionReply(
            transaction_id=transaction.id,
            state=transaction.state,
            decider=transaction.decider,
            episodes=[episode.episode_id for episode, _ in transaction.members],
            waiting_s=round(self._parts.clock() - transaction.since, 3),
        )

    def _state(self, transaction_id: str) -> TransactionState:
        transaction = self._open.get(transaction_id)
        if transaction is not None:
            return transaction.state
        decision = self._parts.ledger.decision(transaction_id)
        if decision is not None:
            return TransactionState.COMMITTED if decision else TransactionState.ABORTED
        return TransactionState.ABORTED if transaction_id in self._presumed else TransactionState.UNKNOWN

    def _settle(self, transaction: Transaction, target: TransactionState) -> None:
        """Book and ledger in one breath; everybody is told once it is durable."""
        commit = target is TransactionState.COMMITTED
        transaction.state = target
        write = self._parts.ledger.decide(transaction.id, commit=commit)
        self._parts.watch(write)
        finishes: list[asyncio.Task[FinishReply]] = []
        for episode, uncalled in transaction.members:
            if commit:
                record = self._parts.book.prepared_record(episode.episode_id)
                finishes.append(self._parts.finishing.count(episode, record, uncalled, lambda _: write))
            else:
                self._parts.finishing.undo(episode, ABORTED)
        transaction.settled = asyncio.create_task(
            self._settled(transaction, write, finishes), name=f"decide-{transaction.id}"
        )

    async def _settled(
        self, transaction: Transaction, write: Future[Any], finishes: Sequence[asyncio.Task[FinishReply]]
    ) -> TransactionReply:
        await until_durable(write)
        replies = await asyncio.gather(*finishes)
        self._open.pop(transaction.id)
        self._parts.metrics.transactions.labels(transaction.state).inc()
        self._parts.metrics.transactions_in_doubt.set(self.num_in_doubt)
        episodes = [episode.episode_id for episode, _ in transaction.members]
        if episodes:
            self._parts.events.emit(f"transaction_{transaction.state}", episodes=episodes)
        return TransactionReply(
            transaction_id=transaction.id,
            state=transaction.state,
            warning="; ".join(dict.fromkeys(reply.warning for reply in replies if reply.warning)),
        )

    # --- doubt --------------------------------------------------------------------------------

    def reap(self) -> None:
        """Do what is due about transactions that nobody decides; called every second."""
        now = self._parts.clock()
        for transaction in list(self._open.values()):
            if transaction.settled is not None or transaction.asking is not None:
                continue
            doubt = Doubt(
                waiting_s=now - transaction.since,
                is_decider=not transaction.decider,
                may_ask=transaction.decider in self._parts.peers,
                num_asked=transaction.num_asked,
                since_asked_s=now - transaction.asked_at,
            )
            move = next_move(doubt, timeout_s=self._parts.timeout_s)
            if move is Move.ABORT:
                logger.warning("transaction %s: its client did not decide in time: aborted", transaction.id)
                self._settle(transaction, TransactionState.ABORTED)
            elif move is not Move.WAIT:
                transaction.asking = asyncio.create_task(self._ask(transaction, move), name=f"ask-{transaction.id}")

    async def _ask(self, transaction: Transaction, move: Move) -> None:
        """Ask the decider, once, and do as it says."""
        try:
            answer = await self._parts.ask(transaction.decider, transaction.id, move is Move.PRESUME)
            event = None if answer is None else after_answer(move, answer)
            if event is not None and transaction.settled is None:
                self._settle(transaction, after(transaction.id, transaction.state, event))
        except WingbeatError as error:
            logger.warning("transaction %s: asking %s: %s", transaction.id, transaction.decider, error.message)
        finally:
            transaction.num_asked += 1
            transaction.asked_at = self._parts.clock()
            transaction.asking = None

    def warnings(self) -> list[str]:
        """For the status: what waits for long, and how people can end it."""
        return [self._told(t) for t in self.in_doubt() if t.waiting_s >= TELL_S]

    def _told(self, waiting: TransactionReply) -> str:
        episodes = ", ".join(waiting.episodes)
        if not waiting.decider:
            how = f"it is aborted here after server.transaction_timeout_s = {self._parts.timeout_s:g}"
        elif waiting.decider in self._parts.peers:
            how = f"{waiting.decider} decides and is asked"
        else:
            how = (
                f"{waiting.decider} decides, and is none of server.peers: see its answer to GET"
                f" /api/transactions/{waiting.transaction_id} and tell this server with POST"
            )
        return (
            f"episode {episodes} waits for transaction {waiting.transaction_id} for {waiting.waiting_s:.0f} s: its"
            f" client does not decide; {how}"
        )

    async def close(self) -> None:
        """Ask nobody any more."""
        asking = [t.asking for t in self._open.values() if t.asking is not None]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _prepared(episode: OpenEpisode, record: EpisodeRecord, write: Future[bool]) -> FinishReply:
    """Once the prepared finish is durable; the transaction may be decided by then."""
    await until_durable(write)
    return FinishReply(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        state=episode.state,
        num_turns=record.num_turns,
        num_sampled_tokens=episode.num_sampled,
    )


def _normal(decider: str) -> str:
    if not decider:
        return ""
    try:
        return server_address(decider)
    except ValueError as error:
        raise RequestError(f"`transaction.decider`: {error}", param="transaction") from None
