"""A damaged ledger, for people: what is wrong, in which file, and what to do.

Also where its last good copy is: ``ledger_backup`` makes them.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from wingbeat.core.errors import LedgerCorrupt, WingbeatError

BACKUP_SUFFIX = ".backup"

LedgerError = sqlite3.Error | WingbeatError | UnicodeDecodeError
"""What work on a ledger may fail with."""

_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_UNREADABLE = (
    "decode to UTF-8",
    "user-defined function raised exception",
    "no such column",
    "no such table",
    "file format",
)
"""What a read fails with where a text, or the schema itself, is damaged."""


def is_damage(error: Exception) -> bool:
    """Whether an error says that the file is not what was written."""
    if isinstance(error, LedgerCorrupt | UnicodeDecodeError):
        return True  # (what SQLite says of a damaged schema may quote it)
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return (code is not None and code & 0xFF in _DAMAGE) or any(text in str(error) for text in _UNREADABLE)


def name_damage(error: LedgerError, path: Path) -> LedgerError:
    """The error itself, or the LedgerCorrupt that names the file and the way out."""
    if not is_damage(error) or str(path) in str(error):
        return error
    return LedgerCorrupt(f"the ledger {path} is damaged: {error}; {way_out(path)}")


def way_out(path: Path) -> str:
    """What to do about a damaged ledger."""
    backup = backup_of(path)
    if backup.is_file():
        return (
            f"stop the server and run `wingbeat ledger restore {path.parent}`, which goes back to the last good copy"
            f" ({backup.name}) and keeps the damaged file; steps that it does not know are taken over from the"
            " trainer's checkpoint or trained anew"
        )
    return (
        "there is no backup (dataflow.ledger_backup_s is 0, or none was due yet): restore the file from a copy of your"
        f" own, or start a new run directory; `wingbeat inspect {path.parent} --ledger` says what is still readable"
    )


def backup_of(path: Path) -> Path:
    """Where the last good copy of a ledger is."""
    return path.with_name(f"{path.stem}{BACKUP_SUFFIX}{path.suffix}")
