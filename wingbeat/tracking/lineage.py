"""Finds the earlier turn that a conversation continues: a trie over messages.

One trie per (policy, agent). Its edges are messages by meaning; a turn sits on the node behind its
reply, so the deepest node with a fitting turn, on the path of a new conversation, is the lineage.

    (root) ── user "hi" ── assistant "hello" [turn 1] ── user "bye" ── assistant "ciao" [turn 2]
                       └── assistant "hey"   [turn 3]

Three things are no part of an edge, because clients lose or rename them:

- Reasoning may be dropped by the client, but not altered.
- Tool-call ids are counted in order of appearance; the real ids only decide between equal texts.
- The ``name`` of assistant and tool messages is decoration.

A search costs one dictionary look-up per message, however many turns there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from wingbeat.tracking.conversation import Conversation, chain_ids, chain_reasoning, spoken
from wingbeat.tracking.excerpts import common_length, difference
from wingbeat.tracking.messages import Message
from wingbeat.tracking.turns import Turn

ReasoningRule = Literal["keep", "fork"]
"""Whether a history without its reasoning still is the same conversation (its tokens stay), or another."""

SAME_PROMPT = "same messages as an earlier prompt, no reply continued"
NO_CHAT = "no earlier chat turn of this agent"
TOOLS_CHANGED = "tools changed"

MAX_COMPARED = 8
"""How many of the newest continuations are looked at to name a difference."""

Edge = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of a search."""

    turn: Turn | None
    chosen_by: str = ""
    """What decided between several fitting turns: "tool-call ids" or "latest"; "" where one fitted."""
    difference: str = ""
    """The first difference from the most similar earlier conversation; "" where a turn is simply continued."""


@dataclass(slots=True)
class _Residents:
    """Turns that end on one node and saw the same tools, oldest first."""

    all: list[Turn] = field(default_factory=list[Turn])
    by_ids: dict[int, list[Turn]] = field(default_factory=dict[int, list[Turn]])
    """By tool-call ids."""
    by_reasoning: dict[tuple[int, int], list[Turn]] = field(default_factory=dict[tuple[int, int], list[Turn]])
    """Those with reasoning, by tool-call ids and reasoning."""

    def add(self, turn: Turn) -> None:
        said = turn.conversation
        self.all.append(turn)
        self.by_ids.setdefault(said.ids_key, []).append(turn)
        if said.reasoning_key:
            self.by_reasoning.setdefault((said.ids_key, said.reasoning_key), []).append(turn)


@dataclass(slots=True)
class _Node:
    message: Message | None = None
    """As first seen."""
    children: dict[Edge, _Node] = field(default_factory=dict[Edge, "_Node"])
    residents: dict[str, _Residents] | None = None
    """By tools."""


@dataclass(slots=True)
class _Walk:
    """The nodes that a conversation reaches, root first, and its keys up to each of them."""

    nodes: list[_Node]
    ids_keys: list[int]
    reasoning_keys: list[int]


class LineageIndex:
    """The chat turns of one policy and agent, by conversation."""

    def __init__(self) -> None:
        self._root = _Node()
        self._places: dict[str, _Node] = {}
        """Where each turn sits."""

    def add(self, turn: Turn, *, parent: Turn | None) -> None:
        """Make a turn findable. Costs only the messages beyond the parent's."""
        news: list[Conversation] = []
        place = turn.conversation
        start = 0 if parent is None else parent.conversation.depth
        while place.depth > start and place.previous is not None:
            news.append(place)
            place = place.previous
        node = self._root if parent is None else self._places[parent.turn_id]
        for place in reversed(news):
            if place.message is None or place.previous is None:
                continue
            answers = place.previous.ordinal_of(place.message.tool_call_id) if place.message.tool_call_id else -1
            edge = edge_of(place.message, answers)
            child = node.children.get(edge)
            if child is None:
                child = node.children[edge] = _Node(place.message)
            node = child
        if node.residents is None:
            node.residents = {}
        node.residents.setdefault(turn.tools_digest, _Residents()).add(turn)
        self._places[turn.turn_id] = node

    def find(self, messages: Sequence[Message], *, tools_digest: str, reasoning: ReasoningRule) -> Match:
        """The deepest turn whose conversation, reply included, begins ``messages`` and that saw the same tools."""
        walk = self._walk(messages)
        for depth in range(len(walk.nodes) - 1, 0, -1):
            node = walk.nodes[depth]
            residents = node.residents.get(tools_digest) if node.residents else None
            found = _choose(residents, walk, messages, depth=depth, rule=reasoning) if residents else None
            if found is not None:
                reason = _explain(walk, messages, tools_digest, reasoning, above=depth) if node.children else ""
                return Match(found[0], found[1], reason)
        return Match(None, difference=_explain(walk, messages, tools_digest, reasoning, above=0))

    def _walk(self, messages: Sequence[Message]) -> _Walk:
        node = self._root
        walk = _Walk([node], [0], [0])
        ordinals: dict[str, int] = {}
        num_calls = 0
        for index, message in enumerate(messages):
            child = node.children.get(edge_of(message, ordinals.get(message.tool_call_id, -1)))
            if child is None:
                break
            for call in message.tool_calls:
                ordinals[call.id] = num_calls
                num_calls += 1
            node = child
            walk.nodes.append(node)
            walk.ids_keys.append(chain_ids(walk.ids_keys[-1], message))
            walk.reasoning_keys.append(chain_reasoning(walk.reasoning_keys[-1], message, depth=index))
        return walk


def edge_of(message: Message, answers: int) -> Edge:
    """What a message means; ``answers`` is the number of the call that it answers, -1 where there is none."""
    calls = tuple([(call.name, call.arguments_key) for call in message.tool_calls])
    name = message.name if message.role in ("user", "system") else ""
    unknown = message.tool_call_id if answers < 0 else ""
    return (message.role, spoken(message)[0], calls, answers, unknown, name)


def _choose(
    residents: _Residents, walk: _Walk, messages: Sequence[Message], *, depth: int, rule: ReasoningRule
) -> tuple[Turn, str] | None:
    """One of several turns with the same texts: by tool-call ids, then by age; and what decided."""
    ids_key, reasoning_key = walk.ids_keys[depth], walk.reasoning_keys[depth]

    def fits(turn: Turn) -> bool:
        if turn.conversation.reasoning_key == reasoning_key or (rule == "keep" and reasoning_key == 0):
            return True
        return rule == "keep" and _altered_reasoning(turn, messages, rule) is None

    same_ids = residents.by_reasoning.get((ids_key, reasoning_key)) or residents.by_ids.get(ids_key, [])
    fitting = list(islice(filter(fits, reversed(same_ids)), 2))
    if fitting:
        by_ids = "tool-call ids" if len(residents.by_ids) > 1 else ""
        return fitting[0], ("latest" if len(fitting) > 1 else by_ids)
    fitting = list(islice(filter(fits, reversed(residents.all)), 2))
    if not fitting:
        return None
    return fitting[0], ("latest" if len(fitting) > 1 else "")


def _altered_reasoning(turn: Turn, messages: Sequence[Message], rule: ReasoningRule) -> int | None:
    """Where a message restates the turn's with another reasoning; leaving it out is one only under ``fork``."""
    for index, (known, given) in enumerate(zip(turn.messages, messages, strict=False)):
        told = spoken(given)[1]
        if told != spoken(known)[1] and (told or rule == "fork"):
            return index
    return None


def _explain(walk: _Walk, messages: Sequence[Message], tools_digest: str, rule: ReasoningRule, *, above: int) -> str:
    """The first difference from the most similar earlier conversation that goes deeper than ``above``."""
    for node in reversed(walk.nodes[above + 1 :]):
        if not node.residents:
            continue
        residents = node.residents.get(tools_digest)
        if residents is None:
            return TOOLS_CHANGED
        known = residents.all[-1]
        altered = _altered_reasoning(known, messages, rule)
        if altered is not None:
            texts = difference(spoken(known.messages[altered])[1], spoken(messages[altered])[1])
            return f"message {altered} differs: reasoning ({texts})"
    place = len(walk.nodes) - 1
    children = list(islice(reversed(walk.nodes[-1].children.values()), MAX_COMPARED))
    if place == len(messages):
        replied = any(node.residents for node in children)
        return SAME_PROMPT if replied else f"an earlier conversation, cut after message {place - 1}"
    given = messages[place]
    known_messages = [node.message for node in children if node.message is not None]
    if not known_messages:
        return NO_CHAT
    most_alike = max(known_messages, key=lambda message: _likeness(message, given))
    return f"message {place} differs: {_first_difference(most_alike, given)}"


def _likeness(known: Message, given: Message) -> tuple[bool, int, int]:
    """More for messages that have more in common; the newest is the first of several."""
    words = common_length(spoken(known)[0], spoken(given)[0])
    return known.role == given.role, words, common_length(_spell(known), _spell(given))


def _first_difference(known: Message, given: Message) -> str:
    """The first differing field, with both sides."""
    pairs = {
        "role": (known.role, given.role),
        "content": (spoken(known)[0], spoken(given)[0]),
        "tool_calls": (_spell(known), _spell(given)),
        "name": (known.name, given.name),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            return f"{name} ({difference(one, other)})"
    return f"tool_call_id of another call ({difference(known.tool_call_id, given.tool_call_id)})"


def _spell(message: Message) -> str:
    return ", ".join(f"{call.name}({call.arguments_key})" for call in message.tool_calls)
