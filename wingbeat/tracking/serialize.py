"""Token graphs as bytes: what the ledger stores and ``inspect`` reads.

msgpack with a format tag. Arrays are little-endian bytes. Each distinct message is stored once and
turns refer to it by number; a continued turn lists only the messages beyond its parent's. Turns can also be
written one by one, as they come (:func:`dump_turn`), and read back as a graph (:func:`load_turns`).

Format 1 had neither supports nor marks nor turns without messages; it is still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import FLOAT_DTYPE, INT_DTYPE
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.messages import Message, Role, ToolCall
from wingbeat.tracking.turns import Turn, TurnKind

FORMAT = "wingbeat-graph/2"

Scalar = TypeVar("Scalar", np.int32, np.float32)


class _Call(msgspec.Struct, frozen=True, array_like=True):
    id: str
    name: str
    arguments_text: str


class _Message(msgspec.Struct, frozen=True, array_like=True):
    role: Role
    content: str
    reasoning: str
    tool_calls: tuple[_Call, ...]
    tool_call_id: str
    name: str


class _Turn(msgspec.Struct, frozen=True):
    turn_id: str
    policy: str
    agent: str
    parent_id: str | None
    segment: bytes
    """int32 [S]."""
    segment_runs: tuple[tuple[Provenance, int], ...]
    sampled: bytes
    """int32 [T]."""
    logprobs: bytes
    """float32 [T]."""
    versions: tuple[tuple[int, int], ...]
    temperature: float
    finish_reason: FinishReason
    messages: tuple[int, ...]
    """Numbers in the graph's message table, of those beyond the parent's."""
    tools_digest: str
    fork_reason: str
    chosen_by: str
    prompt_length: int
    kind: TurnKind = TurnKind.CHAT
    prompt_text: str = ""
    sampled_text: str = ""
    support_table: tuple[bytes, ...] = ()
    support_index: bytes = b""
    """int32 [T], or nothing."""


class _Graph(msgspec.Struct, frozen=True):
    format: Literal["wingbeat-graph/1", "wingbeat-graph/2"]
    episode_id: str
    messages: tuple[_Message, ...]
    turns: tuple[_Turn, ...]
    undelivered: tuple[str, ...] = ()
    resampled: tuple[str, ...] = ()


class TurnNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of an episode, besides its turns, at the moment when one is committed."""

    lineage: int = 0
    """Of the policy: the one in which the turn's versions count."""
    tools: bytes = b""
    """The tool list of the turn's request as JSON, where no earlier turn of the attempt had the same."""
    instructed: bool = False
    """Its system message was sent for this request alone."""
    undelivered: tuple[str, ...] = ()
    """Earlier turns whose reply no caller had received."""
    resampled: tuple[str, ...] = ()
    """Earlier turns whose retry had to be sampled anew."""


NO_NOTES = TurnNotes()


class _Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn by itself."""

    format: Literal["wingbeat-graph/2"]
    messages: tuple[_Message, ...]
    turn: _Turn
    notes: TurnNotes = NO_NOTES


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Graph)
_piece_decoder = msgspec.msgpack.Decoder(_Piece)


def dump_graph(graph: EpisodeGraph) -> bytes:
    """The whole graph; the same graph gives the same bytes."""
    table: dict[_Message, int] = {}
    turns = tuple(_pack_turn(turn, graph=graph, table=table) for turn in graph.turns)
    packed = _Graph(
        format=FORMAT,
        episode_id=graph.episode_id,
        messages=tuple(table),
        turns=turns,
        undelivered=tuple(sorted(graph.undelivered)),
        resampled=tuple(sorted(graph.resampled)),
    )
    return _encoder.encode(packed)


def load_graph(data: bytes) -> EpisodeGraph:
    """The graph in these bytes, ready to be continued.

    Raises ValueError where they are no graph of this format or contradict themselves.
    """
    try:
        packed = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a token graph of format {FORMAT!r}, got something else: {error}") from error
    graph = EpisodeGraph(packed.episode_id)
    messages = [_unpack_message(message) for message in packed.messages]
    for turn in packed.turns:
        graph.add(_unpack_turn(turn, graph=graph, messages=messages))
    try:
        for turn_id in packed.undelivered:
            graph.mark_undelivered(turn_id)
        for turn_id in packed.resampled:
            graph.mark_resampled(turn_id)
    except KeyError as error:
        raise ValueError(f"a mark refers to turn {error}, which is not there: the data is damaged") from error
    return graph


def dump_turn(graph: EpisodeGraph, turn: Turn, *, notes: TurnNotes = NO_NOTES) -> bytes:
    """One turn of ``graph`` by itself; its ancestors are needed to read it."""
    table: dict[_Message, int] = {}
    packed = _pack_turn(turn, graph=graph, table=table)
    return _encoder.encode(_Piece(format=FORMAT, messages=tuple(table), turn=packed, notes=notes))


def load_turns(episode_id: str, pieces: Iterable[bytes]) -> EpisodeGraph:
    """The graph of turns that were written one by one, in the order in which they were committed.

    Raises ValueError where they are no turns of this format or contradict each other.
    """
    return load_noted_turns(episode_id, pieces)[0]


def load_noted_turns(episode_id: str, pieces: Iterable[bytes]) -> tuple[EpisodeGraph, tuple[TurnNotes, ...]]:
    """As :func:`load_turns`, with the notes of each turn."""
    graph, notes = EpisodeGraph(episode_id), list[TurnNotes]()
    for data in pieces:
        try:
            piece = _piece_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(f"expected a turn of format {FORMAT!r}, got something else: {error}") from error
        messages = [_unpack_message(message) for message in piece.messages]
        graph.add(_unpack_turn(piece.turn, graph=graph, messages=messages))
        notes.append(piece.notes)
    return graph, tuple(notes)


def _pack_turn(turn: Turn, *, graph: EpisodeGraph, table: dict[_Message, int]) -> _Turn:
    shared = 0
    if turn.kind is TurnKind.CHAT and turn.parent_id is not None:
        shared = graph.turn(turn.parent_id).conversation.depth
    news = turn.conversation.messages_from(shared)
    return _Turn(
        turn_id=turn.turn_id,
        policy=turn.policy,
        agent=turn.agent,
        parent_id=turn.parent_id,
        segment=turn.segment.astype(INT_DTYPE).tobytes(),
        segment_runs=turn.segment_runs,
        sampled=turn.sampled.astype(INT_DTYPE).tobytes(),
        logprobs=turn.logprobs.astype(FLOAT_DTYPE).tobytes(),
        versions=turn.versions,
        temperature=turn.temperature,
        finish_reason=turn.finish_reason,
        messages=tuple(table.setdefault(_pack_message(message), len(table)) for message in news),
        tools_digest=turn.tools_digest,
        fork_reason=turn.fork_reason,
        chosen_by=turn.chosen_by,
        prompt_length=turn.prompt_length,
        kind=turn.kind,
        prompt_text=turn.prompt_text,
        sampled_text=turn.sampled_text,
        support_table=turn.support_table,
        support_index=turn.support_index.astype(INT_DTYPE).tobytes(),
    )


def _unpack_turn(turn: _Turn, *, graph: EpisodeGraph, messages: list[Message]) -> Turn:
    try:
        parent = graph.turn(turn.parent_id) if turn.parent_id is not None and turn.kind is TurnKind.CHAT else None
        own = tuple(messages[number] for number in turn.messages)
    except LookupError as error:
        raise ValueError(f"turn {turn.turn_id} refers to a parent or message that is not there: {error}") from error
    return Turn(
        turn_id=turn.turn_id,
        policy=turn.policy,
        agent=turn.agent,
        parent_id=turn.parent_id,
        kind=turn.kind,
        segment=_unpack_array(turn.segment, dtype=INT_DTYPE, turn_id=turn.turn_id),
        segment_runs=turn.segment_runs,
        sampled=_unpack_array(turn.sampled, dtype=INT_DTYPE, turn_id=turn.turn_id),
        logprobs=_unpack_array(turn.logprobs, dtype=FLOAT_DTYPE, turn_id=turn.turn_id),
        versions=turn.versions,
        temperature=turn.temperature,
        finish_reason=turn.finish_reason,
        conversation=graph.converse(parent, news=own),
        tools_digest=turn.tools_digest,
        fork_reason=turn.fork_reason,
        chosen_by=turn.chosen_by,
        prompt_length=turn.prompt_length,
        prompt_text=turn.prompt_text,
        sampled_text=turn.sampled_text,
        support_table=turn.support_table,
        support_index=_unpack_array(turn.support_index, dtype=INT_DTYPE, turn_id=turn.turn_id),
    )


def _unpack_array(data: bytes, *, dtype: np.dtype[Scalar], turn_id: str) -> NDArray[Scalar]:
    """[N] numbers, read-only, in the machine's own byte order."""
    if len(data) % dtype.itemsize:
        raise ValueError(
            f"turn {turn_id}: expected numbers of {dtype.itemsize} bytes, got {len(data)} bytes: the data is damaged"
        )
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)


def _pack_message(message: Message) -> _Message:
    return _Message(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(_Call(call.id, call.name, call.arguments_text) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _unpack_message(message: _Message) -> Message:
    return Message(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall.of(call.id, name=call.name, arguments=call.arguments_text) for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )
