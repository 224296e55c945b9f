"""A connection to a ledger that reads only: from any thread, one snapshot at a time, and damage has a name."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from wingbeat.core.errors import LedgerCorrupt, SetupError
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_damage import name_damage
from wingbeat.dataflow.ledger_integrity import require_sound, teach


class LedgerConnection:
    """Read-only access; safe to use from several threads."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, captures: Captures) -> None:
        """Takes over ``connection``; use :func:`open_read_only`."""
        connection.row_factory = sqlite3.Row
        self._path = path
        self._captures = captures
        self._reading = connection
        self._read_lock = threading.Lock()

    def close(self) -> None:
        """A second call does nothing."""
        with self._read_lock:
            self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _rows(self, query: str, parameters: tuple[str | int, ...] = ()) -> list[sqlite3.Row]:
        with self._read_lock, self._naming_damage():
            return self._reading.execute(query, parameters).fetchall()

    @contextmanager
    def snapshot(self) -> Generator[sqlite3.Connection]:
        """Several queries that see one state."""
        with self._read_lock, self._naming_damage():
            self._reading.execute("BEGIN")
            try:
                yield self._reading
            finally:
                if self._reading.in_transaction:
                    self._reading.execute("COMMIT")

    @contextmanager
    def _naming_damage(self) -> Generator[None]:
        """What is damaged is named with its file, and with what can be done."""
        try:
            yield
        except (sqlite3.Error, LedgerCorrupt, UnicodeDecodeError) as error:
            named = name_damage(error, self._path)
            raise named from (None if named is error else error)

    def _meta(self, where: str, parameters: tuple[str, ...] = ()) -> dict[str, str]:
        with self.snapshot() as connection:
            rows = connection.execute(f"SELECT key, value, checksum FROM meta WHERE {where}", parameters).fetchall()
            for row in rows:
                require_sound("meta", row, name=f"the entry {row['key']!r}")
            return {str(row["key"]): str(row["value"]) for row in rows}


def captures_folder(path: Path) -> Path:
    """Where the captured turns of the ledger at ``path`` are."""
    return path.with_name("turns")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that cannot write.  Raises SetupError where there is no such file."""
    if not path.is_file():
        raise SetupError(f"expected a ledger at {path}, found none; name the directory of a run")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA busy_timeout = 5000")
    teach(connection)
    return connection
