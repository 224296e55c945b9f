"""The token graph of one episode: the server's record of what was really sampled on what.

``resolve`` finds the prompt of a request and changes nothing; ``commit`` appends the sampled turn. So
requests of one episode may overlap freely, and long ones may be resolved in another thread. Nothing that
was sampled is ever tokenised again: messages only select the earlier turn whose tokens a prompt extends.
Where no turn fits, the prompt is rendered anew (a fork) and the reason is kept.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking.arrays import float32, int32, merge_runs, pack_supports
from wingbeat.tracking.continuations import AgentIndex, Continuation, continue_chat, continue_text, continue_tokens
from wingbeat.tracking.conversation import Conversation, Conversations
from wingbeat.tracking.lineage import ReasoningRule
from wingbeat.tracking.messages import Message
from wingbeat.tracking.superseded import find_superseded
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.tools import Tools
from wingbeat.tracking.turns import PromptPlan, TextKey, Turn, TurnKind

NEW_AGENT = "no earlier turn of this agent"


class EpisodeGraph:
    """Turns of one episode attempt, in the order in which they were committed."""

    def __init__(self, episode_id: str) -> None:
        self.episode_id = episode_id
        self._turns: dict[str, Turn] = {}
        self._conversations = Conversations()
        self._agents: dict[tuple[str, str], AgentIndex] = {}
        self._continued: set[str] = set()
        self._undelivered: set[str] = set()
        self._resampled: set[str] = set()

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

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._turns

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

    # --- prompts ------------------------------------------------------------------------------

    def resolve(
        self,
        *,
        policy: str,
        agent: str,
        messages: Sequence[Message],
        tools: Tools | None,
        template: ChatTemplate,
        reasoning: ReasoningRule = "keep",
        previous: Turn | None = None,
    ) -> PromptPlan:
        """The prompt for ``messages``: an earlier turn's tokens plus what is new, or all of it rendered.

        ``previous``: ``messages`` are only what is new after that turn's reply, and exactly that turn is
        extended where tools and template allow.

        Raises RequestError where ``messages`` is empty or the template cannot show what they hold.
        """
        if not messages:
            raise RequestError("messages is empty: send at least one message", param="messages")
        if previous is not None:
            self._check_previous(previous, policy=policy, agent=agent)
        found = continue_chat(
            self._agents.get((policy, agent)),
            messages=messages,
            tools=tools,
            template=template,
            reasoning=reasoning,
            previous=previous,
        )
        if found.parent is not None:
            return self._extend(found, kind=TurnKind.CHAT)
        prompt = int32(template.encode_prompt(found.rendered))
        return self._begin(found, prompt, kind=TurnKind.CHAT, policy=policy, agent=agent)

    def resolve_text(self, *, policy: str, agent: str, text: str, template: ChatTemplate) -> PromptPlan:
        """The prompt for plain text: the tokens of the earlier text turn that it continues plus the rest, or all.

        Raises RequestError for a text without tokens.
        """
        found = continue_text(self._agents.get((policy, agent)), text=text, template=template)
        if found.parent is not None:
            return self._extend(found, kind=TurnKind.TEXT)
        prompt = int32(template.encode_prompt(text))
        if not len(prompt):
            raise RequestError("prompt is empty: send at least one character", param="prompt")
        return self._begin(found, prompt, kind=TurnKind.TEXT, policy=policy, agent=agent)

    def resolve_tokens(self, *, policy: str, agent: str, token_ids: Sequence[int]) -> PromptPlan:
        """The prompt for token ids: the earlier turn (of any kind) that they continue plus the rest, or all of them.

        Raises RequestError for no tokens, or for numbers that no vocabulary has.
        """
        try:
            prompt = int32(token_ids)
            found = continue_tokens(self._agents.get((policy, agent)), token_ids=prompt)
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"prompt must hold token ids of the model's vocabulary: {error}", param="prompt"
            ) from None
        if not len(prompt):
            raise RequestError("prompt is empty: send at least one token id", param="prompt")
        if found.parent is not None:
            return self._extend(found, kind=TurnKind.TOKENS)
        return self._begin(found, prompt, kind=TurnKind.TOKENS, policy=policy, agent=agent)

    def _check_previous(self, previous: Turn, *, policy: str, agent: str) -> None:
        if self._turns.get(previous.turn_id) is not previous:
            raise ValueError(f"turn {previous.turn_id} is no turn of episode {self.episode_id}")
        if (previous.policy, previous.agent) != (policy, agent):
            raise RequestError(
                f"{previous.turn_id} was answered by {previous.policy}:{previous.agent}, and only that model can"
                f" continue it; got {policy}:{agent}",
                param="model",
            )
        if previous.kind is not TurnKind.CHAT:
            raise RequestError(f"{previous.turn_id} is a plain completion: it has no conversation", param="model")

    def _begin(
        self, found: Continuation, prompt: NDArray[np.int32], *, kind: TurnKind, policy: str, agent: str
    ) -> PromptPlan:
        """A prompt of its own."""
        known = (policy, agent) in self._agents
        return PromptPlan(
            policy=policy,
            agent=agent,
            parent=None,
            prompt_ids=prompt,
            segment=prompt,
            kind=kind,
            news=found.news,
            tools_digest=found.tools_digest,
            fork_reason=found.reason if known else NEW_AGENT if self._turns else "",
            prompt_text=found.text,
            rendered=TextKey.of(found.rendered) if found.rendered else None,
        )

    def _extend(self, found: Continuation, *, kind: TurnKind) -> PromptPlan:
        """The prompt behind an earlier turn."""
        parent = found.parent
        assert parent is not None
        segment = int32((*found.forced, *found.rest))
        return PromptPlan(
            policy=parent.policy,
            agent=parent.agent,
            parent=parent,
            prompt_ids=np.concatenate([*self._pieces(parent), segment]),
            segment=segment,
            kind=kind,
            forced_count=len(found.forced),
            news=found.news,
            tools_digest=found.tools_digest,
            fork_reason=found.reason,
            chosen_by=found.chosen_by,
            prompt_text=found.text,
            rendered=TextKey.of(found.rendered) if found.rendered else None,
        )

    # --- turns --------------------------------------------------------------------------------

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
        reply: Message | None = None,
        text: str = "",
        supports: Sequence[bytes] = (),
    ) -> Turn:
        """Append what was sampled on ``plan``'s prompt, and return the new turn.

        ``logprobs`` [T] may hold None or NaN: such tokens are kept but never trained, and counted.
        ``versions``: (policy version, count) runs that cover the T tokens.
        ``reply``: of a chat. ``text``: of a text turn, all that the sampled tokens say (a stop string, too).
        ``supports``: [T] which tokens each was drawn among; () where all were drawn from the whole vocabulary.

        Raises ValueError where the pieces do not fit each other.
        """
        conversation = self._conversations.start
        if plan.kind is TurnKind.CHAT:
            if reply is None or reply.role != "assistant":
                role = "none" if reply is None else repr(reply.role)
                raise ValueError(f"turn {turn_id}: the reply must have role 'assistant', got {role}")
            conversation = self.converse(plan.parent, news=(*plan.news, reply))
        if len(supports) not in (0, len(token_ids)):
            raise ValueError(f"turn {turn_id}: expected {len(token_ids)} supports or none, got {len(supports)}")
        support_table, support_index = pack_supports(supports)
        forced, rendered = plan.forced_count, len(plan.segment) - plan.forced_count
        runs = ((Provenance.FORCED, forced), (Provenance.RENDERED, rendered))
        turn = Turn(
            turn_id=turn_id,
            policy=plan.policy,
            agent=plan.agent,
            parent_id=None if plan.parent is None else plan.parent.turn_id,
            kind=plan.kind,
            segment=plan.segment,
            segment_runs=tuple((provenance, count) for provenance, count in runs if count),
            sampled=int32(token_ids),
            logprobs=float32(logprobs),
            versions=merge_runs(versions),
            temperature=temperature,
            finish_reason=finish_reason,
            conversation=conversation,
            tools_digest=plan.tools_digest,
            fork_reason=plan.fork_reason,
            chosen_by=plan.chosen_by,
            prompt_length=len(plan.prompt_ids),
            prompt_text=plan.prompt_text,
            rendered=plan.rendered,
            sampled_text=text if plan.kind is TurnKind.TEXT else "",
            support_table=support_table,
            support_index=support_index,
        )
        return self.add(turn)

    def converse(self, parent: Turn | None, *, news: Sequence[Message]) -> Conversation:
        """The conversation behind ``parent``'s, each message shared with equal earlier ones."""
        start = self._conversations.start if parent is None else parent.conversation
        return self._conversations.extend(start, news)

    def add(self, turn: Turn) -> Turn:
        """Append a turn as it is, for example one read from the ledger; parents come first.

        Raises ValueError where it contradicts itself or this graph.
        """
        self._check(turn)
        parent = None if turn.parent_id is None else self._turns[turn.parent_id]
        self._agents.setdefault((turn.policy, turn.agent), AgentIndex()).add(turn, parent=parent)
        self._turns[turn.turn_id] = turn
        if parent is not None:
            self._continued.add(parent.turn_id)
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
        expected = len(turn.sampled) if turn.support_table else 0
        places = turn.support_index
        if len(places) != expected or (expected and not -1 <= places.min() <= places.max() < len(turn.support_table)):
            raise ValueError(f"turn {turn.turn_id}: the supports do not fit its {len(turn.sampled)} sampled tokens")
        if sum(count for _, count in turn.segment_runs) != len(turn.segment):
            raise ValueError(f"turn {turn.turn_id}: provenance must cover its {len(turn.segment)} prompt tokens")
        before = 0
        if turn.parent_id is not None:
            parent = self._turns.get(turn.parent_id)
            if parent is None or (parent.policy, parent.agent) != (turn.policy, turn.agent):
                raise ValueError(f"turn {turn.turn_id}: its parent {turn.parent_id} is no turn of the same agent here")
            if turn.kind is not TurnKind.TOKENS and parent.kind is not turn.kind:
                raise ValueError(f"turn {turn.turn_id}: a {turn.kind} turn cannot extend a {parent.kind} turn")
            before = parent.end
        expected = before + len(turn.segment)
        if turn.prompt_length != expected:
            raise ValueError(f"turn {turn.turn_id}: expected a prompt of {expected} tokens, got {turn.prompt_length}")

    # --- delivery -----------------------------------------------------------------------------

    @property
    def undelivered(self) -> Set[str]:
        """Turns whose reply never reached the agent."""
        return self._undelivered

    @property
    def resampled(self) -> Set[str]:
        """Turns whose request was repeated and sampled anew."""
        return self._resampled

    def mark_undelivered(self, turn_id: str) -> None:
        """The reply did not reach the agent (yet). Raises KeyError for a turn of another episode."""
        self._undelivered.add(self._turns[turn_id].turn_id)

    def mark_delivered(self, turn_id: str) -> None:
        """A retry fetched the reply after all. Raises KeyError for a turn of another episode."""
        self._undelivered.discard(self._turns[turn_id].turn_id)

    def mark_resampled(self, turn_id: str) -> None:
        """The request was repeated and had to be sampled anew. Raises KeyError for a turn of another episode."""
        self._resampled.add(self._turns[turn_id].turn_id)

    def superseded(self) -> dict[str, str]:
        """Turns that do not count, with the reason (see :mod:`wingbeat.tracking.superseded`)."""
        return find_superseded(
            self.turns, continued=self._continued, undelivered=self._undelivered, resampled=self._resampled
        )
