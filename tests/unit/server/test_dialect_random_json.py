"""Whatever JSON comes, a dialect's parser answers with a call or with a RequestError."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.server.calls.dialects import chat, completions
from wingbeat.server.calls.dialects.base import Dialect
from wingbeat.server.calls.dialects.messages import MESSAGES
from wingbeat.server.calls.dialects.messages import parse as messages
from wingbeat.server.calls.dialects.responses import RESPONSES
from wingbeat.server.calls.dialects.responses import parse as responses
from wingbeat.server.calls.model_call import ChatPrompt, Choice, ModelCall, Prepared, TextPrompt
from wingbeat.tracking.messages import Message

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

WORDS = [
    *("user", "assistant", "system", "developer", "tool", "text", "input_text", "output_text", "message", "auto"),
    *("none", "any", "required", "function", "custom", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    *("reasoning", "function_call", "function_call_output", "json_schema", "json_object", "create", "continue", "a"),
    *("allowed_tools", "reasoning.encrypted_content", "wingbeat-reasoning-1:YQ==", "<think>a</think>b", "", "solver"),
]
KEYS = [
    *(
        "type",
        "role",
        "content",
        "text",
        "name",
        "id",
        "call_id",
        "tool_use_id",
        "input",
        "arguments",
        "output",
        "mode",
    ),
    *(
        "input_schema",
        "parameters",
        "thinking",
        "summary",
        "encrypted_content",
        "format",
        "schema",
        "tools",
        "is_error",
    ),
    *("previous_message_id", "effort", "disable_parallel_tool_use", "strict", "description", "defer_loading"),
]
SCALARS = (
    st.sampled_from(WORDS)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=1)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=6)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(WORDS), "content": inner}, optional={"role": st.sampled_from(WORDS)}
        )
    ),
    max_leaves=20,
)
DIALECTS: dict[str, tuple[Dialect, frozenset[str], dict[str, Any]]] = {
    "messages": (
        MESSAGES,
        messages.HONOURED | messages.NO_EFFECT | set(messages.REFUSED_UNLESS),
        {"model": "solver", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "responses": (
        RESPONSES,
        responses.HONOURED | responses.NO_EFFECT | set(responses.REFUSED_UNLESS),
        {"model": "solver", "input": "hi"},
    ),
    "chat": (
        chat.CHAT,
        chat.HONOURED | chat.NO_EFFECT | set(chat.REFUSED_UNLESS),
        {"model": "solver", "messages": [{"role": "user", "content": "hi"}]},
    ),
    "completions": (
        completions.COMPLETIONS,
        completions.HONOURED | completions.NO_EFFECT | set(completions.REFUSED_UNLESS),
        {"model": "solver", "prompt": "hi"},
    ),
}


CHOICE = Choice(
    index=0,
    turn_id="turn",
    reply=Message("assistant", "Hello"),
    finish_reason=FinishReason.STOP,
    stop_text="",
    token_ids=[7],
    logprobs=[-0.5],
    num_prompt_tokens=5,
)


def _prepared(call: ModelCall) -> Prepared:
    host = cast("Any", SimpleNamespace(template=SimpleNamespace(decode=lambda ids: "x")))
    plan = cast("Any", SimpleNamespace(prompt_ids=np.arange(5)))
    return Prepared(call, host, 0, plan, SamplingParams(max_tokens=9), {}, (CHOICE.turn_id,))


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_parsers_raise_nothing_but_request_errors(name: str, data: st.DataObject) -> None:
    dialect, fields, good = DIALECTS[name]
    some = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    body = data.draw(some.map(lambda changed: {**good, **changed}) | VALUES)
    try:
        call = dialect.parse(body)
    except RequestError as error:
        assert error.message
        orjson.loads(dialect.error(error))
    else:
        assert isinstance(call, ModelCall)
        answer = orjson.loads(dialect.answer(_prepared(call), [CHOICE]))
        assert answer["id"] == CHOICE.turn_id


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("depth", [50, 900, 20_000])
def test_deep_nesting_is_refused_or_passes(name: str, depth: int) -> None:
    """Every field holds lists in lists, or objects in objects, as deep as JSON parsers let through and deeper."""
    dialect, fields, good = DIALECTS[name]
    for wrap in (lambda inner: [inner], lambda inner: {"type": inner}):
        deep: Any = "x"
        for _ in range(depth):
            deep = wrap(deep)
        for field in sorted(fields):
            shapes: list[Any] = [deep, [deep], {"type": deep}, [{"type": deep}], [{"role": "user", "content": deep}]]
            shapes += [[{"name": "a", "input_schema": deep}], [{"type": "function", "name": "a", "parameters": deep}]]
            shapes += [
                [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {"x": deep}}]}]
            ]
            for shape in shapes:
                try:
                    call = dialect.parse({**good, field: shape})
                except RequestError as error:
                    assert len(error.message) < 2000
                else:
                    dialect.answer(_prepared(call), [CHOICE])


@pytest.mark.parametrize("name", DIALECTS)
def test_a_ten_megabyte_message_is_parsed(name: str) -> None:
    dialect, _, good = DIALECTS[name]
    text = "é" * 5_000_000
    field = {"responses": "input", "completions": "prompt"}.get(name, "messages")
    value: Any = text if name == "completions" else [{"role": "user", "content": text}]
    prompt = dialect.parse(orjson.loads(json.dumps({**good, field: value}))).prompt
    assert prompt in (TextPrompt(text), ChatPrompt((Message("user", text),)))
