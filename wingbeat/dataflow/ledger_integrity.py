"""Checksums of a ledger's rows: a flipped bit on disk must never become a wrong value that trains.

SQLite keeps no checksums of its own.  So every row that training depends on carries the CRC-32 of what it
says; it is written with the row (``seal_*``) and compared whenever the row is read (``check_*``)::

    meta       key, value                                   the dealer's place, operators, the run
    groups     the whole specification, with its task
    episodes   the finish (payload, rewards, metrics), and the graph in a checksum of its own
    samples    lineage and shaping
    lineages   where it began
    batches    SHA-256 of the content (``digest``, which also tells repeats from contradictions)

A row without one (NULL) was written by a release that knew none.  What is damaged beyond rows, SQLite finds by the
structure of its pages (``ledger_opening``).
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from wingbeat.core.errors import LedgerCorrupt

E = TypeVar("E", bound=StrEnum)

_CONTENT: Mapping[str, tuple[str, ...]] = {
    "meta": ("key", "value"),
    "groups": ("group_id", "split", "size", "policies", "floor_version", "evaluation_id", "episode_ids"),
    "samples": ("episode_id", "attempt", "policy", "num_tokens", "lineage", "shaping"),
    "lineages": ("policy", "lineage", "base_lineage", "base_step"),
    "episodes": ("episode_id", "attempt", "group_id", "outcome", "finish_digest", "rewards", "metrics", "payload"),
}
"""The columns that the checksum of a table's row covers; a group's covers its task, too."""

Value = str | bytes | int | float | None


def checksum(*values: Value) -> int:
    """CRC-32 of values; where one ends and the next begins counts, too."""
    crc = 0
    for value in values:
        data = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
        crc = zlib.crc32(data, zlib.crc32(b"%d:%d;" % (value is None, len(data)), crc))
    return crc


def row_checksum(table: str, row: Mapping[str, Any] | sqlite3.Row) -> int:
    """What a row's checksum should be (not for groups, whose task is in another table)."""
    return checksum(*(row[column] for column in _CONTENT[table]))


def member_of(kind: type[E], text: str, *, where: str) -> E:
    """A stored state.  Raises LedgerCorrupt where there is none of this name."""
    try:
        return kind(text)
    except ValueError as error:
        raise LedgerCorrupt(f"{where} says {text!r}, expected one of {', '.join(kind)}") from error


def teach(db: sqlite3.Connection) -> None:
    """Give a connection the SQL function ``row_checksum``, with which rows are sealed and checked."""
    db.create_function("row_checksum", -1, checksum, deterministic=True)


def seal(db: sqlite3.Connection, table: str, where: str = "true", parameters: tuple[Value, ...] = ()) -> None:
    """Write the checksums of rows that have just changed."""
    db.execute(f"UPDATE {table} SET checksum = {_expected(table, table)} WHERE {where}", parameters)


def damaged(table: str, alias: str = "") -> str:
    """SQL of whether a row of the table is not what was written."""
    name = alias or table
    return f"({name}.checksum IS NOT NULL AND {name}.checksum IS NOT {_expected(table, name)})"


def page_fault(db: sqlite3.Connection) -> str:
    """What SQLite finds wrong with the structure of a file, in words; "" where it is sound."""
    found = [str(row[0]) for row in db.execute("PRAGMA integrity_check(5)")]
    return "" if found == ["ok"] else f"SQLite finds: {'; '.join(found)}"


def row_fault(db: sqlite3.Connection, table: str) -> str:
    """How many rows of a table are not what was written, in words; "" for none."""
    (count,) = db.execute(f"SELECT COUNT(*) FROM {table} WHERE {damaged(table)}").fetchone()
    return f"table {table}: {count} rows are not what was written (their checksums differ)" if count else ""


def row_faults(db: sqlite3.Connection) -> Iterator[str]:
    """Of all tables, token graphs included."""
    yield from filter(None, (row_fault(db, table) for table in _CONTENT))
    (count,) = db.execute(
        """SELECT COUNT(*) FROM episodes WHERE graph_checksum IS NOT NULL
        AND graph_checksum IS NOT row_checksum(graph)"""
    ).fetchone()
    if count:
        yield f"table episodes: {count} token graphs are not what was written (their checksums differ)"


def require_sound(table: str, row: sqlite3.Row, *, name: str) -> None:
    """Raises LedgerCorrupt where a row (of any table but groups) is not what was written."""
    written = row["checksum"]
    if written is not None and written != row_checksum(table, row):
        raise damaged_row(table, name)


def damaged_row(table: str, name: str) -> LedgerCorrupt:
    """What to raise for a row that is not what was written."""
    return LedgerCorrupt(f"table {table}: {name} is not what was written (its checksum differs)")


def _expected(table: str, name: str) -> str:
    columns = ", ".join(f"{name}.{column}" for column in _CONTENT[table])
    if table != "groups":
        return f"row_checksum({columns})"
    task = f"(SELECT row_checksum(source, id, payload) FROM tasks WHERE tasks.task_key = {name}.task_key)"
    return f"row_checksum({columns}, {task})"
