"""Noticing that an agent's files have changed, and that whoever changed them is done.

Looking at the times of a few files costs next to nothing and works on every file system, also where no notices come
(network mounts, containers).  Editors that write beside the file and rename, or in several pieces, are waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path

POLL_S = 0.2
SETTLED_POLLS = 2
"""So many looks in a row must find the files as they are."""
MISSING_S = 2.0
"""A file may be away for so long while it is replaced; then it counts as removed."""

Signature = tuple[tuple[int, int, int] | None, ...]


def signature(files: Iterable[Path]) -> Signature:
    """Time, size and inode of each file; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def fingerprint(files: Iterable[Path]) -> str:
    """Changes with the content of these files; one that is not there counts as such."""
    whole = hashlib.sha256()
    for file in sorted(files):
        try:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError:
            content = "-"
        whole.update(f"{file}\0{content}\n".encode())
    return whole.hexdigest()


class FileWatch:
    """A set of files whose content was tried; :meth:`changed` waits until it is another one."""

    def __init__(self, *, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._files: tuple[Path, ...] = ()
        self._seen: Signature = ()
        self._tried = ""

    def follow(self, files: Iterable[Path]) -> None:
        """These files, as they are now, are what was tried."""
        self._files = tuple(sorted(set(files)))
        self._seen = signature(self._files)
        self._tried = fingerprint(self._files)

    def forget(self) -> None:
        """What the files hold now was not tried."""
        self._seen, self._tried = (), ""

    async def changed(self) -> None:
        """Until the content is another one than what was tried, and has settled; it is then taken as tried."""
        while True:
            await asyncio.sleep(self._poll_s)
            if signature(self._files) == self._seen:
                continue
            self._seen = await self._settled()
            found = fingerprint(self._files)
            if found != self._tried:
                self._tried = found
                return

    async def _settled(self) -> Signature:
        """Until nobody is writing any more."""
        last, same, missing_s = signature(self._files), 0, 0.0
        while same < SETTLED_POLLS or (None in last and missing_s < MISSING_S):
            await asyncio.sleep(self._poll_s)
            now = signature(self._files)
            same = same + 1 if now == last else 0
            missing_s = missing_s + self._poll_s if None in now else 0.0
            last = now
        return last
