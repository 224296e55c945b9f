"""What real clients resend: what continues the exact tokens, what forks, and the reason that is kept.

The shapes are those that twelve client libraries were seen to send on the second turn of a tool run.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, PromptPlan, Turn, parse_messages, parse_reply

Say = Callable[..., Turn]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]
SAID = "  Let me add: é\n"
ARGUMENTS = '{"b":3,  "a": 2, "note":"é"}'
SAMPLED = f'<think>\nhm\n</think>\n\n{SAID}<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call><|im_end|>'


def called(graph: EpisodeGraph, template: ChatTemplate, say: Say, sampled: str = SAMPLED) -> Turn:
    return say(graph, template, parse_messages(ASKED), sampled, tools=TOOLS)


def verbatim(turn: Turn) -> list[dict[str, Any]]:
    """The first turn's conversation as the server told it, and the tool's result."""
    (call,) = turn.reply.tool_calls
    return [
        *copy.deepcopy(ASKED),
        {
            "role": "assistant",
            "content": turn.reply.content,
            "reasoning_content": turn.reply.reasoning,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.arguments_text}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]


def resolve(graph: EpisodeGraph, template: ChatTemplate, messages: Any, **extra: Any) -> PromptPlan:
    extra = {"policy": "solver", "agent": "", "tools": TOOLS, **extra}
    return graph.resolve(messages=parse_messages(messages), template=template, **extra)


# --- what continues ---------------------------------------------------------------------------


def with_nulls_and_index(messages: list[dict[str, Any]]) -> None:
    messages[2] |= {"refusal": None, "annotations": None, "audio": None, "function_call": None, "parsed": None}
    messages[2]["tool_calls"][0] |= {"index": 0}
    messages[2]["tool_calls"][0]["function"] |= {"parsed_arguments": {"a": 2}}


def with_arguments_dumped_again(messages: list[dict[str, Any]]) -> None:
    function = messages[2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), sort_keys=True)


def with_reasoning_dropped(messages: list[dict[str, Any]]) -> None:
    del messages[2]["reasoning_content"]


def with_reasoning_as_text(messages: list[dict[str, Any]]) -> None:
    """pydantic-ai turns reasoning items into text."""
    messages[2]["content"] = f"<think>\n{messages[2].pop('reasoning_content')}\n</think>\n\n{messages[2]['content']}"


def with_names_and_parts(messages: list[dict[str, Any]]) -> None:
    del messages[2]["reasoning_content"]
    messages[2] |= {"name": "agent", "content": [{"type": "text", "text": messages[2]["content"]}]}
    messages[3] |= {"name": "add", "content": [{"type": "text", "text": "5"}]}


def as_it_was(messages: list[dict[str, Any]]) -> None:
    assert messages


CONTINUE = [as_it_was, with_nulls_and_index, with_arguments_dumped_again, with_reasoning_dropped]
CONTINUE += [with_reasoning_as_text, with_names_and_parts]


@pytest.mark.parametrize("change", CONTINUE)
def test_clients_that_respell_continue_the_exact_tokens(
    chatml: ChatTemplate, say: Say, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    messages = verbatim(first)
    change(messages)
    plan = resolve(graph, chatml, messages)
    assert (plan.parent, plan.fork_reason, plan.chosen_by) == (first, "", "")
    assert plan.prompt_ids[: first.end].tolist() == graph.full_ids(first).tolist()
    assert SAMPLED in chatml.decode(plan.prompt_ids.tolist())


@pytest.mark.parametrize("content", [None, "", [], "absent"], ids=repr)
def test_a_call_without_text_has_many_spellings(chatml: ChatTemplate, say: Say, content: object) -> None:
    """litellm and mini-swe-agent leave the key out where the content is null."""
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say, '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>')
    messages = verbatim(first)
    if content == "absent":
        del messages[2]["content"]
    else:
        messages[2]["content"] = content
    assert resolve(graph, chatml, messages).parent is first


def test_dropped_reasoning_forks_where_the_policy_says_so(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    messages = verbatim(first)
    assert resolve(graph, chatml, messages, reasoning="fork").parent is first
    with_reasoning_dropped(messages)
    plan = resolve(graph, chatml, messages, reasoning="fork")
    assert (plan.parent, plan.fork_reason) == (None, "message 2 differs: reasoning ('hm' -> '')")
    assert "hm" not in chatml.decode(plan.prompt_ids.tolist())
    second = say(graph, chatml, plan.messages, "5<|im_end|>", tools=TOOLS, reasoning="fork")
    # What the client tells now is known, without its reasoning.
    third = [*messages, {"role": "assistant", "content": "5"}, {"role": "user", "content": "sure?"}]
    assert resolve(graph, chatml, third, reasoning="fork").parent is second


def test_altered_reasoning_is_another_reply(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    messages = verbatim(called(graph, chatml, say))
    messages[2]["reasoning_content"] = "hum"
    assert forks(graph, chatml, messages) == "message 2 differs: reasoning ('hm' -> 'hum')"
    with_reasoning_as_text(messages)
    assert forks(graph, chatml, messages) == "message 2 differs: reasoning ('hm' -> 'hum')"


def test_renamed_call_ids_continue_and_results_keep_the_known_ones(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    messages = verbatim(first)
    messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "toolu_1"
    plan = resolve(graph, chatml, messages)
    assert plan.parent is first
    assert plan.messages[3].tool_call_id == first.reply.tool_calls[0].id


# --- what forks -------------------------------------------------------------------------------


def forks(graph: EpisodeGraph, template: ChatTemplate, messages: Any, **extra: Any) -> str:
    plan = resolve(graph, template, messages, **extra)
    assert plan.parent is None
    shown = template.render(plan.messages, tools=extra.get("tools", TOOLS), add_generation_prompt=True)
    assert plan.prompt_ids.tolist() == template.encode_prompt(shown)
    return plan.fork_reason


def test_smolagents_turns_calls_into_text(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say, '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>')
    call = {"id": first.reply.tool_calls[0].id, "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rewritten = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{[call]}"}]},
        {"role": "user", "content": [{"type": "text", "text": "Observation:\n5"}]},
    ]
    reason = forks(graph, chatml, rewritten)
    assert reason.startswith("message 2 differs: content ('' -> \"Calling tools:\\n[{'id': 'call-")
    assert reason.endswith('…")')


def test_crewai_loses_the_text_beside_a_call(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    messages = verbatim(called(graph, chatml, say))
    messages[2]["content"] = None
    assert forks(graph, chatml, messages) == "message 2 differs: content ('  Let me add: é' -> '')"


def test_stripped_text_is_another_text(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    say(graph, chatml, parse_messages(ASKED), "Sure, 5 \n<|im_end|>")
    messages = [*ASKED, {"role": "assistant", "content": "Sure, 5"}, {"role": "user", "content": "why?"}]
    assert forks(graph, chatml, messages, tools=None) == "message 2 differs: content ('Sure, 5 \\n' -> 'Sure, 5')"


def test_autogen_reflects_without_tools(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    messages = verbatim(called(graph, chatml, say))
    assert forks(graph, chatml, messages, tools=None) == "tools changed"


def test_a_clock_in_an_earlier_user_message(chatml: ChatTemplate, say: Say) -> None:
    def at(clock: str) -> list[dict[str, Any]]:
        return [*ASKED, {"role": "user", "content": f"<state>current time: 2026-11-29T{clock}</state>"}]

    graph = EpisodeGraph("e")
    say(graph, chatml, parse_messages(at("20:00:01")), "5<|im_end|>", tools=TOOLS)
    messages = [*at("20:00:07"), {"role": "assistant", "content": "5"}, {"role": "user", "content": "why?"}]
    told = "('…T20:00:01</state>' -> '…T20:00:07</state>')"
    assert forks(graph, chatml, messages) == f"message 2 differs: content {told}"


def test_a_repeated_request_is_a_fork_of_its_own(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    one = called(graph, chatml, say)
    two = called(graph, chatml, say)
    assert (two.parent_id, two.fork_reason) == (None, "same messages as an earlier prompt, no reply continued")
    assert two.segment.tolist() == one.segment.tolist()


def test_a_repeated_later_request_branches_from_the_same_turn(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    messages = parse_messages(verbatim(first))
    one = say(graph, chatml, messages, "5<|im_end|>", tools=TOOLS)
    two = say(graph, chatml, messages, "five<|im_end|>", tools=TOOLS)
    assert (one.parent_id, one.fork_reason) == (first.turn_id, "")
    assert (two.parent_id, two.fork_reason) == (
        first.turn_id,
        "same messages as an earlier prompt, no reply continued",
    )


def test_a_sub_agent_with_its_own_system_prompt(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    called(graph, chatml, say)
    sub = [{"role": "system", "content": "you only search"}, {"role": "user", "content": "2+3?"}]
    told = "('be brief' -> 'you only search')"
    assert forks(graph, chatml, sub) == f"message 0 differs: content {told}"
    assert forks(graph, chatml, sub, agent="search") == "no earlier turn of this agent"


def test_a_changed_system_prompt(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    messages = verbatim(called(graph, chatml, say))
    messages[0]["content"] = "be brief!"
    assert forks(graph, chatml, messages) == "message 0 differs: content ('be brief' -> 'be brief!')"


def test_a_compacted_context(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    say(graph, chatml, parse_messages(verbatim(first)), "5<|im_end|>", tools=TOOLS)
    compacted = [ASKED[0], {"role": "user", "content": "So far: the sum was found to be 5. Go on."}]
    told = "('2+3?' -> 'So far: the sum was found to be 5. Go o…')"
    assert forks(graph, chatml, compacted) == f"message 1 differs: content {told}"


def test_a_history_cut_at_its_beginning(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    messages = verbatim(called(graph, chatml, say))
    assert forks(graph, chatml, messages[:1] + messages[2:]) == "message 1 differs: role ('user' -> 'assistant')"


def test_a_history_cut_at_its_end(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    called(graph, chatml, say)
    assert forks(graph, chatml, ASKED[:1]) == "an earlier conversation, cut after message 0"


def test_an_edited_history_branches_where_it_was_edited(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    messages = verbatim(first)
    second = say(graph, chatml, parse_messages(messages), "5<|im_end|>", tools=TOOLS)
    edited = copy.deepcopy(messages)
    edited[3]["content"] = "6"
    edited += [{"role": "assistant", "content": second.reply.content}, {"role": "user", "content": "why?"}]
    plan = resolve(graph, chatml, edited)
    assert (plan.parent, plan.fork_reason) == (first, "message 3 differs: content ('5' -> '6')")


def test_a_reason_names_the_most_similar_of_several_replies(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    for text in ("It is 5. ", "5", "It was 5"):
        say(graph, chatml, parse_messages(ASKED), f"{text}<|im_end|>", tools=TOOLS)
    messages = [*ASKED, {"role": "assistant", "content": "It is 5."}, {"role": "user", "content": "why?"}]
    assert forks(graph, chatml, messages) == "message 2 differs: content ('It is 5. ' -> 'It is 5.')"


def test_reasons_stay_short(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    text = "word " * 1000
    say(graph, chatml, [Message("user", f"{text}one{text}")], "a<|im_end|>", tools=TOOLS)
    plan = resolve(graph, chatml, [{"role": "user", "content": f"{text}two{text}"}])
    one, two = re.findall(r"'([^']*)'", plan.fork_reason)
    assert len(one) <= 40
    assert len(two) <= 40
    assert one.startswith("…")
    assert "one" in one
    assert "two" in two


# --- ids, order, equal texts ------------------------------------------------------------------


def test_duplicate_call_ids_across_messages(chatml: ChatTemplate, say: Say) -> None:
    """Some clients number calls anew in every message; results belong to the nearest call of that id."""
    graph = EpisodeGraph("e")

    def history(results: tuple[str, str]) -> list[dict[str, Any]]:
        calls = [{"id": "call_0", "function": {"name": "add", "arguments": "{}"}}]
        said = {"role": "assistant", "tool_calls": calls}
        one, two = ({"role": "tool", "tool_call_id": "call_0", "content": text} for text in results)
        return [*ASKED, said, one, said, two]

    first = say(graph, chatml, parse_messages(history(("5", "6"))), "11<|im_end|>", tools=TOOLS)
    told = [*history(("5", "6")), {"role": "assistant", "content": "11"}, {"role": "user", "content": "why?"}]
    assert resolve(graph, chatml, told).parent is first
    told[5]["content"] = "7"
    assert forks(graph, chatml, told) == "message 5 differs: content ('6' -> '7')"


def two_calls(graph: EpisodeGraph, chatml: ChatTemplate) -> Turn:
    names = iter(("one", "two"))
    calls = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in (1, 2))
    plan = resolve(graph, chatml, ASKED)
    ids = chatml.encode(f"{calls}<|im_end|>")
    reply = parse_reply(chatml, ids, tools_given=True, new_id=lambda: next(names))
    return graph.commit(
        plan,
        turn_id="calls",
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        versions=[(0, len(ids))],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reply=reply.message,
    )


def test_parallel_calls_may_be_answered_in_another_order(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = two_calls(graph, chatml)
    results = [Message("tool", text, tool_call_id=text) for text in ("two", "one")]
    second = say(graph, chatml, [*first.messages, *results], "3<|im_end|>", tools=TOOLS)
    assert (second.parent_id, second.fork_reason) == ("calls", "")
    third = [*second.messages, Message("user", "why?")]
    plan = graph.resolve(policy="solver", agent="", messages=third, tools=TOOLS, template=chatml)
    assert plan.parent is second
    swapped = [*first.messages, *reversed(results), *third[5:]]
    plan = graph.resolve(policy="solver", agent="", messages=swapped, tools=TOOLS, template=chatml)
    assert (plan.parent, plan.fork_reason) == (first, "message 3 differs: content ('two' -> 'one')")


def test_several_equal_replies_without_calls_continue_the_latest(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    votes = [say(graph, chatml, parse_messages(ASKED), "5<|im_end|>") for _ in range(3)]
    messages = [*votes[0].messages, Message("user", "why?")]
    plan = graph.resolve(policy="solver", agent="", messages=messages, tools=None, template=chatml)
    assert (plan.parent, plan.chosen_by) == (votes[-1], "latest")


def test_reasoning_tells_equal_replies_apart(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    votes = [say(graph, chatml, parse_messages(ASKED), f"<think>{n}</think>5<|im_end|>") for n in "abc"]
    news = Message("user", "why?")
    for vote in votes:
        plan = graph.resolve(policy="solver", agent="", messages=[*vote.messages, news], tools=None, template=chatml)
        assert (plan.parent, plan.chosen_by) == (vote, "")
    dropped = [*parse_messages(ASKED), Message("assistant", "5"), news]
    plan = graph.resolve(policy="solver", agent="", messages=dropped, tools=None, template=chatml)
    assert (plan.parent, plan.chosen_by) == (votes[-1], "latest")


# --- explicit predecessors --------------------------------------------------------------------


def test_a_named_turn_is_extended_by_what_is_new(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    whole = resolve(graph, chatml, verbatim(first))
    news = verbatim(first)[3:]
    plan = resolve(graph, chatml, news, previous=first)
    assert plan.parent is first
    assert plan.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert plan.messages == whole.messages
    assert (plan.fork_reason, plan.chosen_by) == ("", "")


def test_a_named_turn_goes_before_a_later_equal_one(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    one, two = (say(graph, chatml, parse_messages(ASKED), "5<|im_end|>", tools=TOOLS) for _ in range(2))
    news = [{"role": "user", "content": "why?"}]
    plan = resolve(graph, chatml, news, previous=one)
    assert (plan.parent, plan.chosen_by) == (one, "previous response id")
    say(graph, chatml, plan.messages, "so<|im_end|>", tools=TOOLS)
    again = resolve(graph, chatml, news, previous=two)
    assert (again.parent, again.fork_reason) == (two, "same messages as an earlier prompt, no reply continued")


def test_a_named_turn_with_other_tools_or_a_rewriting_template_is_rendered_anew(
    templates: dict[str, ChatTemplate], chatml: ChatTemplate, say: Say
) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    news = verbatim(first)[3:]
    plan = resolve(graph, chatml, news, previous=first, tools=None)
    assert (plan.parent, plan.fork_reason) == (None, "tools changed")
    assert plan.messages[:-1] == first.messages
    thinking = templates["thinking"]
    first = say(graph, thinking, parse_messages(ASKED), "<think>\nhm\n</think>\n\n5<|im_end|>", agent="t")
    plan = graph.resolve(
        policy="solver", agent="t", messages=[Message("user", "why?")], tools=None, template=thinking, previous=first
    )
    assert plan.parent is None
    assert plan.fork_reason.startswith("template rewrites history at character ")
    assert plan.messages == (*first.messages, Message("user", "why?"))


def test_only_the_same_agent_of_the_same_episode_continues_a_named_turn(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = called(graph, chatml, say)
    news = [{"role": "user", "content": "why?"}]
    with pytest.raises(RequestError, match="only that model") as caught:
        resolve(graph, chatml, news, previous=first, agent="other")
    assert caught.value.param == "model"
    with pytest.raises(ValueError, match="no turn of episode"):
        resolve(EpisodeGraph("other"), chatml, news, previous=first)


def test_results_of_calls_that_nobody_made_differ_by_their_ids(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("ep")
    asked = [*ASKED, {"role": "tool", "tool_call_id": "x", "content": "5"}]
    turn = say(graph, chatml, parse_messages(asked), "so<|im_end|>", tools=TOOLS)
    more = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go"}]
    assert resolve(graph, chatml, [*asked, *more]).parent is turn
    other = resolve(graph, chatml, [*ASKED, {**asked[2], "tool_call_id": "y"}, *more])
    assert other.parent is None
    assert other.fork_reason == "message 2 differs: tool_call_id of another call ('x' -> 'y')"


def test_reasoning_that_moved_to_another_reply_is_another_conversation(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("ep")
    asked = list(ASKED)
    first = say(graph, chatml, parse_messages(asked), "<think>\nhm\n</think>\n\none<|im_end|>")
    asked += [{"role": "assistant", "content": "one", "reasoning_content": "hm"}, {"role": "user", "content": "go"}]
    say(graph, chatml, parse_messages(asked), "two<|im_end|>")
    asked += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "on"}]
    moved = copy.deepcopy(asked)
    moved[4]["reasoning_content"] = moved[2].pop("reasoning_content")
    found = resolve(graph, chatml, moved, tools=None)
    assert (found.parent, found.fork_reason) == (first, "message 4 differs: reasoning ('' -> 'hm')")
