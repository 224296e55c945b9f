"""Recognises a conversation by its beginning, over restarts and without keeping its text.

A digest runs along the messages.  It takes in what a message means, by the rules of
:mod:`wingbeat.tracking.lineage`: reasoning and decoration are left out, tool-call ids are counted.  The real
tool-call ids run along apart, to tell conversations that say the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, Self

import msgspec

from wingbeat.tracking.lineage import edge_of
from wingbeat.tracking.messages import Message

DIGEST_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


class PrefixKey(NamedTuple):
    """What a conversation is up to some message."""

    meaning: bytes
    call_ids: bytes
    """Of its tool calls; b"" where it has none."""


class PrefixWalk:
    """Goes along one conversation, message by message."""

    __slots__ = ("_call_ids", "_meaning", "_num_calls", "_ordinals")

    def __init__(self, *owner: str) -> None:
        """Conversations of different ``owner`` never have the same key."""
        self._meaning = hashlib.blake2b(_encode(owner), digest_size=DIGEST_BYTES)
        self._call_ids = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._ordinals: dict[str, int] = {}
        self._num_calls = 0

    @property
    def key(self) -> PrefixKey:
        """Of the messages so far."""
        return PrefixKey(self._meaning.digest(), self._call_ids.digest() if self._num_calls else b"")

    def push(self, message: Message) -> None:
        """One message more."""
        self._meaning.update(_encode(edge_of(message, self._ordinals.get(message.tool_call_id, -1))))
        for call in message.tool_calls:
            self._call_ids.update(_encode(call.id))
            self._ordinals[call.id] = self._num_calls
            self._num_calls += 1

    def after(self, messages: Iterable[Message]) -> Self:
        """Another walk, of this conversation with more messages."""
        other = object.__new__(type(self))
        other._meaning, other._call_ids = self._meaning.copy(), self._call_ids.copy()
        other._ordinals, other._num_calls = dict(self._ordinals), self._num_calls
        for message in messages:
            other.push(message)
        return other
