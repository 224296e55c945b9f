"""Streaming text: what was sent is always a prefix of the final content, wherever tokens split it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.server.text import Generated, TextStream
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import parse_reply
from wingbeat.tracking.template import ChatTemplate

Split = list[int]
CALL = '<tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'


def play(
    template: ChatTemplate, text: str, sizes: Split, *, stop: tuple[str, ...] = (), tools: bool = False
) -> tuple[list[str], Message, Generated]:
    """Feed the text's tokens in pieces of the given sizes (then all at once); deltas, reply and tokens."""
    ids = template.encode(text)
    stream, generated, deltas = TextStream(template, stop, tools_given=tools), Generated(), []
    for size in (*sizes, len(ids)):
        piece, ids = ids[:size], ids[size:]
        generated.extend(tuple(piece), tuple(-1.0 for _ in piece), 0)
        stream.feed(generated)
        deltas.append(stream.delta())
        if stream.stopped or not ids:
            break
    numbers = itertools.count()
    reply = stream.trim(
        parse_reply(template, generated.token_ids, tools_given=tools, new_id=lambda: f"c{next(numbers)}")
    )
    deltas.append(stream.rest(reply))
    return deltas, reply, generated


WORDS = ("a", "b ", " ", "\n", "é", "🐦", "{", "}", "<", "STOP", "ST", "OP", "hello world")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|im_end|>")
PARTS = st.sampled_from([*WORDS, *MARKS, CALL, '{"name": "calc", "parameters": {}}'])
TEXTS = st.lists(PARTS, max_size=7).map("".join)


@given(
    family=st.sampled_from(["hermes", "opened", "llama3"]),
    text=TEXTS,
    sizes=st.lists(st.integers(1, 5), max_size=60),
    stop=st.sampled_from([(), ("STOP",), ("\n", "STOP"), (" ",)]),
    tools=st.booleans(),
)
def test_deltas_concatenated_are_the_final_content(
    templates: dict[str, ChatTemplate], family: str, text: str, sizes: Split, stop: tuple[str, ...], tools: bool
) -> None:
    deltas, reply, _ = play(templates[family], text, sizes, stop=stop, tools=tools)
    assert "".join(deltas) == reply.content


@given(sizes=st.lists(st.integers(1, 5), max_size=60), stop=st.sampled_from([(), ("END",)]))
def test_tool_calls_and_reasoning_are_never_streamed_as_content(
    template: ChatTemplate, sizes: Split, stop: tuple[str, ...]
) -> None:
    text = f"<think>hm</think>\nok {CALL}END"
    deltas, reply, _ = play(template, text, sizes, stop=stop, tools=True)
    assert "calc" not in "".join(deltas) and "hm" not in "".join(deltas)
    assert [call.name for call in reply.tool_calls] == ["calc"]
    assert reply.reasoning == "hm"
    assert reply.content == ("ok" if stop else "ok END")


def test_plain_text_is_sent_as_it_comes(template: ChatTemplate) -> None:
    deltas, _, _ = play(template, "abc", [1, 1, 1])
    assert deltas == ["a", "b", "c", ""]


def test_half_a_character_is_held_back(template: ChatTemplate) -> None:
    deltas, reply, _ = play(template, "a€b", [1, 1, 1, 1, 1])
    assert deltas == ["a", "", "", "€", "b", ""]
    assert reply.content == "a€b"


def test_half_a_stop_string_is_held_back_until_it_is_none(template: ChatTemplate) -> None:
    deltas, _, _ = play(template, "xSTy", [1, 1, 1, 1], stop=("STOP",))
    assert deltas == ["x", "", "", "STy", ""]


def test_a_stop_string_cuts_at_the_fewest_tokens_and_is_not_in_the_content(template: ChatTemplate) -> None:
    deltas, reply, generated = play(template, "one STOP two", [], stop=("STOP",))
    assert "".join(deltas) == reply.content == "one "
    assert template.decode(generated.token_ids) == "one STOP"
    assert len(generated.token_ids) == len(generated.logprobs) == 8
    assert generated.versions == [(0, 8)]


def test_the_earliest_of_several_stop_strings_ends_the_turn(template: ChatTemplate) -> None:
    _, reply, generated = play(template, "a b\nc", [], stop=("\n", " "))
    assert reply.content == "a"
    assert template.decode(generated.token_ids) == "a "


def test_a_stop_string_within_reasoning_leaves_no_content(template: ChatTemplate) -> None:
    deltas, reply, _ = play(template, "<think>why STOP because", [3], stop=("STOP",))
    assert (reply.reasoning, reply.content, "".join(deltas)) == ("why ", "", "")


@pytest.mark.parametrize(
    ("count", "versions"),
    [(5, [(1, 2), (2, 3)]), (3, [(1, 2), (2, 1)]), (2, [(1, 2)]), (1, [(1, 1)]), (0, []), (9, [(1, 2), (2, 3)])],
)
def test_truncate_keeps_the_run_lengths_true(count: int, versions: list[tuple[int, int]]) -> None:
    generated = Generated()
    generated.extend((1, 2), (-0.1, -0.2), 1)
    generated.extend((), (), 7)
    generated.extend((3,), (-0.3,), 2)
    generated.extend((4, 5), (-0.4, -0.5), 2)
    generated.truncate(count)
    assert generated.token_ids == [1, 2, 3, 4, 5][:count]
    assert generated.logprobs == [-0.1, -0.2, -0.3, -0.4, -0.5][:count]
    assert generated.versions == versions
