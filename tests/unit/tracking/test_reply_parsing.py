"""Sampled tokens become the message that the agent sees; malformed calls never raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.tracking import ChatTemplate, Message, Reply, parse_reply


def ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call-{next(numbers)}"


def parse(template: ChatTemplate, text: str, *, tools_given: bool = True) -> Reply:
    return parse_reply(template, template.encode(text), tools_given=tools_given, new_id=ids())


def calls(reply: Reply) -> list[tuple[str, str, object]]:
    return [(call.id, call.name, call.arguments) for call in reply.message.tool_calls]


def test_the_end_of_turn_is_no_content(templates: dict[str, ChatTemplate]) -> None:
    for name, template in templates.items():
        assert parse(template, f"  hello\n{template.eot_text}").message == Message("assistant", "  hello\n"), name
        assert parse(template, "hello").message == Message("assistant", "hello"), name
        assert parse(template, template.eot_text).message == Message("assistant"), name
        assert parse(template, "").message == Message("assistant"), name


def test_other_special_tokens_are_no_content(chatml: ChatTemplate) -> None:
    assert parse(chatml, "a<|im_start|>b<|im_end|>").message.content == "ab"


def test_hermes_calls(chatml: ChatTemplate) -> None:
    reply = parse(
        chatml,
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 3,  "a": "é"}}\n</tool_call>\n'
        '<tool_call>{"name":"stop","arguments":"{}"}</tool_call><|im_end|>',
    )
    assert reply.message.content == "I add."
    assert calls(reply) == [("call-0", "add", {"a": "é", "b": 3}), ("call-1", "stop", {})]
    assert reply.tool_calls_malformed == 0


def test_hermes_markers_may_be_special_tokens(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "chatml", template="{{ messages[-1].content }}<|im_end|>")
    text = (folder / "tokenizer.json").read_text().replace('"special": false', '"special": true')
    (folder / "tokenizer.json").write_text(text)
    template = ChatTemplate.load(folder)
    assert template.is_special(template.encode("<tool_call>")[0])
    reply = parse(template, '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>')
    assert calls(reply) == [("call-0", "add", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call>null</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        "<tool_call>" + "[" * 2000 + "</tool_call>",
    ],
)
def test_malformed_hermes_calls_stay_content_and_are_counted(chatml: ChatTemplate, text: str) -> None:
    reply = parse(chatml, f"so: {text}<|im_end|>")
    assert reply == Reply(Message("assistant", f"so: {text}"), 1)


def test_a_good_call_survives_a_bad_neighbour(chatml: ChatTemplate) -> None:
    bad = "<tool_call>{}</tool_call>"
    open_ended = '<tool_call>{"name": "x", "arguments": {}}'
    reply = parse(chatml, f'{open_ended}{bad}<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>')
    assert calls(reply) == [("call-0", "add", {})]
    assert reply.message.content == open_ended + bad
    assert reply.tool_calls_malformed == 2


def test_without_tools_nothing_is_a_call(templates: dict[str, ChatTemplate]) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(templates["chatml"], text, tools_given=False) == Reply(Message("assistant", text), 0)
    text = '{"name": "add", "parameters": {}}'
    assert parse(templates["llama3"], text, tools_given=False) == Reply(Message("assistant", text), 0)


def test_reasoning_is_split_off(templates: dict[str, ChatTemplate]) -> None:
    for name in ("thinking", "chatml"):
        reply = parse(templates[name], "<think>\nfirst\n\nthen\n</think>\n\n answer<|im_end|>")
        assert reply.message == Message("assistant", " answer", reasoning="first\n\nthen")
        assert parse(templates[name], "<think>cut").message == Message("assistant", reasoning="cut")
        assert parse(templates[name], "a <think>b</think>").message == Message("assistant", "a <think>b</think>")


def test_reasoning_that_the_prompt_opened(folders: dict[str, Path]) -> None:
    source = "{{ messages[-1].content + '<|im_end|>' }}{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    template = ChatTemplate.load(folders["thinking"], template=source)
    assert parse(template, "why</think>\nso").message == Message("assistant", "so", reasoning="why")
    assert parse(template, "why").message == Message("assistant", reasoning="why")


def test_a_call_inside_reasoning_is_a_thought(templates: dict[str, ChatTemplate]) -> None:
    reply = parse(templates["thinking"], '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>no')
    assert reply.message.tool_calls == ()
    assert reply.message.content == "no"


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama3_calls(templates: dict[str, ChatTemplate], tag: str) -> None:
    reply = parse(templates["llama3"], tag + '{"name": "add", "parameters": {"a": "x; y"}}<|eot_id|>')
    assert calls(reply) == [("call-0", "add", {"a": "x; y"})]
    assert reply.message.content == ""
    two = '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}'
    assert calls(parse(templates["llama3"], f"{tag}{two}<|eom_id|>")) == [("call-0", "f", {}), ("call-1", "g", {})]


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ('{"name": "add", "parameters": {"a": }}', 1),
        ('{"name": "add", "parameters": {}}; {"name": "add"', 1),
        ('<|python_tag|>search.call(query="x")', 1),
        ('{"name": "Bob", "age": 3}', 0),
        ('{"answer": 3}', 0),
        ("{not json", 0),
        ("the answer is 3", 0),
    ],
)
def test_llama3_text_that_is_no_call(templates: dict[str, ChatTemplate], text: str, malformed: int) -> None:
    assert parse(templates["llama3"], text) == Reply(Message("assistant", text), malformed)


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"add"', ',"arguments":{}}', "{", "}", "é", "\n"]
)


@given(texts=st.lists(pieces | st.text(max_size=3), max_size=12), tools_given=st.booleans())
def test_nothing_a_model_writes_raises(templates: dict[str, ChatTemplate], texts: list[str], tools_given: bool) -> None:
    for name in ("chatml", "thinking", "llama3"):
        reply = parse(templates[name], "".join(texts), tools_given=tools_given)
        names = [call.id for call in reply.message.tool_calls]
        assert len(set(names)) == len(names)
        assert tools_given or not names


@given(token_ids=st.lists(st.integers(0, 260), max_size=20))
def test_no_token_sequence_raises(chatml: ChatTemplate, token_ids: list[int]) -> None:
    parse_reply(chatml, token_ids, tools_given=True, new_id=ids())
