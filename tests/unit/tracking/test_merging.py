"""The arithmetic of the merge report."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.tracking.merging import MergeCounts, count_distinct

sequences = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=12)


def arrays(values: list[list[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return [np.asarray(value, np.int32) for value in values]


def test_the_worked_instance_has_eight_tokens_in_its_tree() -> None:
    assert count_distinct(arrays([[1, 2, 10, 11, 20, 30], [1, 2, 10, 11, 21, 31]])) == 8


def test_large_ids_sort_as_numbers() -> None:
    assert count_distinct(arrays([[256, 1], [1, 256], [256, 2]])) == 5


@given(sequences)
def test_a_tree_holds_each_distinct_prefix_once(values: list[list[int]]) -> None:
    prefixes = {tuple(value[:end]) for value in values for end in range(1, len(value) + 1)}
    assert count_distinct(arrays(values)) == len(prefixes)


def test_counts_add_up() -> None:
    assert MergeCounts(1, 2, 3, 4, 5, 6, 7) + MergeCounts(1, 1, 1, 1, 1, 1, 1) == MergeCounts(2, 3, 4, 5, 6, 7, 8)
