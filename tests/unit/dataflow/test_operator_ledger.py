"""Operators, buffer and ledger together: replay over steps and restarts, and what a trained run's ledger says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.buffer import BatchDraft, PolicyBuffer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.operators import OperatorChain, build_chain
from wingbeat.dataflow.records import BeginRecord, ClosedGroup, EpisodeRecord

pytestmark = pytest.mark.unit

STALENESS = 2


def make_chain(*operators: dict[str, Any]) -> OperatorChain:
    dataflow = {"group_size": 2, "groups_per_step": 2, "max_staleness": STALENESS, "operators": list(operators)}
    return build_chain(Config.model_validate({"policies": {"solver": {"model": "m"}}, "dataflow": dataflow}), "solver")


def make_buffer(chain: OperatorChain) -> PolicyBuffer:
    return PolicyBuffer(
        "solver",
        groups_per_step=2,
        max_staleness=STALENESS,
        compose=lambda draft, version: chain.compose(draft, version=version),
    )


def play_group(ledger: Ledger, chain: OperatorChain, group_id: str, *, version: int, make: Any) -> None:
    """From admission to the closed group in the ledger, as control does it."""
    spec = make.spec(group_id, floor=version)
    records: list[EpisodeRecord] = []
    ledger.record_group(spec, episode_ids=[f"{group_id}-0", f"{group_id}-1"])
    for index in range(2):
        record = make.record(f"{group_id}-{index}", group_id=group_id, reward=float(index), versions=(version, version))
        ledger.record_begin(BeginRecord(record.episode_id, 1, group_id=group_id))
        ledger.record_finish(record)
        records.append(record)
    ready = ClosedGroup(spec, finished=tuple(records), given_up=(), cut_off=()).ready("solver")
    assert ready is not None
    outcome = chain.on_group(ready)
    ledger.close_group(
        group_id,
        dropped={"solver": outcome.dropped},
        shaping=outcome.shaping,
        operators={"solver": chain.state_dict()},
    ).result()


def step(ledger: Ledger, draft: BatchDraft, *, version: int) -> TrainingBatch:
    batch = TrainingBatch(
        f"solver-{version + 1}", "solver", version + 1, draft.episodes, seed=version, replayed=draft.replayed
    )
    ledger.log_batch(batch, group_ids=draft.group_ids, dropped=draft.dropped)
    ledger.mark_trained("solver", step=version + 1, metrics={}, advantages={}).result()
    return batch


def run(open_ledger: Callable[[], Ledger], make: Any, *, restarts: bool) -> list[TrainingBatch]:
    operators = ({"use": "reward_scale", "offset": 0.5}, {"use": "replay", "ratio": 0.5, "max_uses": 2})
    ledger, chain = open_ledger(), make_chain(*operators)
    buffer = make_buffer(chain)
    batches: list[TrainingBatch] = []
    for version in range(5):
        for part in "ab":
            play_group(ledger, chain, f"{part}{version}", version=version, make=make)
        if restarts:
            ledger.close()
            ledger, chain = open_ledger(), make_chain(*operators)
            chain.load_state_dict(ledger.load_operator_states()["solver"])
            chain.recall(ledger.batches_after("solver", version - STALENESS))
            chain.on_version(version)
            buffer = make_buffer(chain)
        for group in ledger.unconsumed("solver"):
            buffer.add(group)
        draft = buffer.take(version)
        assert draft is not None
        batches.append(step(ledger, draft, version=version))
        chain.on_version(version + 1)
    assert ledger.verify() == []
    assert list(ledger.batches_after("solver", 0)) == batches
    states = {c.state: c.num_attempts for c in ledger.summary().samples if c.num_attempts}
    assert states == {"trained": 20}
    ledger.close()
    return batches


def test_replayed_members_are_logged_and_stay_trained(open_ledger: Callable[[], Ledger], make: Any) -> None:
    batches = run(open_ledger, make, restarts=False)
    assert [len(batch.episodes) for batch in batches] == [4, 6, 6, 6, 6]
    assert [batch.replayed for batch in batches[:2]] == [(), (("a0-0", 1), ("a0-1", 1))]
    for batch in batches:
        keys = [(m.episode_id, m.attempt) for m in batch.episodes]
        assert len(set(keys)) == len(keys)
        assert {m.shaping for m in batch.episodes} == {0.5}
        assert all(batch.step - 1 - (m.min_version or 0) <= STALENESS for m in batch.episodes)


def test_restarts_change_nothing(open_ledger: Callable[[], Ledger], make: Any, tmp_path: Any) -> None:
    interrupted = run(open_ledger, make, restarts=True)
    (tmp_path / "ledger.sqlite").unlink()
    (tmp_path / "ledger.sqlite.lock").unlink()
    for more in ("-wal", "-shm"):
        (tmp_path / f"ledger.sqlite{more}").unlink(missing_ok=True)
    assert run(open_ledger, make, restarts=False) == interrupted


def test_a_rollback_gives_back_what_was_new_in_the_lost_batches_and_nothing_that_they_repeated(
    open_ledger: Callable[[], Ledger], make: Any
) -> None:
    ledger, chain = open_ledger(), make_chain({"use": "replay", "ratio": 1.0, "max_uses": 9})
    buffer = make_buffer(chain)
    for version in range(4):
        for part in "ab":
            play_group(ledger, chain, f"{part}{version}", version=version, make=make)
        for group in ledger.unconsumed("solver"):
            buffer.add(group)
        draft = buffer.take(version)
        assert draft is not None
        step(ledger, draft, version=version)
        chain.on_version(version + 1)
    lost = ledger.batches_after("solver", 2)
    assert {key[0][:2] for batch in lost for key in batch.replayed} == {"a1", "b1", "a2", "b2"}
    ledger.begin_lineage("solver", base_lineage=0, base_step=2, reason="lost").result()
    waiting = ledger.unconsumed("solver")
    assert {group.group_id for group in waiting} == {"a2", "b2", "a3", "b3"}  # of 1 only repeats are lost
    chain.recall(ledger.batches_after("solver", 2 - STALENESS))
    chain.on_version(2)
    buffer.clear()
    for group in waiting:
        buffer.add(group)
    for version in (2, 3):
        draft = buffer.take(version)
        assert draft is not None
        fresh = {m.episode_id[:2] for m in draft.episodes if (m.episode_id, m.attempt) not in draft.replayed}
        assert fresh == {f"a{version}", f"b{version}"}
        assert {episode_id[:2] for episode_id, _ in draft.replayed} == {f"a{version - 1}", f"b{version - 1}"}
        batch = TrainingBatch(
            f"solver-1.{version + 1}", "solver", version + 1, draft.episodes, seed=0, lineage=1, replayed=draft.replayed
        )
        ledger.log_batch(batch, group_ids=draft.group_ids, dropped=draft.dropped)
        ledger.mark_trained("solver", step=version + 1, metrics={}, advantages={}).result()
        chain.on_version(version + 1)
    assert ledger.verify() == []
    assert {c.state: c.num_attempts for c in ledger.summary().samples if c.num_attempts} == {"trained": 16}
