"""The token graph of one episode: the server's record of what was really sampled on what.

``resolve`` finds the prompt of a request and changes nothing; ``commit`` appends the sampled turn. So
requests of one episode may overlap freely. Nothing that was sampled is ever tokenised again: messages
only select the earlier turn whose tokens a prompt extends. Where no turn fits, the prompt is rendered
anew (a fork) and the reason is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking.bridge import Bridge, build_bridge
from wingbeat.tracking.lineage import LineageIndex, Match
from wingbeat.tracking.messages import Message
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.turns import PromptPlan, Turn

NEW_AGENT = "no earlier turn of this agent"

Tools = Sequence[Mapping[str, Any]]


class EpisodeGraph:
    """Turns of one episode attempt, in the order in which they were committed."""

    def __init__(self, episode_id: str) -> None:
        self.episode_id = episode_id
        self._turns: dict[str, Turn] = {}
        self._lineages: dict[tuple[str, str], LineageIndex] = {}

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns.values())

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(turn.num_sampled for turn in self._turns.values())

    @property
    def num_missing_logprobs(self) -> int:
        """Sampled tokens that cannot train because no usable logprob came with them."""
        return sum(turn.num_missing_logprobs for turn in self._turns.values())

    def turn(self, turn_id: str) -> Turn:
        """Raises KeyError for a turn of another episode."""
        return self._turns[turn_id]

    def path(self, turn: Turn) -> tuple[Turn, ...]:
        """From the root to ``turn``, both included."""
        found = [turn]
        while (parent_id := found[-1].parent_id) is not None:
            found.append(self._turns[parent_id])
        return tuple(reversed(found))

    def prompt_ids(self, turn: Turn) -> NDArray[np.int32]:
        """[P] the exact prompt of a turn."""
        return np.concatenate(self._pieces(turn)[:-1])

    def full_ids(self, turn: Turn) -> NDArray[np.int32]:
        """[P + T] prompt and sampled tokens of a turn."""
        return np.concatenate(self._pieces(turn))

    def _pieces(self, turn: Turn) -> list[NDArray[np.int32]]:
        return [piece for node in self.path(turn) for piece in (node.segment, node.sampled)]

    def resolve(
        self,
        *,
        policy: str,
        agent: str,
        messages: Sequence[Message],
        tools: Tools | None,
        template: ChatTemplate,
    ) -> PromptPlan:
        """The prompt for ``messages``: an earlier turn's tokens plus what is new, or all of it rendered.

        Raises RequestError where ``messages`` is empty or the template refuses the conversation.
        """
        if not messages:
            raise RequestError("messages is empty: send at least one message", param="messages")
        digest = digest_tools(tools)
        lineage = self._lineages.get((policy, agent))
        fork_reason = NEW_AGENT if lineage is None and self._turns else ""
        if lineage is not None:
            match = lineage.find(messages, tools_digest=digest)
            fork_reason = match.difference
            if match.turn is not None:
                known = match.turn.messages
                tail = tuple(messages[len(known) :])
                bridge = build_bridge(template, history=known, tail=tail, tools=tools)
                if isinstance(bridge, Bridge):
                    return self._extend(match, match.turn, bridge, tail=tail, ends=template.turn_end_ids)
                fork_reason = bridge
        prompt = _int32(template.encode_prompt(template.render(messages, tools=tools, add_generation_prompt=True)))
        return PromptPlan(
            policy=policy,
            agent=agent,
            parent=None,
            prompt_ids=prompt,
            segment=prompt,
            forced_count=0,
            messages=tuple(messages),
            tools_digest=digest,
            fork_reason=fork_reason,
            chosen_by="",
        )

    def _extend(
        self, match: Match, parent: Turn, bridge: Bridge, *, tail: tuple[Message, ...], ends: frozenset[int]
    ) -> PromptPlan:
        """The prompt behind ``parent``; a reply that never ended (length, stop string) is closed by force."""
        open_ended = parent.num_sampled == 0 or int(parent.sampled[-1]) not in ends
        forced = (bridge.marker_id,) if open_ended else ()
        segment = _int32((*forced, *bridge.remainder_ids))
        return PromptPlan(
            policy=parent.policy,
            agent=parent.agent,
            parent=parent,
            prompt_ids=np.concatenate([*self._pieces(parent), segment]),
            segment=segment,
            forced_count=len(forced),
            messages=(*parent.messages, *tail),
            tools_digest=parent.tools_digest,
            fork_reason="",
            chosen_by=match.chosen_by,
        )

    def commit(
        self,
        plan: PromptPlan,
        *,
        turn_id: str,
        token_ids: Sequence[int] | NDArray[np.int32],
        logprobs: Sequence[float | None] | NDArray[np.float32],
        versions: Sequence[tuple[int, int]],
        temperature: float,
        finish_reason: FinishReason,
        reply: Message,
    ) -> Turn:
        """Append what was sampled on ``plan``'s prompt, and return the new turn.

        ``logprobs`` [T] may hold None or NaN: such tokens are kept but never trained, and counted.
        ``versions``: (policy version, count) runs that cover the T tokens.

        Raises ValueError where the pieces do not fit each other.
        """
        if reply.role != "assistant":
            raise ValueError(f"turn {turn_id}: the reply must have role 'assistant', got {reply.role!r}")
        forced, rendered = plan.forced_count, len(plan.segment) - plan.forced_count
        runs = ((Provenance.FORCED, forced), (Provenance.RENDERED, rendered))
        turn = Turn(
            turn_id=turn_id,
            policy=plan.policy,
            agent=plan.agent,
            parent_id=None if plan.parent is None else plan.parent.turn_id,
            segment=plan.segment,
            segment_runs=tuple((provenance, count) for provenance, count in runs if count),
            sampled=_int32(token_ids),
            logprobs=_float32(logprobs),
            versions=_merge_runs(versions),
            temperature=temperature,
            finish_reason=finish_reason,
            messages=(*plan.messages, reply),
            tools_digest=plan.tools_digest,
            fork_reason=plan.fork_reason,
            chosen_by=plan.chosen_by,
            prompt_length=len(plan.prompt_ids),
        )
        return self.add(turn)

    def add(self, turn: Turn) -> Turn:
        """Append a turn as it is, for example one read from the ledger; parents come first.

        Raises ValueError where it contradicts itself or this graph.
        """
        self._check(turn)
        lineage = self._lineages.setdefault((turn.policy, turn.agent), LineageIndex())
        turn = replace(turn, messages=lineage.intern(turn.messages))
        self._turns[turn.turn_id] = turn
        lineage.add(turn)
        return turn

    def _check(self, turn: Turn) -> None:
        if turn.turn_id in self._turns:
            raise ValueError(f"turn {turn.turn_id} is already in episode {self.episode_id}")
        covered = sum(count for _, count in turn.versions)
        if not len(turn.sampled) == len(turn.logprobs) == covered:
            raise ValueError(
                f"turn {turn.turn_id}: sampled tokens, logprobs and version counts must have one length, "
                f"got {len(turn.sampled)}, {len(turn.logprobs)} and {covered}"
            )
        if sum(count for _, count in turn.segment_runs) != len(turn.segment):
            raise ValueError(f"turn {turn.turn_id}: provenance must cover its {len(turn.segment)} prompt tokens")
        before = 0
        if turn.parent_id is not None:
            parent = self._turns.get(turn.parent_id)
            if parent is None or (parent.policy, parent.agent) != (turn.policy, turn.agent):
                raise ValueError(f"turn {turn.turn_id}: its parent {turn.parent_id} is no turn of the same agent here")
            before = parent.prompt_length + parent.num_sampled
        expected = before + len(turn.segment)
        if turn.prompt_length != expected:
            raise ValueError(f"turn {turn.turn_id}: expected a prompt of {expected} tokens, got {turn.prompt_length}")


def digest_tools(tools: Tools | None) -> str:
    """Identifies the tool schemas of a request by meaning (key order is none); "" without tools.

    Raises RequestError where they are no JSON.
    """
    if not tools:
        return ""
    try:
        data = msgspec.json.encode(tools, order="sorted")
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"tools cannot be written as JSON: {error}", param="tools") from error
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _int32(values: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """An own, read-only copy."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def _float32(values: Sequence[float | None] | NDArray[np.float32]) -> NDArray[np.float32]:
    """An own, read-only copy; None and anything that is not finite become NaN."""
    array = np.array(values, np.float32)
    array[~np.isfinite(array)] = np.nan
    array.flags.writeable = False
    return array


def _merge_runs(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Run lengths without empty runs and with equal neighbours joined. Raises ValueError for negative ones."""
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if version < 0 or count < 0:
            raise ValueError(f"versions must be (version >= 0, count >= 0), got ({version}, {count})")
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        elif count:
            merged.append((version, count))
    return tuple(merged)
