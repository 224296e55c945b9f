"""Graphs survive the ledger: same turns, same bytes, and ready to be continued."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, Turn, dump_graph, load_graph

ARRAYS = ("segment", "sampled", "logprobs")
FIELDS = [name for name in Turn.__slots__ if name not in ARRAYS]


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
        (("format",), "wingbeat-graph/99", "wingbeat-graph/1"),
        (("turns", 1, "parent_id"), "nobody", "not there"),
        (("turns", 1, "messages"), [99], "not there"),
        (("turns", 1, "prompt_length"), 7, "prompt"),
        (("turns", 1, "versions"), [[0, 9]], "one length"),
        (("turns", 1, "segment_runs"), [["rendered", 9]], "provenance"),
        (("turns", 1, "segment_runs"), [["guessed", 1]], "wingbeat-graph/1"),
        (("turns", 1, "turn_id"), "a", "already"),
        (("turns", 1, "sampled"), b"123", "bytes"),
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
    with pytest.raises(ValueError, match="wingbeat-graph/1"):
        load_graph(data)
