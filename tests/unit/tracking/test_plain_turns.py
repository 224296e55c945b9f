"""Plain completions: text and token ids extend earlier turns by their exact tokens, or begin anew with a reason."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError
from wingbeat.core.types import FinishReason
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, PromptPlan, Turn, TurnKind, dump_graph, load_graph

numbers = itertools.count()


def commit(graph: EpisodeGraph, plan: PromptPlan, ids: Sequence[int], *, text: str = "", turn_id: str = "") -> Turn:
    return graph.commit(
        plan,
        turn_id=turn_id or f"t{next(numbers)}",
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        versions=[(0, len(ids))],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text=text,
    )


def complete(graph: EpisodeGraph, template: ChatTemplate, prompt: str, ids: Sequence[int]) -> Turn:
    plan = graph.resolve_text(policy="solver", agent="", text=prompt, template=template)
    return commit(graph, plan, ids, text=template.plain_text(ids))


def text_plan(graph: EpisodeGraph, template: ChatTemplate, text: str, **extra: Any) -> PromptPlan:
    return graph.resolve_text(**{"policy": "solver", "agent": "", "text": text, "template": template, **extra})


def token_plan(graph: EpisodeGraph, ids: Sequence[int], **extra: Any) -> PromptPlan:
    return graph.resolve_tokens(**{"policy": "solver", "agent": "", "token_ids": ids, **extra})


# --- text -------------------------------------------------------------------------------------


def test_two_text_turns_are_one_timeline_of_exact_tokens(chatml: ChatTemplate) -> None:
    """The sampled "hello" is five tokens; encoding the text again would give one."""
    graph = EpisodeGraph("e")
    letters = [chatml.encode(letter)[0] for letter in "hello"]
    first = complete(graph, chatml, "Q: hi A: ", letters)
    assert (first.kind, first.messages, first.reply) == (TurnKind.TEXT, (), Message("assistant", "hello"))
    plan = text_plan(graph, chatml, "Q: hi A: hello\nQ: bye A:")
    assert (plan.parent, plan.fork_reason) == (first, "")
    assert plan.prompt_ids.tolist() == [*chatml.encode("Q: hi A: "), *letters, *chatml.encode("\nQ: bye A:")]
    second = commit(graph, plan, [5], text=chatml.plain_text([5]))
    assert graph.path(second) == (first, second)
    assert second.prompt_text == "\nQ: bye A:"
    assert text_plan(graph, chatml, f"Q: hi A: hello\nQ: bye A:{chatml.plain_text([5])}!").parent is second


def test_a_fresh_text_prompt_begins_as_the_tokenizer_wants(templates: dict[str, ChatTemplate]) -> None:
    llama = templates["llama3"]
    graph = EpisodeGraph("e")
    bos = llama.encode("<|begin_of_text|>")
    plan = text_plan(graph, llama, "hello")
    assert plan.prompt_ids.tolist() == bos + llama.encode("hello")
    turn = commit(graph, plan, llama.encode(" as"), text=" as")
    assert text_plan(graph, llama, "hello as you").segment.tolist() == llama.encode(" you")
    assert turn.parent_id is None


def test_the_token_that_ended_a_text_stays_in_its_continuation(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    ids = chatml.encode("yes<|im_end|>")
    first = complete(graph, chatml, "so?", ids)
    assert first.sampled_text == "yes"
    plan = text_plan(graph, chatml, "so?yes!")
    assert plan.parent is first
    assert plan.prompt_ids.tolist() == chatml.encode("so?") + ids + chatml.encode("!")


def test_a_text_that_was_cut_at_a_stop_string(chatml: ChatTemplate) -> None:
    """The tokens hold the stop string. A prompt that restates it continues them; one without it is another text."""
    graph = EpisodeGraph("e")
    first = complete(graph, chatml, "Q", chatml.encode("act\nObs:"))
    assert text_plan(graph, chatml, "Qact\nObs: 5").parent is first
    plan = text_plan(graph, chatml, "Qact\nEnd")
    assert (plan.parent, plan.fork_reason) == (None, "text differs at character 5 ('Qact\\nObs:' -> 'Qact\\nEnd')")
    told_less = commit(graph, text_plan(graph, chatml, "Z"), chatml.encode("act\nObs:"), text="act")
    plan = text_plan(graph, chatml, "Zact\nObs: 5")
    assert (plan.parent, plan.fork_reason) == (None, "the earlier reply's tokens say more than its text")
    assert told_less.sampled_text == "act"


def test_text_forks_name_the_first_difference(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    assert text_plan(graph, chatml, "a").fork_reason == ""
    first = complete(graph, chatml, "hello as", chatml.encode(" well"))
    plan = text_plan(graph, chatml, "hello so well")
    assert (plan.parent, plan.fork_reason) == (None, "text differs at character 6 ('hello as well' -> 'hello so well')")
    same = text_plan(graph, chatml, "hello as")
    assert (same.parent, same.fork_reason) == (None, "same prompt as an earlier turn, no reply continued")
    complete(graph, chatml, "hello as well, he", chatml.encode("ll"))
    plan = text_plan(graph, chatml, "hello as well. So")
    assert plan.parent is first
    assert plan.fork_reason == "text differs at character 13 ('hello as well, hell' -> 'hello as well. So')"
    assert text_plan(graph, chatml, "x", agent="other").fork_reason == "no earlier turn of this agent"
    assert len(text_plan(graph, chatml, "hello " * 1000).fork_reason) < 150


def test_equal_texts_continue_the_latest(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    complete(graph, chatml, "a", chatml.encode("hello"))
    two = complete(graph, chatml, "a", [chatml.encode(letter)[0] for letter in "hello"])
    plan = text_plan(graph, chatml, "ahello.")
    assert (plan.parent, plan.chosen_by) == (two, "latest")


def test_kinds_keep_apart(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    """Text never continues a conversation, nor the other way round; token ids continue anything."""
    graph = EpisodeGraph("e")
    chat = say(graph, chatml, [Message("user", "hello")], "as<|im_end|>")
    whole = chatml.decode(graph.full_ids(chat).tolist())
    plan = text_plan(graph, chatml, whole + "!")
    assert (plan.parent, plan.fork_reason) == (None, "no earlier text turn of this agent")
    other = graph.resolve(policy="solver", agent="", messages=[Message("user", "so")], tools=None, template=chatml)
    assert other.fork_reason == "message 0 differs: content ('hello' -> 'so')"
    ids = token_plan(graph, [*graph.full_ids(chat).tolist(), 7])
    assert (ids.parent, ids.segment.tolist()) == (chat, [7])
    follow = commit(graph, ids, [8])
    assert (follow.kind, follow.messages, follow.parent_id) == (TurnKind.TOKENS, (), chat.turn_id)
    again = graph.resolve(
        policy="solver", agent="", messages=[*chat.messages, Message("user", "x")], tools=None, template=chatml
    )
    assert again.parent is chat
    with pytest.raises(RequestError, match="plain completion"):
        graph.resolve(
            policy="solver", agent="", messages=[Message("user", "x")], tools=None, template=chatml, previous=follow
        )


def test_a_first_conversation_after_plain_turns_says_so(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    complete(graph, chatml, "so?", chatml.encode("yes"))
    plan = graph.resolve(policy="solver", agent="", messages=[Message("user", "x")], tools=None, template=chatml)
    assert (plan.parent, plan.fork_reason) == (None, "no earlier chat turn of this agent")


# --- token ids --------------------------------------------------------------------------------


def test_token_turns_extend_the_deepest_turn_whose_ids_begin_theirs() -> None:
    graph = EpisodeGraph("e")
    first = commit(graph, token_plan(graph, [1, 2]), [10, 11])
    assert first.kind is TurnKind.TOKENS
    second = commit(graph, token_plan(graph, [1, 2, 10, 11, 20]), [30])
    assert (second.parent_id, second.segment.tolist()) == (first.turn_id, [20])
    plan = token_plan(graph, [1, 2, 10, 11, 20, 30, 40])
    assert (plan.parent, plan.segment.tolist(), plan.fork_reason) == (second, [40], "")
    assert plan.prompt_ids.tolist() == [1, 2, 10, 11, 20, 30, 40]
    same = token_plan(graph, [1, 2, 10, 11, 20, 30])
    assert (same.parent, same.segment.tolist()) == (second, [])
    branch = token_plan(graph, [1, 2, 10, 11, 21])
    assert (branch.parent, branch.fork_reason) == (first, "token 4 differs (20 -> 21)")
    other = token_plan(graph, [1, 3])
    assert (other.parent, other.fork_reason) == (None, "token 1 differs (2 -> 3)")
    again = token_plan(graph, [1, 2])
    assert (again.parent, again.fork_reason) == (None, "same prompt as an earlier turn, no reply continued")


def test_any_token_id_of_any_vocabulary(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    ids = [0, 0xD800, 0xDFFF, 0xFFFF, 0x10000, 262_143, 0x10FFFF]
    turn = commit(graph, token_plan(graph, ids), ids)
    assert token_plan(graph, [*ids, *ids, 1]).parent is turn


@pytest.mark.parametrize("ids", [[], [-1], [0x110000], [2**31], [2**70]], ids=str)
def test_numbers_that_are_no_tokens_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        token_plan(EpisodeGraph("e"), ids)
    assert caught.value.param == "prompt"


def test_an_empty_text_is_refused_unless_the_tokenizer_makes_something_of_it(
    chatml: ChatTemplate, templates: dict[str, ChatTemplate]
) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        text_plan(EpisodeGraph("e"), chatml, "")
    assert len(text_plan(EpisodeGraph("e"), templates["llama3"], "").prompt_ids) == 1


def test_a_loaded_graph_continues_plain_turns(chatml: ChatTemplate) -> None:
    graph = EpisodeGraph("e")
    text = complete(graph, chatml, "so?", chatml.encode("yes"))
    tokens = commit(graph, token_plan(graph, [1, 2]), [3])
    loaded = load_graph(dump_graph(graph))
    assert text_plan(loaded, chatml, "so?yes!").parent is loaded.turn(text.turn_id)
    assert token_plan(loaded, [1, 2, 3, 4]).parent is loaded.turn(tokens.turn_id)


rows = st.lists(st.integers(0, 2), max_size=6)


@given(steps=st.lists(st.tuples(rows, rows), min_size=1, max_size=8), wanted=rows)
def test_the_tree_finds_what_a_scan_would(steps: list[tuple[list[int], list[int]]], wanted: list[int]) -> None:
    """Over random turns: the deepest turn whose tokens begin the given ones, the latest of several."""
    graph = EpisodeGraph("e")
    for prompt, sampled in steps:
        ids = [7, *prompt]
        turn = commit(graph, token_plan(graph, ids), sampled)
        assert graph.prompt_ids(turn).tolist() == ids
    ids = [7, *wanted]
    plan = token_plan(graph, ids)
    fitting = [turn for turn in graph.turns if ids[: turn.end] == graph.full_ids(turn).tolist()]
    if not fitting:
        assert plan.parent is None
        assert plan.fork_reason
    else:
        deepest = max(turn.end for turn in fitting)
        assert plan.parent is [turn for turn in fitting if turn.end == deepest][-1]
    assert plan.prompt_ids.tolist() == ids


@pytest.mark.slow
def test_a_search_costs_the_given_text_not_the_turns() -> None:
    """2,000 forks of 4,000 tokens: finding one's continuation compares about 4,000 tokens, not 8,000,000."""
    graph = EpisodeGraph("e")
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50_000, (2_000, 4_000), np.int32)
    for index, prompt in enumerate(prompts):
        commit(graph, token_plan(graph, prompt.tolist()), [index])
    ids = [*prompts[1_000].tolist(), 1_000, 5]
    token_plan(graph, ids)  # the tree is built with the first search
    started = time.process_time()
    plans = [token_plan(graph, ids) for _ in range(20)]
    assert (time.process_time() - started) / len(plans) < 0.01
    assert all(plan.parent is graph.turns[1_000] for plan in plans)
