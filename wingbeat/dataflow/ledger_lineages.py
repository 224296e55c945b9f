"""The ledger's part in a rollback: which batches are abandoned, and what becomes of their samples.

Within the writer's transaction, like everything in ``ledger_rows``.  After it, batches off the surviving
path are *abandoned* and those on it are not; a sample is *trained* or *batched* where a batch on the path holds
it as its own, and *finished* where only abandoned ones do (*dropped* where it was erased).
"""

from __future__ import annotations

import sqlite3

import msgspec

from wingbeat.core.errors import ConflictError
from wingbeat.dataflow.ledger_integrity import checksum, damaged, damaged_row, seal
from wingbeat.dataflow.ledger_rows import to_json
from wingbeat.dataflow.ledger_schema import ERASED, BatchState, SampleState, check_rollback
from wingbeat.dataflow.lineages import Ancestry, Lineage


def read_ancestry(db: sqlite3.Connection, policy: str) -> Ancestry:
    """The lineages of a policy."""
    rows = db.execute(
        f"""SELECT policy, lineage, base_lineage, base_step, reason, began_s, {damaged("lineages")} FROM lineages
        WHERE policy = ? ORDER BY lineage""",
        (policy,),
    ).fetchall()
    if any(row[-1] for row in rows):
        raise damaged_row("lineages", f"a lineage of policy {policy!r}")
    return Ancestry.of(Lineage(*row[:-1]) for row in rows)


def begin_lineage(
    db: sqlite3.Connection, policy: str, *, base_lineage: int, base_step: int, reason: str, now: float
) -> Lineage:
    """Record the next lineage and settle batches, samples and floors.  Raises ConflictError for an unknown base."""
    before = read_ancestry(db, policy)
    if base_lineage and base_lineage not in before.lineages:
        raise ConflictError(f"policy {policy!r} has no lineage {base_lineage}: nothing can be based on it")
    base_lineage, base_step = before.normal(base_lineage, base_step)
    lineage = Lineage(policy, before.current + 1, base_lineage, base_step, reason, now)
    db.execute(
        "INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(policy, lineage.lineage, base_lineage, base_step, reason, now),
            checksum(policy, lineage.lineage, base_lineage, base_step),
        ),
    )
    after = before.with_lineage(lineage)
    for batch_id, state in _settled_batches(db, policy, after):
        db.execute("UPDATE batches SET state = ? WHERE batch_id = ?", (state, batch_id))
    _settle_samples(db, policy)
    db.execute("DELETE FROM checkpoints WHERE policy = ? AND step > ?", (policy, base_step))
    _lower_floors(db, policy, highest=after.ceiling(lineage=before.current))
    return lineage


def _settled_batches(db: sqlite3.Connection, policy: str, ancestry: Ancestry) -> list[tuple[str, BatchState]]:
    """The batches whose state changes.  What the trainer holds is trained, whether or not it lived to say so."""
    changed: list[tuple[str, BatchState]] = []
    for batch_id, lineage, step, state in db.execute(
        "SELECT batch_id, lineage, step, state FROM batches WHERE policy = ?", (policy,)
    ):
        target = BatchState.TRAINED if ancestry.contains(lineage, step) else BatchState.ABANDONED
        if state != target:
            changed.append((batch_id, target))
    return changed


def _settle_samples(db: sqlite3.Connection, policy: str) -> None:
    """Each sample's state follows from the surviving batch that holds it as its own, or from there being none."""
    rows = db.execute(
        """SELECT s.episode_id, s.attempt, s.state, s.batch_id, own.batch_id, s.reason FROM samples s
        LEFT JOIN (SELECT m.episode_id, m.attempt, m.batch_id FROM members m JOIN batches b USING (batch_id)
            WHERE b.policy = ?1 AND b.state = 'trained' AND NOT m.replayed) own USING (episode_id, attempt)
        WHERE s.policy = ?1 AND (s.batch_id IS NOT NULL OR own.batch_id IS NOT NULL)""",
        (policy,),
    ).fetchall()
    for episode_id, attempt, state, batch_id, own, reason in rows:
        waits = SampleState.DROPPED if reason == ERASED else SampleState.FINISHED
        target = waits if own is None else SampleState.TRAINED
        if state == target and batch_id == own:
            continue
        if state != target:
            check_rollback(episode_id, attempt, current=SampleState(state), target=target)
        db.execute(
            """UPDATE samples SET state = ?1, batch_id = ?2, reason = ?6,
            masked = CASE WHEN ?2 IS NULL THEN 0 ELSE masked END
            WHERE episode_id = ?3 AND attempt = ?4 AND policy = ?5""",
            (target, own, episode_id, attempt, policy, ERASED if reason == ERASED else None),
        )


def _lower_floors(db: sqlite3.Connection, policy: str, *, highest: int | None) -> None:
    """No version above ``highest`` is left of those that were served, so none can be a group's floor."""
    if highest is None:
        return
    for group_key, text in db.execute("SELECT group_key, floor_version FROM groups WHERE split = 'train'").fetchall():
        floors = msgspec.json.decode(text, type=dict[str, int])
        if floors.get(policy, 0) > highest:
            floors[policy] = highest
            db.execute("UPDATE groups SET floor_version = ? WHERE group_key = ?", (to_json(floors), group_key))
            seal(db, "groups", "group_key = ?", (group_key,))
