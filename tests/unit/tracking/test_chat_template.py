"""Rendering and encoding agree with transformers; loading says what is wrong with a folder."""

# ruff: noqa: RUF001 (marks are spelled as models spell them)
from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from wingbeat.core.errors import ModelSourceError, RequestError, SetupError
from wingbeat.tracking import ChatTemplate, Message, ToolCall, ToolFormat, parse_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 3, "a": "é<&>"}'}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a < b & 'é'", "parameters": {"type": "object", "properties": {}}},
    }
]
CHAT = [
    {"role": "user", "content": "hello wörld <&> 'x'"},
    {"role": "assistant", "content": " hello\n"},
    {"role": "user", "content": "again"},
]
TOOL_CHAT = [
    {"role": "system", "content": "be  brief "},
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": "it is 4", "reasoning_content": "four"},
    {"role": "user", "content": "sure?"},
]
CASES = [("chatml", CHAT), ("chatml", TOOL_CHAT), ("thinking", CHAT), ("thinking", TOOL_CHAT)]
CASES += [("llama3", CHAT), ("llama3", TOOL_CHAT), ("gemma", CHAT), ("gemma3", CHAT), ("mistral", CHAT)]
CASES += [(name, chat) for name in ("qwen25", "qwen3", "deepseek", "gptoss") for chat in (CHAT, TOOL_CHAT)]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "closed"])
@pytest.mark.parametrize(("name", "chat"), CASES)
def test_text_and_tokens_equal_those_of_transformers(
    folders: dict[str, Path], name: str, chat: list[dict[str, object]], prompt: bool, tools: list[dict[str, object]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(folders[name])
    template = ChatTemplate.load(folders[name])
    messages = parse_messages(chat)
    text = template.render(messages, tools=tools, add_generation_prompt=prompt)
    plain = template.traits.form.spell(messages)
    assert text == reference.apply_chat_template(plain, tools=tools, add_generation_prompt=prompt, tokenize=False)
    tokens = reference(text, add_special_tokens=False)["input_ids"]
    assert template.encode(text) == tokens
    assert template.encode_prompt(text) == tokens  # the templates with a BOS write it themselves
    assert template.decode(tokens) == text


def test_what_templates_declare_is_found(templates: dict[str, ChatTemplate]) -> None:
    found = {name: (t.eot_text, t.tool_format, t.opens_reasoning) for name, t in templates.items()}
    assert found == {
        "chatml": ("<|im_end|>", ToolFormat.HERMES, False),
        "thinking": ("<|im_end|>", ToolFormat.HERMES, False),
        "qwen25": ("<|im_end|>", ToolFormat.HERMES, False),
        "qwen3": ("<|im_end|>", ToolFormat.HERMES, False),
        "llama3": ("<|eot_id|>", ToolFormat.LLAMA3, False),
        "gemma": ("<end_of_turn>", ToolFormat.HERMES, False),
        "gemma3": ("<end_of_turn>", ToolFormat.HERMES, False),
        "mistral": ("</s>", ToolFormat.MISTRAL, False),
        "deepseek": ("<｜end▁of▁sentence｜>", ToolFormat.DEEPSEEK, False),
        "gptoss": ("<|return|>", ToolFormat.HARMONY, False),
    }
    stops = {name: [t.decode([token]) for token in t.eos_token_ids] for name, t in templates.items()}
    assert stops == {
        "chatml": ["<|im_end|>"],
        "thinking": ["<|endoftext|>", "<|im_end|>"],
        "llama3": ["<|eot_id|>", "<|eom_id|>"],
        "gemma": ["<eos>", "<end_of_turn>"],
        "gemma3": ["<eos>", "<end_of_turn>"],
        "qwen25": ["<|im_end|>"],
        "qwen3": ["<|im_end|>"],
        "mistral": ["</s>"],
        "deepseek": ["<｜end▁of▁sentence｜>"],
        "gptoss": ["<|return|>", "<|call|>"],
    }


def test_added_tokens_count_as_vocabulary(chatml: ChatTemplate) -> None:
    assert chatml.decode([chatml.num_tokens - 1]) == "</tool_response>"
    assert chatml.decode([chatml.num_tokens]) == ""


def test_a_prompt_that_already_opens_reasoning_is_noticed(folders: dict[str, Path]) -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
    )
    assert ChatTemplate.load(folders["chatml"], template=source).opens_reasoning


def test_tool_call_arguments_reach_the_template_as_objects(chatml: ChatTemplate) -> None:
    call = ToolCall.of("c", name="add", arguments='{"a":   1}')
    text = chatml.render([Message("assistant", tool_calls=(call,))], add_generation_prompt=False)
    assert '{"name": "add", "arguments": {"a": 1}}' in text
    broken = ToolCall.of("c", name="add", arguments='{"a": ')
    text = chatml.render([Message("assistant", tool_calls=(broken,))], add_generation_prompt=False)
    assert '"arguments": "{\\"a\\": "' in text


def test_the_clock_is_the_callers(folders: dict[str, Path]) -> None:
    template = ChatTemplate.load(folders["llama3"], now=lambda: datetime(2001, 2, 3))
    assert "Today: 03 Feb 2001" in template.render([Message("user", "x")], add_generation_prompt=True)


def test_a_refusing_template_is_a_request_error(templates: dict[str, ChatTemplate]) -> None:
    with pytest.raises(RequestError, match="System role not supported") as caught:
        templates["gemma"].render([Message("system", "x")], add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_bos_is_added_once_and_only_to_fresh_prompts(
    folders: dict[str, Path], templates: dict[str, ChatTemplate]
) -> None:
    llama = templates["llama3"]
    bos = llama.encode("<|begin_of_text|>")
    assert len(bos) == 1
    assert llama.encode_prompt("hello") == bos + llama.encode("hello")
    assert llama.encode_prompt("<|begin_of_text|>hello") == bos + llama.encode("hello")
    assert llama.encode("hello")[0] != bos[0]
    assert templates["chatml"].encode_prompt("hello") == templates["chatml"].encode("hello")
    assert llama.encode_prompt("") == bos


def test_an_explicit_setting_decides_about_bos(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "llama3", template="{{ messages[-1].content }}<|eot_id|>", add_bos_token=False)
    template = ChatTemplate.load(folder)
    assert template.encode_prompt("hello") == template.encode("hello")


def test_special_tokens_can_be_left_out_of_text(chatml: ChatTemplate) -> None:
    ids = chatml.encode("<|im_start|>a<tool_call><|im_end|>")
    assert chatml.decode(ids) == "<|im_start|>a<tool_call><|im_end|>"
    assert chatml.decode(ids, skip_special=True) == "a<tool_call>"
    assert chatml.decode(chatml.drop_special(ids, keep=frozenset(["<|im_end|>"]))) == "a<tool_call><|im_end|>"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, make_folder) -> None:
    from tokenizers import Tokenizer

    folder = make_folder(tmp_path, "chatml", template="{{ messages[-1].content }}<|im_end|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(ChatTemplate.load(folder).encode("x y z x y z")) == 11


def test_a_folder_without_template_says_what_to_set(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "chatml")
    with pytest.raises(SetupError, match=r"policies\.NAME\.chat_template"):
        ChatTemplate.load(folder)
    given = ChatTemplate.load(folder, template="{{ messages[-1].content }}<|im_end|>")
    assert given.render([Message("user", "x")], add_generation_prompt=True) == "x<|im_end|>"


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_template_files_are_read(tmp_path: Path, make_folder, name: str) -> None:
    source = "{{ messages[-1].content }}!<|im_end|>"
    folder = make_folder(tmp_path, "chatml")
    (folder / name).write_text(source if name.endswith("jinja") else json.dumps({"chat_template": source}))
    assert ChatTemplate.load(folder).render([Message("user", "x")], add_generation_prompt=True) == "x!<|im_end|>"


def test_the_jinja_file_goes_before_the_configuration(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "chatml", template="old{{ messages[-1].content }}<|im_end|>")
    (folder / "chat_template.jinja").write_text("new{{ messages[-1].content }}<|im_end|>")
    assert ChatTemplate.load(folder).render([Message("user", "x")], add_generation_prompt=True) == "newx<|im_end|>"


def test_requests_with_tools_use_the_template_for_tools(tmp_path: Path, make_folder) -> None:
    named = [
        {"name": "default", "template": "plain {{ messages[-1].content }}<|im_end|>"},
        {"name": "tool_use", "template": "tools {{ messages[-1].content }}<|im_end|>"},
        {"name": "rag", "template": "{% broken"},
    ]
    template = ChatTemplate.load(make_folder(tmp_path, "chatml", template=named))
    messages = [Message("user", "x")]
    assert template.render(messages, add_generation_prompt=True).startswith("plain")
    assert template.render(messages, tools=[], add_generation_prompt=True).startswith("plain")
    assert template.render(messages, tools=TOOLS, add_generation_prompt=True).startswith("tools")


def test_stop_ids_come_from_all_files_but_only_if_they_are_added_tokens(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "llama3", template="{{ messages[-1].content }}<|eot_id|>", eos_token="<|eot_id|>")
    end_of_text = ChatTemplate.load(folder).encode("<|end_of_text|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*end_of_text, 2]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    template = ChatTemplate.load(folder)
    assert {template.decode([t]) for t in template.eos_token_ids} == {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}
    assert template.eot_text == "<|eot_id|>"


def test_a_marker_that_nothing_declares_is_found_in_the_template(tmp_path: Path, make_folder) -> None:
    source = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    template = ChatTemplate.load(make_folder(tmp_path, "thinking", template=source, eos_token="<|im_end|>"))
    assert template.eot_text == "<|endoftext|>"
    assert [template.decode([token]) for token in template.eos_token_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert len(template.turn_end_ids) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", "no valid tokenizer"),
        ("tokenizer_config.json", "{", "no valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<nope>", "chat_template": "x"}', "<nope>"),
        ("chat_template.jinja", "{% if %}", "no valid Jinja"),
        ("chat_template.jinja", "no content", "prints no assistant content"),
        ("chat_template.jinja", "{{ raise_exception('never') }}", "never"),
    ],
)
def test_broken_folders_are_setup_errors(tmp_path: Path, make_folder, name: str, text: str, message: str) -> None:
    folder = make_folder(tmp_path, "chatml", template="{{ messages[-1].content }}<|im_end|>")
    (folder / name).write_text(text)
    with pytest.raises(SetupError, match=message):
        ChatTemplate.load(folder)


def test_a_missing_tokenizer_is_a_model_source_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json"):
        ChatTemplate.load(tmp_path)


def test_a_model_that_never_stops_is_refused(tmp_path: Path, make_folder) -> None:
    folder = make_folder(tmp_path, "gemma", template="{{ messages[-1].content }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}"}))
    text = (folder / "tokenizer.json").read_text().replace("<end_of_turn>", "<something>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(SetupError, match="never stop"):
        ChatTemplate.load(folder)


def test_control_stays_light() -> None:
    import subprocess
    import sys

    code = "import sys, wingbeat.tracking; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SHOW = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("tools[0].function.name", "add"),
        ("tools[0].text", ""),
        ("tools[0]._texts", ""),
        ("tools[0].items() | list | length", "2"),
        ("tools[0].function.parameters | tojson(sort_keys=true)", '{"properties": {}, "type": "object"}'),
        ("tools[0].function.parameters | tojson(indent=1)", '{\n "type": "object",\n "properties": {}\n}'),
        ("tools | length", "1"),
        ("messages[0].items is callable", "True"),
        ("messages[0].nothing is defined", "False"),
        ("messages[0].__class__ is defined", "False"),
        ("namespace(a=1).a", "1"),
        ("namespace(a=1).b is defined", "False"),
        ("namespace(a=1).__class__ is defined", "False"),
    ],
)
def test_fields_are_read_as_jinja_does(folders: dict[str, Path], expression: str, shown: str) -> None:
    """The short ways to fields and to remembered JSON show nothing else, and nothing inside."""
    template = ChatTemplate.load(folders["chatml"], template=f"{SHOW}{{{{ ({expression}) if tools else '' }}}}")
    for _ in range(2):
        text = template.render([Message("user", "x")], tools=TOOLS, add_generation_prompt=True)
        assert text == f"user:x<|im_end|>{shown}"


@pytest.mark.parametrize("expression", ["messages[0].update({'a': 1})", "tools[0].clear()", "loop.__init__()"])
def test_templates_change_nothing(folders: dict[str, Path], expression: str) -> None:
    source = f"{SHOW}{{% for m in messages %}}{{{{ {expression} if tools else '' }}}}{{% endfor %}}"
    template = ChatTemplate.load(folders["chatml"], template=source)
    with pytest.raises(RequestError, match="refuses this conversation"):
        template.render([Message("user", "x")], tools=TOOLS, add_generation_prompt=True)
    assert TOOLS[0]["function"]
