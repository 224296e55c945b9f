"""A conversation is known again by its beginning, whatever its client lost or renamed of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.tracking.messages import Message, ToolCall
from wingbeat.tracking.prefix_digests import PrefixWalk

texts = st.sampled_from(["", "a", "b", "hello", "é"])
calls = st.builds(
    lambda name, number, place: ToolCall.of(f"call_{place}", name=name, arguments=f'{{"n": {number}}}'),
    st.sampled_from(["add", "sub"]),
    st.integers(0, 2),
    st.integers(0, 3),
)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user"]), texts),
    st.builds(Message, st.just("assistant"), texts, st.sampled_from(["", "why"]), st.tuples() | st.tuples(calls)),
    st.builds(lambda text, place: Message("tool", text, tool_call_id=f"call_{place}"), texts, st.integers(0, 3)),
)
conversations = st.lists(messages, max_size=5)


@settings(max_examples=60, deadline=None)
@given(conversations, conversations)
def test_a_walk_may_be_interrupted_anywhere(first: list[Message], second: list[Message]) -> None:
    begun = PrefixWalk("key").after(first)
    before = begun.key
    assert begun.after(second).key == PrefixWalk("key").after([*first, *second]).key
    assert begun.key == before, "a walk goes on by itself"
    assert PrefixWalk("other key").after(first).key.meaning != before.meaning


@settings(max_examples=60, deadline=None)
@given(conversations)
def test_what_clients_lose_makes_no_difference(said: list[Message]) -> None:
    """Reasoning, names of assistants, and the ids of tool calls, where they are renamed throughout."""
    lost = [
        replace(
            message,
            reasoning="",
            name="bot" if message.role in ("assistant", "tool") else message.name,
            tool_call_id=message.tool_call_id and f"other_{message.tool_call_id}",
            tool_calls=tuple(replace(call, id=f"other_{call.id}") for call in message.tool_calls),
        )
        for message in said
    ]
    known = {call.id for message in said for call in message.tool_calls}
    one, other = PrefixWalk("key").after(said).key, PrefixWalk("key").after(lost).key
    if all(not message.tool_call_id or message.tool_call_id in known for message in said):
        answered: set[str] = set()
        for message in said:
            if message.tool_call_id and message.tool_call_id not in answered:
                return  # an answer before its call is known by its id alone
            answered |= {call.id for call in message.tool_calls}
        assert one.meaning == other.meaning
        assert (one.call_ids == other.call_ids) == (not known)


def test_reasoning_that_a_client_puts_into_the_text_is_no_part_of_it() -> None:
    said = [Message("user", "hi"), Message("assistant", "yes", reasoning="hm")]
    told = [Message("user", "hi"), Message("assistant", "<think>\nhm\n</think>\n\nyes")]
    assert PrefixWalk("key").after(said).key == PrefixWalk("key").after(told).key


def test_what_is_said_otherwise_is_another_conversation() -> None:
    base = [Message("user", "hi"), Message("assistant", "yes")]
    others = [
        [Message("user", "hi")],
        [Message("user", "hi"), Message("assistant", "no")],
        [Message("system", "hi"), Message("assistant", "yes")],
        [Message("user", "hi", name="bob"), Message("assistant", "yes")],
        [*base, Message("user", "")],
        [Message("user", "hi"), Message("assistant", "yes", tool_calls=(ToolCall.of("c", name="f", arguments=""),))],
    ]
    keys = {PrefixWalk("key").after(one).key.meaning for one in [base, *others]}
    assert len(keys) == 1 + len(others)
