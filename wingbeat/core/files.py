"""Writing files so that a crash or a full disk leaves whole things: the old file or the new one, lines or none."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from pathlib import Path

from wingbeat.core.errors import UnavailableError

OWNER_ONLY = 0o600
"""The mode of files that hold keys, or what agents and people said."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""A full disk, or a quota or size limit that is reached."""

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where what was made or fetched once is kept for later runs: ``$WINGBEAT_CACHE``, else ``~/.cache/wingbeat``."""
    given = os.environ.get("WINGBEAT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "wingbeat"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: written beside it, synced, renamed.

    Raises UnavailableError, with the old file in place, where the disk does not take it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except FileNotFoundError:
        raise  # no such folder
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UnavailableError(f"cannot write {path}: {error}; it stays as it was") from error


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LineFile:
    """Appends lines to a file; one that the disk does not take is left out whole and counted."""

    def __init__(self, path: Path) -> None:
        self.num_lost = 0
        """Lines that the disk did not take, since the start or since whoever counts them set it back."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, line: str) -> bool:
        """Hand a line (without its end) to the operating system; False where it did not take it.

        Raises OSError for anything but a full disk.
        """
        data = line.encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            taken = os.write(self._file, data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            taken = 0
        if taken == len(data):
            return True
        if taken:
            os.ftruncate(self._file, size)
        if not self.num_lost:
            logger.warning("the disk is full: lines for %s are lost until there is room", self._path)
        self.num_lost += 1
        return False

    def close(self) -> None:
        """A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
