"""A ledger's last good copy: made while the run goes on, verified before it replaces the one before.

::

    ledger.sqlite ──copy of one snapshot, in small steps──▶ .ledger.backup.sqlite.tmp ──verified──▶ ledger.backup.sqlite
                                                                                  its SHA-256 ──▶ ledger.backup.json

The writer is never held up: a snapshot of a WAL database locks nobody out, and between the steps the disk is free.
A copy that is damaged is thrown away, and its source is what is damaged: :class:`LedgerCorrupt`.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wingbeat.core.errors import LedgerCorrupt, SetupError, UnavailableError, UnknownEpisode
from wingbeat.core.files import OWNER_ONLY, sha256_of, sync, write_atomically
from wingbeat.dataflow.ledger_attempt_writes import compress
from wingbeat.dataflow.ledger_connection import connect_read_only
from wingbeat.dataflow.ledger_damage import backup_of, name_damage
from wingbeat.dataflow.ledger_erase import erase_episode, overwrite_what_goes
from wingbeat.dataflow.ledger_integrity import page_fault, row_faults, teach
from wingbeat.dataflow.ledger_opening import lock_ledger
from wingbeat.dataflow.ledger_rows import close_open_group, set_meta, to_json
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_writer import has_no_room
from wingbeat.dataflow.records import NOT_DEALT

PAGES_PER_STEP = 256
"""1 MiB at SQLite's page size."""
PAUSE_S = 0.004
"""Between steps: at most 250 MiB/s are copied, and whoever syncs meanwhile waits for one step."""

ROOM_LEFT_BYTES = 64 * 2**20
"""A copy must not take the room that the ledger itself needs."""

MAYBE_TRAINED = "maybe_trained"
"""Why samples of a restored ledger train no more: whether a step after the copy had trained them nobody knows."""

DELETED = "collected_deleted"
"""The event of an episode whose text was erased."""

Stop = Callable[[], bool]


class BackupManifest(msgspec.Struct, frozen=True):
    """``ledger.backup.json``."""

    sha256: tuple[str, ...]
    """Of the copy; while one replaces another, of both."""
    made_s: float
    """Wall clock."""
    trained_step: dict[str, int]
    """Per policy, the last step that the copy knows as trained."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy that was made."""

    path: Path
    num_bytes: int
    seconds: float


def back_up(path: Path, *, clock: Callable[[], float] = time.time, stop: Stop = lambda: False) -> Backup | None:
    """Copy the ledger at ``path``, also while a server writes it; None where ``stop`` ended it.

    Takes a while: call it in a thread.  Raises LedgerCorrupt where the ledger is damaged (the copy before stays),
    UnavailableError where the disk has no room.
    """
    started, target = time.monotonic(), backup_of(path)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    needed, free = path.stat().st_size + ROOM_LEFT_BYTES, shutil.disk_usage(path.parent).free
    if free < needed:
        raise UnavailableError(
            f"no room for a backup of {path}: it takes {needed / 2**20:.0f} MiB with what the run needs meanwhile, and"
            f" {free / 2**20:.0f} MiB are free; make room, or set dataflow.ledger_backup_s = 0"
        )
    try:
        if not _copy(path, temporary, stop=stop):
            return None
        trained = _verified(temporary, stop=stop)
        _replace(temporary, target, trained=trained, made_s=clock())
        return Backup(target, target.stat().st_size, time.monotonic() - started)
    except (sqlite3.Error, LedgerCorrupt, UnicodeDecodeError, OSError) as error:
        if stop():
            return None
        if has_no_room(error):
            raise UnavailableError(f"no room for a backup of {path}: {error}") from error
        if isinstance(error, OSError):
            raise
        raise name_damage(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def restore(path: Path, *, clock: Callable[[], float] = time.time) -> tuple[Path, BackupManifest]:
    """Put the last good copy in the place of a ledger that nobody writes; where the damaged file went.

    What a step after the copy may have trained trains no more, since nobody knows: waiting samples are dropped, and
    open groups with finished members close, their tasks to be dealt again.  A trainer that is further than the copy
    keeps its weights: its step begins the next lineage.  What was erased since the copy, as the run's events say, is
    erased again.

    Raises SetupError where there is no copy, or it is damaged, too, or a server writes the ledger.
    """
    backup = backup_of(path)
    manifest = read_manifest(path)
    with lock_ledger(path) as lock:
        if sha256_of(backup) not in manifest.sha256:
            raise LedgerCorrupt(
                f"the backup {backup} is damaged, too (its checksum differs): restore it from elsewhere"
            )
        lock.truncate(0)  # whoever opens it next looks at all of it
        kept = _free_name(path)
        for suffix in ("", "-wal", "-shm"):  # never the ledger without its last writes, wherever a kill ends this
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(kept.with_name(kept.name + suffix))
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.touch(mode=OWNER_ONLY)
        shutil.copyfile(backup, temporary)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            teach(db)
            overwrite_what_goes(db)
            _forget_uncertain(db, now=clock())
            _erase_again(db, path.with_name("events.jsonl"))
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    return kept, manifest


def read_manifest(path: Path) -> BackupManifest:
    """What is known of the backup of the ledger at ``path``.  Raises SetupError where there is none."""
    backup = backup_of(path)
    try:
        manifest = msgspec.json.decode(backup.with_suffix(".json").read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        manifest = None
    except msgspec.MsgspecError as error:
        raise LedgerCorrupt(f"the backup's manifest {backup.with_suffix('.json')} is damaged: {error}") from error
    if manifest is None or not backup.is_file():
        raise SetupError(
            f"{path.parent} holds no backup of its ledger ({backup.name}); dataflow.ledger_backup_s makes them"
        )
    return manifest


def _copy(path: Path, target: Path, *, stop: Stop) -> bool:
    """A copy of one snapshot.  False where it was stopped."""

    class Stopped(Exception):
        pass

    def pause(status: int, remaining: int, total: int) -> None:
        if stop():
            raise Stopped
        if remaining:
            time.sleep(PAUSE_S)

    target.touch(mode=OWNER_ONLY)
    with closing(connect_read_only(path)) as source, closing(sqlite3.connect(target, isolation_level=None)) as copy:
        copy.execute("PRAGMA synchronous = OFF")
        copy.execute("PRAGMA journal_mode = OFF")
        source.execute("BEGIN")
        source.execute(
            "SELECT key FROM meta LIMIT 1"
        ).fetchone()  # pins the snapshot, so that no write restarts the copy
        try:
            source.backup(copy, pages=PAGES_PER_STEP, progress=pause)
        except Stopped:
            return False
    sync(target)
    return True


def _verified(copy: Path, *, stop: Stop) -> dict[str, int]:
    """The trained step of each policy.  Raises LedgerCorrupt where anything in a copy is not what was written."""
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        teach(db)
        db.set_progress_handler(stop, 1_000_000)
        if fault := page_fault(db) or next(row_faults(db), ""):
            raise LedgerCorrupt(fault)
        steps = db.execute("SELECT policy, MAX(step) FROM batches WHERE state = 'trained' GROUP BY policy").fetchall()
        return {str(policy): int(step) for policy, step in steps}


def _replace(temporary: Path, target: Path, *, trained: dict[str, int], made_s: float) -> None:
    """At any moment the manifest names the copy that is there."""
    manifest_path, new = target.with_suffix(".json"), sha256_of(temporary)
    old = (sha256_of(target),) if target.exists() else ()
    manifest = BackupManifest((new, *old), made_s, trained)
    write_atomically(manifest_path, msgspec.json.encode(manifest))
    temporary.rename(target)
    sync(target.parent)
    write_atomically(manifest_path, msgspec.json.encode(msgspec.structs.replace(manifest, sha256=(new,))))


def _forget_uncertain(db: sqlite3.Connection, *, now: float) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.execute(
        "UPDATE samples SET state = ?, reason = ? WHERE state = ?",
        (SampleState.DROPPED, MAYBE_TRAINED, SampleState.FINISHED),
    )
    groups = db.execute(
        """SELECT g.group_id, t.source, t.id FROM groups g JOIN tasks t USING (task_key)
        WHERE g.state = 'open' AND g.split = 'train' AND EXISTS (SELECT 1 FROM episodes e
            WHERE e.group_id = g.group_id AND e.state = 'finished' AND e.outcome = 'agent')
        AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.group_id = g.group_id AND e.state = 'prepared')"""
    ).fetchall()
    for group_id, _, _ in groups:
        close_open_group(db, group_id, reason=MAYBE_TRAINED, now=now)
    dealer = db.execute("SELECT value FROM meta WHERE key = 'dealer'").fetchone()
    if dealer is not None:
        state = msgspec.json.decode(dealer[0])
        for group_id, source, task_id in groups:
            place = state["sources"].get(source)
            if place is not None and not group_id.startswith(NOT_DEALT):
                place.setdefault("returned", []).append(task_id)
        set_meta(db, "dealer", to_json(state))
    db.execute("COMMIT")


def _erase_again(db: sqlite3.Connection, events: Path) -> None:
    """A copy of before must not bring back what people had deleted."""
    deleted: dict[str, None] = {}
    if events.is_file():
        with events.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(msgspec.MsgspecError):  # a torn line
                    event = msgspec.json.decode(line, type=_Deleted) if DELETED in line else None
                    if event is not None and event.event == DELETED:
                        deleted[event.episode_id] = None
    db.execute("BEGIN IMMEDIATE")
    for episode_id in deleted:
        with suppress(UnknownEpisode):  # the copy never had it
            erase_episode(db, episode_id, compress=compress)
    db.execute("COMMIT")


class _Deleted(msgspec.Struct):
    """What the restoring of a copy needs of an event."""

    event: str
    episode_id: str


def _free_name(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    return kept
