"""Every family of templates in use: what extends exactly, what forks and why, and how replies are read.

The templates in ``templates/`` are our own spelling of the public formats, quirks included.
"""

# ruff: noqa: RUF001 (marks are spelled as models spell them)
from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError
from wingbeat.tracking import (
    ChatTemplate,
    EpisodeGraph,
    Message,
    ToolCall,
    ToolFormat,
    Turn,
    parse_messages,
    parse_reply,
)

Say = Callable[..., Turn]

FAMILIES = ["chatml", "qwen25", "qwen3", "llama3", "gemma3", "mistral", "deepseek", "gptoss"]
WITH_TOOLS = [name for name in FAMILIES if name != "gemma3"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ARGUMENTS = '{"b":3,  "a": 2, "note":"é"}'
"""Spelled as no template and no client would."""


def write(name: str, template: ChatTemplate, content: str = "", *, call: str = "", thought: str = "") -> str:
    """What a model of this family samples, end of turn included."""
    if template.tool_format is ToolFormat.HARMONY:
        start = "<|start|>assistant"
        parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
        if content and call:
            parts.append(f"<|channel|>commentary<|message|>{content}<|end|>")
        if call:
            parts.append(f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{call}<|call|>")
        else:
            parts.append(f"<|channel|>final<|message|>{content}<|return|>")
        return start.join(parts)
    if template.tool_format is ToolFormat.MISTRAL:
        head = f"[THINK]{thought}[/THINK]" if thought else ""
        calls = f'[TOOL_CALLS] [{{"name": "add", "arguments": {call}}}]' if call else ""
    elif template.tool_format is ToolFormat.DEEPSEEK:
        head = f"<think>{thought}</think>" if thought else ""
        block = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{call}\n```<｜tool▁call▁end｜>"
        calls = f"<｜tool▁calls▁begin｜>{block}<｜tool▁calls▁end｜>" if call else ""
    else:
        head = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        calls = f'<tool_call>\n{{"name": "add", "arguments": {call}}}\n</tool_call>' if call else ""
        if template.tool_format is ToolFormat.LLAMA3 and call:
            calls = f'{{"name": "add", "parameters": {call}}}'
    return f"{head}{content}{calls}{template.eot_text}"


def fresh(template: ChatTemplate, messages: Any, tools: Any = None) -> list[int]:
    return template.encode_prompt(template.render(messages, tools=tools, add_generation_prompt=True))


def resolve(graph: EpisodeGraph, template: ChatTemplate, messages: Any, tools: Any = None) -> Any:
    return graph.resolve(policy="solver", agent="", messages=messages, tools=tools, template=template)


def result_of(turn: Turn, text: str = "5") -> Message:
    return Message("tool", text, tool_call_id=turn.reply.tool_calls[0].id)


# --- reading replies --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_is_read_as_it_was_meant(templates: dict[str, ChatTemplate], name: str) -> None:
    template = templates[name]
    numbers = itertools.count()

    def read(text: str) -> Message:
        reply = parse_reply(
            template, template.encode(text), tools_given=name != "gemma3", new_id=lambda: f"c{next(numbers)}"
        )
        assert reply.tool_calls_malformed == 0
        return reply.message

    assert read(write(name, template, "hello é")) == Message("assistant", "hello é")
    assert read(write(name, template, "so", thought="why\nthen")) == Message("assistant", "so", reasoning="why\nthen")
    if name == "gemma3":
        return
    call = ToolCall.of("c0", name="add", arguments=ARGUMENTS)
    assert read(write(name, template, call=ARGUMENTS)) == Message("assistant", tool_calls=(call,))
    call = ToolCall.of("c1", name="add", arguments="{}")
    assert read(write(name, template, call="{}", thought="t")) == Message(
        "assistant", reasoning="t", tool_calls=(call,)
    )
    if name != "llama3":
        call = ToolCall.of("c2", name="add", arguments="{}")
        assert read(write(name, template, "sum", call="{}")) == Message("assistant", "sum", tool_calls=(call,))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_half_a_call_stays_content_and_is_counted(templates: dict[str, ChatTemplate], name: str) -> None:
    template = templates[name]
    whole = write(name, template, call='{"a": 1}')
    cut = whole[: whole.index("1")]
    reply = parse_reply(template, template.encode(cut), tools_given=True, new_id=lambda: "c")
    assert reply.message.tool_calls == ()
    assert reply.tool_calls_malformed == 1
    assert '"a": ' in reply.message.content
    silent = parse_reply(template, template.encode(whole), tools_given=False, new_id=lambda: "c")
    assert (silent.message.tool_calls, silent.tool_calls_malformed) == ((), 0)


MARKS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "add",
        '{"a": 1}',
        '[{"name": "f"',
        "}",
        "```json",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "[THINK]",
        "function",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final", "commentary", "assistant"),
    *(" to=functions.add", "<|constrain|>json", "\n", "é", "; ", '{"name": "f", "parameters": {}}'),
]


@given(texts=st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=14), tools_given=st.booleans())
def test_nothing_a_model_of_any_family_writes_raises(
    templates: dict[str, ChatTemplate], texts: list[str], tools_given: bool
) -> None:
    for name in FAMILIES:
        numbers = itertools.count()
        ids = templates[name].encode("".join(texts))
        reply = parse_reply(templates[name], ids, tools_given=tools_given, new_id=lambda n=numbers: f"c{next(n)}")
        assert tools_given or not reply.message.tool_calls


def test_mistral_calls_with_names_before_arguments(templates: dict[str, ChatTemplate]) -> None:
    text = 'so[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}</s>'
    numbers = itertools.count()
    reply = parse_reply(
        templates["mistral"],
        templates["mistral"].encode(text),
        tools_given=True,
        new_id=lambda: f"c{next(numbers)}",
    )
    assert reply.message.content == "so"
    assert [(call.name, call.arguments) for call in reply.message.tool_calls] == [("add", {"a": 1}), ("sub", {})]


def test_deepseek_calls_with_bare_json(templates: dict[str, ChatTemplate]) -> None:
    call = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>"
    numbers = itertools.count()
    template = templates["deepseek"]
    reply = parse_reply(template, template.encode(text), tools_given=True, new_id=lambda: f"c{next(numbers)}")
    assert [(call.id, call.name, call.arguments) for call in reply.message.tool_calls] == [
        ("c0", "add", {"a": 1}),
        ("c1", "add", {"a": 1}),
    ]


def test_harmony_messages_that_never_began(templates: dict[str, ChatTemplate]) -> None:
    template = templates["gptoss"]

    def read(text: str) -> Message:
        return parse_reply(template, template.encode(text), tools_given=True, new_id=lambda: "c").message

    assert read("plain words<|return|>") == Message("assistant", "plain words")
    assert read("<|channel|>final") == Message("assistant")
    thinking = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    assert read(thinking) == Message("assistant", reasoning="why")
    assert read(f"{thinking}<|channel|>final<|message|>cut") == Message("assistant", "cut", reasoning="why")


def test_harmony_calls_in_any_channel(templates: dict[str, ChatTemplate]) -> None:
    template = templates["gptoss"]
    for header in (
        "<|channel|>analysis to=functions.add <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
        " to=functions.add<|channel|>commentary",
    ):
        text = f'{header}<|message|>{{"a": 1}}<|call|>'
        reply = parse_reply(template, template.encode(text), tools_given=True, new_id=lambda: "c")
        assert reply.message == Message("assistant", tool_calls=(ToolCall.of("c", name="add", arguments='{"a": 1}'),))


# --- what extends, what forks -----------------------------------------------------------------

EXTENDS = {
    # a next question | a tool's result | a question after tools | a question, a result after a thought
    "chatml": (True, True, True, True, True),
    "qwen25": (True, True, True, True, True),
    "qwen3": (True, True, True, False, True),
    "llama3": (True, True, True, True, True),
    "mistral": (True, True, False, True, True),
    "deepseek": (True, True, True, True, True),
    "gptoss": (True, True, True, False, True),
}
"""Qwen 3 and gpt-oss cut old thoughts; Mistral moves the tools to the newest question."""


@pytest.mark.parametrize("name", list(EXTENDS))
def test_what_extends_and_what_the_template_rewrites(templates: dict[str, ChatTemplate], say: Say, name: str) -> None:
    template = templates[name]
    question = Message("user", "hello")

    def extends(graph: EpisodeGraph, turn: Turn, news: Message, tools: Any) -> bool:
        messages = (*turn.messages, news)
        plan = resolve(graph, template, messages, tools)
        if plan.parent is None:
            assert plan.fork_reason.startswith("template rewrites history at character ")
            assert plan.prompt_ids.tolist() == fresh(template, messages, tools)
            return False
        head = graph.full_ids(turn).tolist()
        assert plan.parent is turn
        assert plan.fork_reason == ""
        assert plan.prompt_ids.tolist()[: len(head)] == head
        text = template.render(messages, tools=tools, add_generation_prompt=True)
        assert text.endswith(template.decode(plan.segment.tolist()))
        return True

    plain = EpisodeGraph("plain")
    first = say(plain, template, [question], write(name, template, "so"))
    tools = EpisodeGraph("tools")
    called = say(tools, template, [question], write(name, template, call=ARGUMENTS), tools=TOOLS)
    got = extends(tools, called, result_of(called), TOOLS)
    answered = say(tools, template, [*called.messages, result_of(called)], write(name, template, "5"), tools=TOOLS)
    thoughts = EpisodeGraph("thoughts")
    thought = say(thoughts, template, [question], write(name, template, "so", thought="why"))
    deep = EpisodeGraph("deep")
    deeper = say(deep, template, [question], write(name, template, call=ARGUMENTS, thought="why"), tools=TOOLS)
    assert (
        extends(plain, first, Message("user", "next"), None),
        got,
        extends(tools, answered, Message("user", "next"), TOOLS),
        extends(thoughts, thought, Message("user", "next"), None),
        extends(deep, deeper, result_of(deeper), TOOLS),
    ) == EXTENDS[name]


def test_gemma_alternates_and_merges_the_system_message(templates: dict[str, ChatTemplate], say: Say) -> None:
    gemma = templates["gemma3"]
    graph = EpisodeGraph("e")
    first = say(graph, gemma, [Message("system", "be brief"), Message("user", "hello")], "so<end_of_turn>")
    plan = resolve(graph, gemma, [*first.messages, Message("user", "next")])
    assert plan.parent is first
    assert gemma.decode(plan.prompt_ids.tolist()) == (
        "<bos><start_of_turn>user\nbe brief\n\nhello<end_of_turn>\n<start_of_turn>model\nso<end_of_turn>\n"
        "<start_of_turn>user\nnext<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(RequestError, match="must alternate"):
        resolve(graph, gemma, [Message("user", "a"), Message("user", "b")])


def test_qwen3_with_thinking_switched_off(folders: dict[str, Path], say: Say) -> None:
    """The prompt then ends with an empty thought, which the template leaves out of every later history."""
    source = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
    template = ChatTemplate.load(folders["qwen3"], template="{%- set enable_thinking = false %}" + source)
    assert not template.opens_reasoning
    graph = EpisodeGraph("e")
    first = say(graph, template, [Message("user", "hello")], "so<|im_end|>")
    assert template.decode(graph.prompt_ids(first).tolist()).endswith("assistant\n<think>\n\n</think>\n\n")
    plan = resolve(graph, template, [*first.messages, Message("user", "next")])
    assert plan.parent is None
    assert plan.fork_reason.startswith("template rewrites history at character ")
    assert "<think>" in plan.fork_reason


def test_a_loaded_graph_extends_what_the_template_only_decorates(templates: dict[str, ChatTemplate], say: Say) -> None:
    """Qwen 3 gives an empty thought to whatever reply comes last; after a restart the prompt is rendered again."""
    from wingbeat.tracking import dump_graph, load_graph

    qwen3 = templates["qwen3"]
    graph = EpisodeGraph("e")
    first = say(graph, qwen3, [Message("user", "hello")], write("qwen3", qwen3, "so", call=ARGUMENTS), tools=TOOLS)
    loaded = load_graph(dump_graph(graph))
    messages = [*first.messages, result_of(first)]
    one, two = (resolve(each, qwen3, messages, TOOLS) for each in (graph, loaded))
    assert (one.parent.turn_id, two.parent.turn_id) == (first.turn_id, first.turn_id)
    assert one.prompt_ids.tolist() == two.prompt_ids.tolist()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_marks_inside_arguments_end_no_turn(templates: dict[str, ChatTemplate], say: Say, name: str) -> None:
    """A model may write an end-of-turn mark as data; the remainder still begins behind the real one."""
    template = templates[name]
    graph = EpisodeGraph("e")
    body = json.dumps({"a": f"x{template.eot_text}ZZ"}, ensure_ascii=True).replace("<", "\\u003c")
    turn = say(graph, template, [Message("user", "hello")], write(name, template, call=body), tools=TOOLS)
    assert turn.reply.tool_calls[0].arguments == {"a": f"x{template.eot_text}ZZ"}
    plan = resolve(graph, template, [*turn.messages, result_of(turn)], TOOLS)
    assert plan.parent is turn
    rest = template.decode(plan.segment.tolist())
    assert "ZZ" not in rest
    assert "5" in rest


# --- forms ------------------------------------------------------------------------------------


def test_templates_that_paste_arguments_get_them_as_text(templates: dict[str, ChatTemplate]) -> None:
    call = ToolCall.of("c", name="add", arguments=ARGUMENTS)
    forms = {name: template.traits.form.arguments_as_text for name, template in templates.items()}
    assert [name for name, as_text in forms.items() if as_text] == ["deepseek"]
    messages = [Message("user", "x"), Message("assistant", tool_calls=(call,))]
    text = templates["deepseek"].render(messages, add_generation_prompt=False)
    assert f"```json\n{ARGUMENTS}\n```" in text


def test_templates_that_check_ids_get_short_ones(templates: dict[str, ChatTemplate]) -> None:
    mistral = templates["mistral"]
    assert mistral.traits.form.short_ids
    call = ToolCall.of("call_0123456789", name="add", arguments="{}")
    messages = [
        Message("user", "x"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", "5", tool_call_id=call.id),
    ]
    spelled = mistral.traits.form.spell(messages)
    short = spelled[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert (spelled[2]["tool_call_id"], spelled[2]["name"]) == (short, "add")
    assert mistral.traits.form.spell(messages) == spelled
    kept = ToolCall.of("AbC123xyZ", name="add", arguments="{}")
    assert mistral.traits.form.spell([Message("assistant", tool_calls=(kept,))])[0]["tool_calls"][0]["id"] == kept.id


def test_templates_that_take_calls_only_without_content(folders: dict[str, Path]) -> None:
    source = (
        "{% for m in messages %}{% if m.content is not none %}{{ m.role + ':' + m.content }}{% else %}"
        "{% for c in m.tool_calls %}{{ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}{% endif %}"
        "<|im_end|>{% endfor %}"
    )
    template = ChatTemplate.load(folders["chatml"], template=source)
    assert template.traits.form.empty_content is None
    call = ToolCall.of("c", name="add", arguments='{"a": 1}')
    text = template.render([Message("assistant", tool_calls=(call,))], add_generation_prompt=False)
    assert text == 'add{"a": 1}<|im_end|>'


PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
NO_SYSTEM = PLAIN.replace("{{", "{% if m.role != 'system' %}{{").replace("}}", "}}{% endif %}")
FIRST_SYSTEM = PLAIN.replace("{{", "{% if m.role != 'system' or loop.first %}{{").replace("}}", "}}{% endif %}")
NO_RESULTS = PLAIN.replace("{{", "{% if m.role != 'tool' %}{{").replace("}}", "}}{{ m.tool_calls }}{% endif %}")
CALL = ToolCall.of("c1", name="add", arguments="{}")
USER = Message("user", "x")


@pytest.mark.parametrize(
    ("source", "messages", "tools", "param"),
    [
        (PLAIN, [USER], TOOLS, "tools"),
        (NO_SYSTEM, [Message("system", "x"), USER], None, "messages[0].role"),
        (FIRST_SYSTEM, [USER, Message("assistant", "y"), Message("system", "x"), USER], None, "messages[2].role"),
        (PLAIN, [USER, Message("assistant", "", tool_calls=(CALL,))], None, "messages[1].tool_calls"),
        (
            NO_RESULTS,
            [USER, Message("assistant", tool_calls=(CALL,)), Message("tool", "y", tool_call_id="c1")],
            None,
            "messages[2].role",
        ),
    ],
    ids=["tools", "system", "later system", "calls", "results"],
)
def test_what_a_template_leaves_out_is_refused_by_name(
    folders: dict[str, Path], source: str, messages: list[Message], tools: Any, param: str
) -> None:
    template = ChatTemplate.load(folders["chatml"], template=source)
    with pytest.raises(RequestError, match="chat template of this policy") as caught:
        resolve(EpisodeGraph("e"), template, messages, tools)
    assert caught.value.param == param
    assert param in caught.value.message or param == "tools"


def test_what_a_template_refuses_is_refused_with_its_words(templates: dict[str, ChatTemplate]) -> None:
    two = Message("assistant", tool_calls=(CALL, ToolCall.of("c2", name="add", arguments="{}")))
    with pytest.raises(RequestError, match="only supports single tool-calls") as caught:
        resolve(EpisodeGraph("e"), templates["llama3"], [USER, two])
    assert caught.value.param == "messages[1].tool_calls"
    with pytest.raises(RequestError, match="several calls in one message"):
        resolve(EpisodeGraph("e"), templates["gptoss"], [USER, two])
    with pytest.raises(RequestError, match="System role not supported"):
        resolve(EpisodeGraph("e"), templates["gemma"], [Message("system", "x"), USER])
    with pytest.raises(RequestError, match="does not show tools"):
        resolve(EpisodeGraph("e"), templates["gemma3"], [USER], TOOLS)


# --- random conversations ---------------------------------------------------------------------

words = st.text(alphabet="helowas ?é", min_size=1, max_size=6).filter(lambda text: text == text.strip())
steps = st.lists(st.tuples(st.sampled_from(["answer", "call"]), words, st.booleans()), min_size=1, max_size=5)


def resend(turn: Turn, *, change: str) -> list[dict[str, Any]]:
    """The conversation as a client sends it back, respelled but with the same meaning."""
    messages: list[dict[str, Any]] = []
    for message in turn.messages:
        data = message.to_template_dict()
        data.pop("thinking", None)
        if change == "drops reasoning":
            data.pop("reasoning_content", None)
        if "tool_calls" in data:
            for index, call in enumerate(data["tool_calls"]):
                indent = 1 if change == "dumps arguments" else None
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], indent=indent)
                call["index"] = index
            if change == "nulls" and not data["content"]:
                data["content"] = None
        if change == "parts" and message.role == "user":
            data["content"] = [{"type": "text", "text": message.content}]
        messages.append(data)
    return messages


@given(data=st.data(), name=st.sampled_from(FAMILIES), script=steps)
def test_a_conversation_extends_exactly_or_forks_with_a_reason(
    templates: dict[str, ChatTemplate], say: Say, data: st.DataObject, name: str, script: list[tuple[str, str, bool]]
) -> None:
    """Random conversations per family, resent by clients of every kind: no sampled token is ever lost or changed."""
    template = templates[name]
    tools = TOOLS if name in WITH_TOOLS and data.draw(st.booleans()) else None
    graph = EpisodeGraph("e")
    history: list[dict[str, Any]] = [{"role": "user", "content": data.draw(words)}]
    previous: Turn | None = None
    for kind, text, thinks in script:
        messages = parse_messages(history)
        plan = resolve(graph, template, messages, tools)
        if plan.parent is None:
            assert previous is None or plan.fork_reason
            assert plan.prompt_ids.tolist() == fresh(template, plan.messages, tools)
        else:
            assert previous is not None
            assert plan.parent is previous
            head = graph.full_ids(previous).tolist()
            assert plan.prompt_ids.tolist() == head + plan.segment.tolist()
            rest = template.decode(plan.segment.tolist())
            assert template.render(plan.messages, tools=tools, add_generation_prompt=True).endswith(rest)
        calls = kind == "call" and tools is not None
        content = "" if calls and name == "llama3" else text
        thought = text[::-1] if thinks else ""
        sampled = write(name, template, content, call=ARGUMENTS if calls else "", thought=thought)
        turn = say(graph, template, messages, sampled, tools=tools)
        assert template.decode(turn.sampled.tolist()) == sampled
        assert bool(turn.reply.tool_calls) == calls
        history = resend(turn, change=data.draw(st.sampled_from(["", "drops reasoning", "dumps arguments", "nulls"])))
        if calls:
            history.append({"role": "tool", "tool_call_id": turn.reply.tool_calls[0].id, "content": data.draw(words)})
        else:
            history.append({"role": "user", "content": data.draw(words)})
        previous = turn


@given(name=st.sampled_from(["chatml", "qwen25", "qwen3", "deepseek", "gptoss", "llama3"]), script=steps)
def test_without_thoughts_every_conversation_is_one_timeline(
    templates: dict[str, ChatTemplate], say: Say, name: str, script: list[tuple[str, str, bool]]
) -> None:
    """Round trip of tool calls: however spelled, the sampled ids of all turns stand in the last prompt."""
    template = templates[name]
    graph = EpisodeGraph("e")
    messages: tuple[Message, ...] = (USER,)
    for kind, text, _ in script:
        sampled = write(name, template, "" if kind == "call" else text, call=ARGUMENTS if kind == "call" else "")
        turn = say(graph, template, messages, sampled, tools=TOOLS)
        news = result_of(turn, text) if kind == "call" else Message("user", text)
        messages = (*parse_messages(resend(turn, change="dumps arguments")), news)
    assert [turn.parent_id for turn in graph.turns] == [None, *[turn.turn_id for turn in graph.turns[:-1]]]
    assert all(turn.fork_reason == "" for turn in graph.turns)
