"""Replies that do not count: never delivered, sampled again, or passed over for a sibling; and how they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.tracking import (
    ChatTemplate,
    EpisodeGraph,
    Message,
    Turn,
    build_samples,
    count_untrainable,
    dump_graph,
    load_graph,
)

Grow = Callable[..., Turn]
Say = Callable[..., Turn]


def trained(graph: EpisodeGraph, **extra: Any) -> list[int]:
    samples = build_samples(graph, policy="solver", episode_id="e", **extra)
    found: list[int] = []
    for parts in samples.values():
        for sample in parts:
            found += sample.tokens_T[sample.sampled_T.astype(bool)].tolist()
    return sorted(found)


def test_votes_of_which_none_was_continued_all_count(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    for index in range(3):
        grow(graph, f"t{index}", segment=[1], sampled=[10 + index])
    assert graph.superseded() == {}
    assert trained(graph) == [10, 11, 12]


def test_the_sibling_of_a_continued_reply_does_not_count(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    one = grow(graph, "one", segment=[1, 2], sampled=[10])
    grow(graph, "two", segment=[1, 2], sampled=[20, 21])
    grow(graph, "other", segment=[1, 3], sampled=[30])
    deeper = grow(graph, "a", parent=one, segment=[4], sampled=[40])
    grow(graph, "b", parent=one, segment=[4], sampled=[50])
    grow(graph, "c", parent=one, segment=[5], sampled=[60])
    assert graph.superseded() == {"two": "sibling continued"}
    grow(graph, "end", parent=deeper, segment=[6], sampled=[70])
    assert graph.superseded() == {"two": "sibling continued", "b": "sibling continued"}
    assert trained(graph) == [10, 30, 40, 60, 70]
    assert trained(graph, train_superseded=True) == [10, 20, 21, 30, 40, 50, 60, 70]
    assert count_untrainable(graph, policy="solver") == {"superseded: sibling continued": 3}
    assert count_untrainable(graph, policy="solver", train_superseded=True) == {}


def test_siblings_belong_to_one_agent_and_policy(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    one = grow(graph, "one", segment=[1], sampled=[10])
    grow(graph, "agent", segment=[1], sampled=[20], agent="critic")
    grow(graph, "policy", segment=[1], sampled=[30], policy="judge")
    grow(graph, "next", parent=one, segment=[2], sampled=[40])
    assert graph.superseded() == {}


def test_a_reply_that_never_arrived_counts_only_if_it_was_continued(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    lost = grow(graph, "lost", segment=[1], sampled=[10])
    graph.mark_undelivered("lost")
    assert graph.superseded() == {"lost": "undelivered"}
    assert trained(graph) == []
    assert count_untrainable(graph, policy="solver") == {"superseded: undelivered": 1}
    grow(graph, "next", parent=lost, segment=[2], sampled=[20])
    assert graph.superseded() == {}
    assert trained(graph) == [10, 20]


def test_a_retry_that_fetches_the_reply_delivers_it(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "late", segment=[1], sampled=[10])
    graph.mark_undelivered("late")
    graph.mark_delivered("late")
    assert graph.superseded() == {}


def test_a_retry_that_was_sampled_anew_replaces_the_first(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "first", segment=[1], sampled=[10])
    graph.mark_resampled("first")
    grow(graph, "retry", segment=[1], sampled=[20])
    assert graph.superseded() == {"first": "resampled"}
    assert trained(graph) == [20]


def test_undelivered_goes_before_other_reasons(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "first", segment=[1], sampled=[10])
    graph.mark_undelivered("first")
    graph.mark_resampled("first")
    grow(graph, "next", parent=grow(graph, "retry", segment=[1], sampled=[20]), segment=[2], sampled=[30])
    assert graph.superseded() == {"first": "undelivered"}


def test_the_ancestors_of_a_superseded_leaf_still_train(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    root = grow(graph, "root", segment=[1], sampled=[10])
    grow(graph, "lost", parent=root, segment=[2], sampled=[20])
    graph.mark_undelivered("lost")
    (sample,) = build_samples(graph, policy="solver", episode_id="e")[""]
    assert sample.tokens_T.tolist() == [1, 10]
    assert sample.turn_ids == ("root",)


def test_greedy_and_blind_tokens_of_superseded_turns_are_counted_once(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "lost", segment=[1], sampled=[10, 11], logprobs=[-1.0, None])
    grow(graph, "cold", segment=[2], sampled=[20], temperature=0.0)
    graph.mark_undelivered("lost")
    graph.mark_undelivered("cold")
    assert count_untrainable(graph, policy="solver") == {"superseded: undelivered": 3}
    assert count_untrainable(graph, policy="solver", train_superseded=True) == {"greedy": 1, "missing_logprob": 1}


def test_marks_need_a_turn_of_this_episode(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "a", segment=[1], sampled=[2])
    for mark in (graph.mark_undelivered, graph.mark_delivered, graph.mark_resampled):
        with pytest.raises(KeyError):
            mark("nobody")


def test_a_partial_reply_that_the_agent_continues_trains(chatml: ChatTemplate, say: Say) -> None:
    """A stream was cut; the agent goes on with what it got. The end of turn is forced, the sampled part trains."""
    graph = EpisodeGraph("e")
    cut = say(graph, chatml, [Message("user", "hello")], "as he")
    graph.mark_undelivered(cut.turn_id)
    assert trained(graph) == []
    say(graph, chatml, [*cut.messages, Message("user", "so")], "ll<|im_end|>")
    assert graph.superseded() == {}
    assert len(trained(graph)) == graph.num_sampled_tokens


@given(data=st.data())
def test_every_token_trains_once_or_is_counted_once(grow: Grow, data: st.DataObject) -> None:
    """Over random forests with marks and equal prompts: nothing is lost, nothing trains twice."""
    graph = EpisodeGraph("e")
    for number in range(data.draw(st.integers(1, 12))):
        sampled = [1000 * (number + 1) + offset for offset in range(data.draw(st.integers(0, 3)))]
        grow(
            graph,
            f"t{number}",
            parent=data.draw(st.sampled_from([None, *graph.turns])),
            segment=[data.draw(st.integers(0, 1))],
            sampled=sampled,
            logprobs=[data.draw(st.sampled_from([-0.5, None])) for _ in sampled],
            temperature=data.draw(st.sampled_from([1.0, 0.7, 0.0])),
        )
    for turn in graph.turns:
        if data.draw(st.integers(0, 3)) == 0:
            data.draw(st.sampled_from([graph.mark_undelivered, graph.mark_resampled]))(turn.turn_id)
    superseded = graph.superseded()
    parents = {turn.parent_id for turn in graph.turns}
    assert not parents & superseded.keys()
    for with_superseded in (False, True):
        counts = Counter(trained(graph, train_superseded=with_superseded))
        assert set(counts.values()) <= {1}
        untrained = sum(count_untrainable(graph, policy="solver", train_superseded=with_superseded).values())
        assert len(counts) + untrained == graph.num_sampled_tokens
    for turn_id, reason in superseded.items():
        turn = graph.turn(turn_id)
        same = [t for t in graph.turns if (t.parent_id, t.segment.tolist()) == (turn.parent_id, turn.segment.tolist())]
        marked = turn_id in graph.undelivered or turn_id in graph.resampled
        assert marked or any(other.turn_id in parents for other in same)
        assert (reason == "sibling continued") == (not marked)
    assert load_graph(dump_graph(graph)).superseded() == superseded
