"""Where turns begin in samples, what each earned, and which of them saw the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import TrainingSample
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, Turn, build_samples
from wingbeat.tracking.credit import turn_credits

Grow = Callable[..., Turn]


def samples_of(graph: EpisodeGraph, agent: str = "") -> tuple[TrainingSample, ...]:
    return build_samples(graph, policy="solver", episode_id="e").get(agent, ())


def fork(grow: Grow) -> EpisodeGraph:
    """``a -> b -> c`` and ``a -> d``; b is sampled at another temperature."""
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1, 2], sampled=[10, 11])
    b = grow(graph, "b", parent=a, segment=[3], sampled=[20], temperature=0.5)
    grow(graph, "c", parent=b, segment=[4, 5], sampled=[30, 31])
    grow(graph, "d", parent=a, segment=[6], sampled=[40])
    return graph


def test_a_turn_starts_at_its_first_sampled_token_in_every_timeline(grow: Grow) -> None:
    warm, cool, other = samples_of(fork(grow))
    assert (warm.turn_ids, warm.turn_starts) == (("a", "c"), (2, 8))
    assert [int(warm.tokens_T[place]) for place in warm.turn_starts] == [10, 30]
    assert (cool.turn_ids, cool.turn_starts) == (("b",), (5,))
    assert int(cool.tokens_T[5]) == 20
    assert (other.turn_ids, other.turn_starts) == (("d",), (5,))
    assert int(other.tokens_T[5]) == 40


def test_a_turn_starts_before_tokens_that_do_not_train_and_after_forced_ones(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10, 11], logprobs=[None, -1.0])
    grow(graph, "b", parent=a, segment=[99, 2], sampled=[20, 21], logprobs=[None, -2.0], forced=1)
    (sample,) = samples_of(graph)
    assert sample.sampled_T.tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert (sample.turn_ids, sample.turn_starts) == (("a", "b"), (1, 5))


def test_a_turn_that_trains_nothing_is_no_turn_of_the_sample(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10], logprobs=[None])
    grow(graph, "b", parent=a, segment=[2], sampled=[20])
    (sample,) = samples_of(graph)
    assert (sample.turn_ids, sample.turn_starts) == (("b",), (3,))


def test_credits_hold_every_turn_with_its_parent_and_its_reward(grow: Grow) -> None:
    graph = fork(grow)
    grow(graph, "j", segment=[7], sampled=[50], policy="judge")
    grow(graph, "k", segment=[8], sampled=[60], agent="critic")
    credits = turn_credits(graph, policy="solver", rewards={"b": 0.5, "k": -1.0, "j": 9.0})
    assert {agent: [(c.turn_id, c.parent_id, c.reward) for c in found] for agent, found in credits.items()} == {
        "": [("a", "", 0.0), ("b", "a", 0.5), ("c", "b", 0.0), ("d", "a", 0.0)],
        "critic": [("k", "", -1.0)],
    }
    assert turn_credits(graph, policy="nobody", rewards={}) == {}


def test_a_superseded_turn_is_none_of_them_unless_it_trains(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "lost", segment=[1], sampled=[10])
    kept = grow(graph, "kept", segment=[1], sampled=[11])
    grow(graph, "next", parent=kept, segment=[2], sampled=[12])
    assert graph.superseded() == {"lost": "sibling continued"}
    (credits,) = turn_credits(graph, policy="solver", rewards={"lost": 2.0}).values()
    assert [(c.turn_id, c.reward) for c in credits] == [("kept", 0.0), ("next", 0.0)]
    assert [s.turn_ids for s in samples_of(graph)] == [("kept", "next")]
    (credits,) = turn_credits(graph, policy="solver", rewards={"lost": 2.0}, train_superseded=True).values()
    assert [(c.turn_id, c.reward) for c in credits] == [("lost", 2.0), ("kept", 0.0), ("next", 0.0)]
    assert credits[0].state == credits[1].state, "both were sampled from the same prompt"


def test_an_agent_that_continues_anothers_conversation_has_turns_of_its_own(say: Grow, chatml: ChatTemplate) -> None:
    """So whatever trains in an agent's samples is among that agent's turns."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [Message("user", "hi")], "hello", agent="a")
    history = [*first.messages, Message("user", "go on")]
    second = say(graph, chatml, history, "well", agent="b")
    assert second.parent_id is None
    credits = turn_credits(graph, policy="solver", rewards={})
    assert {agent: [c.turn_id for c in found] for agent, found in credits.items()} == {
        "a": [first.turn_id],
        "b": [second.turn_id],
    }
    for agent, samples in build_samples(graph, policy="solver", episode_id="e").items():
        known = {credit.turn_id for credit in credits[agent]}
        assert all(set(sample.turn_ids) <= known for sample in samples)


@given(data=st.data())
def test_states_are_equal_exactly_where_prompts_are(grow: Grow, data: st.DataObject) -> None:
    """Over pairs of random forests: however the tokens are cut into turns, only the whole prompt matters."""
    graphs = [EpisodeGraph("one"), EpisodeGraph("two")]
    prompts: dict[str, list[bytes]] = {}
    for graph in graphs:
        for number in range(data.draw(st.integers(1, 6))):
            parent = data.draw(st.sampled_from([None, *graph.turns]))
            segment = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
            sampled = data.draw(st.lists(st.integers(1, 2), max_size=2))
            grow(graph, f"{graph.episode_id}-{number}", parent=parent, segment=segment, sampled=sampled)
        for credit in turn_credits(graph, policy="solver", rewards={}).get("", ()):
            prompt = np.asarray(graph.prompt_ids(graph.turn(credit.turn_id)), "<i4").tobytes()
            prompts.setdefault(credit.state, []).append(prompt)
    assert all(len(set(found)) == 1 for found in prompts.values()), "equal states, other prompts"
    distinct = {prompt for found in prompts.values() for prompt in found}
    assert len(distinct) == len(prompts), "equal prompts, other states"


@given(data=st.data())
def test_every_start_is_where_its_turn_was_sampled(grow: Grow, data: st.DataObject) -> None:
    """Over random forests with gaps, temperatures and empty turns: token k of a turn is token start + k."""
    graph = EpisodeGraph("e")
    for number in range(data.draw(st.integers(1, 8))):
        sampled = [100 * number + offset for offset in range(data.draw(st.integers(0, 3)))]
        grow(
            graph,
            f"t{number}",
            parent=data.draw(st.sampled_from([None, *graph.turns])),
            segment=[number] * data.draw(st.integers(1, 3)),
            sampled=sampled,
            logprobs=[data.draw(st.sampled_from([-0.5, None])) for _ in sampled],
            temperature=data.draw(st.sampled_from([1.0, 0.7, 0.0])),
        )
    for sample in samples_of(graph):
        assert len(sample.turn_starts) == len(sample.turn_ids)
        assert all(first < second for first, second in pairwise(sample.turn_starts))
        for turn_id, start in zip(sample.turn_ids, sample.turn_starts, strict=True):
            turn = graph.turn(turn_id)
            assert sample.tokens_T[start : start + turn.num_sampled].tolist() == turn.sampled.tolist()
