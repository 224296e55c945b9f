"""Packing: nothing lost, nothing cut, budgets kept, exclusions counted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.batching import (
    Credit,
    TokenFacts,
    micro_batches,
    padded_tokens,
    plan_micro_batches,
    plan_packs,
)
from wingbeat.trainer.rows import build_rows, split_by_group


def _episode(samples: tuple[TrainingSample, ...], *, group: str = "g") -> EpisodeSamples:
    return EpisodeSamples("e", 1, group, "p", "", 1.0, samples)


def _worked_sample(logprobs: list[float], *, temperature: float = 1.0) -> TrainingSample:
    """The worked instance of core.samples: two turns in one timeline."""
    return TrainingSample.build(
        "s",
        token_ids=np.array([1, 2, 10, 11, 20, 30], np.int32),
        sampled=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        sampling_logprobs=np.array(logprobs, np.float32),
        versions=np.array([-1, -1, 4, 4, -1, 5], np.int32),
        temperature=temperature,
    )


def test_each_sampled_token_is_explained_by_the_position_before_it() -> None:
    rows = build_rows([_episode((_worked_sample([0, 0, -1, -2, 0, -3], temperature=0.5),))], vocabulary=48)
    credit = Credit([np.array([0.75, 0.25, -1.0])], [0.5])
    (micro,) = micro_batches(rows, max_tokens=100, device=torch.device("cpu"))
    assert micro.sources_N.tolist() == [1, 2, 4]
    assert micro.targets.targets_N.tolist() == [10, 11, 30]
    assert micro.targets.temperatures_N.tolist() == [0.5] * 3
    facts = TokenFacts.of(micro.rows, credit=credit, device=torch.device("cpu"))
    assert facts.sampling_logprobs_N.tolist() == [-1, -2, -3]
    assert facts.versions_N.tolist() == [4, 4, 5]
    assert facts.advantages_N.tolist() == [0.75, 0.25, -1.0]
    assert facts.weights_N.tolist() == [0.5] * 3


def test_turns_are_numbered_over_rows() -> None:
    """Runs of two turns whose sample does not name them; the next row begins a new one."""
    samples = tuple(_worked_sample(found) for found in ([0, 0, -1, -2, 0, -3], [0, 0, float("nan"), -2, 0, -3]))
    rows = build_rows([_episode(samples)], vocabulary=48)
    facts = TokenFacts.of(rows, credit=Credit([np.ones(3), np.ones(2)], [1]), device=torch.device("cpu"))
    assert facts.sequences_N.tolist() == [1, 1, 2, 3, 4]
    assert facts.take(torch.tensor([3, 4])).sequences_N.tolist() == [3, 4]


def test_a_turn_stays_one_around_a_token_that_cannot_train() -> None:
    """Where the sample names its turns.  They may touch, too: the second begins right behind the first one's token."""
    sample = TrainingSample.build(
        "s",
        token_ids=np.arange(9, dtype=np.int32),
        sampled=np.array([0, 1, 1, 1, 1, 1, 0, 1, 1], np.uint8),
        sampling_logprobs=np.array([0, -1, float("nan"), -1, -1, -1, 0, float("nan"), -1], np.float32),
        versions=np.zeros(9, np.int32),
        turn_ids=("a", "b", "c"),
        turn_starts=(1, 4, 7),
    )
    rows = build_rows([_episode((sample, sample))], vocabulary=48)
    facts = TokenFacts.of(rows, credit=Credit([np.ones(5)] * 2, [1]), device=torch.device("cpu"))
    assert facts.sequences_N.tolist() == [1, 1, 2, 2, 3, 4, 4, 5, 5, 6]


def test_credit_of_another_row_is_refused() -> None:
    rows = build_rows([_episode((_worked_sample([0, 0, -1, -2, 0, -3]),))], vocabulary=48)
    with pytest.raises(ValueError, match="row 0: expected 3 advantages, one per trained token, got 2"):
        TokenFacts.of(rows, credit=Credit([np.ones(2)], [1]), device=torch.device("cpu"))


def test_tokens_know_their_turns() -> None:
    """The first turn begins at 2, its first token cannot train; the second at 5."""
    sample = _worked_sample([0, 0, float("nan"), -2, 0, -3])
    named = msgspec.structs.replace(sample, turn_ids=("a", "b"), turn_starts=(2, 5))
    (row,) = build_rows([_episode((named,))], vocabulary=48)
    assert [row.turn_ids[place] for place in row.turns_N] == ["a", "b"]
    (nameless,) = build_rows([_episode((sample,))], vocabulary=48)
    with pytest.raises(ValueError, match="expected a turn for each trained token, got 0 starts for 0 turns"):
        _ = nameless.turns_N


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_missing_logprobs_exclude_the_token_and_are_counted(bad: float) -> None:
    (row,) = build_rows([_episode((_worked_sample([0, 0, -1, bad, 0, -3]),))], vocabulary=48)
    assert row.targets_N.tolist() == [2, 5]
    assert row.num_excluded == 1


def test_a_first_token_has_nothing_to_explain_it() -> None:
    sample = TrainingSample.build(
        "s",
        token_ids=np.array([5, 6], np.int32),
        sampled=np.array([1, 1], np.uint8),
        sampling_logprobs=np.array([-1, -1], np.float32),
        versions=np.array([0, 0], np.int32),
    )
    (row,) = build_rows([_episode((sample,))], vocabulary=48)
    assert (row.targets_N.tolist(), row.num_excluded) == ([1], 1)


def test_greedy_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        build_rows([_episode((_worked_sample([0] * 6, temperature=0.0),))], vocabulary=48)


def test_padding_is_on_the_right_and_masked(make_sample: Callable[..., TrainingSample]) -> None:
    rng = np.random.default_rng(0)
    rows = build_rows([_episode((make_sample(rng, "a", length=4), make_sample(rng, "b", length=7)))], vocabulary=48)
    (micro,) = micro_batches(rows, max_tokens=14, device=torch.device("cpu"))
    assert micro.attention_mask_BT.tolist() == [[1] * 7, [1] * 4 + [0] * 3]
    assert micro.input_ids_BT[1, :4].tolist() == rows[0].token_ids_T.tolist()
    assert micro.num_tokens == 11
    # A padding id may equal a real one; no target ever points at padding.
    assert bool(micro.attention_mask_BT[micro.rows_N, micro.sources_N + 1].all())


@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_tokens=st.integers(1, 200))
def test_plans_cover_each_row_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    parts = plan_micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[index] for index in part)
        assert padded <= max_tokens or len(part) == 1


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9), parts=st.integers(1, 6), seed=st.integers(0, 9))
def test_splits_keep_groups_whole_and_even(sizes: list[int], parts: int, seed: int) -> None:
    episodes = [_episode((), group=f"g{index}") for index, size in enumerate(sizes) for _ in range(size)]
    split = split_by_group(episodes, parts=parts, seed=seed)
    assert sorted(index for part in split for index in part) == list(range(len(episodes)))
    assert len(split) == min(parts, len(sizes))
    groups = [{episodes[index].group_id for index in part} for part in split]
    assert sum(len(names) for names in groups) == len(sizes)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert split == split_by_group(episodes, parts=parts, seed=seed)


def test_splits_do_not_follow_the_order_of_arrival(make_batch: Callable[..., TrainingBatch]) -> None:
    episodes = make_batch(groups=6, size=2).episodes
    splits = {str(split_by_group(episodes, parts=2, seed=seed)) for seed in range(5)}
    assert len(splits) > 1


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_packs_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    packs = plan_packs(lengths, max_tokens=max_tokens, width=8)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert pack
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= max_tokens


def test_rows_of_which_no_two_fit_together_are_packed_alone() -> None:
    """Counting up from the fewest thinkable packs would take a cube of their number."""
    assert plan_packs([2100] * 1500, max_tokens=4096, width=8) == [[index] for index in range(1500)]


def test_packs_are_balanced_by_cost_and_hold_no_padding() -> None:
    """Long-tailed lengths: padded, a fifth and more would be padding."""
    lengths = [int(20 * (1 + place) ** 0.9) for place in range(64)]
    packs = plan_packs(lengths, max_tokens=4096, width=64)
    assert len(packs) == -(-sum(lengths) // 4096)
    costs = [sum(lengths[index] * (12 * 64 + lengths[index]) for index in pack) for pack in packs]
    assert max(costs) <= 1.05 * sum(costs) / len(costs)
    assert sum(lengths) / padded_tokens(lengths, plan_micro_batches(lengths, max_tokens=16384)) < 0.8
