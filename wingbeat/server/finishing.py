"""How episodes end: durable first, acknowledged after, then on to groups, buffers and evaluations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from wingbeat.core.errors import EpisodeClosed, IdempotencyConflict, RequestError
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import AbortRequest, FinishReply, FinishRequest
from wingbeat.core.samples import EpisodeSamples
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.groups import GroupBook, ReleaseReason
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.operators import ChainOutcome
from wingbeat.dataflow.records import ClosedGroup, EpisodeRecord, GroupSpec, finish_digest
from wingbeat.server.engines import EnginePool
from wingbeat.server.episodes import EpisodeRegistry, EpisodeState, OpenEpisode
from wingbeat.server.evaluations import Evaluations
from wingbeat.server.lost_groups import NO_TOKENS, LostGroups
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies import PolicyHost
from wingbeat.server.rewards import Credit, assign_rewards, uncalled_policies
from wingbeat.server.signals import Changed
from wingbeat.server.source_metrics import SourceMeter
from wingbeat.server.untrained import Untrained
from wingbeat.tracking.credit import turn_credits
from wingbeat.tracking.serialize import dump_graph
from wingbeat.tracking.timelines import build_samples, count_untrainable


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
    on_settled: Callable[[GroupSpec, bool], None]
    """Told every training group that closed, and whether some policy's buffer counts it."""


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
        if episode.finishing is not None:
            if digest != episode.finish_digest:
                raise IdempotencyConflict(
                    f"episode {episode.episode_id} attempt {episode.attempt} finished with another body;"
                    " the first counts"
                )
            return await asyncio.shield(episode.finishing)
        if episode.state not in (EpisodeState.OPEN, EpisodeState.LOST):
            if episode.state is EpisodeState.SUPERSEDED:
                self._parts.metrics.late_finishes.inc()
            raise EpisodeClosed(
                f"episode {episode.episode_id} attempt {episode.attempt} is {episode.state}; its finish cannot count"
            )
        record = self._record(episode, request, digest)
        uncalled = uncalled_policies(request.rewards, _credit(episode))
        # Book and ledger in one breath: what happens to the group later comes after this finish there, too.
        self._parts.book.finish(episode.episode_id, episode.attempt, record)
        self._count_untrainable(episode, record)
        warning = self._count_untrained(episode, record) or self._note_uncalled(episode, record, uncalled)
        episode.become(EpisodeState.CLOSING)
        episode.finish_digest = digest
        _cancel_calls(episode)
        write = self._parts.ledger.record_finish(record)
        self._parts.watch(write)
        episode.finishing = asyncio.create_task(
            self._await_write(episode, record, write, warning), name=f"finish-{episode.episode_id}"
        )
        return await asyncio.shield(episode.finishing)  # a caller that hangs up does not undo its finish

    async def _await_write(
        self, episode: OpenEpisode, record: EpisodeRecord, write: Future[bool], warning: str
    ) -> FinishReply:
        """Once the finish is durable, let the episode go."""
        await asyncio.wrap_future(write)
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
        self._ended(episode, EpisodeState.FINISHED, record.outcome)
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
        _cancel_calls(episode)
        was_open = episode.state is EpisodeState.OPEN
        episode.become(EpisodeState.ABORTED)
        if was_open:
            self._parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.ABORTED)
        self._parts.events.emit(
            "episode_aborted",
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            outcome=request.outcome,
            message=request.message[-2000:],
        )
        if was_open:  # a lost attempt stands in the ledger as lost
            self._record_end(episode, request.outcome, request.message)
        episode.outcome = request.outcome
        self._parts.registry.remember(episode)
        self._after(episode, request.outcome)

    def _record_end(self, episode: OpenEpisode, outcome: Outcome, message: str) -> None:
        self._parts.watch(
            self._parts.ledger.record_end(
                episode.episode_id, episode.attempt, state=AttemptState.ABORTED, outcome=outcome, message=message
            )
        )

    def _ended(self, episode: OpenEpisode, state: EpisodeState, outcome: Outcome) -> None:
        episode.outcome = outcome
        self._parts.registry.end(episode, state)
        self._after(episode, outcome)

    def _after(self, episode: OpenEpisode, outcome: Outcome) -> None:
        self._parts.engines.forget(episode.episode_id)
        self._parts.metrics.episodes.labels(episode.split, outcome).inc()
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
        outcomes: dict[str, ChainOutcome] = {}
        counts = False
        for host in self._parts.policies.values():
            ready = group.ready(host.name) if host.config.trainable else None
            if ready is None:
                continue
            outcome = outcomes[host.name] = host.chain.on_group(ready)
            host.buffer.count_dropped(ready, outcome.dropped)
            if outcome.group is not None and not host.halted:  # else the ledger keeps it for the run's continuation
                counts = host.add_group(outcome.group) or counts
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
            )
        )
        if reason is not None:
            self._parts.events.emit("group_dropped", group_id=group.spec.id, reason=reason)
        self._parts.on_settled(group.spec, counts)

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
            _cancel_calls(episode)
            if episode.state is EpisodeState.OPEN:
                self._record_end(episode, Outcome.TIMEOUT, "its group closed at the deadline")
                self._parts.metrics.episodes.labels(episode.split, Outcome.TIMEOUT).inc()
            episode.outcome = Outcome.TIMEOUT
            self._parts.registry.end(episode, EpisodeState.ABORTED)
            self._parts.engines.forget(episode.episode_id)

    # --- records ------------------------------------------------------------------------------

    def _record(self, episode: OpenEpisode, request: FinishRequest, digest: str) -> EpisodeRecord:
        """Everything about the attempt that must be durable."""
        _mark_superseded(episode)
        credit = _credit(episode)
        is_agent = request.outcome is Outcome.AGENT
        trainable = self._trainable(episode)
        assigned = assign_rewards(request.rewards, credit, required=trainable if is_agent else ())
        rewards = {f"{policy}:{agent}" if agent else policy: reward for (policy, agent), reward in assigned.items()}
        for policy in episode.policies:
            own = [r for (p, _), r in assigned.items() if p == policy]
            if isinstance(request.rewards, float | int):
                rewards.setdefault(policy, float(request.rewards))
            elif policy in request.rewards.policies:
                rewards.setdefault(policy, request.rewards.policies[policy])
            elif own:
                rewards.setdefault(policy, sum(own) / len(own))
        turn_rewards = {} if isinstance(request.rewards, float | int) else request.rewards.turns
        samples = ()
        if _trains(episode, request.outcome):
            samples = self._samples(episode, trainable, rewards=assigned, turn_rewards=turn_rewards)
        return EpisodeRecord(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            group_id=episode.group.id,
            outcome=request.outcome,
            finish_digest=digest,
            rewards=rewards,
            metrics=dict(request.metrics),
            samples=samples,
            graph=dump_graph(episode.graph),
            label=episode.label,
            message=request.message,
            num_turns=episode.graph.num_turns,
            created_s=episode.began_s,
            finished_s=time.time(),
        )

    def _samples(
        self,
        episode: OpenEpisode,
        policies: Sequence[str],
        *,
        rewards: Mapping[tuple[str, str], float],
        turn_rewards: Mapping[str, float],
    ) -> tuple[EpisodeSamples, ...]:
        """What each policy and agent trains on."""
        samples: list[EpisodeSamples] = []
        task = episode.group.task
        for policy in policies:
            keeps = self._parts.policies[policy].config.train_superseded
            turns = turn_credits(episode.graph, policy=policy, rewards=turn_rewards, train_superseded=keeps)
            built = build_samples(episode.graph, policy=policy, episode_id=episode.episode_id, train_superseded=keeps)
            for agent, parts in built.items():
                samples.append(
                    EpisodeSamples(
                        episode_id=episode.episode_id,
                        attempt=episode.attempt,
                        group_id=episode.group.id,
                        policy=policy,
                        agent=agent,
                        reward=rewards[(policy, agent)],
                        samples=parts,
                        truncated=(policy, agent) in episode.truncated,
                        turns=turns[agent],
                        source=task.source,
                        task_id=task.id,
                    )
                )
        highest = episode.highest_versions
        return tuple(rebase_member(s, highest=highest[s.policy]) if s.policy in highest else s for s in samples)

    def _trainable(self, episode: OpenEpisode) -> list[str]:
        return [policy for policy in episode.policies if self._parts.policies[policy].config.trainable]

    def _count_untrainable(self, episode: OpenEpisode, record: EpisodeRecord) -> None:
        """By reason; only of a finish that counts."""
        for policy in self._trainable(episode) if _trains(episode, record.outcome) else ():
            keeps = self._parts.policies[policy].config.train_superseded
            for reason, count in count_untrainable(episode.graph, policy=policy, train_superseded=keeps).items():
                self._parts.metrics.untrainable.labels(policy, reason).inc(count)

    def _count_untrained(self, episode: OpenEpisode, record: EpisodeRecord) -> str:
        """What the caller of a finish that trains nothing should know, or ""."""
        if not _trains(episode, record.outcome):
            return ""
        called = {turn.policy for turn in episode.graph.turns}
        warning = self.untrained.note(called, self._trainable(episode))
        if warning:
            self._parts.metrics.untrained_episodes.inc()
        return warning

    def _note_uncalled(self, episode: OpenEpisode, record: EpisodeRecord, uncalled: Sequence[str]) -> str:
        """What the caller of a finish that rewards policies without turns should know, or ""."""
        if not _trains(episode, record.outcome):
            return ""
        trainable = self._trainable(episode)
        return self.untrained.note_uncalled([policy for policy in uncalled if policy in trainable])


def _credit(episode: OpenEpisode) -> Credit:
    """What the episode holds that can be rewarded."""
    turns = episode.graph.turns
    return Credit(
        agents={(t.policy, t.agent) for t in turns},
        turns={t.turn_id: (t.policy, t.agent) for t in turns},
        policies=episode.policies,
    )


def _trains(episode: OpenEpisode, outcome: Outcome) -> bool:
    return outcome is Outcome.AGENT and episode.split is Split.TRAIN


def _dropped_whole(outcomes: Collection[ChainOutcome]) -> str | None:
    """Why nothing of a group may train, where that is the operators' doing."""
    if not outcomes or any(outcome.group is not None for outcome in outcomes):
        return None
    return "; ".join(sorted({dropped.reason for outcome in outcomes for dropped in outcome.dropped}))


def _mark_superseded(episode: OpenEpisode) -> None:
    """Tell the graph which replies nobody received, and which were sampled again."""
    for turn in episode.graph.turns:
        if turn.turn_id in episode.undelivered:
            episode.graph.mark_undelivered(turn.turn_id)
        else:
            episode.graph.mark_delivered(turn.turn_id)
        if turn.turn_id in episode.resampled:
            episode.graph.mark_resampled(turn.turn_id)


def _cancel_calls(episode: OpenEpisode) -> None:
    """The episode is over for its running model calls: their callers get 409."""
    for task in tuple(episode.calls):
        task.cancel()
