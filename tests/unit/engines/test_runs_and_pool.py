"""The pure parts: covering rows by runs, and handing out extents."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.engines.embedded.pool import MIN_EXTENT_TOKENS, Extent, ExtentPool
from wingbeat.engines.embedded.runs import Run, plan_runs, run_cost

ROWS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 3000), st.integers(1, 64)),
    min_size=1,
    max_size=60,
    unique_by=lambda row: row[0],
).map(sorted)


def test_equal_neighbours_share_one_run() -> None:
    assert plan_runs(range(64), [160] * 64, overhead=256) == [Run(0, 63, 64, 160, 1)]


def test_a_hole_is_bridged_only_where_that_is_cheaper_than_a_call() -> None:
    assert plan_runs([0, 2], [100, 100], overhead=256) == [Run(0, 1, 3, 100, 1)]
    assert plan_runs([0, 9], [100, 100], overhead=256) == [Run(0, 0, 1, 100, 1), Run(1, 1, 1, 100, 1)]


def test_a_long_row_is_kept_apart_from_short_ones() -> None:
    runs = plan_runs([0, 1, 2, 3, 4], [50, 50, 4000, 50, 50], overhead=256)
    assert [(r.first, r.last) for r in runs] == [(0, 1), (2, 2), (3, 4)]


def test_nothing_needs_no_run() -> None:
    assert plan_runs([], [], overhead=256) == []


@given(rows=ROWS, overhead=st.integers(0, 5000))
def test_runs_cover_every_row_once_and_cost_no_more_than_the_extremes(
    rows: list[tuple[int, int, int]], overhead: int
) -> None:
    units, lengths, queries = (list(column) for column in zip(*rows, strict=True))
    runs = plan_runs(units, lengths, queries=queries, overhead=overhead)
    assert [i for run in runs for i in range(run.first, run.last + 1)] == list(range(len(rows)))
    for run in runs:
        members = slice(run.first, run.last + 1)
        assert run.span == units[run.last] - units[run.first] + 1
        assert run.length == max(lengths[members])
        assert run.queries == max(queries[members])

    cost = sum(run_cost(r.span, r.length, queries=r.queries, overhead=overhead) for r in runs)
    separate = sum(run_cost(1, n, queries=q, overhead=overhead) for n, q in zip(lengths, queries, strict=True))
    single = run_cost(units[-1] - units[0] + 1, max(lengths), queries=max(queries), overhead=overhead)
    assert cost <= min(separate, single) * (1 + 1e-9)


@given(
    capacity=st.integers(MIN_EXTENT_TOKENS, 3000),
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=80),
)
def test_extents_are_aligned_disjoint_and_all_come_back(capacity: int, actions: list[tuple[bool, int]]) -> None:
    pool = ExtentPool(capacity)
    live: list[Extent] = []
    for give_back, number in actions:
        if give_back and live:
            pool.free(live.pop(number % len(live)))
        elif (extent := pool.allocate(number)) is not None:
            assert extent.size >= number
            assert extent.start % extent.size == 0
            assert extent.start + extent.size <= capacity
            live.append(extent)
        taken = sorted((e.start, e.start + e.size) for e in live)
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        assert pool.free_tokens == pool.capacity_tokens - sum(e.size for e in live)
    for extent in live:
        pool.free(extent)
    assert pool.allocate(pool.largest_extent) is not None


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=20), pick=st.integers(0, 19))
def test_a_just_freed_extent_can_be_reserved_again(sizes: list[int], pick: int) -> None:
    pool = ExtentPool(4096)
    live = [extent for size in sizes if (extent := pool.allocate(size)) is not None]
    again = live[pick % len(live)]
    before = pool.free_tokens
    pool.free(again)
    pool.reserve(again)
    assert pool.free_tokens == before
    for extent in live:
        pool.free(extent)
    assert pool.allocate(4096) == Extent(0, 4096)
