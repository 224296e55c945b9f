"""m2po's mask: by hand, and what holds of every mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.trainer.second_moment import candidates, second_moment_kept


def _kept(log_ratios: list[list[float]], advantages: list[list[float]], *, threshold: float) -> list[list[bool]]:
    rows = [np.asarray(row) for row in log_ratios]
    found = second_moment_kept(rows, [np.asarray(row) for row in advantages], threshold=threshold)
    return [row.tolist() for row in found]


def test_by_hand() -> None:
    """Candidates have squares 0.01, 0.04, 0.09 and 1; the mean of the first three is 0.0467, of the first two 0.025."""
    log_ratios = [[0.1, -0.2, 5.0], [0.3, -1.0]]
    advantages = [[1.0, -1.0, -1.0], [2.0, -1.0]]
    assert _kept(log_ratios, advantages, threshold=0.05) == [[True, True, True], [True, False]]
    assert _kept(log_ratios, advantages, threshold=0.04) == [[True, True, True], [False, False]]
    assert _kept(log_ratios, advantages, threshold=1.0) == [[True] * 3, [True] * 2]
    assert _kept(log_ratios, advantages, threshold=1e-9) == [[False, False, True], [False, False]]


def test_the_bound_is_of_the_update_not_of_a_forward() -> None:
    """The same row is trained or not, depending on the others: a mask per micro-batch would be another mask."""
    far, near = [0.5], [0.01] * 20
    assert _kept([far], [[1.0]], threshold=0.04) == [[False]]
    assert _kept([far, near], [[1.0], [1.0] * 20], threshold=0.04) == [[True], [True] * 20]


def test_no_rows_and_no_candidates() -> None:
    assert _kept([], [], threshold=0.1) == []
    assert _kept([[5.0, 0.0]], [[0.0, 1.0]], threshold=0.1) == [[True, True]]


TOKENS = st.lists(
    st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.0, 0.0, 0.5])), max_size=8), min_size=1, max_size=5
)


@given(rows=TOKENS, threshold=st.floats(1e-3, 2), data=st.data())
def test_what_holds_of_every_mask(rows: list[list[tuple[float, float]]], threshold: float, data: st.DataObject) -> None:
    log_ratios = [np.asarray([token[0] for token in row]) for row in rows]
    advantages = [np.asarray([token[1] for token in row]) for row in rows]
    kept = second_moment_kept(log_ratios, advantages, threshold=threshold)
    squares, left = np.concatenate(log_ratios) ** 2, np.concatenate(kept)
    chosen = candidates(np.concatenate(log_ratios), np.concatenate(advantages))
    assert left[~chosen].all(), "only candidates are taken out"
    inside, outside = squares[chosen & left], squares[chosen & ~left]
    if inside.size:
        assert inside.mean() <= threshold * (1 + 1e-12)
    if outside.size:
        assert not inside.size or inside.max() < outside.min(), "the farthest go first"
        nearest = outside[outside == outside.min()]
        assert np.append(inside, nearest).mean() > threshold * (1 - 1e-12), "and no more than need be"
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = second_moment_kept([log_ratios[i] for i in order], [advantages[i] for i in order], threshold=threshold)
    assert all(np.array_equal(found, kept[i]) for found, i in zip(shuffled, order, strict=True))


def test_what_counts_as_a_candidate() -> None:
    """A > 0 and rho > 1, or A < 0 and rho < 1."""
    found = candidates(np.asarray([0.1, 0.1, -0.1, -0.1, 0.0]), np.asarray([1.0, -1.0, 1.0, -1.0, 1.0]))
    assert found.tolist() == [True, False, False, True, False]


def test_wild_log_ratios_are_cut_as_in_the_loss() -> None:
    assert _kept([[-np.inf, 0.0]], [[-1.0, 1.0]], threshold=400.0) == [[True, True]]
    assert _kept([[-np.inf, 0.0]], [[-1.0, 1.0]], threshold=399.0) == [[False, True]]


@pytest.mark.parametrize("scale", [np.float32, np.float64])
def test_any_float_type(scale: type) -> None:
    rows = [np.asarray([0.1, 2.0], scale)]
    assert second_moment_kept(rows, [np.ones(2)], threshold=0.1)[0].tolist() == [True, False]
