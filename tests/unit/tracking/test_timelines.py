"""Samples: one per timeline, every sampled token trained exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import TrainingSample
from wingbeat.tracking import EpisodeGraph, Turn, build_samples, count_untrainable, timelines

Grow = Callable[..., Turn]


def bits(sample: TrainingSample) -> str:
    return "".join(map(str, sample.sampled_T))


def samples_of(graph: EpisodeGraph, agent: str = "") -> tuple[TrainingSample, ...]:
    return build_samples(graph, policy="solver", episode_id="e").get(agent, ())


def test_three_linear_turns_are_one_sample(grow: Grow) -> None:
    """``[1-5] -> [10,11,12]``, ``[..., 20,21] -> [30,31]``, ``[..., 40] -> [50-52]``."""
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1, 2, 3, 4, 5], sampled=[10, 11, 12])
    b = grow(graph, "b", parent=a, segment=[20, 21], sampled=[30, 31])
    grow(graph, "c", parent=b, segment=[40], sampled=[50, 51, 52])
    (sample,) = samples_of(graph)
    assert sample.tokens_T.tolist() == [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 30, 31, 40, 50, 51, 52]
    assert bits(sample)[1:] == "000011100110111"
    assert sample.num_sampled == 8
    assert sample.turn_ids == ("a", "b", "c")
    assert sample.sample_id == "e:c"
    assert sample.sampling_logprobs_T.tolist() == [0, 0, 0, 0, 0, -10, -11, -12, 0, 0, -30, -31, 0, -50, -51, -52]


def test_two_unrelated_turns_are_two_samples(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "a", segment=[1, 2, 3], sampled=[10, 11])
    grow(graph, "b", segment=[50, 51, 52], sampled=[60, 61])
    assert [bits(sample)[1:] for sample in samples_of(graph)] == ["0011", "0011"]


def test_the_worked_example_of_the_sample_format(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1, 2], sampled=[10, 11], versions=[(4, 2)])
    grow(graph, "b", parent=a, segment=[20], sampled=[30], versions=[(5, 1)])
    (sample,) = samples_of(graph)
    assert sample.tokens_T.tolist() == [1, 2, 10, 11, 20, 30]
    assert sample.sampled_T.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.versions_T.tolist() == [-1, -1, 4, 4, -1, 5]
    assert sample.min_version == 4


def test_shared_turns_train_in_the_first_timeline_only(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10])
    d = grow(graph, "d", parent=a, segment=[2], sampled=[20])
    c = grow(graph, "c", parent=a, segment=[3], sampled=[30])
    grow(graph, "late", parent=d, segment=[4], sampled=[40])
    assert [path[-1] for path in timelines(graph, policy="solver")] == [c, graph.turn("late")]
    first, second = samples_of(graph)
    assert (first.tokens_T.tolist(), bits(first), first.turn_ids) == ([1, 10, 3, 30], "0101", ("a", "c"))
    assert (second.tokens_T.tolist(), bits(second)) == ([1, 10, 2, 20, 4, 40], "000101")
    assert second.versions_T.tolist() == [-1, -1, -1, 0, -1, 0]
    assert second.sampling_logprobs_T.tolist() == [0, 0, 0, -20, 0, -40]


def test_agents_are_apart_and_other_policies_left_out(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "a", segment=[1], sampled=[10], agent="planner")
    grow(graph, "b", segment=[2], sampled=[20], agent="critic")
    grow(graph, "c", segment=[3], sampled=[30], policy="judge", agent="critic")
    found = build_samples(graph, policy="solver", episode_id="e")
    assert {agent: [s.turn_ids for s in samples] for agent, samples in found.items()} == {
        "planner": [("a",)],
        "critic": [("b",)],
    }
    assert list(build_samples(graph, policy="judge", episode_id="e")) == ["critic"]
    assert build_samples(graph, policy="nobody", episode_id="e") == {}


def test_tokens_without_logprob_and_forced_tokens_never_train(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10, 11, 12], logprobs=[-1.0, None, -3.0])
    grow(graph, "b", parent=a, segment=[99, 2], sampled=[20], forced=1)
    (sample,) = samples_of(graph)
    assert sample.tokens_T.tolist() == [1, 10, 11, 12, 99, 2, 20]
    assert bits(sample) == "0101001"
    assert np.isfinite(sample.sampling_logprobs_T).all()
    assert sample.versions_T.tolist() == [-1, 0, -1, 0, -1, -1, 0]
    assert count_untrainable(graph, policy="solver") == {"missing_logprob": 1}


def test_nothing_trainable_gives_no_sample(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    grow(graph, "empty", segment=[1], sampled=[])
    grow(graph, "blind", segment=[2], sampled=[3, 4], logprobs=[None, None])
    grow(graph, "greedy", segment=[5], sampled=[6, 7, 8], temperature=0.0)
    assert build_samples(graph, policy="solver", episode_id="e") == {}
    assert count_untrainable(graph, policy="solver") == {"greedy": 3, "missing_logprob": 2}
    assert build_samples(EpisodeGraph("none"), policy="solver", episode_id="e") == {}


def test_an_empty_leaf_still_trains_its_ancestors(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10])
    grow(graph, "b", parent=a, segment=[2], sampled=[])
    (sample,) = samples_of(graph)
    assert (bits(sample), sample.turn_ids) == ("010", ("a",))


def test_each_temperature_has_a_sample_of_its_own(grow: Grow) -> None:
    graph = EpisodeGraph("e")
    a = grow(graph, "a", segment=[1], sampled=[10])
    b = grow(graph, "b", parent=a, segment=[2], sampled=[20], temperature=0.5)
    grow(graph, "c", parent=b, segment=[3], sampled=[30])
    warm, cool = samples_of(graph)
    assert (warm.temperature, bits(warm), warm.sample_id) == (1.0, "010001", "e:c")
    assert (cool.temperature, bits(cool), cool.sample_id) == (0.5, "000100", "e:c:1")
    assert warm.token_ids == cool.token_ids


@given(data=st.data())
def test_every_trainable_token_trains_exactly_once(grow: Grow, data: st.DataObject) -> None:
    """Over random forests: tokens are made unique, so that each can be counted over all samples."""
    graph = EpisodeGraph("e")
    expected: Counter[tuple[str, int, float, int]] = Counter()
    for number in range(data.draw(st.integers(0, 12))):
        agent = data.draw(st.sampled_from(["", "critic"]))
        parent = data.draw(st.sampled_from([None, *(turn for turn in graph.turns if turn.agent == agent)]))
        base = 1000 * (number + 1)
        sampled = [base + offset for offset in range(data.draw(st.integers(0, 4)))]
        logprobs = [data.draw(st.sampled_from([-0.5, -1.5, None])) for _ in sampled]
        split = data.draw(st.integers(0, len(sampled)))
        grow(
            graph,
            f"t{number}",
            parent=parent,
            segment=[number] * data.draw(st.integers(1, 3)),
            sampled=sampled,
            logprobs=logprobs,
            versions=[(number, split), (number + 1, len(sampled) - split)],
            temperature=data.draw(st.sampled_from([1.0, 0.7])),
            agent=agent,
        )
        for index, (token, logprob) in enumerate(zip(sampled, logprobs, strict=True)):
            if logprob is not None:
                expected[agent, token, logprob, number + (index >= split)] += 1
    found: Counter[tuple[str, int, float, int]] = Counter()
    names: list[str] = []
    for agent, samples in build_samples(graph, policy="solver", episode_id="e").items():
        for sample in samples:
            names.append(sample.sample_id)
            assert sample.num_sampled > 0
            columns = (sample.tokens_T, sample.sampling_logprobs_T, sample.versions_T)
            mask = sample.sampled_T.astype(bool)
            found.update((agent, int(t), float(p), int(v)) for t, p, v in zip(*(c[mask] for c in columns), strict=True))
            assert (sample.versions_T[~mask] == -1).all()
            paths = [graph.full_ids(turn).tolist() for turn in graph.turns]
            assert sample.tokens_T.tolist() in paths
    assert found == expected
    assert len(set(names)) == len(names)
