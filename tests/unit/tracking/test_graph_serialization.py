"""Graphs survive the ledger: same turns, same bytes, and ready to be continued."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.types import FinishReason
from wingbeat.tracking import (
    ChatTemplate,
    EpisodeGraph,
    Message,
    Turn,
    build_samples,
    dump_graph,
    dump_turn,
    load_graph,
    load_turns,
)

ARRAYS = ("segment", "sampled", "logprobs", "support_index")
FIELDS = [*(name for name in Turn.__slots__ if name not in (*ARRAYS, "conversation", "rendered")), "messages"]


def facts(graph: EpisodeGraph) -> list[tuple[Any, ...]]:
    return [
        (*(getattr(turn, name) for name in FIELDS), *(getattr(turn, name).tobytes() for name in ARRAYS))
        for turn in graph.turns
    ]


@given(data=st.data())
def test_a_round_trip_changes_nothing(grow: Callable[..., Turn], data: st.DataObject) -> None:
    graph = EpisodeGraph(data.draw(st.text(max_size=5)))
    for number in range(data.draw(st.integers(0, 8))):
        sampled = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
        numbers = st.none() | st.floats(-50, 0, width=32) | st.just(float("nan"))
        grow(
            graph,
            f"t{number}",
            parent=data.draw(st.sampled_from([None, *graph.turns])),
            segment=data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)),
            sampled=sampled,
            logprobs=[data.draw(numbers) for _ in sampled],
            versions=[(number, len(sampled))],
            temperature=data.draw(st.floats(0, 2)),
            forced=data.draw(st.integers(0, 1)),
        )
    data_bytes = dump_graph(graph)
    loaded = load_graph(data_bytes)
    assert loaded.episode_id == graph.episode_id
    assert facts(loaded) == facts(graph)
    assert dump_graph(loaded) == data_bytes


def test_a_loaded_graph_can_be_continued(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = '<think>é</think>ok <tool_call>{"name": "add", "arguments": {"b":  1, "a": "é"}}</tool_call><|im_end|>'
    first = say(graph, chatml, [Message("user", "hello", name="Bo")], text, tools=tools)
    call = first.reply.tool_calls[0]
    say(graph, chatml, [*first.messages, Message("tool", "2", tool_call_id=call.id)], "done<|im_end|>", tools=tools)
    loaded = load_graph(dump_graph(graph))
    assert facts(loaded) == facts(graph)
    messages = [*graph.turns[-1].messages, Message("user", "more")]
    resolved = [
        g.resolve(policy="solver", agent="", messages=messages, tools=tools, template=chatml) for g in (graph, loaded)
    ]
    assert resolved[1].parent is loaded.turns[-1]
    assert resolved[0].prompt_ids.tolist() == resolved[1].prompt_ids.tolist()


def test_the_size_grows_with_what_is_new(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    messages: tuple[Message, ...] = ()
    sizes: list[int] = []
    for number in range(20):
        messages = (*messages, Message("user", f"question {number:03}"))
        messages = say(graph, chatml, messages, f"answer {number:03}<|im_end|>").messages
        sizes.append(len(dump_graph(graph)))
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) - min(steps) < 32


def packed(graph: EpisodeGraph) -> dict[str, Any]:
    return msgspec.msgpack.decode(dump_graph(graph))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), "wingbeat-graph/99", "wingbeat-graph/2"),
        (("turns", 1, "parent_id"), "nobody", "not there"),
        (("turns", 1, "messages"), [99], "not there"),
        (("turns", 1, "prompt_length"), 7, "prompt"),
        (("turns", 1, "versions"), [[0, 9]], "one length"),
        (("turns", 1, "segment_runs"), [["rendered", 9]], "provenance"),
        (("turns", 1, "segment_runs"), [["guessed", 1]], "wingbeat-graph/2"),
        (("turns", 1, "turn_id"), "a", "already"),
        (("turns", 1, "sampled"), b"123", "bytes"),
        (("turns", 1, "support_table"), [b"x"], "supports do not fit"),
        (("turns", 1, "support_index"), b"\0\0\0\0", "supports do not fit"),
        (("turns", 1, "kind"), "text", "cannot extend"),
    ],
)
def test_damaged_bytes_are_refused(
    grow: Callable[..., Turn], place: tuple[Any, ...], value: object, message: str
) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "b", parent=grow(graph, "a", segment=[1], sampled=[2]), segment=[3], sampled=[4])
    data = packed(graph)
    holder: Any = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        load_graph(msgspec.msgpack.encode(data))


@pytest.mark.parametrize("data", [b"", b"not msgpack", b"\x80"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="wingbeat-graph/2"):
        load_graph(data)


def test_marks_and_plain_turns_survive(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    chat = say(graph, chatml, [Message("user", "hello")], "a<|im_end|>")
    plan = graph.resolve_text(policy="solver", agent="", text="so?", template=chatml)
    facts_of = {"logprobs": [-1.0], "versions": [(0, 1)], "temperature": 1.0, "finish_reason": FinishReason.LENGTH}
    text = graph.commit(plan, turn_id="text", token_ids=[5], text="yes", supports=[b"\x01\x05\0\0\0"], **facts_of)
    plan = graph.resolve_tokens(policy="solver", agent="", token_ids=[*graph.full_ids(chat).tolist(), 9])
    tokens = graph.commit(plan, turn_id="tokens", token_ids=[6], **facts_of)
    graph.mark_undelivered(text.turn_id)
    graph.mark_resampled(tokens.turn_id)
    loaded = load_graph(dump_graph(graph))
    assert facts(loaded) == facts(graph)
    assert (loaded.undelivered, loaded.resampled) == ({"text"}, {"tokens"})
    assert loaded.superseded() == {"text": "undelivered", "tokens": "resampled"}
    assert dump_graph(loaded) == dump_graph(graph)


def test_format_1_is_still_read(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    """Bytes of the release before, written down field by field."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [Message("user", "hello")], "a<|im_end|>")
    say(graph, chatml, [*first.messages, Message("user", "b")], "c<|im_end|>")
    old = packed(graph)
    old["format"] = "wingbeat-graph/1"
    del old["undelivered"], old["resampled"]
    for turn in old["turns"]:
        for name in ("kind", "prompt_text", "sampled_text", "support_table", "support_index"):
            del turn[name]
    loaded = load_graph(msgspec.msgpack.encode(old))
    assert facts(loaded) == facts(graph)
    assert build_samples(loaded, policy="solver", episode_id="e") == build_samples(
        graph, policy="solver", episode_id="e"
    )


def test_turns_written_one_by_one_are_the_graph(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    pieces: list[bytes] = []
    messages: tuple[Message, ...] = ()
    for number in range(4):
        messages = (*messages, Message("user", f"question {number}"))
        turn = say(graph, chatml, messages, f"answer {number}<|im_end|>")
        pieces.append(dump_turn(graph, turn))
        messages = turn.messages
    pieces.append(dump_turn(graph, say(graph, chatml, [Message("user", "else")], "b<|im_end|>")))
    loaded = load_turns("e", pieces)
    assert facts(loaded) == facts(graph)
    assert dump_graph(loaded) == dump_graph(graph)
    assert max(len(piece) for piece in pieces[1:]) < len(pieces[0]) + 64
    with pytest.raises(ValueError, match=f"{graph.turns[0].turn_id}"):
        load_turns("e", pieces[1:])
    with pytest.raises(ValueError, match="expected a turn of format 'wingbeat-graph/2'"):
        load_turns("e", [dump_graph(graph)])


def test_a_mark_of_nobody_is_damage(grow: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "a", segment=[1], sampled=[2])
    data = packed(graph)
    data["undelivered"] = ["nobody"]
    with pytest.raises(ValueError, match="nobody"):
        load_graph(msgspec.msgpack.encode(data))
