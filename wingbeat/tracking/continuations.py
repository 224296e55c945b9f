"""Which earlier turn a request continues, with what behind its tokens, or why none.

One :class:`AgentIndex` per (policy, agent) knows that agent's turns in three ways: by conversation, by
plain text and by token ids. Searching changes nothing that a search could see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from wingbeat.tracking.bridge import Bridge, build_bridge
from wingbeat.tracking.excerpts import MAX_EXCERPT, difference
from wingbeat.tracking.lineage import TOOLS_CHANGED, LineageIndex, Match, ReasoningRule
from wingbeat.tracking.messages import Message
from wingbeat.tracking.prefixes import Prefix, PrefixIndex, as_text
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.tools import Tools, share_tools
from wingbeat.tracking.turns import Turn, TurnKind

NO_TEXT_TURN = "no earlier text turn of this agent"
SAME_TEXT = "same prompt as an earlier turn, no reply continued"
BY_RESPONSE_ID = "previous response id"
OTHER_TEXT = "the earlier reply's tokens say more than its text"


class AgentIndex:
    """The turns of one policy and agent. Searches may run in other threads than additions."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chats = LineageIndex()
        self._texts = PrefixIndex()
        self._tokens: PrefixIndex | None = None
        """A copy of all tokens, so it is built only where prompts come as token ids."""
        self._turns: list[Turn] = []

    def add(self, turn: Turn, *, parent: Turn | None) -> None:
        """Parents come first."""
        with self._lock:
            self._turns.append(turn)
            if turn.kind is TurnKind.CHAT:
                self._chats.add(turn, parent=parent)
            elif turn.kind is TurnKind.TEXT:
                self._texts.add(turn, text=turn.prompt_text + turn.sampled_text)
            if self._tokens is not None:
                _add_tokens(self._tokens, turn)

    def find_chat(self, messages: Sequence[Message], *, tools_digest: str, reasoning: ReasoningRule) -> Match:
        with self._lock:
            return self._chats.find(messages, tools_digest=tools_digest, reasoning=reasoning)

    def find_text(self, text: str) -> Prefix:
        """Among text turns."""
        with self._lock:
            return self._texts.find(text)

    def find_tokens(self, text: str) -> Prefix:
        """Among all turns; ``text`` is :func:`as_text` of the ids."""
        with self._lock:
            if self._tokens is None:
                self._tokens = PrefixIndex()
                for turn in self._turns:
                    _add_tokens(self._tokens, turn)
            return self._tokens.find(text)


def _add_tokens(index: PrefixIndex, turn: Turn) -> None:
    index.add(turn, text=as_text(turn.segment) + as_text(turn.sampled))


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a request continues."""

    parent: Turn | None = None
    """None: a prompt of its own."""
    forced: tuple[int, ...] = ()
    """Tokens that close the parent's unfinished turn."""
    rest: Sequence[int] | NDArray[np.int32] = ()
    """Tokens after that."""
    news: tuple[Message, ...] = ()
    """Of a chat: the messages beyond the parent's (all of them without one)."""
    text: str = ""
    """Of a text: what it adds to the parent's."""
    rendered: str = ""
    """Of a chat: the whole prompt, as the template writes it."""
    tools_digest: str = ""
    reason: str = ""
    """The first difference from the most similar turn, where this is a fork."""
    chosen_by: str = ""


def continue_chat(
    index: AgentIndex | None,
    *,
    messages: Sequence[Message],
    tools: Tools | None,
    template: ChatTemplate,
    reasoning: ReasoningRule,
    previous: Turn | None,
) -> Continuation:
    """Raises RequestError where the template refuses the conversation."""
    template.check(messages, tools=tools)
    digest, tools = share_tools(tools)
    whole = tuple(messages)
    if index is not None and previous is not None:
        whole = (*previous.messages, *messages)
        match = _after(previous, index.find_chat(whole, tools_digest=digest, reasoning="keep"), tools_digest=digest)
    elif index is not None:
        match = index.find_chat(messages, tools_digest=digest, reasoning=reasoning)
    else:
        match = Match(None)
    reason, bridge = match.difference, None
    if match.turn is not None:
        known = match.turn.messages
        news = _with_known_ids(whole[len(known) :], known=known, given=whole)
        whole = (*known, *news)
    rendered = template.render(whole, tools=tools, add_generation_prompt=True)
    if match.turn is not None:
        length = match.turn.conversation.depth
        bridge = build_bridge(
            template,
            rendered,
            history=whole[:length],
            tail=whole[length:],
            tools=tools,
            asked=match.turn.rendered,
        )
        if isinstance(bridge, Bridge):
            return Continuation(
                parent=match.turn,
                forced=() if _is_closed(match.turn, ends=template.turn_end_ids) else (bridge.marker_id,),
                rest=bridge.remainder_ids,
                news=whole[length:],
                rendered=rendered,
                tools_digest=digest,
                reason=reason,
                chosen_by=match.chosen_by,
            )
        reason = bridge
    return Continuation(news=whole, rendered=rendered, tools_digest=digest, reason=reason)


def _with_known_ids(
    news: tuple[Message, ...], *, known: Sequence[Message], given: Sequence[Message]
) -> tuple[Message, ...]:
    """``news`` in terms of the known tool-call ids, where the client renamed them."""
    calls = ((old.tool_calls, new.tool_calls) for old, new in zip(known, given, strict=False) if new.tool_calls)
    renamed = {two.id: one.id for old, new in calls for one, two in zip(old, new, strict=True) if one.id != two.id}
    if not renamed:
        return news
    return tuple(
        replace(message, tool_call_id=renamed.get(message.tool_call_id, message.tool_call_id)) for message in news
    )


def _is_closed(turn: Turn, *, ends: frozenset[int]) -> bool:
    """Whether a reply ended by itself; one cut by a limit or a stop string did not."""
    return turn.num_sampled > 0 and int(turn.sampled[-1]) in ends


def _after(previous: Turn, found: Match, *, tools_digest: str) -> Match:
    """That very turn, if its tools are still the same; ``found``: what the conversation alone tells."""
    if previous.tools_digest != tools_digest:
        return Match(None, difference=TOOLS_CHANGED)
    if found.turn is previous:
        return Match(previous, difference=found.difference)
    return Match(previous, chosen_by=BY_RESPONSE_ID)


def continue_text(index: AgentIndex | None, *, text: str, template: ChatTemplate) -> Continuation:
    """The deepest earlier text turn whose prompt and reply begin ``text``."""
    if index is None:
        return Continuation(text=text)
    found = index.find_text(text)
    reason = _text_difference(found, text)
    if found.turn is None:
        return Continuation(text=text, reason=reason)
    if template.plain_text(found.turn.sampled.tolist()) != found.turn.sampled_text:
        return Continuation(text=text, reason=OTHER_TEXT)
    rest = text[found.length :]
    return Continuation(
        parent=found.turn,
        rest=template.encode(rest) if rest else (),
        text=rest,
        reason=reason if found.branches else "",
        chosen_by="latest" if found.several else "",
    )


def continue_tokens(index: AgentIndex | None, *, token_ids: NDArray[np.int32]) -> Continuation:
    """The deepest earlier turn whose tokens begin these. Raises ValueError for numbers that are no token ids."""
    text = as_text(token_ids)
    if index is None:
        return Continuation()
    found = index.find_tokens(text)
    reason = _token_difference(found, text)
    if found.turn is None:
        return Continuation(reason=reason)
    return Continuation(
        parent=found.turn,
        rest=token_ids[found.length :],
        reason=reason if found.branches else "",
        chosen_by="latest" if found.several else "",
    )


def _text_difference(found: Prefix, text: str) -> str:
    at = found.parts_at
    if at == len(text):
        return SAME_TEXT
    if not found.known and not found.length:
        return NO_TEXT_TURN
    before = text[max(0, at - MAX_EXCERPT) : at]
    told = difference(before + found.known, before + text[at:], at=len(before))
    return f"text differs at character {at} ({told})"


def _token_difference(found: Prefix, text: str) -> str:
    at = found.parts_at
    if at == len(text):
        return SAME_TEXT
    known = str(ord(found.known[0])) if found.known else "the end"
    return f"token {at} differs ({known} -> {ord(text[at])})"
