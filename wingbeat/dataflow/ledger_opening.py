"""Opening a ledger for writing: its lock, its settings, whether it is whole, and whether it is the right one."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wingbeat.core.errors import LedgerCorrupt, SetupError
from wingbeat.dataflow.ledger_damage import backup_of, is_damage
from wingbeat.dataflow.ledger_erase import overwrite_what_goes
from wingbeat.dataflow.ledger_integrity import page_fault, row_fault
from wingbeat.dataflow.ledger_rows import set_meta
from wingbeat.dataflow.ledger_schema import TABLES, BatchState, SampleState
from wingbeat.dataflow.ledger_views import RunMeta

logger = logging.getLogger(__name__)

WHOLE_CHECK_BYTES = 2**30
"""Ledgers up to this size have all pages checked at every start: some 0.3 s per GiB beyond reading it."""
CHECK_AT_MOST_S = 60.0
"""A check of pages that takes longer ends unfinished: the server must come up."""
SAY_EVERY_S = 5.0

_STEPS_PER_TICK = 1_000_000

_STATES = {
    "groups": ("open", "closed"),
    "samples": tuple(SampleState),
    "batches": tuple(BatchState),
}


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """How a ledger was checked when it was opened."""

    why: str
    """"" where it was left as its last server closed it."""
    is_whole: bool
    """All pages were looked at, or only the rows that a run goes on from."""
    num_bytes: int
    seconds: float


def lock_ledger(path: Path) -> BinaryIO:
    """Hold the ledger for this process until the file is closed (the system closes it for a killed one)."""
    if not path.parent.is_dir():
        raise SetupError(f"expected the run directory {path.parent}, found none; create it first")
    try:
        lock = path.with_name(f"{path.name}.lock").open("a+b")
    except OSError as error:
        raise SetupError(f"the ledger {path} cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise SetupError(f"another server writes {path}; stop it or choose another run name") from error
    return lock


def take_closing_mark(lock: BinaryIO) -> int | None:
    """The size with which the last server closed the ledger; None where it did not live to do so."""
    lock.seek(0)
    text = lock.read().strip()
    lock.truncate(0)
    return int(text) if text.isdigit() else None


def leave_closing_mark(lock: BinaryIO, path: Path) -> None:
    """After the last write: the next server need not suspect a crash."""
    lock.write(b"%d\n" % path.stat().st_size)
    lock.flush()


def require_content(path: Path, *, closed_at: int | None) -> None:
    """Raises LedgerCorrupt where a ledger has lost all that it held: SQLite would begin a new one."""
    size = path.stat().st_size if path.exists() else 0
    if not size and (closed_at or backup_of(path).exists()):
        raise LedgerCorrupt("it is empty or gone, and its last server did not leave it so")


def configure(db: sqlite3.Connection) -> None:
    """WAL lets readers read while we write; FULL syncs at every commit, which is what "durable" means here."""
    try:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise LedgerCorrupt(f"SQLite cannot open it ({error})") from error
        raise
    if mode != "wal":
        raise SetupError(f"the ledger's file system does not support SQLite's WAL (got {mode!r}); use a local disk")
    db.execute("PRAGMA synchronous = FULL")
    overwrite_what_goes(db)
    db.execute("PRAGMA busy_timeout = 5000")


def check_pages(db: sqlite3.Connection, path: Path, *, closed_at: int | None) -> LedgerCheck:
    """Whether what is on disk is a database; all of it after a crash, or where it is small.  Raises LedgerCorrupt."""
    size, started = path.stat().st_size, time.monotonic()
    why = "" if size in (closed_at, 0) else "its last server did not close it"
    if why and closed_at is not None:
        why = f"its size has changed from {closed_at} to {size} bytes since its last server closed it"
    if not why and size > WHOLE_CHECK_BYTES:
        return LedgerCheck(why, False, size, 0.0)
    if size > WHOLE_CHECK_BYTES:
        logger.info("checking the ledger %s (%.1f GiB): %s", path, size / 2**30, why)
    is_whole = _integrity_check(db, path, started=started)
    return LedgerCheck(why, is_whole, size, time.monotonic() - started)


def _integrity_check(db: sqlite3.Connection, path: Path, *, started: float) -> bool:
    """False where it took too long.  Raises LedgerCorrupt."""
    said = started

    def tick() -> bool:
        nonlocal said
        now = time.monotonic()
        if now - said > SAY_EVERY_S:
            said = now
            logger.info("still checking the ledger %s (%.0f s)", path, now - started)
        return now - started > CHECK_AT_MOST_S

    db.set_progress_handler(tick, _STEPS_PER_TICK)
    try:
        fault = page_fault(db)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        logger.warning("the check of the ledger %s was ended after %.0f s", path, CHECK_AT_MOST_S)
        return False
    finally:
        db.set_progress_handler(None, 0)
    if fault:
        raise LedgerCorrupt(fault)
    return True


def check_rows(db: sqlite3.Connection, *, is_whole: bool) -> None:
    """Whether the tables, and the rows that a run goes on from, are such as were written.  Raises LedgerCorrupt.

    ``is_whole``: every row of those that are many, too; they are checked again when they are read.
    """
    with closing(sqlite3.connect(":memory:")) as blank:
        for statement in TABLES:
            blank.execute(statement)
        if missing := _layout(blank) - _layout(db):
            raise LedgerCorrupt(f"its schema lacks {', '.join(sorted(missing))}")
    for table, states in _STATES.items():
        for (state,) in db.execute(f"SELECT DISTINCT state FROM {table}"):
            if state not in states:
                raise LedgerCorrupt(f"table {table}: a row is in the state {state!r}, expected {', '.join(states)}")
    for table in ("meta", "lineages", *(("groups", "samples") if is_whole else ())):
        if fault := row_fault(db, table):
            raise LedgerCorrupt(fault)


def _layout(db: sqlite3.Connection) -> set[str]:
    """Columns and indexes, by what they are."""
    columns = db.execute(
        """SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type = 'table'"""
    )
    indexes = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL")
    return {f"column {table}.{name}" for table, name in columns} | {
        f"index {name} ({' '.join(str(sql).split())})" for name, sql in indexes
    }


def adopt(db: sqlite3.Connection, run: RunMeta) -> None:
    """Check that the ledger is this run's."""
    known = {str(key): str(value) for key, value in db.execute("SELECT key, value FROM meta")}
    for key, wanted in (("run_id", run.run_id), ("seed", str(run.seed))):
        if known.get(key, wanted) != wanted:
            fix = f", or leave run.seed out, or set it to {known[key]}" if key == "seed" else ""
            raise SetupError(f"this ledger has {key} {known[key]!r}, got {wanted!r}; choose another run directory{fix}")
    db.execute("BEGIN IMMEDIATE")
    for key, value in (("run_id", run.run_id), ("seed", str(run.seed)), ("config", run.config)):
        set_meta(db, key, value)
    db.execute("COMMIT")
