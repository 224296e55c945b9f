"""How episodes end: durable first, acknowledged after, then on to groups, buffers and evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from wingbeat.core.errors import EpisodeClosed, IdempotencyConflict, RequestError
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import AbortRequest, FinishReply, FinishRequest
from wingbeat.core.signals import Changed
from wingbeat.core.types import OUTCOME_OF, UNSAID, Cause, Outcome, Split
from wingbeat.dataflow.groups import GroupBook, ReleaseReason
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.operators import ChainOutcome
from wingbeat.dataflow.records import (
    ClosedGroup,
    Dropped,
    DropReason,
    EpisodeRecord,
    GroupSpec,
    ReadyGroup,
    finish_digest,
)
from wingbeat.server.collect.conversations import is_collected
from wingbeat.server.collect.groups import CollectedGroups
from wingbeat.server.episodes.durable import until_durable
from wingbeat.server.episodes.endings import Endings, real_cause
from wingbeat.server.episodes.evaluations import Evaluations
from wingbeat.server.episodes.finish_records import credit_of, record_of, trainable, trains
from wingbeat.server.episodes.lost_groups import NO_TOKENS, LostGroups
from wingbeat.server.episodes.registry import EpisodeRegistry, EpisodeState, OpenEpisode
from wingbeat.server.episodes.rewards import uncalled_policies
from wingbeat.server.episodes.source_metrics import SourceMeter
from wingbeat.server.episodes.untrained import Untrained
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.host import PolicyHost
from wingbeat.server.variants.variants import Variants
from wingbeat.server.workers.engines import EnginePool
from wingbeat.tracking.timelines import count_untrainable

GROUP_CLOSED = "its group closed at the deadline"


@dataclass(frozen=True, slots=True)
class FinishingParts:
    """What ending an episode needs."""

    policies: dict[str, PolicyHost]
    book: GroupBook
    ledger: Ledger
    registry: EpisodeRegistry
    evaluations: Evaluations
    engines: EnginePool
    events: EventLog
    metrics: ControlMetrics
    changed: Changed
    watch: Callable[[Future[Any]], None]
    on_closed: Callable[[set[str]], None]
    """Told the ids of groups that closed."""
    on_settled: Callable[[GroupSpec, bool, bool], Mapping[str, Any] | None]
    """Told every training group that closed, whether some policy's buffer counts it, and whether its task is to be
    dealt again; returns the dealer's state."""
    endings: Endings
    variants: Variants


class Finishing:
    """Runs on control's event loop."""

    def __init__(self, parts: FinishingParts) -> None:
        self._parts = parts
        self.rewards_seen: dict[str, list[float]] = {}
        """Per policy: training rewards since the last step (progress metrics)."""
        self.sources = SourceMeter()
        self.num_finished_train = 0
        """Training episodes that counted, since this process began."""
        self.untrained = Untrained()
        self.lost_groups = LostGroups()

    async def finish(self, episode: OpenEpisode, request: FinishRequest) -> FinishReply:
        """Count an attempt.  The same body again gets the same answer.

        Raises InvalidReward (nothing changes), EpisodeClosed or ConflictError.
        """
        digest = finish_digest(request)
        if self.is_repeated(episode, digest):
            return await episode.finished()
        record = self.record(episode, request, digest)
        uncalled = uncalled_policies(request.rewards, credit_of(episode))
        self.count(episode, record, uncalled, self._parts.ledger.record_finish)
        return await episode.finished()

    def is_repeated(self, episode: OpenEpisode, digest: str) -> bool:
        """Whether this finish came before.

        Raises IdempotencyConflict after another body, EpisodeClosed for an attempt that cannot finish any more.
        """
        if episode.has_finish:
            if digest != episode.finish_digest:
                raise IdempotencyConflict(
                    f"episode {episode.episode_id} attempt {episode.attempt} finished with another body;"
                    " the first counts"
                )
            return True
        if episode.state not in (EpisodeState.OPEN, EpisodeState.LOST):
            if episode.state is EpisodeState.SUPERSEDED:
                self._parts.metrics.late_finishes.inc()
            raise EpisodeClosed(
                f"episode {episode.episode_id} attempt {episode.attempt} is {episode.state}; its finish cannot count"
            )
        return False

    def count(
        self,
        episode: OpenEpisode,
        record: EpisodeRecord,
        uncalled: Sequence[str],
        write: Callable[[EpisodeRecord], Future[Any]],
    ) -> asyncio.Task[FinishReply]:
        """The attempt counts, once ``write`` has made that durable; the task ends then.

        Book and ledger in one breath: what happens to the group later comes after this finish there, too.
        """
        self._parts.book.finish(episode.episode_id, episode.attempt, record)
        self.note_untrainable(episode, record)
        warning = self._count_untrained(episode, record) or self._note_uncalled(episode, record, uncalled)
        episode.become(EpisodeState.CLOSING)
        episode.finish_digest = record.finish_digest
        cancel_calls(episode)
        written = write(record)
        self._parts.watch(written)
        episode.finishing = asyncio.create_task(
            self._await_write(episode, record, written, warning), name=f"finish-{episode.episode_id}"
        )
        return episode.finishing

    async def _await_write(
        self, episode: OpenEpisode, record: EpisodeRecord, write: Future[Any], warning: str
    ) -> FinishReply:
        """Once the finish is durable, let the episode go."""
        await until_durable(write)
        reply = FinishReply(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            state=EpisodeState.FINISHED,
            num_turns=record.num_turns,
            num_sampled_tokens=episode.num_sampled,
            warning=warning,
        )
        episode.finish_reply = reply
        if episode.split is Split.TRAIN and record.outcome is Outcome.AGENT:
            self.num_finished_train += 1
            for policy in episode.policies:
                if policy in record.rewards and not self._parts.policies[policy].complete:
                    self.rewards_seen.setdefault(policy, []).append(record.rewards[policy])
            self.sources.finished(record, source=episode.group.task.source, policies=self._trainable(episode))
        episode.ended_by(UNSAID[record.outcome], record.message)
        self._parts.registry.end(episode, EpisodeState.FINISHED)
        self._after(
            episode, rewards={policy: record.rewards[policy] for policy in episode.policies if policy in record.rewards}
        )
        return reply

    def abort(self, episode: OpenEpisode, request: AbortRequest) -> None:
        """End an attempt that must not count; its slot reopens.  Repeats are harmless.

        Raises RequestError for the outcome of a finish, EpisodeClosed where the attempt ended otherwise.
        """
        if request.outcome is Outcome.AGENT:
            raise RequestError(
                "`outcome` agent means that the episode ran to its end: finish it; an abort names what broke",
                param="outcome",
            )
        if episode.state is EpisodeState.ABORTED:
            return
        cause = request.cause or UNSAID[request.outcome]
        self.break_off(episode, real_cause(request.outcome, cause, fault=episode.call_fault), request.message)

    def break_off(self, episode: OpenEpisode, cause: Cause, message: str) -> None:
        """End an attempt without a finish, for whatever cause; its slot reopens.

        Raises EpisodeClosed where it has ended.
        """
        if episode.state is EpisodeState.PREPARED:
            raise EpisodeClosed(
                f"episode {episode.episode_id} attempt {episode.attempt} is prepared: its transaction decides whether"
                " it counts (POST /api/transactions/{id})"
            )
        cancel_calls(episode)
        was_open = episode.state is EpisodeState.OPEN
        episode.become(EpisodeState.ABORTED)
        if was_open:
            self._parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.ABORTED)
            self._record_end(episode, cause, message)  # a lost attempt stands in the ledger as lost
        self._let_go(episode, cause, message)

    def undo(self, episode: OpenEpisode, message: str) -> None:
        """The transaction of a prepared finish was aborted (the ledger knows): its slot reopens."""
        episode.become(EpisodeState.ABORTED)
        self._parts.book.undo(episode.episode_id, episode.attempt)
        self._let_go(episode, Cause.TRANSACTION_ABORTED, message)

    def _let_go(self, episode: OpenEpisode, cause: Cause, message: str) -> None:
        """It ended without counting."""
        episode.ended_by(cause, message)
        self._parts.events.emit(
            "episode_aborted",
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            outcome=episode.outcome,
            cause=cause,
            message=episode.message,
        )
        self._parts.registry.remember(episode)
        self._after(episode)

    def _record_end(self, episode: OpenEpisode, cause: Cause, message: str) -> None:
        self._parts.watch(
            self._parts.ledger.record_end(
                episode.episode_id,
                episode.attempt,
                state=AttemptState.ABORTED,
                outcome=OUTCOME_OF[cause],
                cause=cause,
                message=message,
            )
        )

    def _after(self, episode: OpenEpisode, *, rewards: Mapping[str, float] | None = None) -> None:
        assert episode.outcome is not None and episode.cause is not None
        self._parts.engines.forget(episode.episode_id)
        self._parts.metrics.episodes.labels(episode.split, episode.outcome).inc()
        self._parts.endings.note(episode.split, episode.cause)
        counts = episode.outcome is Outcome.AGENT
        self._parts.variants.ended(episode, episode.outcome, rewards if counts else None)
        self.settle()

    # --- groups -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Move closed groups on: to the buffers, or to their evaluation."""
        closed = self._parts.book.closed()
        for group in closed:
            self._cut_off(group)
            if group.spec.split is Split.EVAL:
                self._parts.watch(self._parts.ledger.close_group(group.spec.id))
                self._parts.evaluations.collect(group)
                continue
            self._settle_training(group)
        if closed:
            self._parts.on_closed({group.spec.id for group in closed})
        self._parts.changed.notify()

    def _settle_training(self, group: ClosedGroup) -> None:
        """Through each policy's operators into its buffer; the ledger learns in one write what they made of it."""
        if is_collected(group.spec.id):  # its server was killed between its feedback and this
            CollectedGroups(self._parts.policies, self._parts.ledger, watch=self._parts.watch).settle(group)
            return
        outcomes: dict[str, ChainOutcome] = {}
        counts = False
        for host in self._parts.policies.values():
            ready = group.ready(host.name) if host.config.trainable else None
            if ready is None:
                continue
            outcome = _recalled(ready) if group.is_recalled else host.chain.on_group(ready)
            outcomes[host.name] = outcome
            host.buffer.count_dropped(ready, outcome.dropped)
            if outcome.group is not None and not host.halted:  # else the ledger keeps it for the run's continuation
                counts = host.add_group(outcome.group) or counts
        if not group.is_recalled:  # no fault of tasks or agents
            self._note_lost(group, outcomes.values())
        reason = group.drop_reason or _dropped_whole(outcomes.values())
        self._parts.watch(
            self._parts.ledger.close_group(
                group.spec.id,
                reason=reason,
                dropped={name: outcome.dropped for name, outcome in outcomes.items()},
                shaping=[shaping for outcome in outcomes.values() for shaping in outcome.shaping],
                operators={
                    name: state for name in outcomes if (state := self._parts.policies[name].chain.state_dict())
                },
                dealer_state=self._settled(group, counts),
            )
        )
        if reason is not None:
            self._parts.events.emit("group_dropped", group_id=group.spec.id, reason=reason)

    def _settled(self, group: ClosedGroup, counts: bool) -> Mapping[str, Any] | None:
        """What the dealer makes of it: its turn is over, or comes again, with the same task if nobody is to blame."""
        self._parts.variants.settled(group.spec, counts)
        return self._parts.on_settled(group.spec, counts, group.is_recalled)

    def _note_lost(self, group: ClosedGroup, outcomes: Collection[ChainOutcome]) -> None:
        """What operators drop whole they tell themselves, and of policies that nobody calls ``untrained`` does."""
        kept = [outcome.group for outcome in outcomes if outcome.group is not None]
        if group.drop_reason is not None:
            self.lost_groups.note(group.drop_reason)
        elif any(member.num_sampled for ready in kept for member in ready.members):
            self.lost_groups.note(None)
        elif kept or not (outcomes or self.untrained.in_a_row):
            self.lost_groups.note(NO_TOKENS)

    def _cut_off(self, group: ClosedGroup) -> None:
        """Members that did not finish before their group closed: no attempt of theirs can count any more."""
        for member in (*group.cut_off, *group.given_up):
            episode = self._parts.registry.current(member.episode_id)
            if episode is None or episode.state not in (EpisodeState.OPEN, EpisodeState.LOST):
                continue
            cancel_calls(episode)
            if episode.state is EpisodeState.OPEN:
                self._record_end(episode, Cause.GROUP_DEADLINE, GROUP_CLOSED)
                self._parts.metrics.episodes.labels(episode.split, Outcome.TIMEOUT).inc()
                self._parts.endings.note(episode.split, Cause.GROUP_DEADLINE)
                self._parts.variants.ended(episode, Outcome.TIMEOUT)
            episode.ended_by(Cause.GROUP_DEADLINE, GROUP_CLOSED)
            self._parts.registry.end(episode, EpisodeState.ABORTED)
            self._parts.engines.forget(episode.episode_id)

    # --- records ------------------------------------------------------------------------------

    def record(self, episode: OpenEpisode, request: FinishRequest, digest: str) -> EpisodeRecord:
        """Everything about the attempt that must be durable.  Raises InvalidReward."""
        return record_of(episode, request, digest, policies=self._parts.policies)

    def _trainable(self, episode: OpenEpisode) -> list[str]:
        return trainable(episode, self._parts.policies)

    def note_untrainable(self, episode: OpenEpisode, record: EpisodeRecord) -> None:
        """By reason; only of a finish that counts."""
        for policy in self._trainable(episode) if trains(episode, record.outcome) else ():
            keeps = self._parts.policies[policy].config.train_superseded
            for reason, count in count_untrainable(episode.graph, policy=policy, train_superseded=keeps).items():
                self._parts.metrics.untrainable.labels(policy, reason).inc(count)

    def _count_untrained(self, episode: OpenEpisode, record: EpisodeRecord) -> str:
        """What the caller of a finish that trains nothing should know, or ""."""
        if not trains(episode, record.outcome):
            return ""
        called = {turn.policy for turn in episode.graph.turns}
        warning = self.untrained.note(called, self._trainable(episode))
        if warning:
            self._parts.metrics.untrained_episodes.inc()
        return warning

    def _note_uncalled(self, episode: OpenEpisode, record: EpisodeRecord, uncalled: Sequence[str]) -> str:
        """What the caller of a finish that rewards policies without turns should know, or ""."""
        if not trains(episode, record.outcome):
            return ""
        trainable = self._trainable(episode)
        return self.untrained.note_uncalled([policy for policy in uncalled if policy in trainable])


def _recalled(ready: ReadyGroup) -> ChainOutcome:
    """Nothing of the group may train, and no operator learns of it: who edits an agent says nothing about a task."""
    attempts = dict.fromkeys((member.episode_id, member.attempt) for member in ready.members)
    return ChainOutcome(None, tuple(Dropped(*attempt, DropReason.VERSION_LEFT) for attempt in attempts))


def _dropped_whole(outcomes: Collection[ChainOutcome]) -> str | None:
    """Why nothing of a group may train, where that is the operators' doing."""
    if not outcomes or any(outcome.group is not None for outcome in outcomes):
        return None
    return "; ".join(sorted({dropped.reason for outcome in outcomes for dropped in outcome.dropped}))


def cancel_calls(episode: OpenEpisode) -> None:
    """The episode is over for its running model calls: their callers get 409."""
    for task in tuple(episode.calls):
        task.cancel()
