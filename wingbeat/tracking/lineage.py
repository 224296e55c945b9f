"""Finds the earlier turn that a conversation continues: a trie over messages.

One trie per (policy, agent). Its edges are messages by meaning; a turn sits on the node behind its
reply, so the deepest node with a fitting turn, on the path of a new conversation, is the lineage.

    (root) ── user "hi" ── assistant "hello" [turn 1] ── user "bye" ── assistant "ciao" [turn 2]
                       └── assistant "hey"   [turn 3]

Three things are no part of an edge, because clients lose or rename them:

- Reasoning may be dropped by the client, but not altered.
- Tool-call ids are numbered in order of appearance; the real ids only decide between equal texts.
- The ``name`` of assistant and tool messages is decoration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wingbeat.tracking.messages import Message
from wingbeat.tracking.turns import Turn

Edge = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of a search."""

    turn: Turn | None
    chosen_by: str = ""
    """What decided between several fitting turns: "tool-call ids" or "latest"; "" where one fitted."""
    difference: str = ""
    """Why no turn fits, as the first difference from the most similar one."""


@dataclass(slots=True)
class _Node:
    message: Message | None = None
    """As first seen."""
    children: dict[Edge, _Node] = field(default_factory=dict[Edge, "_Node"])
    turns: list[Turn] = field(default_factory=list[Turn])
    """Turns that end here, oldest first."""


class LineageIndex:
    """The turns of one policy and agent, by conversation."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, turn: Turn) -> None:
        """Make a turn findable."""
        node = self._root
        edges = _Edges()
        for message in turn.messages:
            edge = edges.next(message)
            child = node.children.get(edge)
            if child is None:
                child = node.children[edge] = _Node(message)
            node = child
        node.turns.append(turn)

    def intern(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The same conversation, sharing equal messages with earlier ones: a long history is stored once."""
        known = [node.message for node in self._path(messages)[1:]]
        shared = [old if old == new else new for old, new in zip(known, messages, strict=False) if old is not None]
        return (*shared, *messages[len(shared) :])

    def find(self, messages: Sequence[Message], *, tools_digest: str) -> Match:
        """The deepest turn whose conversation, reply included, begins ``messages`` and that saw the same tools."""
        path = self._path(messages)
        for node in reversed(path[1:]):
            fitting = [
                turn for turn in node.turns if turn.tools_digest == tools_digest and _reasoning_fits(turn, messages)
            ]
            if fitting:
                return _choose(fitting, messages)
        return Match(None, difference=_difference(path, messages, tools_digest=tools_digest))

    def _path(self, messages: Sequence[Message]) -> list[_Node]:
        """The nodes that ``messages`` reach, root first."""
        path = [self._root]
        edges = _Edges()
        for message in messages:
            child = path[-1].children.get(edges.next(message))
            if child is None:
                break
            path.append(child)
        return path


class _Edges:
    """Turns the messages of one conversation, in order, into edges."""

    def __init__(self) -> None:
        self._ordinals: dict[str, int] = {}

    def next(self, message: Message) -> Edge:
        calls = tuple((self._ordinal(call.id), call.name, call.arguments_key) for call in message.tool_calls)
        answers = self._ordinal(message.tool_call_id) if message.tool_call_id else -1
        name = message.name if message.role in ("user", "system") else ""
        return (message.role, message.content, calls, answers, name)

    def _ordinal(self, call_id: str) -> int:
        return self._ordinals.setdefault(call_id, len(self._ordinals))


def _reasoning_fits(turn: Turn, messages: Sequence[Message]) -> bool:
    return _altered_reasoning(turn, messages) is None


def _altered_reasoning(turn: Turn, messages: Sequence[Message]) -> int | None:
    """Where a message restates the turn's with another reasoning; leaving it out is no alteration."""
    for index, (known, given) in enumerate(zip(turn.messages, messages, strict=False)):
        if given.reasoning and given.reasoning != known.reasoning:
            return index
    return None


def _choose(fitting: Sequence[Turn], messages: Sequence[Message]) -> Match:
    """One of several turns with the same texts: by tool-call ids, then by age."""
    if len(fitting) == 1:
        return Match(fitting[0])
    same_ids = [turn for turn in fitting if _call_ids(turn.messages) == _call_ids(messages[: len(turn.messages)])]
    if len(same_ids) == 1:
        return Match(same_ids[0], "tool-call ids")
    return Match((same_ids or fitting)[-1], "latest")


def _call_ids(messages: Sequence[Message]) -> list[str]:
    return [call.id for message in messages for call in message.tool_calls]


def _difference(path: Sequence[_Node], messages: Sequence[Message], *, tools_digest: str) -> str:
    """Names the first difference from the most similar earlier conversation."""
    for node in reversed(path):
        for turn in reversed(node.turns):
            altered = _altered_reasoning(turn, messages)
            if altered is not None:
                return f"message {altered} differs: reasoning"
            if turn.tools_digest != tools_digest:
                return "tools changed"
    place = len(path) - 1
    if place == len(messages):
        return "same messages as an earlier prompt, no reply continued"
    known = [node.message for node in path[-1].children.values() if node.message is not None]
    fields = _differing_fields(known[-1], messages[place])
    return f"message {place} differs: {', '.join(fields)}"


def _differing_fields(known: Message, given: Message) -> list[str]:
    pairs = {
        "role": (known.role, given.role),
        "content": (known.content, given.content),
        "tool_calls": (_calls(known), _calls(given)),
        "tool_call_id": (known.tool_call_id, given.tool_call_id),
        "name": (known.name, given.name),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments_key) for call in message.tool_calls]
