"""How rows are put into forwards: each once, within the budget, shared where that pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.trainer.forwards import Forwards, SharingRules, plan_forwards
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import TreePlan

RULES = SharingRules(mode="on", min_sharing=1.2, depth_first="never", max_tokens=10_000)
MakeRow = Callable[..., Row]
MakeRows = Callable[[np.random.Generator], list[Row]]


def _identities(plan: Forwards) -> list[int]:
    return sorted(id(row) for part in [plan.plain, *plan.trees, *plan.deep] for row in part)


@settings(deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["auto", "on"]),
    depth_first=st.sampled_from(["never", "large", "always"]),
    max_tokens=st.integers(1, 60),
)
def test_each_row_that_trains_is_forwarded_once_within_the_budget(
    seed: int, mode: Any, depth_first: Any, max_tokens: int, make_rows: MakeRows
) -> None:
    rows = make_rows(np.random.default_rng(seed))
    rules = SharingRules(mode=mode, min_sharing=1.2, depth_first=depth_first, max_tokens=max_tokens)
    plan = plan_forwards(rows, rules=rules)
    assert _identities(plan) == sorted(id(row) for row in rows if row.num_trained)
    for part in plan.trees:
        tree = TreePlan.of(part)
        assert tree.num_tokens <= max_tokens or tree.num_tokens == tree.longest_path
        assert mode == "on" or tree.sharing >= 1.2
    assert not (plan.deep and depth_first == "never")
    assert not (plan.trees and depth_first == "always")
    assert not (plan.plain and mode == "on")


def _group(make_row: MakeRow, *, prompt: int, reply: int, size: int, seed: int = 0) -> list[Row]:
    """A group's rows: one prompt, a reply each."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 48, prompt)
    replies = [np.concatenate([[first], rng.integers(0, 48, reply - 1)]) for first in range(size)]
    return [make_row(rng, np.concatenate([shared, reply]), start=prompt) for reply in replies]


def test_a_tree_that_fits_is_forwarded_whole_and_small_ones_together(make_row: MakeRow) -> None:
    rows = [row for seed in (1, 2) for row in _group(make_row, prompt=40, reply=10, size=3, seed=seed)]
    (tree,) = plan_forwards(rows, rules=RULES).trees
    assert len(tree) == 6
    assert len(plan_forwards(rows, rules=replace(RULES, max_tokens=80)).trees) == 2


def test_auto_goes_depth_first_only_where_cutting_costs_too_much(make_row: MakeRow) -> None:
    """A tree of 112 tokens.  Cut to 60, the prompt of 40 is there four times: 232; cut to 95, twice: 152."""
    rows = _group(make_row, prompt=40, reply=10, size=8)
    assert TreePlan.of(rows).num_tokens == 40 + 8 * 9
    large = replace(RULES, depth_first="large")
    plan = plan_forwards(rows, rules=replace(large, max_tokens=60))
    assert ([len(part) for part in plan.deep], plan.trees) == ([8], [])
    plan = plan_forwards(rows, rules=replace(large, max_tokens=95))
    assert (plan.deep, [len(part) for part in plan.trees]) == ([], [6, 2])
    plan = plan_forwards(rows, rules=replace(RULES, max_tokens=60))
    assert [len(part) for part in plan.trees] == [2, 2, 2, 2]


def test_rows_that_share_too_little_are_trained_as_if_there_were_no_trees(make_row: MakeRow) -> None:
    little = [row for seed in range(3) for row in _group(make_row, prompt=4, reply=30, size=2, seed=seed)]
    much = _group(make_row, prompt=40, reply=5, size=4, seed=9)
    plan = plan_forwards([*little[:3], *much, *little[3:]], rules=replace(RULES, mode="auto", max_tokens=70))
    assert [id(row) for row in plan.plain] == [id(row) for row in little], "in the order given"
    assert [len(part) for part in plan.trees] == [4]


@pytest.mark.parametrize("mode", ["off", "auto", "on"])
def test_no_rows(mode: Any) -> None:
    assert plan_forwards([], rules=replace(RULES, mode=mode)) == Forwards([], [], [])


def test_off_shares_nothing(make_row: MakeRow) -> None:
    rows = _group(make_row, prompt=40, reply=10, size=3)
    assert plan_forwards(rows, rules=replace(RULES, mode="off", depth_first="always")).plain == rows
