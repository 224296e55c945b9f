"""A disk that can be full on demand: a small file system, or where none may be mounted, a limit on files' sizes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Where a run writes."""

    kind: str
    folder: Path

    def fill(self) -> None:
        """Leave no room."""
        ...

    def free(self) -> None:
        """Make room again."""
        ...


class MountedDisk:
    """A file system in memory with a size of its own; what does not fit gets ENOSPC, whoever writes it."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Others may write meanwhile: what room is left then goes in ever smaller pieces."""
        with self._ballast.open("wb", buffering=0) as file:
            size, piece = 0, 1 << 40
            while piece:
                try:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size += piece
                except OSError:
                    piece //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


class LimitedDisk:
    """A folder whose writers may not write any more (EFBIG), as by a quota that is used up."""

    kind = "file size limit"

    def __init__(self, folder: Path, writers: Callable[[], Iterable[int]]) -> None:
        """``writers``: the processes that write there now."""
        self.folder = folder
        self._writers = writers
        self._limited: dict[int, tuple[int, int]] = {}

    def fill(self) -> None:
        for pid in self._writers():
            with suppress(ProcessLookupError):  # it has ended
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
                self._limited[pid] = before

    def free(self) -> None:
        while self._limited:
            pid, before = self._limited.popitem()
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder: Path, *, megabytes: int, writers: Callable[[], Iterable[int]]) -> Iterator[Disk]:
    """A disk at a new folder; its contents are gone afterwards where it is a file system of its own."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        yield LimitedDisk(folder, writers)
        return
    try:
        yield MountedDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
