"""Which neighbouring rows one attention call covers.

A call over a stretch of the pool costs a fixed overhead plus work proportional to its area, padding
and holes included.  ``plan_runs`` trades the one against the other; it is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUERY_WEIGHT = 1 / 16
"""Cost of one query over one key, relative to reading that key and value from memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``first..last`` (indices into the planned rows, inclusive) served by one call."""

    first: int
    last: int
    span: int
    """Grid units covered, holes included."""
    length: int
    """Keys per row: the longest row's."""
    queries: int
    """Queries per row: the most of any row."""


def run_cost(span: int, length: int, *, queries: int, overhead: int) -> float:
    """Modelled cost of one call, in units of reading one token's keys and values."""
    return overhead + span * length * (1 + queries * QUERY_WEIGHT)


def plan_runs(
    units: Sequence[int], lengths: Sequence[int], *, overhead: int, queries: Sequence[int] | None = None
) -> list[Run]:
    """Cover strictly ascending grid ``units`` by runs; each row lies in exactly one run, in order.

    Greedy from the left: a row joins the open run where that is no dearer than a call of its own.
    The result therefore never costs more than one call per row, and the single run over everything is
    taken instead where that is cheaper still.  ``overhead`` is a call's fixed cost in tokens.
    """
    if not units:
        return []
    counts = queries if queries is not None else [1] * len(units)
    runs: list[Run] = []
    first, length, most = 0, lengths[0], counts[0]
    cost = run_cost(1, length, queries=most, overhead=overhead)
    total = 0.0
    for i in range(1, len(units)):
        joined_length, joined_most = max(length, lengths[i]), max(most, counts[i])
        joined = run_cost(units[i] - units[first] + 1, joined_length, queries=joined_most, overhead=overhead)
        alone = run_cost(1, lengths[i], queries=counts[i], overhead=overhead)
        if joined <= cost + alone:
            length, most, cost = joined_length, joined_most, joined
            continue
        runs.append(Run(first, i - 1, units[i - 1] - units[first] + 1, length, most))
        total += cost
        first, length, most, cost = i, lengths[i], counts[i], alone
    runs.append(Run(first, len(units) - 1, units[-1] - units[first] + 1, length, most))
    total += cost
    whole = Run(0, len(units) - 1, units[-1] - units[0] + 1, max(lengths), max(counts))
    if run_cost(whole.span, whole.length, queries=whole.queries, overhead=overhead) < total:
        return [whole]
    return runs
