"""What a team has begun to finish on several servers, so that a successor can end it.

A folder with one small file per transaction, written before its first server hears of it and removed when the last
one knows its end.  The process that made a file holds a lock on it: a successor takes only those whose process
is gone, so that several processes can share the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from wingbeat.core.errors import SetupError
from wingbeat.core.files import OWNER_ONLY, sync

logger = logging.getLogger("wingbeat.client")

VERSION = 1
SUFFIX = ".transaction.json"
UNSEEN = ".transaction.new"
"""Of a file that is not whole yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One transaction."""

    transaction_id: str
    servers: Mapping[str, str]
    """Names and addresses, the decider first."""
    is_committing: bool = False


class OpenEntry:
    """A file of the journal in this process's hands; all calls block for the disk."""

    def __init__(self, path: Path, file: int, entry: Entry) -> None:
        self._path = path
        self._file = file
        self.entry = entry

    def commit(self) -> None:
        """From now on a successor says "commit", too.  Raises SetupError where the disk does not take it."""
        entry = replace(self.entry, is_committing=True)
        try:
            _write(self._file, entry)
        except OSError as error:
            raise SetupError(f"the team's journal cannot be written: {error}") from error
        self.entry = entry

    def remove(self) -> None:
        """Everybody knows the end."""
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Leave it to a successor; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Journal:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SetupError(f"the team's journal {folder} cannot be made: {error}") from error

    def open(self, entry: Entry) -> OpenEntry:
        """Begin a transaction's file; it is on disk when this returns.

        Raises SetupError where the disk does not take it.
        """
        path = self._folder / f"{entry.transaction_id}{SUFFIX}"
        unseen = self._folder / f"{entry.transaction_id}{UNSEEN}"
        try:
            file = os.open(unseen, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, entry)
            unseen.rename(path)  # whole and locked before a successor can see it
            sync(self._folder)
        except OSError as error:
            raise SetupError(f"the team's journal cannot be written: {error}") from error
        return OpenEntry(path, file, entry)

    def left(self) -> Iterator[OpenEntry]:
        """What processes that are gone have left."""
        for path in sorted(self._folder.glob(f"*{UNSEEN}")):
            file = _lock(path)
            if file is not None:  # killed before any server had heard of it
                path.unlink(missing_ok=True)
                os.close(file)
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            file = _lock(path)
            if file is None:
                continue
            entry = _read(path)
            if entry is None:
                logger.warning("the team's journal has an entry that cannot be read, %s: its servers end it", path)
                os.close(file)
                continue
            yield OpenEntry(path, file, entry)


def _lock(path: Path) -> int | None:
    """The open file, if its process is gone and nobody else has taken it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # its process lives
        os.close(file)
        return None
    if not path.exists():  # it was removed while we opened it
        os.close(file)
        return None
    return file


def _write(file: int, entry: Entry) -> None:
    """One JSON line per state, appended: a half-written last line leaves the state before it.

    Raises OSError where the disk does not take it; then the file is as before, since nothing may follow half a line.
    """
    line = {
        "version": VERSION,
        "transaction": entry.transaction_id,
        "servers": dict(entry.servers),
        "committing": entry.is_committing,
    }
    data, size = json.dumps(line).encode() + b"\n", os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def _read(path: Path) -> Entry | None:
    """The last whole state; None where there is none.  Raises SetupError for a file of a newer release."""
    entry: Entry | None = None
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            data: Any = json.loads(line)
        except ValueError:
            break
        if not isinstance(data, dict):
            break
        fields = cast(dict[str, Any], data)
        if fields.get("version") != VERSION:
            raise SetupError(f"{path}: expected version {VERSION}, got {fields.get('version')!r}: of a newer release?")
        try:
            servers = {str(name): str(url) for name, url in fields["servers"].items()}
            entry = Entry(str(fields["transaction"]), servers, bool(fields["committing"]))
        except (KeyError, AttributeError):
            break
    return entry
