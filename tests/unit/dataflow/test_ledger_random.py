"""Random operations on a ledger: whatever is refused, the file never contradicts itself."""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import ConflictError, NotFoundError
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import BeginRecord, Dropped

OPERATIONS = st.tuples(
    st.sampled_from(
        ["begin", "lose", "fail", "train", "drop", "reopen", *["close", "batch"] * 2, *["finish"] * 3],
    ),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([1, 1, 1, 2, 2, 3]),
)


def perform(make, ledger: Ledger, operation: str, *, group: int, member: int, number: int) -> Future:
    """``number`` is an attempt or a step."""
    group_id, episode_id = f"g{group}", f"g{group}-{member}"
    match operation:
        case "begin":
            return ledger.record_begin(BeginRecord(episode_id, number, group_id=group_id))
        case "lose":
            return ledger.record_end(episode_id, number, state=AttemptState.LOST, outcome=Outcome.CLIENT)
        case "finish" | "fail":
            outcome = Outcome.AGENT if operation == "finish" else Outcome.TIMEOUT
            return ledger.record_finish(make.record(episode_id, number, group_id=group_id, outcome=outcome))
        case "close":
            return ledger.close_group(group_id)
        case "batch":
            episodes = tuple(make.samples(f"g{group}-{i}", group_id=group_id) for i in range(member + 1))
            batch = TrainingBatch(f"b{number}", "solver", number, episodes, seed=0)
            return ledger.log_batch(batch, group_ids=[group_id])
        case "train":
            return ledger.mark_trained("solver", step=number, metrics={}, advantages={})
        case _:
            return ledger.mark_dropped("solver", dropped=[Dropped(episode_id, number, "test")])


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(OPERATIONS, min_size=10, max_size=60))
def test_no_sequence_of_operations_leaves_a_contradiction(make, operations):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = Ledger.open(path, run=make.run)
        for i in range(2):
            ledger.record_group(make.spec(f"g{i}"), episode_ids=[f"g{i}-0", f"g{i}-1"])
        futures: list[Future] = []
        for operation, group, member, number in operations:
            if operation == "reopen":
                ledger.close()
                ledger = Ledger.open(path, run=make.run)
            else:
                futures.append(perform(make, ledger, operation, group=group, member=member, number=number))
        ledger.close()
        for future in futures:
            assert isinstance(future.exception(10), ConflictError | NotFoundError | None)
        with Ledger.open(path, run=make.run) as reopened:
            assert reopened.verify() == []
            batched = [(e.episode_id, e.attempt) for b in reopened.batches_after("solver", 0) for e in b.episodes]
            waiting = [(e.episode_id, e.attempt) for g in reopened.unconsumed("solver") for e in g.members]
            assert max(Counter(batched + waiting).values(), default=0) <= 1
