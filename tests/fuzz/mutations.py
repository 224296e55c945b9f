"""Hypothesis strategies that damage a valid JSON body in one to four places."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", "user", "tool", "system", "text", "image_url", "function", "\ud800", "\x00", "auto", "{"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "id", "name", "arguments"]) | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["messages", "content", "type", "tools", "tool_calls", "function_call", "stop", "n", "prompt", "input", "thread"]
) | st.text(max_size=6)
Place = tuple[Any, Any]
"""A container and the key or index in it."""


def places(value: Any) -> list[Place]:
    """Every place in a JSON value, outermost first."""
    found: list[Place] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


@st.composite
def damaged(draw: st.DrawFn, bodies: list[Any]) -> Any:
    """One of ``bodies`` with one to four edits."""
    body = copy.deepcopy(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, 4))):
        choices = places(body)
        if not choices:
            break
        container, key = draw(st.sampled_from(choices))
        match draw(st.sampled_from(["replace", "replace", "delete", "double", "add", "wrap"])):
            case "replace":
                container[key] = draw(VALUES)
            case "delete":
                del container[key]
            case "double" if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case "add" if isinstance(container, dict):
                container[draw(NAMES)] = draw(VALUES)
            case _:
                container[key] = [container[key]]
    return draw(st.sampled_from([body, body, body, body, draw(VALUES)]))
