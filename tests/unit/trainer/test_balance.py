"""Dealing rows to processes: whole, complete, alike for all, and even."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.trainer.distributed.balance import RowCost, deal
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import TreePlan

COST = RowCost(per_token=440e6, per_square=28 * 2048)
"""Of a model of 0.6 B."""
RANKS = 8


def row(tokens: np.ndarray, *, index: int) -> Row:
    """Trains its second half."""
    targets_N = np.arange(max(1, len(tokens) // 2), len(tokens))
    count = len(targets_N)
    return Row(
        episode=index,
        token_ids_T=tokens.astype(np.int32),
        targets_N=targets_N,
        sampling_logprobs_N=np.zeros(count, np.float32),
        versions_N=np.zeros(count, np.int32),
        temperature=1.0,
        num_excluded=0,
        supports_N=np.full(count, -1, np.int32),
        index=index,
    )


def lognormal_rows(rng: np.random.Generator, *, groups: int, size: int, prompt: int) -> list[Row]:
    """Groups with a prompt in common, and answers of realistic lengths: median 400 tokens, a long tail up to 4096."""
    rows: list[Row] = []
    for _ in range(groups):
        start = rng.integers(1, 30_000, prompt)
        for _ in range(size):
            length = int(np.clip(rng.lognormal(6.0, 0.9), 16, 4096))
            rows.append(row(np.concatenate([start, rng.integers(1, 30_000, length)]), index=len(rows)))
    return rows


def tree_cost(rows: Sequence[Row]) -> float:
    """What a tree of the rows costs, from the tree itself: each of its tokens once, at its depth."""
    plan = TreePlan.of(rows)
    depths_T = plan.positions_T + 1
    return COST.per_token * plan.num_tokens + COST.per_square * float((2 * depths_T - 1).sum())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), prompt=st.sampled_from([0, 200, 1500]), shares=st.booleans())
def test_eight_ranks_are_within_five_percent_of_their_mean(seed: int, prompt: int, shares: bool) -> None:
    rows = lognormal_rows(np.random.default_rng(seed), groups=32, size=8, prompt=prompt)
    found = deal(rows, ranks=RANKS, cost=COST, shares=shares)
    assert sorted(place for rank in found.ranks for place in rank) == list(range(len(rows)))
    assert max(found.costs) <= 1.05 * np.mean(found.costs)
    assert deal(rows, ranks=RANKS, cost=COST, shares=shares) == found


@pytest.mark.parametrize("prompt", [0, 1500])
def test_what_ranks_are_said_to_cost_is_what_their_trees_cost(prompt: int) -> None:
    """Or less: stretches that meet again on one rank share more than was counted."""
    rows = lognormal_rows(np.random.default_rng(1), groups=16, size=8, prompt=prompt)
    found = deal(rows, ranks=4, cost=COST, shares=True)
    for places, cost in zip(found.ranks, found.costs, strict=True):
        real = tree_cost([rows[place] for place in places])
        assert 0.85 * cost <= real <= cost * 1.0001


def test_rows_that_begin_alike_stay_together_where_that_is_cheap(make_row: Callable[..., Row]) -> None:
    """Four groups of four over two ranks: two whole groups each, whatever their order in the batch."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 1000, 400) for _ in range(4)]
    rows = [row(np.concatenate([prompts[i % 4], rng.integers(1, 1000, 50)]), index=i) for i in range(16)]
    found = deal(rows, ranks=2, cost=RowCost(1.0, 0.0), shares=True)
    assert sorted(sorted({place % 4 for place in rank}) for rank in found.ranks) in (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 3], [1, 2]],
    )
    assert sum(found.costs) == 4 * 400 + 16 * 49  # the last token of a row explains nothing


def test_fewer_rows_than_ranks_leave_some_without() -> None:
    rows = [row(np.arange(1, 9), index=0), row(np.arange(20, 24), index=1)]
    found = deal(rows, ranks=3, cost=RowCost(1.0, 1.0), shares=False)
    assert found.ranks == ((0,), (1,), ())
    assert found.costs == (72.0, 20.0, 0.0)
