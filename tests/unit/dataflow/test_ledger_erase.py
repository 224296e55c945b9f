"""Taking one episode's text out of a ledger: everything else stays as it was, and stays consistent."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.errors import UnknownEpisode
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_opening import configure
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import GroupSpec


def spec(name: str, task: str) -> GroupSpec:
    return GroupSpec(f"group-{name}", Task("collect:shop", task), Split.TRAIN, 1, ("solver",), {"solver": 0})


@pytest.fixture
def ledger(tmp_path: Path, make: Any) -> Any:
    """Three conversations of one task with their feedback."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("run", seed=0))
    for name in ("a", "b", "c"):
        record = make.record(name, group_id=f"group-{name}")
        ledger.record_collected(spec(name, "a name"), record).result(10)
        ledger.close_group(f"group-{name}").result(10)
    yield ledger
    ledger.close()


def states(ledger: Ledger, episode_id: str) -> list[tuple[SampleState, str | None]]:
    (view,) = ledger.episode(episode_id)
    return [(status.state, status.reason) for status in view.samples]


def train(ledger: Ledger, make: Any, step: int, *names: str) -> None:
    episodes = tuple(make.samples(name, group_id=f"group-{name}") for name in names)
    batch = TrainingBatch(f"solver-{step}", "solver", step, episodes, seed=1)
    ledger.log_batch(batch, group_ids=[f"group-{name}" for name in names]).result(10)
    ledger.mark_trained("solver", step=step, metrics={}, advantages={}).result(10)


def test_what_waits_never_trains(ledger: Ledger) -> None:
    assert ledger.erase_episode("a").result(10) == 0
    assert states(ledger, "a") == [(SampleState.DROPPED, "erased")]
    assert [group.group_id for group in ledger.unconsumed("solver")] == ["group-b", "group-c"]
    erased, kept = ledger.episode("a")[0], ledger.episode("b")[0]
    assert erased.record is not None and (erased.record.samples, erased.record.rewards) == ((), {"solver": 1.0})
    assert (erased.group.task.id, kept.group.task.id) == ("a", "a name"), "others keep the task that they shared"
    assert ledger.erase_episode("a").result(10) == 0, "a repeat is harmless"
    assert ledger.verify() == []
    with pytest.raises(UnknownEpisode):
        ledger.erase_episode("nobody").result(10)


def test_batches_keep_what_a_trainer_may_have_to_repeat(ledger: Ledger, make: Any, tmp_path: Path) -> None:
    train(ledger, make, 1, "a", "b")
    train(ledger, make, 2, "c")
    before = ledger.batches_after("solver", 0)
    assert ledger.erase_episode("a").result(10) == 1, "no checkpoint holds it yet"
    assert ledger.batches_after("solver", 0) == before
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        ledger.record_checkpoint("solver", step=step, path=str(tmp_path / f"step-{step}")).result(10)
    assert ledger.erase_episode("a").result(10) == 0
    first, second = ledger.batches_after("solver", 0)
    assert [member.samples == () for member in first.episodes] == [True, False]
    assert (first.episodes[1], second) == (before[0].episodes[1], before[1])
    assert first.episodes[0].task_id == "a"
    assert states(ledger, "a") == [(SampleState.TRAINED, "erased")]
    assert ledger.erased_after("solver", 0) == {("a", 1)} and ledger.erased_after("solver", 1) == frozenset()
    assert ledger.erase_episode("c").result(10) == 1, "its step is behind the older checkpoint"
    assert ledger.verify() == [] and ledger.empty_log()


def test_what_was_erased_does_not_wait_again_after_a_rollback(ledger: Ledger, make: Any) -> None:
    train(ledger, make, 1, "a", "b")
    assert ledger.erase_episode("a").result(10) == 1
    ledger.begin_lineage("solver", base_lineage=0, base_step=0, reason="a test").result(10)
    assert states(ledger, "a") == [(SampleState.DROPPED, "erased")]
    assert [group.group_id for group in ledger.unconsumed("solver")] == ["group-b", "group-c"]
    ledger.begin_lineage("solver", base_lineage=0, base_step=1, reason="it came back").result(10)
    assert states(ledger, "a") == [(SampleState.TRAINED, "erased")], "a checkpoint holds it after all"
    assert ledger.verify() == []


def test_a_ledger_overwrites_what_goes_whatever_sqlite_does_by_itself(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA secure_delete = OFF")
        configure(db)
        assert db.execute("PRAGMA secure_delete").fetchone() == (1,)


def test_emptying_the_log_waits_for_nobody(ledger: Ledger, make: Any, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM episodes").fetchone()
        ledger.erase_episode("a").result(10)
        before = time.monotonic()
        assert not ledger.empty_log(), "somebody reads it as it was"
        assert time.monotonic() - before < 2, "commits would wait as long"
    assert ledger.empty_log() and (tmp_path / "ledger.sqlite-wal").stat().st_size == 0
