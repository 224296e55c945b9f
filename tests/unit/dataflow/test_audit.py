"""The audit of a run: silent about a sound one, and naming what a broken one broke."""

from __future__ import annotations

import sqlite3

import msgspec
import pytest

from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.audit import audit_run
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import BeginRecord, GroupSpec


@pytest.fixture
def run(open_ledger, tmp_path, make):
    """Seven groups of one over an epoch and a bit of five tasks, closed and waiting, but the last, which runs."""
    tasks = [Task("src", f"t{i}", {"n": i}) for i in range(5)]
    folder = tmp_path / "tasks"
    folder.mkdir()
    saved = {"source": "src", "split": "train", "tasks": tasks}
    (folder / "src-train.json").write_bytes(msgspec.json.encode(saved))
    dealer = TaskDealer(seed=7)
    dealer.add_source("src", Split.TRAIN, tasks)
    ledger = open_ledger()
    for i in range(7):
        task = dealer.next_task()
        assert task is not None
        spec = GroupSpec(f"g{i}", task, Split.TRAIN, 1, ("solver",), floor_version={"solver": 0})
        ledger.record_group(spec, episode_ids=[f"g{i}-0"], dealer_state=dealer.state_dict())
        ledger.record_begin(BeginRecord(f"g{i}-0", 1, f"g{i}"))
        if i < 6:
            ledger.record_finish(make.record(f"g{i}-0", group_id=f"g{i}"))
            ledger.close_group(f"g{i}")
    ledger.record_end("g6-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT)
    ledger.record_begin(BeginRecord("g6-0", 2, "g6")).result()
    return ledger


def sabotage(tmp_path, statement: str) -> list[str]:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(statement)
    db.close()
    return audit_run(tmp_path)


def test_a_sound_run_keeps_its_promises(run, tmp_path):
    assert audit_run(tmp_path) == [], "also while it is written"
    run.close()
    assert audit_run(tmp_path) == []


def test_a_skipped_task_is_named(run, tmp_path):
    run.close()
    sabotage(tmp_path, "DELETE FROM samples WHERE episode_id = 'g2-0'")
    sabotage(tmp_path, "DELETE FROM episodes WHERE group_id = 'g2'")
    problems = sabotage(tmp_path, "DELETE FROM groups WHERE group_id = 'g2'")
    assert any("dealt 7 groups, the ledger has 6" in problem for problem in problems)
    assert any("never issued: t" in problem for problem in problems)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM samples WHERE episode_id = 'g1-0'", "samples are nowhere: g1-0 1"),
        ("UPDATE episodes SET state = 'running' WHERE episode_id = 'g6-0'", "a later one has begun: g6-0 1"),
        ("UPDATE groups SET state = 'open' WHERE group_id = 'g0'", "all their episodes count: g0"),
        ("UPDATE episodes SET outcome = 'client' WHERE episode_id = 'g3-0'", "closed with neither a reason"),
        ("UPDATE episodes SET state = 'running' WHERE episode_id = 'g0-0'", "running attempts in closed groups: 1"),
    ],
)
def test_broken_promises_are_named(run, tmp_path, statement, named):
    run.close()
    assert any(named in problem for problem in sabotage(tmp_path, statement))


def test_captured_turns_that_nobody_needs_are_named(run, tmp_path):
    run.close()
    Captures(tmp_path / "turns").append("g0-0", 1, b"turn")
    assert audit_run(tmp_path) == ["captured turns of attempts that have ended: g0-0:1"]
