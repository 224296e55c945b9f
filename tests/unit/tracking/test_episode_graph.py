"""The token graph: prompts extend exact tokens where the conversation continues, and fork with a reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking import (
    ChatTemplate,
    EpisodeGraph,
    Message,
    PromptPlan,
    Turn,
    digest_tools,
    dump_graph,
    parse_messages,
)

Say = Callable[..., Turn]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO = Message("user", "hello")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def plan_for(
    graph: EpisodeGraph, template: ChatTemplate, messages: Sequence[Message], *, agent: str = "", **extra: Any
) -> PromptPlan:
    extra = {"policy": "solver", "tools": None, **extra}
    return graph.resolve(agent=agent, messages=messages, template=template, **extra)


def fresh(template: ChatTemplate, messages: Sequence[Message], tools: Any = None) -> list[int]:
    return template.encode_prompt(template.render(messages, tools=tools, add_generation_prompt=True))


def test_a_first_turn_is_rendered_and_no_fork(chatml: ChatTemplate) -> None:
    plan = plan_for(EpisodeGraph("e"), chatml, [HELLO])
    assert (plan.parent, plan.fork_reason, plan.forced_count) == (None, "", 0)
    assert chatml.decode(plan.prompt_ids.tolist()) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert plan.prompt_ids.dtype == np.int32


def test_a_continued_turn_keeps_the_sampled_tokens(chatml: ChatTemplate, say: Say) -> None:
    """Text would re-encode as one token "hello"; what was sampled is five (a retokenisation drift)."""
    letters = [chatml.encode(letter)[0] for letter in "hello"]
    end = chatml.encode("<|im_end|>")
    assert len(chatml.encode("hello")) == 1
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], token_ids=[*letters, *end])
    assert first.reply == Message("assistant", "hello")
    plan = plan_for(graph, chatml, [HELLO, Message("assistant", "hello"), Message("user", "so")])
    assert plan.parent is first
    assert plan.fork_reason == ""
    head = graph.full_ids(first).tolist()
    assert head == fresh(chatml, [HELLO]) + letters + end
    assert plan.prompt_ids[: len(head)].tolist() == head
    assert chatml.decode(plan.segment.tolist()) == "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    second = say(graph, chatml, plan.messages, "well<|im_end|>")
    assert graph.prompt_ids(second).tolist() == plan.prompt_ids.tolist()
    assert second.prompt_length == len(plan.prompt_ids)
    assert second.segment_runs == ((Provenance.RENDERED, len(plan.segment)),)
    assert graph.path(second) == (first, second)


def test_clients_may_respell_a_tool_call(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], f"sum<tool_call>{CALL[11:]}<|im_end|>", tools=TOOLS)
    (call,) = first.reply.tool_calls
    resent = parse_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": "sum",
                "name": "bot",
                "refusal": None,
                "tool_calls": [
                    {"index": 0, "id": call.id, "function": {"name": "add", "arguments": '{ "a" : 1.0 }'}},
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "2"},
        ]
    )
    plan = plan_for(graph, chatml, resent, tools=TOOLS)
    assert plan.parent is first
    assert plan.messages[1] is first.reply


def test_the_deepest_earlier_turn_is_continued(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "a<|im_end|>")
    second = say(graph, chatml, [*first.messages, Message("user", "b")], "c<|im_end|>")
    assert plan_for(graph, chatml, [*second.messages, Message("user", "d")]).parent is second
    edited = [*first.messages, Message("user", "other"), Message("assistant", "c"), Message("user", "d")]
    branch = plan_for(graph, chatml, edited)
    assert (branch.parent, branch.fork_reason) == (first, "message 2 differs: content ('b' -> 'other')")
    again = plan_for(graph, chatml, [*first.messages, Message("user", "b")])
    assert (again.parent, again.fork_reason) == (first, "same messages as an earlier prompt, no reply continued")


FORKS = [
    ([Message("user", "hi"), Message("assistant", "a"), HELLO], "message 0 differs: content ('hello' -> 'hi')"),
    ([Message("system", "hello"), Message("assistant", "a")], "message 0 differs: role ('user' -> 'system')"),
    ([HELLO, Message("assistant", "b"), HELLO], "message 1 differs: content ('a' -> 'b')"),
    ([HELLO, Message("user", "a")], "message 1 differs: role ('assistant' -> 'user')"),
    ([HELLO], "same messages as an earlier prompt, no reply continued"),
    ([HELLO, Message("assistant", "a", reasoning="new"), HELLO], "message 1 differs: reasoning ('' -> 'new')"),
    ([Message("user", "hello", name="Bo"), Message("assistant", "a")], "message 0 differs: name ('' -> 'Bo')"),
]


@pytest.mark.parametrize(("messages", "reason"), FORKS, ids=[reason for _, reason in FORKS])
def test_a_fork_renders_everything_and_names_the_first_difference(
    chatml: ChatTemplate, say: Say, messages: list[Message], reason: str
) -> None:
    graph = EpisodeGraph("e")
    say(graph, chatml, [HELLO], "a<|im_end|>")
    plan = plan_for(graph, chatml, messages)
    assert (plan.parent, plan.fork_reason) == (None, reason)
    assert plan.prompt_ids.tolist() == plan.segment.tolist() == fresh(chatml, messages)
    assert say(graph, chatml, messages, "x<|im_end|>").fork_reason == reason


def test_rewritten_tool_calls_fork(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], f"{CALL}<|im_end|>", tools=TOOLS)
    text = Message("assistant", "Calling tools: add")
    assert plan_for(graph, chatml, [HELLO, text], tools=TOOLS).fork_reason == (
        "message 1 differs: content ('' -> 'Calling tools: add')"
    )
    both = [*first.messages, Message("tool", "2", tool_call_id="another")]
    assert plan_for(graph, chatml, both, tools=TOOLS).parent is first


def test_other_tools_fork_but_other_spelling_does_not(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "a<|im_end|>", tools=TOOLS)
    messages = [*first.messages, HELLO]
    assert plan_for(graph, chatml, messages, tools=None).fork_reason == "tools changed"
    respelled = json.loads(json.dumps(TOOLS, sort_keys=True))
    assert plan_for(graph, chatml, messages, tools=respelled).parent is first
    assert digest_tools([]) == digest_tools(None) == ""


def test_agents_and_policies_have_their_own_lineages(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "a<|im_end|>", agent="planner")
    messages = [*first.messages, HELLO]
    for other in ({"agent": "critic"}, {"agent": "planner", "policy": "judge"}):
        plan = plan_for(graph, chatml, messages, **other)
        assert (plan.parent, plan.fork_reason) == (None, "no earlier turn of this agent")
    assert plan_for(graph, chatml, messages, agent="planner").parent is first


def test_dropped_reasoning_continues_and_stays_in_the_prompt(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "<think>why</think>a<|im_end|>")
    assert first.reply == Message("assistant", "a", reasoning="why")
    plan = plan_for(graph, chatml, [HELLO, Message("assistant", "a"), HELLO])
    assert plan.parent is first
    assert "<think>why</think>" in chatml.decode(plan.prompt_ids.tolist())


def test_a_template_that_strips_reasoning_forks_at_the_next_question(
    templates: dict[str, ChatTemplate], say: Say
) -> None:
    thinking = templates["thinking"]
    graph = EpisodeGraph("e")
    first = say(graph, thinking, [HELLO], "<think>\nwhy\n</think>\n\na<|im_end|>")
    messages = [*first.messages, Message("user", "next")]
    plan = plan_for(graph, thinking, messages)
    assert plan.parent is None
    told = r"('…sistant\n<think>\nwhy\n</think>\n\na<|im_en…' -> '…sistant\na<|im_end|>\n<|im_start|>user\nn…')"
    assert plan.fork_reason == f"template rewrites history at character 55 {told}"
    assert "why" not in thinking.decode(plan.prompt_ids.tolist())
    dropped = [HELLO, Message("assistant", "a"), Message("user", "next")]
    assert plan_for(graph, thinking, dropped).prompt_ids.tolist() == plan.prompt_ids.tolist()


def test_a_template_that_strips_reasoning_continues_after_a_tool(templates: dict[str, ChatTemplate], say: Say) -> None:
    thinking = templates["thinking"]
    graph = EpisodeGraph("e")
    first = say(graph, thinking, [HELLO], f"<think>\nwhy\n</think>\n\n{CALL}<|im_end|>", tools=TOOLS)
    answer = Message("tool", "2", tool_call_id=first.reply.tool_calls[0].id)
    plan = plan_for(graph, thinking, [*first.messages, answer], tools=TOOLS)
    assert plan.parent is first
    assert plan.prompt_ids.tolist()[: first.prompt_length + first.num_sampled] == graph.full_ids(first).tolist()


def test_between_equal_texts_tool_call_ids_decide_then_the_latest(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    one = say(graph, chatml, [HELLO], f"{CALL}<|im_end|>", tools=TOOLS)
    two = say(graph, chatml, [HELLO], f"{CALL}<|im_end|>", tools=TOOLS)
    for turn in (one, two):
        answer = Message("tool", "2", tool_call_id=turn.reply.tool_calls[0].id)
        plan = plan_for(graph, chatml, [*turn.messages, answer], tools=TOOLS)
        assert (plan.parent, plan.chosen_by) == (turn, "tool-call ids")
    renamed = parse_messages(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a":1}'}}]},
            {"role": "tool", "tool_call_id": "x", "content": "2"},
        ]
    )
    plan = plan_for(graph, chatml, renamed, tools=TOOLS)
    assert (plan.parent, plan.chosen_by) == (two, "latest")
    assert say(graph, chatml, renamed, "a<|im_end|>", tools=TOOLS).chosen_by == "latest"


def test_results_given_to_the_wrong_calls_are_another_conversation(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    calls = [{"id": name, "function": {"name": "add", "arguments": "{}"}} for name in ("x", "y")]
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": name, "content": "2"} for name in ("x", "y")]
    say(graph, chatml, parse_messages([*asked, *results]), "a<|im_end|>", tools=TOOLS)
    swapped = [*asked, results[1], results[0], {"role": "assistant", "content": "a"}]
    plan = plan_for(graph, chatml, parse_messages(swapped), tools=TOOLS)
    assert plan.fork_reason == "message 2 differs: tool_call_id of another call ('x' -> 'y')"


@pytest.mark.parametrize(
    ("name", "text", "marker"),
    [
        ("chatml", "cut", "<|im_end|>"),
        ("chatml", "", "<|im_end|>"),
        ("chatml", "whole<|im_end|>", ""),
        ("thinking", "<think>\n\n</think>\n\nend of text<|endoftext|>", "<|im_end|>"),
        ("llama3", "cut", "<|eot_id|>"),
        ("llama3", "whole<|eot_id|>", ""),
        ("llama3", "another end of turn<|eom_id|>", ""),
        ("gemma", "cut", "<end_of_turn>"),
        ("gemma", "end of text<eos>", "<end_of_turn>"),
    ],
)
def test_a_reply_without_end_of_turn_is_closed_by_force(
    templates: dict[str, ChatTemplate], say: Say, name: str, text: str, marker: str
) -> None:
    template = templates[name]
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO], text, finish=FinishReason.LENGTH)
    tail = Message("tool", "x", tool_call_id="c") if name == "thinking" else Message("user", "next")
    plan = plan_for(graph, template, [*first.messages, tail])
    assert plan.parent is first
    assert plan.forced_count == (1 if marker else 0)
    assert template.decode(plan.segment[: plan.forced_count].tolist()) == marker
    second = say(graph, template, plan.messages, "b")
    runs = [(Provenance.FORCED, 1)] if marker else []
    assert second.segment_runs == (*runs, (Provenance.RENDERED, len(plan.segment) - len(runs)))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "{% for m in messages %}{{ m.role + ':' + m.content }}{{ '' if loop.last else '<|im_end|>' }}{% endfor %}",
    ],
    ids=["no marker", "no marker after the last"],
)
def test_templates_that_mark_no_end_fork(folders: dict[str, Path], say: Say, source: str) -> None:
    template = ChatTemplate.load(folders["chatml"], template=source)
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO], "a<|im_end|>")
    plan = plan_for(graph, template, [*first.messages, HELLO])
    assert (plan.parent, plan.fork_reason) == (None, "template marks no end of the turn")


def test_a_template_that_changes_what_it_wrote_forks_though_all_lengths_stay(
    folders: dict[str, Path], say: Say
) -> None:
    source = (
        "{{ messages | length }} {% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '' }}"
    )
    template = ChatTemplate.load(folders["chatml"], template=source)
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO], "a<|im_end|>")
    plan = plan_for(graph, template, [*first.messages, HELLO])
    assert plan.parent is None
    assert plan.fork_reason.startswith("template rewrites history at character 0 ('2 user:")


def test_a_day_that_passes_forks_nothing(folders: dict[str, Path], say: Say) -> None:
    """The prompt tells the date. The conversation goes on with the tokens that told yesterday's."""
    today = [datetime(2026, 11, 29)]
    template = ChatTemplate.load(folders["llama3"], now=lambda: today[0])
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO], "a<|eot_id|>")
    today[0] = datetime(2026, 11, 30)
    plan = plan_for(graph, template, [*first.messages, HELLO])
    assert plan.parent is first
    assert "Today: 29 Nov" in template.decode(plan.prompt_ids.tolist())


def test_a_template_that_cannot_end_with_a_reply_forks(folders: dict[str, Path], say: Say) -> None:
    source = (
        "{% if messages | length == 4 and not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    template = ChatTemplate.load(folders["chatml"], template=source)
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO, HELLO, HELLO], "a<|im_end|>")
    plan = plan_for(graph, template, [*first.messages, HELLO])
    assert (plan.parent, plan.fork_reason) == (None, "template cannot end with a reply")


def test_tokenizers_that_mark_word_starts_continue_exactly(tmp_path: Path, say: Say) -> None:
    """A sentencepiece-like tokenizer puts a word mark before text, also after special tokens."""
    words = ["▁", "a", "b", ":", "\n", "▁a", "▁b", "<s>", "</s>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = (
        "{{ bos_token }}"
        "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else ':') }}{% endfor %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    graph = EpisodeGraph("e")
    ids = template.encode("<s>a:b</s>")
    prompt = fresh(template, [Message("user", "a")])
    assert ids[: len(prompt)] == prompt
    first = say(graph, template, [Message("user", "a")], token_ids=ids[len(prompt) :])
    plan = plan_for(graph, template, [*first.messages, Message("user", "b a")])
    assert plan.parent is first
    assert plan.prompt_ids.tolist() == fresh(template, plan.messages)


def test_text_that_ends_a_closed_conversation_is_no_obstacle(folders: dict[str, Path], say: Say) -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '<|endoftext|>' }}"
    )
    template = ChatTemplate.load(folders["thinking"], template=source)
    graph = EpisodeGraph("e")
    first = say(graph, template, [HELLO], "a<|im_end|>")
    plan = plan_for(graph, template, [*first.messages, HELLO])
    text = "user:hello<|im_end|>\nassistant:a<|im_end|>\nuser:hello<|im_end|>\nassistant:"
    assert template.decode(plan.prompt_ids.tolist()) == text


def test_requests_may_overlap(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "a<|im_end|>")
    before = dump_graph(graph)
    plans = [plan_for(graph, chatml, [*first.messages, Message("user", text)]) for text in "xyz"]
    assert dump_graph(graph) == before
    for number, plan in reversed(list(enumerate(plans))):
        graph.commit(plan, **sampled(f"late-{number}", [5, 6]))
    assert [turn.parent_id for turn in graph.turns] == [None, *[first.turn_id] * 3]
    assert [turn.turn_id for turn in graph.turns[1:]] == ["late-2", "late-1", "late-0"]
    assert graph.turn("late-1").messages[2].content == "y"


@given(data=st.data())
def test_overlapping_requests_do_not_disturb_each_other(chatml: ChatTemplate, data: st.DataObject) -> None:
    """Any interleaving of resolves and commits: every turn is sampled on the prompt that its plan promised."""
    graph = EpisodeGraph("e")
    open_plans: list[tuple[str, PromptPlan, list[int]]] = []
    promised: dict[str, tuple[str | None, list[int]]] = {}
    for number in range(data.draw(st.integers(2, 12))):
        if open_plans and data.draw(st.booleans()):
            turn_id, plan, before = open_plans.pop(data.draw(st.integers(0, len(open_plans) - 1)))
            ids = chatml.encode(data.draw(words) + "<|im_end|>")
            reply = Message("assistant", chatml.plain_text(ids))
            turn = graph.commit(plan, **sampled(turn_id, ids, reply=reply))
            assert graph.prompt_ids(turn).tolist() == before
            promised[turn_id] = (turn.parent_id, [*before, *ids])
            continue
        history = data.draw(st.sampled_from([(), *(turn.messages for turn in graph.turns)]))
        plan = plan_for(graph, chatml, [*history, Message("user", data.draw(words))])
        assert (plan.parent is None) == (not history)
        open_plans.append((f"t{number}", plan, plan.prompt_ids.tolist()))
    for turn_id, (parent_id, ids) in promised.items():
        assert graph.turn(turn_id).parent_id == parent_id
        assert graph.full_ids(graph.turn(turn_id)).tolist() == ids


def test_prompts_may_be_resolved_in_another_thread(chatml: ChatTemplate) -> None:
    """Text and token searches see a whole tree while turns are added, or none of the new turn."""
    graph = EpisodeGraph("e")
    stop = threading.Event()

    def search() -> int:
        count = 0
        while not stop.is_set() or count == 0:
            for number in range(20):
                text = f"question {number} answer {number}!"
                plan = graph.resolve_text(policy="solver", agent="", text=text, template=chatml)
                assert chatml.decode(plan.prompt_ids.tolist()) == text
                ids = plan.prompt_ids.tolist()
                assert graph.resolve_tokens(policy="solver", agent="", token_ids=ids).prompt_ids.tolist() == ids
                messages = [Message("user", text), Message("assistant", "so"), Message("user", "x")]
                plan = plan_for(graph, chatml, messages)
                assert (plan.parent is None) == ("so" in chatml.decode(plan.segment.tolist()))
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(search)
        for number in range(200):
            text = f"question {number % 20} "
            ids = chatml.encode(f"answer {number % 20}")
            plan = graph.resolve_text(policy="solver", agent="", text=text, template=chatml)
            graph.commit(plan, **sampled(f"text-{number}", ids, reply=None), text=chatml.plain_text(ids))
            plan = plan_for(graph, chatml, [Message("user", f"{text}answer {number % 20}!")])
            graph.commit(plan, **sampled(f"chat-{number}", [5], reply=Message("assistant", "so")))
        stop.set()
        assert searching.result(timeout=60) > 0


def sampled(turn_id: str, ids: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "turn_id": turn_id,
        "token_ids": ids,
        "logprobs": [-1.0] * len(ids),
        "versions": [(0, len(ids))],
        "temperature": 1.0,
        "finish_reason": FinishReason.STOP,
        "reply": Message("assistant", turn_id),
        **changes,
    }


def test_missing_logprobs_keep_the_token_and_are_counted(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    values = [-1.0, None, float("nan"), float("-inf"), -2.0]
    turn = graph.commit(plan_for(graph, chatml, [HELLO]), **sampled("t", [1, 2, 3, 4, 5], logprobs=values))
    assert turn.sampled.tolist() == [1, 2, 3, 4, 5]
    assert turn.trainable_T.tolist() == [True, False, False, False, True]
    assert (turn.num_missing_logprobs, graph.num_missing_logprobs, graph.num_sampled_tokens) == (3, 3, 5)


def test_versions_are_run_lengths(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    runs = [(4, 1), (4, 1), (7, 0), (5, 2)]
    turn = graph.commit(plan_for(graph, chatml, [HELLO]), **sampled("t", [1, 2, 3, 4], versions=runs))
    assert turn.versions == ((4, 2), (5, 2))
    assert turn.versions_T.tolist() == [4, 4, 5, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-1.0]}, "one length"),
        ({"versions": [(0, 1)]}, "one length"),
        ({"versions": [(-1, 2)]}, "version >= 0"),
        ({"reply": Message("user", "x")}, "assistant"),
        ({"turn_id": "first"}, "already"),
    ],
)
def test_contradictions_are_refused_and_leave_the_graph_alone(
    chatml: ChatTemplate, changes: dict[str, Any], message: str
) -> None:
    graph = EpisodeGraph("e")
    graph.commit(plan_for(graph, chatml, [HELLO]), **sampled("first", [1]))
    with pytest.raises(ValueError, match=message):
        graph.commit(plan_for(graph, chatml, [HELLO]), **{**sampled("t", [1, 2]), **changes})
    assert graph.num_turns == 1


def test_a_plan_of_another_episode_is_refused(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "a<|im_end|>")
    plan = plan_for(graph, chatml, [*first.messages, HELLO])
    with pytest.raises(ValueError, match="parent"):
        EpisodeGraph("other").commit(plan, **sampled("t", [1]))


def test_bad_requests_are_request_errors(chatml: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="empty"):
        plan_for(EpisodeGraph("e"), chatml, [])
    with pytest.raises(RequestError, match="JSON"):
        plan_for(EpisodeGraph("e"), chatml, [HELLO], tools=[{"name": object()}])


def test_a_long_history_is_stored_once(chatml: ChatTemplate, say: Say) -> None:
    graph = EpisodeGraph("e")
    history: list[dict[str, Any]] = []
    for number in range(5):
        history.append({"role": "user", "content": f"question {number}"})
        turn = say(graph, chatml, parse_messages(history), f"answer {number}<|im_end|>")
        history.append({"role": "assistant", "content": turn.reply.content})
    fork = say(graph, chatml, parse_messages([*history[:3], {"role": "user", "content": "else"}]), "b<|im_end|>")
    objects = {id(message) for turn in graph.turns for message in turn.messages}
    assert len(objects) == 12
    assert fork.messages[2] is graph.turns[-2].messages[2]
    assert not graph.turns[0].sampled.flags.writeable


words = st.text(alphabet="helowas ?é", min_size=1, max_size=6).filter(lambda text: text == text.strip())
scripts = st.lists(st.tuples(words, words), min_size=2, max_size=5)


@given(script=scripts, name=st.sampled_from(["chatml", "llama3", "gemma"]), use_tools=st.booleans())
def test_continuing_gives_the_tokens_of_a_fresh_rendering(
    templates: dict[str, ChatTemplate], say: Say, script: list[tuple[str, str]], name: str, use_tools: bool
) -> None:
    """Where the model writes exactly what the template would, extending and rendering anew agree."""
    template = templates[name]
    tools = TOOLS if use_tools and template.shows_tools else None
    graph = EpisodeGraph("e")
    messages: tuple[Message, ...] = ()
    for number, (question, answer) in enumerate(script):
        messages = (*messages, Message("user", question))
        plan = plan_for(graph, template, messages, tools=tools)
        assert (plan.parent is None) == (number == 0)
        assert plan.prompt_ids.tolist() == fresh(template, messages, tools)
        messages = say(graph, template, messages, answer + template.eot_text, tools=tools).messages


@given(data=st.data())
def test_every_continued_prompt_extends_its_parent(
    templates: dict[str, ChatTemplate], say: Say, data: st.DataObject
) -> None:
    """Random trees of conversations, with arbitrary (even cut) replies: no sampled token is ever changed."""
    template = templates[data.draw(st.sampled_from(["chatml", "llama3", "gemma"]))]
    graph = EpisodeGraph("e")
    for _ in range(data.draw(st.integers(1, 6))):
        before = data.draw(st.sampled_from([None, *graph.turns]))
        history = () if before is None else before.messages
        reply = data.draw(st.lists(st.integers(0, 265), max_size=5))
        turn = say(graph, template, [*history, Message("user", data.draw(words))], token_ids=reply)
        assert turn.sampled.tolist() == reply
        if turn.parent_id is not None:
            head = graph.full_ids(graph.turn(turn.parent_id))
            assert graph.prompt_ids(turn)[: len(head)].tolist() == head.tolist()
            assert graph.turn(turn.parent_id).messages == turn.messages[: len(history)]
        assert len(graph.prompt_ids(turn)) == turn.prompt_length
