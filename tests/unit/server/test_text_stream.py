"""Streaming text: what was sent is always a prefix of the final content, wherever tokens split it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.worker_protocol import TokenChunk
from wingbeat.server.calls.text import Generated, TextStream
from wingbeat.server.calls.visible import TextRules
from wingbeat.tracking.formats import DEEPSEEK_CALL, DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR, THINK
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import parse_reply
from wingbeat.tracking.template import ChatTemplate

Split = list[int]
DEEPSEEK_ONE = f"{DEEPSEEK_CALL[0]}calc{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL[1]}"
CALL = '<tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'


class Played:
    """What a caller saw of a text that came in pieces."""

    def __init__(self) -> None:
        self.generated = Generated()
        self.deltas: list[list[tuple[str, str]]] = []
        self.reply = Message("assistant")

    def told(self, kind: str) -> str:
        return "".join(text for deltas in self.deltas for k, text in deltas if k == kind)


def chunk(tokens: Split, version: int = 0, **more: Any) -> TokenChunk:
    return TokenChunk("r", tuple(tokens), tuple(-1.0 for _ in tokens), version, **more)


def play(template: ChatTemplate, text: str, sizes: Split, rules: TextRules | None = None) -> Played:
    """Feed the text's tokens in pieces of the given sizes (then all at once)."""
    rules = rules or TextRules()
    ids, stream, played = template.encode(text), TextStream(template, rules), Played()
    for size in (*sizes, len(ids)):
        piece, ids = ids[:size], ids[size:]
        played.generated.extend(chunk(piece))
        stream.feed(played.generated)
        played.deltas.append(list(stream.deltas()))
        if stream.stopped or not ids:
            break
    numbers = itertools.count()
    tokens = played.generated.token_ids
    parsed = parse_reply(template, tokens, tools_given=rules.tools_given, new_id=lambda: f"c{next(numbers)}")
    played.reply = stream.trim(parsed)
    played.deltas.append(list(stream.rest(played.reply)))
    return played


WORDS = ("a", "b ", " ", "\n", "é", "🐦", "{", "}", "<", "STOP", "ST", "OP", "hello world")
MARKS = {
    "hermes": ("<think>", "</think>", "<tool_call>", "</tool_call>", CALL),
    "llama3": ("<think>", "</think>", "<|python_tag|>", '{"name": "calc", "parameters": {}}', "; "),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", '[{"name": "calc", "arguments": {}}]', "calc"),
    "deepseek": (*THINK, *DEEPSEEK_CALLS, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, "function", "calc", "{}"),
    "harmony": (
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        *("assistant", "analysis", "final", "commentary to=functions.calc", "{}"),
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant"),
    ),
}
MARKS["opened"] = MARKS["hermes"]


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, str]:
    """(family, a text that such a model may write, well-formed or not)."""
    family = draw(st.sampled_from(sorted(MARKS)))
    parts = st.sampled_from([*WORDS, *MARKS[family], "<|im_end|>"])
    return family, "".join(draw(st.lists(parts, max_size=9)))


SIZES = st.lists(st.integers(1, 5), max_size=60)


@given(reply=replies(), sizes=SIZES, stop=st.sampled_from([(), ("STOP",), ("\n", "STOP"), (" ",)]), tools=st.booleans())
def test_deltas_concatenated_are_the_final_reply(
    templates: dict[str, ChatTemplate], reply: tuple[str, str], sizes: Split, stop: tuple[str, ...], tools: bool
) -> None:
    family, text = reply
    played = play(templates[family], text, sizes, TextRules(stop=stop, tools_given=tools))
    assert played.told("content") == played.reply.content
    assert played.told("reasoning") == played.reply.reasoning


@given(text=st.lists(st.sampled_from([*WORDS, *MARKS["hermes"]]), max_size=9).map("".join), sizes=SIZES)
def test_a_plain_completion_is_sent_as_it_is(template: ChatTemplate, text: str, sizes: Split) -> None:
    ids, stream, generated = template.encode(text), TextStream(template, TextRules(plain=True)), Generated()
    told = ""
    for size in (*sizes, len(ids)):
        piece, ids = ids[:size], ids[size:]
        generated.extend(chunk(piece))
        stream.feed(generated)
        told += "".join(news for _, news in stream.deltas())
    assert told == stream.decode(generated.token_ids) == template.plain_text(generated.token_ids) == text


@given(sizes=SIZES, stop=st.sampled_from([(), ("END",)]))
def test_tool_calls_and_reasoning_are_never_streamed_as_content(
    template: ChatTemplate, sizes: Split, stop: tuple[str, ...]
) -> None:
    played = play(template, f"<think>hm</think>\nok {CALL}END", sizes, TextRules(stop=stop, tools_given=True))
    assert "calc" not in played.told("content") and "hm" not in played.told("content")
    assert [call.name for call in played.reply.tool_calls] == ["calc"]
    assert played.told("reasoning") == played.reply.reasoning == "hm"
    assert played.reply.content == ("ok" if stop else "ok END")


# Written out: what is told with every token, and how little is held back.
STEPS = {
    "plain text": ("hermes", "abc", TextRules(), ["a", "b", "c"]),
    "half a character": ("hermes", "a€b", TextRules(), ["a", "", "", "€", "b"]),
    "half a stop string": ("hermes", "xSTy", TextRules(stop=("STOP",)), ["x", "", "", "STy"]),
    "whitespace before a call": ("hermes", "a <b", TextRules(tools_given=True), ["a", "", "", " <b"]),
    "leading whitespace": ("hermes", " \nab", TextRules(tools_given=True), ["", "", " \na", "b"]),
    "reasoning": ("hermes", "<think>a b</think>\nc", TextRules(), ["", "(a)", "", "( b)", "", "", "c"]),
    "opened reasoning": ("opened", "ab</think>c", TextRules(), ["(a)", "(b)", "", "c"]),
    "no reasoning after all": ("hermes", "<th", TextRules(), ["", "", ""]),
    "text before Mistral's calls": ("mistral", "a[T", TextRules(tools_given=True), ["a", "", ""]),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_told_with_every_token(templates: dict[str, ChatTemplate], name: str) -> None:
    family, text, rules, expected = STEPS[name]
    told = play(templates[family], text, [1] * 40, rules).deltas[:-1]
    assert ["".join(t if k == "content" else f"({t})" for k, t in deltas) for deltas in told] == expected


def test_harmonys_channels_are_told_apart(templates: dict[str, ChatTemplate]) -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.calc"
        "<|constrain|>json<|message|>{}<|call|>"
    )
    played = play(templates["harmony"], text, [1] * 200, TextRules(tools_given=True))
    assert (played.told("reasoning"), played.told("content")) == ("hm", "")
    assert [call.name for call in played.reply.tool_calls] == ["calc"]
    final = play(templates["harmony"], "<|channel|>final<|message|>ab<|return|>", [1] * 200)
    assert final.told("content") == "ab"
    assert sum(bool(deltas) for deltas in final.deltas) == 2, "token by token"


# --- what ends a turn ------------------------------------------------------------------------------


def test_a_stop_string_cuts_at_the_fewest_tokens_and_is_not_in_the_content(template: ChatTemplate) -> None:
    played = play(template, "one STOP two", [], TextRules(stop=("STOP",)))
    assert played.told("content") == played.reply.content == "one "
    assert template.decode(played.generated.token_ids) == "one STOP"
    assert len(played.generated.token_ids) == len(played.generated.logprobs) == 8
    assert played.generated.versions == [(0, 8)]


def test_the_earliest_of_several_stop_strings_ends_the_turn(template: ChatTemplate) -> None:
    played = play(template, "a b\nc", [], TextRules(stop=("\n", " ")))
    assert played.reply.content == "a"
    assert template.decode(played.generated.token_ids) == "a "


def test_a_stop_string_within_reasoning_leaves_no_content(template: ChatTemplate) -> None:
    played = play(template, "<think>why STOP because", [3], TextRules(stop=("STOP",)))
    assert (played.reply.reasoning, played.reply.content) == ("why ", "")
    assert (played.told("reasoning"), played.told("content")) == ("why ", "")


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("hermes", f"a{CALL}\n", CALL),
        ("deepseek", DEEPSEEK_CALLS[0] + DEEPSEEK_ONE, DEEPSEEK_ONE + DEEPSEEK_CALLS[1]),
        ("mistral", "[TOOL_CALLS]calc[ARGS]{}", "[TOOL_CALLS]calc[ARGS]{}"),
    ],
)
def test_the_second_call_is_cut_off_where_only_one_may_stand(
    templates: dict[str, ChatTemplate], family: str, first: str, second: str
) -> None:
    template = templates[family]
    one = TextRules(tools_given=True, one_call=True)
    for sizes in ([], [1] * 200):
        played = play(template, first + second, sizes, one)
        assert len(played.reply.tool_calls) == 1
        assert played.generated.token_ids == template.encode(first)
    assert len(play(template, first + second, [], TextRules(tools_given=True)).reply.tool_calls) == 2
    assert play(template, first, [], one).generated.token_ids == template.encode(first)


@given(text=st.lists(st.sampled_from([*WORDS, *MARKS["hermes"]]), max_size=9).map("".join), sizes=SIZES)
def test_an_abandoned_turn_keeps_exactly_what_was_sent(template: ChatTemplate, text: str, sizes: Split) -> None:
    ids, stream, generated = template.encode(text), TextStream(template, TextRules(tools_given=True)), Generated()
    told = {"content": "", "reasoning": ""}
    for size in sizes:
        piece, ids = ids[:size], ids[size:]
        generated.extend(chunk(piece))
        stream.feed(generated)
        for kind, news in stream.deltas():
            told[kind] += news
    before = list(generated.token_ids)
    reply = stream.keep_sent(generated)
    if reply is None:
        assert told == {"content": "", "reasoning": ""} and generated.token_ids == before
        return
    assert (reply.content, reply.reasoning) == (told["content"], told["reasoning"])
    kept = template.decode(generated.token_ids)
    assert told["content"] in kept and told["reasoning"] in kept
    assert generated.token_ids == before[: len(generated.token_ids)] and generated.token_ids


# --- the facts of the tokens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "versions"),
    [(5, [(1, 2), (2, 3)]), (3, [(1, 2), (2, 1)]), (2, [(1, 2)]), (1, [(1, 1)]), (0, []), (9, [(1, 2), (2, 3)])],
)
def test_truncate_keeps_the_run_lengths_true(count: int, versions: list[tuple[int, int]]) -> None:
    generated = Generated(is_truncated=True)
    generated.extend(chunk([1, 2], 1, supports=(b"a", b"b")))
    generated.extend(chunk([], 7))
    generated.extend(chunk([3], 2))
    generated.extend(chunk([4, 5], 2, supports=(b"", b"e")))
    generated.truncate(count)
    assert generated.token_ids == [1, 2, 3, 4, 5][:count]
    assert generated.supports == [b"a", b"b", b"", b"", b"e"][:count]
    assert [math.isfinite(logprob) for logprob in generated.logprobs] == [True, True, False, True, True][:count]
    assert generated.versions == versions


def test_free_sampling_keeps_no_supports() -> None:
    generated = Generated()
    generated.extend(chunk([1, 2], supports=(b"a", b"b")))
    assert (generated.supports, generated.logprobs) == ([], [-1.0, -1.0])
