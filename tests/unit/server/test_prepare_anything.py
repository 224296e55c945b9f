"""Whatever a request says: it is prepared, or refused with the field at fault; nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.dialects.base import Dialect
from wingbeat.server.calls.dialects.chat import CHAT
from wingbeat.server.calls.dialects.completions import COMPLETIONS
from wingbeat.server.calls.dialects.messages import MESSAGES
from wingbeat.server.calls.dialects.responses import RESPONSES
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.tracking.graph import EpisodeGraph

TEXT = st.text(max_size=6) | st.sampled_from(["<|im_end|>", "<tool_call>", "{", "é", "\x00", "{{ x }}", "\udcff"])
NAME = st.sampled_from(["f", "g", "", 'a"b', "é"])
ID = st.sampled_from(["c1", "c2", ""])
SCHEMA: Any = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "object"},
            {"type": "string", "pattern": "^a+$"},
            {"type": "string", "pattern": "("},
            {"type": "integer", "minimum": 3},
            {"enum": ["a", 1, None]},
            {"enum": []},
            {"not": {}},
            {"$ref": "#/nowhere"},
            {"$ref": "#"},
            {"type": "string", "format": "date"},
            {"oneOf": [{"type": "string"}, {"type": "string"}]},
            {"type": "object", "minProperties": 2, "uniqueItems": True},
            {"type": "nonsense"},
            True,
            None,
        ]
    ),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", 'c"']), inner, max_size=2).map(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)}
        )
        | inner.map(lambda items: {"type": "array", "items": items})
    ),
    max_leaves=3,
)
TOOL = st.fixed_dictionaries({"name": NAME}, optional={"description": TEXT, "parameters": SCHEMA})
PARTS = TEXT | st.none() | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": TEXT}))
CALL = st.builds(lambda i, n, a: {"id": i, "type": "function", "function": {"name": n, "arguments": a}}, ID, NAME, TEXT)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "wizard"]), "content": PARTS},
    optional={"tool_calls": st.lists(CALL, max_size=2), "tool_call_id": ID, "name": TEXT, "reasoning_content": TEXT},
)
CHOICE = st.sampled_from(
    [
        *(None, "auto", "none", "required", "any", {"type": "any"}),
        {"type": "function", "function": {"name": "f"}},
        {"type": "tool", "name": "f"},
        {"type": "function", "name": "g"},
    ]
)
LIMITS = {
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 5),
    "stop": st.lists(TEXT, max_size=2),
    "n": st.integers(1, 3),
}
BODIES: dict[str, tuple[Dialect, Any]] = {
    "chat": (
        CHAT,
        st.fixed_dictionaries(
            {"messages": st.lists(MESSAGE, max_size=4)},
            optional={
                "tools": st.lists(TOOL.map(lambda tool: {"type": "function", "function": tool}), max_size=2),
                "tool_choice": CHOICE,
                "response_format": st.sampled_from([None, {"type": "json_object"}])
                | SCHEMA.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
                "parallel_tool_calls": st.booleans(),
                **LIMITS,
            },
        ),
    ),
    "completions": (
        COMPLETIONS,
        st.fixed_dictionaries(
            {"prompt": TEXT | st.lists(st.integers(-1, 300), max_size=5)}, optional={**LIMITS, "logprobs": st.just(1)}
        ),
    ),
    "messages": (
        MESSAGES,
        st.fixed_dictionaries(
            {"messages": st.lists(MESSAGE, max_size=4), "max_tokens": st.just(9)},
            optional={
                "system": TEXT,
                "tools": st.lists(TOOL.map(lambda t: {**t, "input_schema": t.pop("parameters", {})}), max_size=2),
                "tool_choice": CHOICE,
                "thread": st.sampled_from([{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]),
            },
        ),
    ),
    "responses": (
        RESPONSES,
        st.fixed_dictionaries(
            {"input": TEXT | st.lists(MESSAGE | TOOL.map(lambda t: {"type": "function_call", **t}), max_size=3)},
            optional={
                "instructions": TEXT,
                "tools": st.lists(TOOL.map(lambda tool: {"type": "function", **tool}), max_size=2),
                "tool_choice": CHOICE,
                "previous_response_id": st.just("resp_1"),
            },
        ),
    ),
}


@pytest.fixture
def desk(open_desk: Any) -> Any:
    return open_desk()


@pytest.mark.parametrize("name", BODIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_request_is_prepared_or_refused(desk: Any, name: str, data: st.DataObject) -> None:
    dialect, bodies = BODIES[name]
    group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
    episode = OpenEpisode("ep", 1, group, {"solver": None}, "", "digest", 9.0, 0.0, 0.0, EpisodeGraph("ep"))
    try:
        prepared = desk.gateway.prepare(episode, dialect.parse({"model": "solver", **data.draw(bodies)}))
    except WingbeatError as error:
        assert 400 <= error.status < 500 and error.message
        assert dialect.error(error)
    else:
        assert len(prepared.plan.prompt_ids) + prepared.sampling.max_tokens <= 64
