"""Taking the text of one episode out of a ledger, because somebody has the right to it.

What stays says that it was there: ids, times, outcome, rewards, numbers of tokens.  What goes: its messages and
tokens, what its people wrote, and the name that its task had.  The bytes are overwritten, not only unlinked:
every connection that writes has SQLite's ``secure_delete`` on from its beginning (:func:`overwrite_what_goes`), since a
page that was split before leaves copies of its rows, too.

Batches hold tokens, too.  Those that a trainer may have to repeat after a crash must stay as they are; older ones
are written anew without the episode.  Operators replay it no more, whatever batches hold it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

from wingbeat.core.errors import UnknownEpisode
from wingbeat.dataflow.ledger_decoding import decode_batch
from wingbeat.dataflow.ledger_integrity import seal
from wingbeat.dataflow.ledger_rows import drop_samples, to_json
from wingbeat.dataflow.ledger_schema import ERASED, SampleState
from wingbeat.dataflow.records import Dropped

_pack = msgspec.msgpack.Encoder().encode


def overwrite_what_goes(db: sqlite3.Connection) -> None:
    """Leave no bytes of what is deleted, changed or moved in the file; not every build of SQLite does so unasked."""
    db.execute("PRAGMA secure_delete = ON")


def erase_episode(db: sqlite3.Connection, episode_id: str, *, compress: Callable[[bytes], bytes]) -> int:
    """In the caller's transaction; returns how many batches still hold the episode.  Raises UnknownEpisode."""
    rows = db.execute("SELECT group_id FROM episodes WHERE episode_id = ?", (episode_id,)).fetchall()
    if not rows:
        raise UnknownEpisode(f"no attempt of an episode {episode_id!r} is recorded")
    _drop_waiting(db, episode_id)
    db.execute(
        "UPDATE episodes SET payload = ?, graph = NULL, graph_checksum = NULL, message = '' WHERE episode_id = ?",
        (compress(_pack(())), episode_id),
    )
    seal(db, "episodes", "episode_id = ?", (episode_id,))
    for (group_id,) in set(rows):
        _rename_task(db, group_id, episode_id)
    return _scrub_batches(db, episode_id, compress=compress)


def _drop_waiting(db: sqlite3.Connection, episode_id: str) -> None:
    """What waits to be trained never will be."""
    waiting = db.execute(
        "SELECT policy, attempt FROM samples WHERE episode_id = ? AND state = ?", (episode_id, SampleState.FINISHED)
    ).fetchall()
    for policy, attempt in waiting:
        drop_samples(db, [Dropped(episode_id, attempt, ERASED)], policy=policy)
    db.execute(
        "UPDATE samples SET reason = ? WHERE episode_id = ? AND state IN (?, ?)",
        (ERASED, episode_id, SampleState.BATCHED, SampleState.TRAINED),
    )


def _rename_task(db: sqlite3.Connection, group_id: str, episode_id: str) -> None:
    """Its task gets the episode's id for a name, and nothing else."""
    task_key, source = db.execute(
        "SELECT task_key, source FROM groups JOIN tasks USING (task_key) WHERE group_id = ?", (group_id,)
    ).fetchone()
    nameless = (source, episode_id, to_json({}))
    db.execute("INSERT OR IGNORE INTO tasks (source, id, payload) VALUES (?, ?, ?)", nameless)
    (new_key,) = db.execute(
        "SELECT task_key FROM tasks WHERE source = ? AND id = ? AND payload = ?", nameless
    ).fetchone()
    db.execute("UPDATE groups SET task_key = ? WHERE group_id = ?", (new_key, group_id))
    if new_key != task_key and not db.execute("SELECT 1 FROM groups WHERE task_key = ?", (task_key,)).fetchone():
        db.execute("DELETE FROM tasks WHERE task_key = ?", (task_key,))
    seal(db, "groups", "group_id = ?", (group_id,))


def _scrub_batches(db: sqlite3.Connection, episode_id: str, *, compress: Callable[[bytes], bytes]) -> int:
    """Take it out of the batches that nobody needs as they were; how many others hold it."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    rows = cursor.execute(
        "SELECT DISTINCT b.* FROM batches b JOIN members m USING (batch_id) WHERE m.episode_id = ?", (episode_id,)
    ).fetchall()
    kept = 0
    for row in rows:
        batch = decode_batch(row)
        if not any(member.samples for member in batch.episodes if member.episode_id == episode_id):
            continue
        if row["state"] == "logged" or row["step"] > _oldest_needed(db, row["policy"]):
            kept += 1
            continue
        episodes = tuple(
            msgspec.structs.replace(member, samples=(), turns=(), task_id=episode_id)
            if member.episode_id == episode_id
            else member
            for member in batch.episodes
        )
        packed = _pack(msgspec.structs.replace(batch, episodes=episodes))
        db.execute(
            "UPDATE batches SET payload = ?, digest = ? WHERE batch_id = ?",
            (compress(packed), hashlib.sha256(packed).hexdigest(), row["batch_id"]),
        )
    return kept


def _oldest_needed(db: sqlite3.Connection, policy: str) -> int:
    """The step up to which no batch can be repeated: the trainer's oldest checkpoint is of it."""
    steps = [
        step
        for step, path in db.execute("SELECT step, path FROM checkpoints WHERE policy = ?", (policy,))
        if Path(path).exists()
    ]
    return min(steps, default=0)


def empty_log(path: Path) -> bool:
    """Bring what the write-ahead log holds into the ledger and empty it, so that no old page stays there.

    False where readers (a copy that is being made, people who look) or a commit kept it from that: call it again.  It
    never waits for them, since what waits holds commits up; most of the work is done before they are locked out.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        connection.close()
