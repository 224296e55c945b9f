"""How collected conversations end: with feedback, without it, or deleted.

Feedback is durable before it is acknowledged.  Then a conversation is a group of one like any other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from wingbeat.core.config.collect import CollectConfig
from wingbeat.core.errors import EpisodeClosed, IdempotencyConflict, RequestError, UnknownEpisode
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import AbortRequest, DeletedReply, FinishReply, FinishRequest
from wingbeat.core.types import OUTCOME_OF, UNSAID, Cause, Outcome, Split
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.dataflow.records import ClosedGroup, EpisodeRecord, GroupSpec, finish_digest
from wingbeat.server.calls.replays import ReplayBook
from wingbeat.server.collect.conversation_store import ConversationStore
from wingbeat.server.collect.conversations import CollectedEpisode, Conversation
from wingbeat.server.collect.groups import RECORDED, TRAINED, CollectedGroups, Settled
from wingbeat.server.collect.metrics import CollectMetrics
from wingbeat.server.episodes.endings import Endings
from wingbeat.server.episodes.finishing import Finishing
from wingbeat.server.episodes.registry import EpisodeState
from wingbeat.server.keys.principals import Principal, Role
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.host import PolicyHost
from wingbeat.tracking.serialize import load_graph

REMEMBERED = 20_000
"""Ended conversations whose reply is in memory; the ledger knows the others."""
UNSCORED = "unscored"
ABORTED = "aborted"
DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class CollectParts:
    """What collection needs of control."""

    config: CollectConfig
    keys: KeyRing
    store: ConversationStore
    policies: Mapping[str, PolicyHost]
    ledger: Ledger
    finishing: Finishing
    groups: CollectedGroups
    endings: Endings
    events: EventLog
    metrics: ControlMetrics
    collect_metrics: CollectMetrics
    replays: ReplayBook
    watch: Callable[[Future[Any]], None]
    notify: Callable[[], None]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """The conversation that a call of ``/api/episodes/{id}`` means, and who calls."""

    episode_id: str
    caller: Principal
    conversation: Conversation | None
    """None where it has ended."""


@dataclass(frozen=True, slots=True)
class _Ended:
    key_id: str
    digest: str
    reply: FinishReply


class ConversationEnds:
    """Runs on control's event loop."""

    def __init__(self, parts: CollectParts) -> None:
        self._parts = parts
        self._store = parts.store
        self.pending: dict[str, Conversation] = {}
        """Those whose end is being made durable."""
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._log_has_text = False
        """Of what was deleted."""

    async def close_unscored(
        self, conversation: Conversation, cause: Cause, why: str, *, unless_used: bool = False
    ) -> None:
        """End a conversation without a reward; ``unless_used``: not if a call comes while its turns are read."""
        parts, outcome, last_used = self._parts, OUTCOME_OF[cause], conversation.last_used
        result = UNSCORED if cause is Cause.FEEDBACK_MISSING else ABORTED
        episode = await self._store.load(conversation) if parts.config.keep_unscored else None
        if conversation.ended or not conversation.num_turns or (unless_used and conversation.last_used != last_used):
            return
        write = None
        if episode is not None:
            request = FinishRequest(outcome=outcome, message=why)
            record, spec = self._record(episode, request, f"{result}: {outcome}", cause)
            reason = why if cause is Cause.FEEDBACK_MISSING else f"{result}: {outcome}"
            write = parts.ledger.record_collected(spec, record, closed_because=reason)
            parts.watch(write)
        self._store.end(conversation)
        self.pending[conversation.episode_id] = conversation
        try:
            if write is not None:
                await asyncio.wrap_future(write)
            self._store.forget(conversation)
        finally:
            self.pending.pop(conversation.episode_id, None)
            conversation.settled.set()
        settled = Settled(result, why if cause is Cause.FEEDBACK_MISSING else "")
        self._note(conversation, settled, Split.EVAL, cause)

    async def finish(self, target: Target, request: FinishRequest) -> FinishReply:
        """Feedback: the conversation becomes an episode.  The same body again gets the same answer.

        Raises InvalidReward (nothing changes), EpisodeClosed, IdempotencyConflict, UnknownEpisode.
        """
        if request.transaction is not None:
            raise RequestError(
                "a collected conversation is on one server: leave `transaction` out", param="transaction"
            )
        digest, conversation = finish_digest(request), target.conversation
        if conversation is None:
            return await self._repeated(target, digest)
        if conversation.finishing is None:
            episode = await self._store.load(conversation)
            if conversation.finishing is None:
                if target.episode_id in self.pending:
                    raise EpisodeClosed(f"conversation {target.episode_id} is being closed without feedback")
                if episode is None:
                    return await self._repeated(target, digest)
                self._begin_finish(episode, conversation, request, digest)
        assert conversation.finishing is not None
        if digest != conversation.finish_digest:
            raise _other_body(target.episode_id)
        return await asyncio.shield(conversation.finishing)

    def _begin_finish(
        self, episode: CollectedEpisode, conversation: Conversation, request: FinishRequest, digest: str
    ) -> None:
        """From here on the feedback counts, and calls open another conversation."""
        if not episode.graph.num_turns:
            raise EpisodeClosed(f"conversation {episode.episode_id} has no turn yet: send feedback after its first")
        parts = self._parts
        record, spec = self._record(episode, request, digest, UNSAID[request.outcome])
        parts.finishing.note_untrainable(episode, record)
        closed_because = None if spec.split is Split.TRAIN else _untrained(conversation, request.outcome)
        write = parts.ledger.record_collected(spec, record, closed_because=closed_because)
        parts.watch(write)
        self._store.end(conversation)
        self.pending[episode.episode_id] = conversation
        conversation.finish_digest = digest
        lineages = {name: parts.policies[name].ancestry.current for name in spec.policies}
        conversation.finishing = asyncio.create_task(
            self._await_write(conversation, ClosedGroup(spec, (record,), (), ()), lineages, write),
            name=f"feedback-{episode.episode_id}",
        )

    async def _await_write(
        self, conversation: Conversation, group: ClosedGroup, lineages: Mapping[str, int], write: Future[bool]
    ) -> FinishReply:
        """Once the feedback is durable, on to the buffers."""
        try:
            await asyncio.wrap_future(write)
            self._store.forget(conversation)
            (record,) = group.finished
            settled = Settled(RECORDED)
            if group.spec.split is Split.TRAIN:
                group = replace(group, finished=(self._rebased(record, lineages),))
                settled = self._parts.groups.settle(group)
                self._trained(record, settled)
                self._parts.notify()
            reply = _reply(record, settled.warning)
            self._ended[record.episode_id] = _Ended(conversation.key_id, record.finish_digest, reply)
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            self._note(conversation, settled, group.spec.split, Cause(record.cause))
            return reply
        finally:
            self.pending.pop(conversation.episode_id, None)
            conversation.settled.set()

    def _trained(self, record: EpisodeRecord, settled: Settled) -> None:
        """In the progress of a policy its conversations are episodes like others."""
        finishing = self._parts.finishing
        finishing.num_finished_train += 1
        if settled.result != TRAINED:
            return
        for policy in settled.policies:
            finishing.rewards_seen.setdefault(policy, []).append(record.rewards[policy])
        source = record.samples[0].source
        finishing.sources.finished(record, source=source, policies=settled.policies)

    def _record(
        self, episode: CollectedEpisode, request: FinishRequest, digest: str, cause: Cause
    ) -> tuple[EpisodeRecord, GroupSpec]:
        """What the ledger gets, with versions as they count now."""
        hosts = self._parts.policies
        turns = [turn for turn in episode.graph.turns if turn.policy in hosts]  # others are gone from the configuration
        called = [name for name in episode.policies if any(turn.policy == name for turn in turns)]
        for turn in turns:
            ceiling = hosts[turn.policy].ancestry.ceiling(lineage=episode.lineages.get(turn.turn_id, 0))
            if ceiling is not None:
                known = episode.highest_versions.get(turn.policy, ceiling)
                episode.highest_versions[turn.policy] = min(known, ceiling)
        trains = episode.split is Split.TRAIN and request.outcome is Outcome.AGENT
        allowed, episode.policies = episode.policies, dict.fromkeys(called)
        try:
            record = self._parts.finishing.record(episode, request, digest)
        finally:  # feedback that is refused changes nothing
            episode.policies = allowed
        record = replace(record, cause=cause, client=episode.client)
        floors: dict[str, int] = {}
        for name in called:
            lowest = [m.min_version for m in record.samples if m.policy == name and m.min_version is not None]
            floors[name] = min(lowest, default=hosts[name].version)
        split = Split.TRAIN if trains else Split.EVAL
        return record, replace(episode.group, split=split, policies=tuple(called), floor_version=floors)

    def _rebased(self, record: EpisodeRecord, lineages: Mapping[str, int]) -> EpisodeRecord:
        """After a rollback while the write was under way."""
        samples = [
            member
            if (ceiling := self._parts.policies[member.policy].ancestry.ceiling(lineage=lineages[member.policy]))
            is None
            else rebase_member(member, highest=ceiling)
            for member in record.samples
        ]
        return replace(record, samples=tuple(samples))

    async def _repeated(self, target: Target, digest: str) -> FinishReply:
        """The answer to feedback on what has ended."""
        known = self._ended.get(target.episode_id)
        if known is not None:
            check_owner(target.caller, known.key_id, target.episode_id)
            if known.digest != digest:
                raise _other_body(target.episode_id)
            return known.reply
        view = await self.ended(target)
        if view.record is None or view.cause == Cause.FEEDBACK_MISSING:
            raise EpisodeClosed(f"conversation {target.episode_id} was closed unscored: {view.message}")
        if view.record.finish_digest != digest:
            raise _other_body(target.episode_id)
        reasons = sorted({s.reason for s in view.samples if s.reason and s.state is SampleState.DROPPED})
        return _reply(view.record, f"recorded, and trains nothing: {', '.join(reasons)}" if reasons else "")

    async def ended(self, target: Target) -> AttemptView:
        """What the ledger says of a conversation that has ended, once it has it.  Raises UnknownEpisode."""
        conversation = self.pending.get(target.episode_id)
        if conversation is not None:
            await conversation.settled.wait()
        try:
            views = await asyncio.to_thread(self._parts.ledger.episode, target.episode_id)
        except UnknownEpisode:
            raise _unknown(target.episode_id) from None
        check_owner(target.caller, views[-1].client, target.episode_id)
        return views[-1]

    async def abort(self, target: Target, request: AbortRequest) -> None:
        """End it without a reward.  Repeats are harmless.  Raises RequestError, EpisodeClosed, UnknownEpisode."""
        if request.outcome is Outcome.AGENT:
            raise RequestError("an abort is no feedback: finish the conversation instead", param="outcome")
        cause = request.cause or UNSAID[request.outcome]
        conversation = target.conversation
        if conversation is not None and not conversation.ended:
            await self.close_unscored(conversation, cause, request.message or "aborted")
        else:
            view = await self.ended(target)
            if view.outcome is Outcome.AGENT:
                raise EpisodeClosed(f"conversation {target.episode_id} has its feedback; it cannot be aborted")

    async def delete(self, target: Target) -> DeletedReply:
        """Its text goes, from memory, disk and ledger; it trains no more.  Repeats are harmless.

        Batches that a trainer may have to repeat keep its tokens: the reply counts them, and a later repeat finds
        fewer.
        """
        conversation, episode_id = target.conversation, target.episode_id
        if conversation is not None and not conversation.ended:
            self._store.end(conversation)
            self._store.forget(conversation)
            self._parts.collect_metrics.ended.labels(conversation.key_name, DELETED).inc()
            self._parts.events.emit("collected_deleted", episode_id=episode_id)
            return DeletedReply(episode_id=episode_id)
        view = await self.ended(target)
        self._forget_group(view.group.id)
        erased = await asyncio.wrap_future(self._parts.ledger.erase_episode(episode_id))
        self._forget_group(view.group.id)  # a rollback may have read the ledger just before
        self._ended.pop(episode_id, None)
        self._log_has_text = True
        await self.empty_log()
        self._parts.events.emit("collected_deleted", episode_id=episode_id, in_batches=erased)
        return DeletedReply(episode_id=episode_id, in_batches=erased)

    async def empty_log(self) -> None:
        """Leave nothing of what was deleted in the ledger's write-ahead log; until that is done, call it again."""
        if self._log_has_text:
            self._log_has_text = not await asyncio.to_thread(self._parts.ledger.empty_log)

    def _forget_group(self, group_id: str) -> None:
        for host in self._parts.policies.values():
            host.buffer.remove(group_id)
            host.chain.forget(group_id)

    def _note(self, conversation: Conversation, settled: Settled, split: Split, cause: Cause) -> None:
        """Where people look; what was said in the conversation, or of it, is not for logs."""
        parts = self._parts
        parts.collect_metrics.ended.labels(conversation.key_name, settled.result).inc()
        parts.metrics.episodes.labels(split, OUTCOME_OF[cause]).inc()
        parts.endings.note(split, cause)
        parts.events.emit(
            "collected",
            episode_id=conversation.episode_id,
            key=conversation.key_name,
            result=settled.result,
            outcome=OUTCOME_OF[cause],
            message=settled.warning,
        )


def check_owner(caller: Principal, key_id: str, episode_id: str) -> None:
    """Raises UnknownEpisode: what other keys collect does not exist for this one."""
    if caller.role is not Role.ADMIN and caller.key_id != key_id:
        raise _unknown(episode_id)


def _unknown(episode_id: str) -> UnknownEpisode:
    return UnknownEpisode(f"no conversation {episode_id!r} of this key is open or recorded here")


def _other_body(episode_id: str) -> IdempotencyConflict:
    return IdempotencyConflict(f"conversation {episode_id} has other feedback already; the first counts")


def _untrained(conversation: Conversation, outcome: Outcome) -> str:
    """Why what is recorded never trains."""
    return f"outcome {outcome}" if conversation.train else "recorded only: its key was made without --train"


def _reply(record: EpisodeRecord, warning: str) -> FinishReply:
    return FinishReply(
        episode_id=record.episode_id,
        attempt=record.attempt,
        state=EpisodeState.FINISHED,
        num_turns=record.num_turns,
        num_sampled_tokens=sampled_tokens(record),
        warning=warning,
    )


def sampled_tokens(record: EpisodeRecord) -> int:
    """All that were sampled, whether they may train or not."""
    return load_graph(record.graph).num_sampled_tokens if record.graph else record.num_sampled
