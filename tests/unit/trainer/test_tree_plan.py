"""Trees of tokens: every row found again, every token once, whatever the rows look like."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.support import encode_support
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import TreePlan


def _row(
    tokens: list[int], targets: list[int], *, temperature: float = 1.0, support: bytes | None = None, episode: int = 0
) -> Row:
    count = len(targets)
    return Row(
        episode=episode,
        token_ids_T=np.asarray(tokens, np.int32),
        targets_N=np.asarray(targets, np.int64),
        sampling_logprobs_N=np.full(count, -1, np.float32),
        versions_N=np.zeros(count, np.int32),
        temperature=temperature,
        num_excluded=0,
        supports_N=np.full(count, -1 if support is None else 0, np.int32),
        support_table=() if support is None else (support,),
    )


@st.composite
def _forests(draw: st.DrawFn) -> list[Row]:
    """Rows over three tokens, so that prefixes, duplicates and forks are common; some train nothing."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 9))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        if rows and draw(st.booleans()):
            tokens = (rows[draw(st.integers(0, len(rows) - 1))].token_ids_T.tolist() + tokens)[:20]
        targets = [t for t in range(1, len(tokens)) if draw(st.booleans())]
        rows.append(_row(tokens, targets, temperature=draw(st.sampled_from([1.0, 0.5]))))
    return rows


def _ancestors(plan: TreePlan, place: int) -> list[int]:
    return [k for k in range(place + 1) if place < plan.tout_T[k]]


def test_the_worked_instance() -> None:
    plan = TreePlan.of([_row([1, 2, 3, 4, 9], [2, 3, 4]), _row([1, 2, 5, 9], [2, 3])])
    assert plan.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert plan.positions_T.tolist() == [0, 1, 2, 3, 2]
    assert plan.tout_T.tolist() == [5, 5, 4, 4, 5]
    assert list(zip(plan.starts_S, plan.stops_S, plan.touts_S, plan.parents_S, strict=True)) == [
        (0, 2, 5, -1), (2, 4, 4, 0), (4, 5, 5, 0),
    ]  # fmt: skip
    assert list(zip(plan.edges.sources_E, plan.edges.targets_E, strict=True)) == [
        (1, 3),
        (1, 5),
        (2, 4),
        (3, 9),
        (4, 9),
    ]
    assert plan.edge_N.tolist() == [0, 2, 3, 1, 4]
    assert plan.sharing == 9 / 5
    assert plan.longest_path == 4


@given(rows=_forests())
def test_each_trained_token_is_explained_by_its_own_rows_path(rows: list[Row]) -> None:
    """Whatever is shared: the visible tokens of a token's source are its row up to there, at their positions."""
    plan = TreePlan.of(rows)
    facts = [(row, int(target)) for row in rows for target in row.targets_N]
    assert len(plan.edge_N) == len(facts)
    for edge, (row, target) in zip(plan.edge_N, facts, strict=True):
        seen = _ancestors(plan, int(plan.edges.sources_E[edge]))
        assert plan.tokens_T[seen].tolist() == row.token_ids_T[:target].tolist()
        assert plan.positions_T[seen].tolist() == list(range(target))
        assert plan.edges.targets_E[edge] == row.token_ids_T[target]
        assert plan.edges.temperatures_E[edge] == row.temperature


@given(rows=_forests())
def test_nothing_is_forwarded_or_scored_twice_or_in_vain(rows: list[Row]) -> None:
    plan = TreePlan.of(rows)
    prefixes = {tuple(row.explaining_T[: end + 1]) for row in rows for end in range(len(row.explaining_T))}
    assert plan.num_tokens == len(prefixes)
    edges = {
        (tuple(row.token_ids_T[:target]), row.token_ids_T[target], row.temperature)
        for row in rows
        for target in row.targets_N
    }
    assert len(plan.edges) == len(edges)
    assert sorted(set(plan.edge_N.tolist())) == list(range(len(edges)))
    assert np.all(np.diff(plan.edges.sources_E) >= 0)
    assert plan.row_tokens == sum(row.num_tokens for row in rows if row.num_trained)


@given(rows=_forests())
def test_segments_are_the_tree(rows: list[Row]) -> None:
    """Contiguous, parents first, one ``tout`` each, and cut only where there is a fork."""
    plan = TreePlan.of(rows)
    assert plan.starts_S.tolist() == [0, *plan.stops_S[:-1]][: plan.num_segments]
    assert plan.num_segments == 0 or plan.stops_S[-1] == plan.num_tokens
    for segment, (start, stop) in enumerate(zip(plan.starts_S, plan.stops_S, strict=True)):
        assert set(plan.tout_T[start:stop]) == {plan.touts_S[segment]}
        assert plan.positions_T[start:stop].tolist() == list(
            range(plan.positions_T[start], plan.positions_T[start] + stop - start)
        )
        parent = plan.parents_S[segment]
        assert parent < segment
        last = -1 if parent < 0 else plan.positions_T[plan.stops_S[parent] - 1]
        assert plan.positions_T[start] == last + 1
        children = np.flatnonzero(plan.parents_S == segment)
        assert len(children) != 1
        assert np.all(plan.touts_S[children] <= plan.touts_S[segment])


def test_edges_differ_by_temperature_and_support() -> None:
    few, more = encode_support(np.arange(9) < 3), encode_support(np.arange(9) < 5)
    rows = [
        _row([1, 2], [1]),
        _row([1, 2], [1], temperature=0.5),
        _row([1, 2], [1], support=few),
        _row([1, 2], [1], support=more),
        _row([1, 2], [1], support=few),
        _row([1, 2], [1], support=b""),
    ]
    plan = TreePlan.of(rows)
    assert plan.num_tokens == 1
    assert len(plan.edges) == 4
    table = [*plan.edges.support_table, b""]
    found = [(float(plan.edges.temperatures_E[e]), table[plan.edges.supports_E[e]]) for e in plan.edge_N]
    assert found == [(1, b""), (0.5, b""), (1, few), (1, more), (1, few), (1, b"")]
