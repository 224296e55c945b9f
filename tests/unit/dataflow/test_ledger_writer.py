"""The commit thread: grouping, failures of a commit, and a thread that dies."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from wingbeat.core.errors import ConflictError, SetupError, UnavailableError
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.ledger_writer import CommitThread


@pytest.fixture
def connection():
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.execute("CREATE TABLE t (x INTEGER CHECK (x > 0))")
    return db


def insert(value: int):
    return lambda db: db.execute("INSERT INTO t VALUES (?)", (value,)).rowcount


def read(db: sqlite3.Connection) -> list[int]:
    return [x for (x,) in db.execute("SELECT x FROM t ORDER BY rowid")]


def refuse(error: Exception):
    def job(db: sqlite3.Connection) -> None:
        insert(9)(db)
        raise error

    return job


def test_jobs_that_came_during_a_commit_share_the_next_one(connection):
    commits: list[str] = []
    connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    writer = CommitThread(connection)
    started, go_on = threading.Event(), threading.Event()

    def wait(db: sqlite3.Connection) -> None:
        started.set()
        assert go_on.wait(10)

    first = writer.submit(wait)
    assert started.wait(10)
    futures = [writer.submit(insert(i)) for i in range(1, 51)]
    assert not any(f.done() for f in futures)
    go_on.set()
    first.result(10)
    assert [f.result(10) for f in futures] == [1] * 50
    assert len(commits) == 2
    assert writer.submit(read).result(10) == list(range(1, 51))
    writer.close()


@pytest.mark.parametrize("error", [ConflictError("no"), sqlite3.IntegrityError("no")])
def test_a_refused_job_is_undone_alone(connection, error):
    writer = CommitThread(connection)
    futures = [writer.submit(job) for job in (insert(1), refuse(error), insert(-1), insert(2))]
    assert futures[0].result(10) == futures[3].result(10) == 1
    for future in futures[1:3]:
        assert future.exception(10) is not None
    assert writer.submit(read).result(10) == [1, 2]
    writer.close()


def test_a_failed_commit_fails_all_its_jobs_and_the_next_one_works(connection):
    writer = CommitThread(connection)

    def break_transaction(db: sqlite3.Connection) -> None:
        insert(5)(db)
        db.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk full")

    with pytest.raises(sqlite3.OperationalError, match="disk full"):
        writer.submit(break_transaction).result(10)
    assert writer.submit(insert(1)).result(10) == 1
    assert writer.submit(read).result(10) == [1]
    writer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_dead_thread(connection):
    writer = CommitThread(connection)
    with pytest.raises(UnavailableError, match="writer died"):
        writer.submit(refuse(ZeroDivisionError())).result(10)
    writer.close()
    with pytest.raises(UnavailableError, match="closed"):
        writer.submit(read)


def test_close_commits_what_is_queued_and_may_be_repeated(connection):
    writer = CommitThread(connection)
    futures = [writer.submit(insert(i)) for i in range(1, 5)]
    writer.close()
    writer.close()
    assert all(f.result(0) == 1 for f in futures)
    with pytest.raises(UnavailableError, match="closed"):
        writer.submit(read)
    assert not [t for t in threading.enumerate() if t.name == "wingbeat-ledger"]


# --- a full disk ----------------------------------------------------------------------------------------


class Disk:
    """A ledger file whose size is limited by SQLite itself, and a wait that tests drive."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE t (x INTEGER, y BLOB)")
        self.waits = 0
        self.waiting, self.go_on = threading.Event(), threading.Event()

    def limit(self, pages: int) -> None:
        self.db.execute(f"PRAGMA max_page_count = {pages}")

    def wait(self, closing: threading.Event, seconds: float) -> None:
        """Instead of sleeping: until the test has made room."""
        self.waits += 1
        self.waiting.set()
        while not (self.go_on.wait(0.01) or closing.is_set()):
            pass
        self.go_on.clear()


def insert_blob(value: int):
    return lambda db: db.execute("INSERT INTO t VALUES (?, zeroblob(40000))", (value,)).rowcount


def test_a_full_disk_keeps_jobs_until_there_is_room(tmp_path):
    disk = Disk(tmp_path / "full.sqlite")
    disk.limit(5)
    writer = CommitThread(disk.db, wait=disk.wait)
    futures = [writer.submit(job) for job in (insert_blob(1), refuse(ConflictError("no")), insert_blob(2))]
    assert disk.waiting.wait(10)
    assert "full" in writer.blocked and not any(f.done() for f in futures[::2])
    late = writer.submit(insert_blob(3))
    disk.waiting.clear()
    disk.go_on.set()  # still no room
    assert disk.waiting.wait(10) and disk.waits == 2 and not late.done()
    disk.limit(1000)
    disk.go_on.set()
    assert [f.result(10) for f in (futures[0], futures[2], late)] == [1, 1, 1]
    assert isinstance(futures[1].exception(10), ConflictError | sqlite3.Error)
    assert writer.blocked == "" and writer.submit(read).result(10) == [1, 2, 3]
    writer.close()


def test_closing_on_a_full_disk_refuses_what_could_not_be_recorded(tmp_path):
    disk = Disk(tmp_path / "full.sqlite")
    disk.limit(5)
    writer = CommitThread(disk.db, wait=disk.wait)
    futures = [writer.submit(insert_blob(i)) for i in range(3)]
    assert disk.waiting.wait(10)
    writer.close()
    for future in futures:
        with pytest.raises(UnavailableError, match="full disk"):
            future.result(10)
    with sqlite3.connect(tmp_path / "full.sqlite") as db:
        assert read(db) == []
    db.close()


def test_a_size_limit_of_the_process_counts_as_a_full_disk(tmp_path):
    """What a quota does: the file cannot grow, and SQLite calls it an I/O error."""
    code = """
import resource, sqlite3, sys
from wingbeat.dataflow.ledger_writer import has_no_room
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
db.execute("CREATE TABLE t (x)")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    db.execute("INSERT INTO t VALUES (zeroblob(200000))")
except sqlite3.Error as error:
    print(has_no_room(error), error.sqlite_errorname)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "limited.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "SQLITE_IOERR_WRITE"], done.stdout


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")])
def test_a_disk_without_room_for_what_lies_beside_the_ledger_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(captures: Captures) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Captures, "prepare", refuse)
        with pytest.raises(SetupError, match=r"cannot be written: .*; make room on its disk"):
            Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("r", seed=1))
    assert not [t for t in threading.enumerate() if t.name == "wingbeat-ledger"]
    Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("r", seed=1)).close()  # nobody holds its lock


def test_a_lock_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite.lock").mkdir()
    with pytest.raises(SetupError, match=r"cannot be written: .*Is a directory"):
        Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("r", seed=1))
