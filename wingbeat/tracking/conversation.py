"""Conversations as linked values: a turn refers to its last message, and that to the one before.

Ten thousand turns of one conversation, or ten thousand forks of a long one, so hold every message once.
"""

from __future__ import annotations

from collections.abc import Iterable

from wingbeat.tracking.formats import THINK
from wingbeat.tracking.messages import Message


class Conversation:
    """A sequence of messages. Equal ones of one episode are one object (see :class:`Conversations`)."""

    __slots__ = ("depth", "ids_key", "message", "num_calls", "previous", "reasoning_key")

    def __init__(self, previous: Conversation | None = None, message: Message | None = None) -> None:
        """Without arguments: the empty conversation. Others come from :meth:`Conversations.extend`."""
        self.previous = previous
        self.message = message
        self.depth: int = 0
        """Number of messages."""
        self.num_calls: int = 0
        self.ids_key: int = 0
        """Stands for the tool-call ids of all messages (a chained hash)."""
        self.reasoning_key: int = 0
        """Stands for the reasoning of all messages."""
        if previous is not None and message is not None:
            self.depth = previous.depth + 1
            self.num_calls = previous.num_calls + len(message.tool_calls)
            self.ids_key = chain_ids(previous.ids_key, message)
            self.reasoning_key = chain_reasoning(previous.reasoning_key, message, depth=previous.depth)

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.messages_from(0)

    def messages_from(self, start: int) -> tuple[Message, ...]:
        """Those after the first ``start``."""
        found: list[Message] = []
        place = self
        while place.depth > start and place.message is not None and place.previous is not None:
            found.append(place.message)
            place = place.previous
        found.reverse()
        return tuple(found)

    def ordinal_of(self, call_id: str) -> int:
        """Which call of this conversation has this id, counted from 0; the latest where ids repeat; -1 for none."""
        place = self
        while place.message is not None and place.previous is not None:
            for index, call in enumerate(place.message.tool_calls):
                if call.id == call_id:
                    return place.previous.num_calls + index
            place = place.previous
        return -1


class Conversations:
    """All conversations of one episode, each once.

    What continues a conversation is known here and not there: without a cycle, an episode's messages are freed the
    moment it is let go. The collector would find them late: control lets it look at what has lived for some seconds
    once in minutes, and again once in hours.
    """

    def __init__(self) -> None:
        self.start = Conversation()
        """The empty one."""
        self._known: dict[tuple[Conversation, Message], Conversation] = {}

    def extend(self, place: Conversation, messages: Iterable[Message]) -> Conversation:
        """``place`` with more messages; the same ones give the same object."""
        for message in messages:
            found = self._known.get((place, message))
            if found is None:
                found = self._known[place, message] = Conversation(place, message)
            place = found
        return place


def spoken(message: Message) -> tuple[str, str]:
    """(content, reasoning); some clients put the reasoning that they were told into the text, as ``<think>``."""
    if message.role == "assistant" and not message.reasoning and message.content.startswith(THINK[0]):
        reasoning, closed, rest = message.content.removeprefix(THINK[0]).partition(THINK[1])
        if closed:
            return rest.lstrip("\n"), reasoning.strip()
    return message.content, message.reasoning


def chain_ids(key: int, message: Message) -> int:
    """The ``ids_key`` of a conversation with one more message."""
    return hash((key, *[call.id for call in message.tool_calls])) if message.tool_calls else key


def chain_reasoning(key: int, message: Message, *, depth: int) -> int:
    """The ``reasoning_key`` of a conversation of ``depth`` messages with one more."""
    reasoning = spoken(message)[1]
    return hash((key, depth, reasoning)) if reasoning else key
