"""Which tokens a sampled token was drawn among: stored once per distinct set, from the turn to the sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.types import FinishReason
from wingbeat.tracking import EpisodeGraph, PromptPlan, Turn, build_samples, dump_graph, load_graph

Grow = Callable[..., Turn]


def add(graph: EpisodeGraph, turn_id: str, supports: list[bytes], *, ids: list[int], **extra: Any) -> Turn:
    plan: PromptPlan = graph.resolve_tokens(policy="solver", agent="", token_ids=ids)
    count = extra.pop("count", len(supports))
    return graph.commit(
        plan,
        turn_id=turn_id,
        token_ids=range(100, 100 + count),
        versions=[(0, count)],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        supports=supports,
        **{"logprobs": [-1.0] * count, **extra},
    )


def test_equal_supports_are_stored_once() -> None:
    turn = add(EpisodeGraph("e"), "a", [b"x", b"", b"y", b"x"], ids=[1])
    assert turn.support_table == (b"x", b"y")
    assert turn.support_index.tolist() == [0, -1, 1, 0]


@pytest.mark.parametrize("supports", [[], [b"", b"", b""]])
def test_the_whole_vocabulary_costs_nothing(supports: list[bytes]) -> None:
    turn = add(EpisodeGraph("e"), "a", supports, ids=[1], count=3)
    assert (turn.support_table, turn.support_index.size) == ((), 0)
    (sample,) = build_samples(load(turn), policy="solver", episode_id="e")[""]
    assert (sample.support_table, sample.support_index) == ((), b"")


def load(turn: Turn) -> EpisodeGraph:
    graph = EpisodeGraph("e")
    graph.add(turn)
    return load_graph(dump_graph(graph))


def test_a_support_for_some_tokens_only_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 3 supports or none, got 2"):
        add(EpisodeGraph("e"), "a", [b"x", b"y"], ids=[1], count=3)


def test_a_sample_holds_the_supports_of_its_trained_tokens() -> None:
    graph = EpisodeGraph("e")
    add(graph, "a", [b"x", b"", b"y"], ids=[1, 2], logprobs=[None, -1.0, -1.0])
    add(graph, "b", [b"z", b"y"], ids=[1, 2, 100, 101, 102, 3])
    add(graph, "c", [b"w"], ids=[1, 2, 100, 101, 102, 4])
    first, second = build_samples(graph, policy="solver", episode_id="e")[""]
    assert first.tokens_T.tolist() == [1, 2, 100, 101, 102, 3, 100, 101]
    assert first.support_table == (b"y", b"z")
    assert first.support_index_T.tolist() == [-1, -1, -1, -1, 0, -1, 1, 0]
    assert (second.support_table, second.support_index_T.tolist()) == ((b"w",), [-1] * 6 + [0])


@given(data=st.data())
def test_supports_stay_with_their_tokens(data: st.DataObject) -> None:
    graph = EpisodeGraph("e")
    wanted: dict[int, bytes] = {}
    ids = [7]
    for number in range(data.draw(st.integers(1, 4))):
        supports = data.draw(st.lists(st.sampled_from([b"", b"x", b"y", b"z"]), min_size=1, max_size=4))
        sampled = [1000 * (number + 1) + offset for offset in range(len(supports))]
        graph.commit(
            graph.resolve_tokens(policy="solver", agent="", token_ids=ids),
            turn_id=f"t{number}",
            token_ids=sampled,
            logprobs=[-1.0] * len(sampled),
            versions=[(0, len(sampled))],
            temperature=data.draw(st.sampled_from([1.0, 0.5])),
            finish_reason=FinishReason.STOP,
            supports=supports,
        )
        wanted |= dict(zip(sampled, supports, strict=True))
        ids = [*ids, *sampled, number] if data.draw(st.booleans()) else [7, number]
    loaded = load_graph(dump_graph(graph))
    found: dict[int, bytes] = {}
    for sample in build_samples(loaded, policy="solver", episode_id="e")[""]:
        for token, trains, place in zip(sample.tokens_T, sample.sampled_T, sample.support_index_T, strict=True):
            if trains:
                found[int(token)] = sample.support_table[place] if place >= 0 else b""
            else:
                assert place == -1
        assert len(set(sample.support_table)) == len(sample.support_table)
    assert found == wanted
