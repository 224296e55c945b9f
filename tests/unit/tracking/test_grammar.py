"""Whatever a model samples under a grammar parses into what was demanded, in every family's way of writing."""

# ruff: noqa: RUF001 (marks are spelled as models spell them)
from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from wingbeat.core.errors import InvalidToolSchema, RequestError
from wingbeat.tracking import ChatTemplate, Message, Reply, ToolCall, ToolFormat, parse_reply
from wingbeat.tracking.grammar import build_grammar, grammar_fault
from wingbeat.tracking.grammar_families import FAMILIES

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

NAMES = ["chatml", "thinking", "qwen25", "qwen3", "llama3", "mistral", "deepseek", "gptoss", "gemma"]
LIMIT = 300
"""Tokens after which a reply is cut off."""
END = "<|test: the end|>"

MARKS = ["<tool_response>", "<|im_start|>", "[INST]", "<｜User｜>", "<|endoftext|>", "<|start_header_id|>"]
"""Texts that are tokens of their own in some family; inside JSON they are spelled by others."""

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 5},
                    "spot": {"$ref": "#/$defs/spot"},
                },
                "required": ["city", "spot"],
                "additionalProperties": False,
            },
            "exact": {"type": "boolean"},
        },
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {
            "spot": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "number", "minimum": -9, "maximum": 9}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    "choices": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["naïve", "雪", 'a "quoted" \\ slash/', 7, None, True]},
            "unit": {"const": "°C"},
            "either": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
        },
        "required": ["kind", "unit", "either"],
        "additionalProperties": False,
    },
    "lists": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
            "pairs": {
                "type": "array",
                "items": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["ж", "}"]}], "items": False},
                "maxItems": 2,
            },
        },
        "required": ["words", "pairs"],
        "additionalProperties": False,
    },
    "odd keys": {
        "type": "object",
        "properties": {'clé "é"\\': {"type": "integer", "minimum": 0, "maximum": 9}, "\n": {"enum": MARKS}},
        "required": ['clé "é"\\'],
        "additionalProperties": False,
    },
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tool(name: str, parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


@dataclass(frozen=True)
class Sampler:
    """A model that knows nothing: each token that a grammar allows is as likely as any other, ends a bit more."""

    tokenizer: Tokenizer
    index: LLTokenizer
    stops: tuple[int, ...]
    ends: bytes
    """Bits of the tokens that end a text."""

    @classmethod
    def load(cls, folder: Path, template: ChatTemplate) -> Sampler:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        index = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END))
        ends = sum(1 << token for token in (*template.eos_token_ids, *index.eos_tokens))
        return cls(tokenizer, index, template.eos_token_ids, ends.to_bytes((index.vocab_size + 31) // 32 * 4, "little"))

    def replies(self, grammar: str, rng: np.random.Generator, *, count: int = 1, least: int = 0) -> Iterator[list[int]]:
        """So many, without those that were cut off; at least ``least`` must come to their end."""
        start = LLMatcher(self.index, grammar, log_level=0)
        ended = 0
        for _ in range(count):
            token_ids, complete = self._sample(start.deep_copy(), rng)
            if complete:
                ended += 1
                yield token_ids
        assert ended >= least

    def _sample(self, matcher: LLMatcher, rng: np.random.Generator) -> tuple[list[int], bool]:
        """The reply's tokens, and whether it came to its end."""
        token_ids: list[int] = []
        while len(token_ids) < LIMIT:
            assert not matcher.is_error(), matcher.get_error()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8) & ~np.frombuffer(self.ends, np.uint8)
            ids = np.unpackbits(bits, bitorder="little").nonzero()[0]
            if matcher.is_accepting() and (not ids.size or matcher.is_stopped() or rng.random() < 0.5):
                return [*token_ids, self.stops[rng.integers(len(self.stops))]], True
            token_ids.append(int(ids[rng.integers(ids.size)]))
            assert matcher.consume_token(token_ids[-1])
        return token_ids, False

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a whole reply may read so."""
        matcher = LLMatcher(self.index, grammar, log_level=0)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def samplers(folders: dict[str, Path], templates: dict[str, ChatTemplate]) -> dict[str, Sampler]:
    return {name: Sampler.load(folders[name], templates[name]) for name in NAMES}


def read(template: ChatTemplate, token_ids: Sequence[int], *, tools_given: bool = True) -> Reply:
    numbers = itertools.count()
    return parse_reply(template, token_ids, tools_given=tools_given, new_id=lambda: f"call-{next(numbers)}")


def test_every_family_has_a_grammar() -> None:
    assert set(FAMILIES) == set(ToolFormat)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("one_call", [False, True])
def test_a_required_call_is_what_every_reply_parses_into(
    templates: dict[str, ChatTemplate], samplers: dict[str, Sampler], name: str, one_call: bool
) -> None:
    template, rng = templates[name], np.random.default_rng(1)
    schemas = {f"tool-{index}": schema for index, schema in enumerate(SCHEMAS.values())}
    tools = [tool(key, schema) for key, schema in schemas.items()]
    grammar = build_grammar(template, tools=tools, required=True, one_call=one_call)
    called = 0
    for token_ids in samplers[name].replies(grammar, rng, count=30, least=10):
        reply = read(template, token_ids)
        assert reply.tool_calls_malformed == 0 and reply.message.content == ""
        calls = reply.message.tool_calls
        assert len(calls) == 1 if one_call else calls
        for call in calls:
            jsonschema.Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments_text))
        called = max(called, len(calls))
    several = not one_call and not template.traits.refuses_parallel_calls and name != "gptoss"
    assert (called > 1) == several


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", list(SCHEMAS))
def test_a_named_tool_is_the_only_one_called(
    templates: dict[str, ChatTemplate], samplers: dict[str, Sampler], name: str, which: str
) -> None:
    template, rng = templates[name], np.random.default_rng(5)
    tools = [tool("other", SCHEMAS["nested"]), tool("wanted", SCHEMAS[which]), tool("wanted_too", SCHEMAS["lists"])]
    grammar = build_grammar(template, tools=tools, names=("wanted",), required=True)
    for token_ids in samplers[name].replies(grammar, rng, count=8, least=2):
        calls = read(template, token_ids).message.tool_calls
        assert {call.name for call in calls} == {"wanted"}
        for call in calls:
            jsonschema.Draft202012Validator(SCHEMAS[which]).validate(json.loads(call.arguments_text))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", list(SCHEMAS))
def test_content_matches_its_schema(
    templates: dict[str, ChatTemplate], samplers: dict[str, Sampler], name: str, which: str
) -> None:
    template, rng = templates[name], np.random.default_rng(3)
    grammar = build_grammar(template, tools=None, schema=SCHEMAS[which])
    for token_ids in samplers[name].replies(grammar, rng, count=10, least=2):
        content = read(template, token_ids, tools_given=False).message.content
        jsonschema.Draft202012Validator(SCHEMAS[which]).validate(json.loads(content))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(NAMES),
    enum=st.lists(st.text(max_size=6), min_size=1, max_size=4),
    key=st.text(min_size=1, max_size=6),
)
def test_any_text_in_a_schema_survives(
    templates: dict[str, ChatTemplate],
    samplers: dict[str, Sampler],
    seed: int,
    name: str,
    enum: list[str],
    key: str,
) -> None:
    schema = {"type": "object", "properties": {key: {"enum": enum}}, "required": [key], "additionalProperties": False}
    grammar = build_grammar(templates[name], tools=[tool("f", schema)], required=True, one_call=True)
    for token_ids in samplers[name].replies(grammar, np.random.default_rng(seed)):
        (call,) = read(templates[name], token_ids).message.tool_calls
        jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments_text))


CALL = '{"name": "f", "arguments": {"a": 1}}'
ACCEPTED: dict[str, list[str]] = {
    "chatml": [f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"],
    "qwen3": [
        f"<think>\nhm, </thin\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think></think><tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    ],
    "llama3": ['{"name": "f", "parameters": {"a": 1}}', '<|python_tag|>{"name": "f", "parameters": {"a":1}}'],
    "mistral": [
        f"[TOOL_CALLS] [{CALL}]",
        f"[TOOL_CALLS][{CALL}, {CALL}]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123XYZ"}]',
        f"[THINK]so[/THINK][TOOL_CALLS] [{CALL}]",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ],
    "gptoss": [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        "<|channel|>analysis<|message|>a <| b<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a":1}',
    ],
    "gemma": [f"<tool_call>\n{CALL}\n</tool_call>"],
}
REFUSED = [
    "",
    "words",
    "<think>hm",
    '{"a": 1}',
    '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>',
    f"Sure. <tool_call>\n{CALL}\n</tool_call>",
    '{"name": "g", "parameters": {"a": 1}}',
    '[TOOL_CALLS] [{"name": "g", "arguments": {}}]',
    "<|channel|>final<|message|>words",
]


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_the_family_s_own_spelling_is_allowed_and_others_are_not(
    templates: dict[str, ChatTemplate], samplers: dict[str, Sampler], name: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = build_grammar(templates[name], tools=[tool("f", schema)], required=True)
    for text in ACCEPTED[name]:
        assert samplers[name].accepts(grammar, text), text
        reply = read(templates[name], templates[name].encode(text))
        assert {call.name for call in reply.message.tool_calls} == {"f"}
    for text in REFUSED:
        assert not samplers[name].accepts(grammar, text), text


def test_what_a_template_renders_of_a_call_is_what_its_grammar_allows(
    templates: dict[str, ChatTemplate], samplers: dict[str, Sampler]
) -> None:
    """The same text comes back in histories, so a model learns one spelling."""
    user = Message("user", "hi")
    call = Message("assistant", tool_calls=(ToolCall.of("abc123XYZ", name="f", arguments='{"a":1}'),))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for name in ("chatml", "qwen25", "llama3", "mistral", "deepseek", "gptoss"):
        template = templates[name]
        grammar = build_grammar(template, tools=[tool("f", schema)], required=True)
        before = template.render([user], add_generation_prompt=True)
        whole = template.render([user, call], add_generation_prompt=False)
        assert whole.startswith(before)
        text = whole.removeprefix(before)
        ends = [text.find(end) for end in template.eos_texts if end in text]
        assert samplers[name].accepts(grammar, text[: min(ends)]), (name, text)


def test_a_template_that_opens_reasoning_must_close_it(
    make_folder: Callable[..., Path], tmp_path: Path, samplers: dict[str, Sampler]
) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}<tool_call>"
    for family in ("thinking", "chatml"):  # with and without tokens of their own for the marks
        folder = make_folder(tmp_path / family, family, template=source.replace("<tool_call>", ""))
        template = ChatTemplate.load(folder)
        sampler = Sampler.load(folder, template)
        grammar = build_grammar(template, tools=None, schema={})
        assert template.opens_reasoning
        assert sampler.accepts(grammar, "so\n</think>\n\n{}")
        assert not sampler.accepts(grammar, "{}")
        reply = read(template, template.encode("so\n</think>\n\n{}"), tools_given=False).message
        assert (reply.reasoning, reply.content) == ("so", "{}")


def test_the_empty_schema_is_any_object_and_spaces_come_to_an_end(
    chatml: ChatTemplate, samplers: dict[str, Sampler]
) -> None:
    grammar = build_grammar(chatml, tools=None, schema={})
    accepts = samplers["chatml"].accepts
    assert accepts(grammar, '{\n    "a": [1, {"b": null}]\n}') and accepts(grammar, "{}")
    assert not any(accepts(grammar, text) for text in ("[]", "1", '"a"', "null", " {}", "{} ", '{"a": 01}'))
    assert not accepts(grammar, "{" + " " * 65 + "}")


def test_content_or_calls_where_tools_may_but_need_not_be_called(
    chatml: ChatTemplate, samplers: dict[str, Sampler]
) -> None:
    beyond = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    grammar = build_grammar(chatml, tools=[tool("f", beyond)], schema=SCHEMAS["nothing"])
    accepts = samplers["chatml"].accepts
    assert accepts(grammar, "{}") and accepts(grammar, f"<tool_call>\n{CALL}\n</tool_call>")
    assert not accepts(grammar, '{"a": 1}') and not accepts(grammar, "words")


def test_arguments_of_tools_without_and_with_loose_parameters(
    chatml: ChatTemplate, samplers: dict[str, Sampler]
) -> None:
    cases: list[tuple[object, dict[str, bool]]] = [
        (None, {"{}": True, '{"a": 1}': False}),
        ({}, {"{}": True, '{"a": 1}': True, "[]": False}),
        ({"properties": {"a": {"type": "integer"}}}, {'{"a": 1}': True, '{"a": "1"}': False, "[]": False}),
        ({"type": ["object", "null"]}, {"{}": True, "null": False}),
    ]
    for parameters, texts in cases:
        grammar = build_grammar(chatml, tools=[tool("f", parameters)], required=True)
        for arguments, allowed in texts.items():
            text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            assert samplers["chatml"].accepts(grammar, text) == allowed, (parameters, arguments)


def test_nothing_asked_is_no_grammar(chatml: ChatTemplate) -> None:
    assert build_grammar(chatml, tools=[tool("f", {})], one_call=True) == ""
    assert build_grammar(chatml, tools=None) == ""


def test_a_request_s_own_options_for_the_library_are_overwritten(
    chatml: ChatTemplate, samplers: dict[str, Sampler]
) -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True, "bogus": 1}, "properties": {"a": {"const": 1}}}
    grammar = build_grammar(chatml, tools=None, schema=schema)
    assert samplers["chatml"].accepts(grammar, '{"a": 1}')
    assert "lenient" not in grammar


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "string"}, "must describe an object"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "strin"),
        ({"type": "object", "properties": {"a": {"$ref": "http://example.com/x"}}}, "example.com"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "pattern|regex"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
        ({"type": "object", "properties": {"a": {"const": "\ud800"}}}, "serializable"),
    ],
)
def test_a_tool_s_schema_beyond_enforcing_is_named_with_the_reason(
    chatml: ChatTemplate, parameters: dict[str, Any], reason: str
) -> None:
    tools = [tool("good", SCHEMAS["nested"]), tool("bad", parameters)]
    with pytest.raises(InvalidToolSchema, match=reason) as caught:
        build_grammar(chatml, tools=tools, required=True)
    assert caught.value.param == "tools[1].function.parameters"
    assert build_grammar(chatml, tools=tools, names=("good",), required=True)


def test_a_schema_nested_too_deeply_is_refused(chatml: ChatTemplate) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidToolSchema, match="recursion"):
        build_grammar(chatml, tools=[tool("f", schema)], required=True)
    with pytest.raises(RequestError, match="JSON schema of the reply cannot be enforced"):
        build_grammar(chatml, tools=None, schema=schema)


@pytest.mark.parametrize(
    ("tools", "names", "message"),
    [
        (None, (), "has no `tools`"),
        ([tool("f", {})], ("g",), r"names 'g', which is none of the request's tools \(f\)"),
    ],
)
def test_choices_that_cannot_be_made_name_the_field(
    chatml: ChatTemplate, tools: list[dict[str, Any]] | None, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        build_grammar(chatml, tools=tools, names=names, required=True)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["deepseek", "gptoss"])
def test_names_that_stand_in_the_open_must_be_plain(templates: dict[str, ChatTemplate], name: str) -> None:
    with pytest.raises(RequestError, match="cannot be forced") as caught:
        build_grammar(templates[name], tools=[tool("a b", {})], required=True)
    assert caught.value.param == "tools[0].function.name"
    assert build_grammar(templates["chatml"], tools=[tool('a "b"', {})], required=True)


def test_mistral_s_newer_spelling_follows_the_template(
    make_folder: Callable[..., Path], tmp_path: Path, folders: Mapping[str, Path]
) -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
        "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    folder = make_folder(tmp_path / "newer", "mistral", template=source)
    template = ChatTemplate.load(folder)
    sampler = Sampler.load(folder, template)
    grammar = build_grammar(template, tools=[tool("f", SCHEMAS["choices"])], required=True)
    rng = np.random.default_rng(0)
    for token_ids in sampler.replies(grammar, rng, count=10, least=2):
        assert {call.name for call in read(template, token_ids).message.tool_calls} == {"f"}
    assert not sampler.accepts(grammar, f"[TOOL_CALLS] [{CALL}]")


def test_faults_are_told_in_one_line() -> None:
    assert grammar_fault("start: /a+/") == ""
    fault = grammar_fault("start: nothing")
    assert fault and "\n" not in fault
    fault = grammar_fault('start: %json {"type": "string", "pattern": "(["}')
    assert fault.endswith("regex parse error: ([ error: unclosed character class")
