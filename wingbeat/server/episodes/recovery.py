"""Attempts that outlive the process that ran them.

When control starts again, every attempt that may still finish is rebuilt from the ledger (who runs it, with which
keys) and from its captured turns (its token graph), and its client goes on as if nothing had happened: same ids,
same key.  It gets a whole period to come back; one that never does is *interrupted*, which uses up no attempt.

What cannot be rebuilt (turns damaged on disk, a policy or a pinned version that is gone, an attempt that an older
release began) is interrupted at once and issued anew; its client is told so with 409.

**The last reply.**  Whether a caller received the turn that was captured last nobody knows: control may have died
just before it was sent.  Such a turn is *in doubt*.  If the agent goes on from it, it had it.  If the same prompt is
asked again, it had not, and the new reply replaces it (superseded: resampled).  If the agent finishes without asking
again, it counts: an agent that lacks a reply asks for it, or gives up.  Earlier turns that were undelivered when the
last one was captured stay so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson

from wingbeat.core.errors import AuthenticationError, UnknownEpisode
from wingbeat.core.protocol import FinishReply
from wingbeat.core.types import Cause, FinishReason, Outcome, Split
from wingbeat.dataflow.groups import ReleaseReason
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import RunningAttempt
from wingbeat.dataflow.records import BeginRecord, GroupSpec
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.keys.ring import bearer, digest
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.serialize import TurnNotes, dump_turn, load_graph, load_noted_turns
from wingbeat.tracking.turns import PromptPlan, Turn

if TYPE_CHECKING:
    from wingbeat.server.control import Control
    from wingbeat.server.episodes.rollout_parts import RolloutParts
    from wingbeat.server.policies.host import PolicyHost

logger = logging.getLogger(__name__)

NUMBERS_PER_LIFE = 1000
"""Turns of a restored attempt are numbered from the next such number on: those in flight had numbers, too, which a
streaming client may have seen."""


class CannotRecover(Exception):
    """Why an attempt cannot go on; for people."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a restart found."""

    episodes: tuple[OpenEpisode, ...]
    """Those that go on."""
    interrupted: tuple[tuple[RunningAttempt, str], ...]
    """Those that do not, each with the reason."""


# --- capturing ------------------------------------------------------------------------------------


def dump_noted_turn(episode: OpenEpisode, turn: Turn, *, lineage: int) -> bytes:
    """A committed turn with what else of its episode must outlive this process."""
    graph, tools = episode.graph, b""
    digest_of_tools = turn.tools_digest
    if digest_of_tools not in episode.captured_tools and digest_of_tools in episode.tools_by_digest:
        episode.captured_tools.add(digest_of_tools)
        tools = orjson.dumps(episode.tools_by_digest[digest_of_tools])
    open_calls = episode.undelivered - {turn.turn_id} if len(episode.undelivered) > 1 else ()
    instructed = turn.turn_id in episode.instructed
    if not (lineage or tools or instructed or open_calls or episode.resampled):
        return dump_turn(graph, turn)  # what most turns are
    notes = TurnNotes(
        lineage=lineage,
        tools=tools,
        instructed=instructed,
        undelivered=tuple(sorted(turn_id for turn_id in open_calls if turn_id in graph)),
        resampled=tuple(sorted(episode.resampled)),
    )
    return dump_turn(graph, turn, notes=notes)


# --- rebuilding -----------------------------------------------------------------------------------


def recover_episodes(control: Control, specs: Mapping[str, GroupSpec]) -> Recovery:
    """Rebuild the attempts of open groups that may still finish; the ledger learns of those that cannot.

    ``specs``: all open groups by id.
    """
    episodes: list[OpenEpisode] = []
    interrupted: list[tuple[RunningAttempt, str]] = []
    for attempt in control.ledger.running_attempts():
        spec = specs[attempt.begin.group_id]
        try:
            episodes.append(_rebuilt(control, attempt, spec))
        except CannotRecover as error:
            interrupted.append((attempt, str(error)))
            _interrupted(control, attempt, str(error), split=spec.split)
    kept = {(episode.episode_id, episode.attempt) for episode in episodes}
    control.ledger.interrupt_running(keep=kept).result()  # before the slots of the groups are read
    return Recovery(tuple(episodes), tuple(interrupted))


def take_up(control: Control, recovery: Recovery) -> None:
    """Have the episodes go on, once the book holds their groups."""
    for episode in recovery.episodes:
        is_lost, episode.state = episode.state is EpisodeState.LOST, EpisodeState.OPEN
        control.registry.add(episode)
        control.rollouts.begins.restored(episode)
        if is_lost:
            control.registry.lose(episode)
    if recovery.episodes or recovery.interrupted:
        control.events.emit("episodes_recovered", running=len(recovery.episodes), interrupted=len(recovery.interrupted))


def _rebuilt(control: Control, attempt: RunningAttempt, spec: GroupSpec) -> OpenEpisode:
    """Raises CannotRecover."""
    begin = attempt.begin
    if not attempt.key_digests:
        raise CannotRecover("a release that recorded no keys began it")
    for name, version in begin.policies.items() if attempt.state is not AttemptState.PREPARED else ():
        host = control.policies.get(name)
        if host is None:
            raise CannotRecover(f"policy {name!r} is not here any more")
        if version is not None and not host.is_pinned(version):
            raise CannotRecover(f"version {version} of policy {name!r} is not held any more")
    graph, notes = EpisodeGraph(begin.episode_id), ()
    if attempt.state is not AttemptState.PREPARED:  # the record of its finish has the graph
        try:
            pieces = control.ledger.recover_turns(begin.episode_id, begin.attempt)
            graph, notes = load_noted_turns(begin.episode_id, pieces)
        except (ValueError, OSError) as error:
            raise CannotRecover(f"its turns cannot be read: {error}") from error
    strange = {turn.policy for turn in graph.turns} - set(begin.policies)
    if strange:
        raise CannotRecover(f"its turns are of policies that it may not call: {', '.join(sorted(strange))}")
    episode = _as_begun(control, attempt, spec)
    episode.graph = graph
    episode.restored_at = episode.last_seen
    episode.state = EpisodeState.LOST if attempt.state is AttemptState.LOST else EpisodeState.OPEN
    _remember_turns(episode, notes, control.policies)
    return episode


def _as_begun(control: Control, attempt: RunningAttempt, spec: GroupSpec) -> OpenEpisode:
    """What the ledger knows of an attempt since its begin."""
    begin = attempt.begin
    return OpenEpisode(
        episode_id=begin.episode_id,
        attempt=begin.attempt,
        group=spec,
        policies=dict(begin.policies),
        label=begin.label,
        client=begin.client,
        code=begin.code,
        key_digest=attempt.key_digests[0] if attempt.key_digests else "",
        more_keys=list(attempt.key_digests[1:]),
        idle_timeout_s=begin.idle_timeout_s or control.config.server.idle_timeout_s,
        began_s=attempt.created_s,
        last_seen=control.clock(),
        graph=EpisodeGraph(begin.episode_id),
        has_heartbeat=begin.heartbeats,
        idempotency_key=begin.idempotency_key,
        begin_digest=begin.begin_digest,
    )


def _remember_turns(episode: OpenEpisode, notes: Sequence[TurnNotes], policies: Mapping[str, PolicyHost]) -> None:
    """Everything that an episode keeps beside its graph."""
    turns = episode.graph.turns
    for turn, note in zip(turns, notes, strict=True):
        if note.tools:
            episode.tools_by_digest[turn.tools_digest] = orjson.loads(note.tools)
            episode.captured_tools.add(turn.tools_digest)
        if note.instructed:
            episode.instructed.add(turn.turn_id)
        if turn.finish_reason is FinishReason.LENGTH:
            episode.truncated.add((turn.policy, turn.agent))
        if turn.finish_reason is FinishReason.ABORT:
            episode.undelivered.add(turn.turn_id)
        highest = policies[turn.policy].ancestry.ceiling(lineage=note.lineage)
        if highest is not None:
            known = episode.highest_versions.get(turn.policy, highest)
            episode.highest_versions[turn.policy] = min(known, highest)
    if turns:
        _mark_the_last(episode, turns, notes[-1])
    first = max((_number(turn.turn_id) for turn in turns), default=-1) + 1
    lives = -(-first // NUMBERS_PER_LIFE) + 1 if turns else 1
    episode.turn_numbers = itertools.count(lives * NUMBERS_PER_LIFE)


def _mark_the_last(episode: OpenEpisode, turns: Sequence[Turn], note: TurnNotes) -> None:
    """What had not been delivered when the last turn was captured; with other choices of its call it is in doubt."""
    last = turns[-1]
    open_calls = set(note.undelivered)
    siblings = {
        turn.turn_id for turn in turns if turn.turn_id in open_calls and _has_prompt(turn, last, last.parent_id)
    }
    episode.in_doubt |= ({last.turn_id} | siblings) - episode.undelivered
    episode.undelivered |= open_calls - siblings
    episode.resampled |= set(note.resampled)


def _number(turn_id: str) -> int:
    """The last part of a turn's id; -1 where it is none of ours."""
    number = turn_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _has_prompt(turn: Turn, other: Turn | PromptPlan, parent_id: str | None) -> bool:
    """Whether it answers the prompt of another, which continues ``parent_id``."""
    same_place = (turn.policy, turn.agent, turn.parent_id) == (other.policy, other.agent, parent_id)
    return same_place and np.array_equal(turn.segment, other.segment)


def asked_again(episode: OpenEpisode, plan: PromptPlan) -> None:
    """A new call: where it repeats the prompt of a turn in doubt, its reply replaces that turn."""
    parent_id = None if plan.parent is None else plan.parent.turn_id
    for turn_id in tuple(episode.in_doubt):
        if _has_prompt(episode.graph.turn(turn_id), plan, parent_id):
            episode.in_doubt.discard(turn_id)
            episode.resampled.add(turn_id)
            return


# --- what does not go on --------------------------------------------------------------------------


def _interrupted(control: Control, attempt: RunningAttempt, reason: str, *, split: Split) -> None:
    """On record, and for its client to be told."""
    begin = attempt.begin
    message = f"the server restarted, and this attempt could not go on: {reason}"
    logger.warning("episode %s attempt %d: %s", begin.episode_id, begin.attempt, message)
    if attempt.state is AttemptState.RUNNING:
        control.watch(record_interruption(control.ledger, begin, message))
        control.metrics.episodes.labels(split, "interrupted").inc()
        control.endings.note(split, Cause.SERVER_RESTART)
    control.events.emit("episode_interrupted", episode_id=begin.episode_id, attempt=begin.attempt, reason=reason)


def record_interruption(ledger: Ledger, attempt: BeginRecord | OpenEpisode, message: str) -> Future[None]:
    """A running attempt ends, through no fault of its own."""
    return ledger.record_end(
        attempt.episode_id,
        attempt.attempt,
        state=AttemptState.INTERRUPTED,
        outcome=Outcome.INFRASTRUCTURE,
        cause=Cause.SERVER_RESTART,
        message=message,
    )


def interrupt(parts: RolloutParts, episode: OpenEpisode) -> None:
    """A restored attempt whose client never came back: its slot reopens, and it uses up no attempt."""
    message = "its client did not come back after a restart of the server"
    episode.become(EpisodeState.ABORTED)
    episode.ended_by(Cause.SERVER_RESTART, message)
    parts.registry.remember(episode)
    parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.INTERRUPTED)
    parts.watch(record_interruption(parts.ledger, episode, message))
    parts.metrics.episodes.labels(episode.split, "interrupted").inc()
    parts.endings.note(episode.split, Cause.SERVER_RESTART)
    parts.events.emit("episode_interrupted", episode_id=episode.episode_id, attempt=episode.attempt, reason=message)
    parts.changed.notify()


# --- attempts that ended before this process began ------------------------------------------------


def find_attempt(control: Control, episode_id: str, headers: Mapping[str, str]) -> OpenEpisode:
    """The attempt that an episode call means, also where it ended before this process began.

    Raises as :meth:`EpisodeRegistry.by_id`.
    """
    try:
        return control.registry.by_id(episode_id, headers)
    except (AuthenticationError, UnknownEpisode) as error:
        key = bearer(headers) if isinstance(error, AuthenticationError) else ""
        found = _ended_attempt(control, episode_id, key) if key or isinstance(error, UnknownEpisode) else None
        if found is None:
            raise
        return found


def _ended_attempt(control: Control, episode_id: str, key: str) -> OpenEpisode | None:
    """As the ledger knows it: the attempt of this key, or without one the newest."""
    attempts = control.ledger.attempts_begun(episode_id)
    found = [attempt for attempt in attempts if not key or digest(key) in attempt.key_digests]
    if not found:
        return None
    episode = _recalled(control, found[-1], is_newest=found[-1] is attempts[-1])
    control.registry.recall(episode)
    return episode


def _recalled(control: Control, attempt: RunningAttempt, *, is_newest: bool) -> OpenEpisode:
    """An attempt that is over: it answers questions and repeats, and nothing else."""
    begin = attempt.begin
    view = next(v for v in control.ledger.episode(begin.episode_id) if v.attempt == begin.attempt)
    episode = _as_begun(control, attempt, view.group)
    episode.state = EpisodeState.ABORTED if is_newest else EpisodeState.SUPERSEDED
    episode.outcome, episode.cause = attempt.outcome, Cause(attempt.cause) if attempt.cause else None
    episode.message = attempt.message
    if (record := view.record) is not None:
        episode.state, episode.finish_digest = EpisodeState.FINISHED, record.finish_digest
        reply = FinishReply(
            episode_id=begin.episode_id,
            attempt=begin.attempt,
            state=EpisodeState.FINISHED,
            num_turns=record.num_turns,
            num_sampled_tokens=load_graph(record.graph).num_sampled_tokens if record.graph else record.num_sampled,
        )
        episode.finish_reply = reply
    return episode
