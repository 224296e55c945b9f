"""A ledger that the first release wrote opens, reads and goes on."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import msgspec
import pytest
import zstandard

from wingbeat.core.errors import SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_schema import AttemptState, SampleState

TABLES_1 = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE tasks (
        task_key INTEGER PRIMARY KEY,
        source TEXT NOT NULL,
        id TEXT NOT NULL,
        payload TEXT NOT NULL,
        UNIQUE (source, id, payload))""",
    """CREATE TABLE groups (
        group_key INTEGER PRIMARY KEY,
        group_id TEXT NOT NULL UNIQUE,
        task_key INTEGER NOT NULL REFERENCES tasks,
        split TEXT NOT NULL,
        size INTEGER NOT NULL,
        policies TEXT NOT NULL,
        floor_version TEXT NOT NULL,
        evaluation_id TEXT,
        episode_ids TEXT NOT NULL,
        state TEXT NOT NULL,
        reason TEXT,
        opened_s REAL NOT NULL,
        closed_s REAL)""",
    "CREATE INDEX groups_open ON groups (state) WHERE state = 'open'",
    """CREATE TABLE episodes (
        episode_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        group_id TEXT NOT NULL REFERENCES groups (group_id),
        label TEXT NOT NULL,
        state TEXT NOT NULL,
        outcome TEXT,
        message TEXT NOT NULL DEFAULT '',
        rewards TEXT,
        metrics TEXT,
        num_turns INTEGER NOT NULL DEFAULT 0,
        num_sampled INTEGER NOT NULL DEFAULT 0,
        created_s REAL NOT NULL,
        finished_s REAL,
        finish_digest TEXT,
        payload BLOB,
        graph BLOB,
        PRIMARY KEY (episode_id, attempt))""",
    "CREATE INDEX episodes_by_group ON episodes (group_id)",
    "CREATE INDEX episodes_running ON episodes (state) WHERE state = 'running'",
    "CREATE UNIQUE INDEX episodes_counted ON episodes (episode_id) WHERE state = 'finished' AND outcome = 'agent'",
    """CREATE TABLE batches (
        batch_id TEXT PRIMARY KEY,
        policy TEXT NOT NULL,
        step INTEGER NOT NULL,
        group_ids TEXT NOT NULL,
        seed INTEGER NOT NULL,
        state TEXT NOT NULL,
        metrics TEXT,
        advantages TEXT,
        logged_s REAL NOT NULL,
        trained_s REAL,
        digest TEXT NOT NULL,
        payload BLOB NOT NULL,
        UNIQUE (policy, step))""",
    """CREATE TABLE samples (
        episode_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        policy TEXT NOT NULL,
        state TEXT NOT NULL,
        reason TEXT,
        batch_id TEXT REFERENCES batches,
        num_tokens INTEGER NOT NULL,
        PRIMARY KEY (episode_id, attempt, policy),
        FOREIGN KEY (episode_id, attempt) REFERENCES episodes) WITHOUT ROWID""",
    "CREATE INDEX samples_waiting ON samples (policy) WHERE state = 'finished'",
    "CREATE INDEX samples_by_batch ON samples (batch_id) WHERE batch_id IS NOT NULL",
    """CREATE TABLE evaluations (
        evaluation_id TEXT PRIMARY KEY,
        policy TEXT NOT NULL,
        version INTEGER NOT NULL,
        done INTEGER NOT NULL,
        result TEXT NOT NULL,
        recorded_s REAL NOT NULL)""",
    """CREATE TABLE checkpoints (
        policy TEXT NOT NULL,
        step INTEGER NOT NULL,
        path TEXT NOT NULL,
        recorded_s REAL NOT NULL,
        PRIMARY KEY (policy, step)) WITHOUT ROWID""",
)
"""The schema of version 1, as it was."""

RUN = {"run_id": "run-1", "seed": "7", "config": "{}", "schema_version": "1"}


def pack(value: object) -> bytes:
    return zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(value))


def digest_of(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()


@pytest.fixture
def old(tmp_path: Path, make) -> Path:
    """One closed group of three members: trained at step 1, batched for step 2, finished."""
    path = tmp_path / "ledger.sqlite"
    db = sqlite3.connect(path)
    for statement in TABLES_1:
        db.execute(statement)
    db.executemany("INSERT INTO meta VALUES (?, ?)", RUN.items())
    db.execute("INSERT INTO tasks VALUES (1, 'src', 't1', '{}')")
    db.execute(
        """INSERT INTO groups VALUES (1, 'g', 1, 'train', 3, '["solver"]', '{"solver":0}', NULL,
        '["g-0","g-1","g-2"]', 'closed', NULL, 0.0, 1.0)"""
    )
    episodes = [make.samples(f"g-{i}", reward=float(i)) for i in range(3)]
    for step, state in ((1, "trained"), (2, "logged")):
        batch = TrainingBatch(f"solver-{step}", "solver", step, (episodes[step - 1],), seed=step)
        db.execute(
            """INSERT INTO batches VALUES (?, 'solver', ?, '["g"]', ?, ?, NULL, '{"g-0:1:":0.5}', 0.0, NULL, ?, ?)""",
            (batch.batch_id, step, step, state, digest_of(batch), pack(batch)),
        )
    for i, (state, batch_id) in enumerate((("trained", "solver-1"), ("batched", "solver-2"), ("finished", None))):
        db.execute(
            """INSERT INTO episodes VALUES (?, 1, 'g', '', 'finished', 'agent', '', '{"solver":1.0}', '{}', 1, 2, 0.0,
            1.0, 'digest', ?, NULL)""",
            (f"g-{i}", pack((episodes[i],))),
        )
        db.execute("INSERT INTO samples VALUES (?, 1, 'solver', ?, NULL, ?, 2)", (f"g-{i}", state, batch_id))
    db.execute(
        """INSERT INTO episodes (episode_id, attempt, group_id, label, state, created_s)
        VALUES ('g-2', 2, 'g', '', 'running', 0.0)"""
    )
    db.execute("INSERT INTO checkpoints VALUES ('solver', 1, '/c/1', 0.0)")
    db.commit()
    db.close()
    return path


def test_an_old_ledger_is_lifted_when_its_run_goes_on(old: Path, open_ledger, make) -> None:
    with pytest.raises(SetupError, match="start its run once"):
        open_read_only(old)
    ledger: Ledger = open_ledger()
    assert ledger.verify() == []
    assert [b.step for b in ledger.batches_after("solver", 0)] == [1, 2]
    assert [m.episode_id for g in ledger.unconsumed("solver") for m in g.members] == ["g-2"]
    assert ledger.summary().trained_step == {"solver": 1}
    assert [(c.step, c.path, c.lineage) for c in ledger.checkpoints()] == [(1, "/c/1", 0)]
    assert ledger.attempts_begun("g-2")[1].state is AttemptState.INTERRUPTED, "nobody knows how it began"
    states = [ledger.episode(f"g-{i}")[0].samples[0].state for i in range(3)]
    assert states == [SampleState.TRAINED, SampleState.BATCHED, SampleState.FINISHED]
    assert ledger.mark_trained("solver", step=2, metrics={}, advantages={}).result() is True
    batch = TrainingBatch("solver-3", "solver", 3, (make.samples("g-2"),), seed=3)
    assert ledger.log_batch(batch, group_ids=["g"]).result() is True
    assert ledger.verify() == []
    ledger.close()
    assert open_ledger().verify() == []
