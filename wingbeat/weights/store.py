"""The weight files that one host pulled, shared by all engines there: each file comes over the network once.

    FOLDER/POLICY-00000007-0123456789abcdef.safetensors            whole, verified; what engines map
    FOLDER/….delta                                                 verified; for other hosts that pull from this one
    FOLDER/….partial                                               on its way; whoever comes next goes on with it
    FOLDER/….safetensors.pinned.PID                                a process may be asked for it for a long time
    FOLDER/.POLICY.lock                                            held by the process that pulls

Mapped files may be deleted: whoever mapped them keeps their memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from wingbeat.core.errors import UnavailableError
from wingbeat.weights.host import make_private
from wingbeat.weights.names import WHOLE, names_of, shown

PARTIAL = ".partial"
KEPT = 2
"""Whole files per policy: the newest, and the one before it, which another process may be about to map."""
POLL_S = 0.05
_PINNED = re.compile(r"(?P<name>.+)\.pinned\.(?P<pid>\d+)")


class HostStore:
    """One folder; several processes and threads use it at once."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError where the folder belongs to another user."""
        self.folder = folder
        self._alive = self._enter()

    def _enter(self) -> int:
        """Say that this process uses the folder; another one may be deleting it just now."""
        while True:
            make_private(self.folder)
            with contextlib.suppress(FileNotFoundError):
                alive = os.open(self.folder / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(alive, fcntl.LOCK_SH)
                if (self.folder / ".alive").exists():
                    return alive
                os.close(alive)

    def path(self, name: str) -> Path:
        """Where a file lies once it is whole.  Raises UnavailableError for what is no plain file name."""
        return self.folder / checked_name(name)

    def partial(self, name: str) -> Path:
        """Where it grows."""
        return self.folder / (checked_name(name) + PARTIAL)

    def of_checksum(self, policy: str, checksum: str) -> Path | None:
        """The whole file that holds these tensors, if there is one."""
        return next((path for path in self._whole(policy) if path.stem.endswith(f"-{shown(checksum)}")), None)

    @contextlib.contextmanager
    def pulling(self, policy: str, *, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Be the only one on this host that pulls files of a policy; waits for another who does.

        Raises UnavailableError once ``is_wanted`` says no.
        """
        make_private(self.folder)  # somebody may have swept it away
        lock = os.open(self.folder / f".{checked_name(policy)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _take(lock):
                if not is_wanted():
                    raise UnavailableError(f"weights of {policy!r} are not wanted any more")
                time.sleep(POLL_S)
            yield
        finally:
            os.close(lock)

    def pin(self, name: str) -> None:
        """Keep a file for as long as this process lives, or until :meth:`unpin`."""
        self.path(f"{name}.pinned.{os.getpid()}").touch()

    def unpin(self, name: str) -> None:
        self.path(f"{name}.pinned.{os.getpid()}").unlink(missing_ok=True)

    def sweep(self, policy: str, *, keep: Collection[str]) -> None:
        """Delete what nobody on this host needs: all but the newest whole files, ``keep``, and what is pinned.

        Only while :meth:`pulling`.
        """
        kept = {*keep, *self._pinned()}
        whole = sorted(self._whole(policy), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept |= {path.name for path in whole[:KEPT]}
        kept |= {name + PARTIAL for name in keep}
        files = _files_of(policy)
        for path in self.folder.iterdir():
            if path.name not in kept and files.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """The last process of the host deletes the folder."""
        for path in self.folder.glob(f"*.pinned.{os.getpid()}"):
            path.unlink(missing_ok=True)
        is_last = _take(self._alive)
        if is_last:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._alive)

    def _whole(self, policy: str) -> list[Path]:
        files = _files_of(policy)
        return [path for path in self.folder.glob(f"*{WHOLE}") if files.fullmatch(path.name)]

    def _pinned(self) -> set[str]:
        """Names that a living process pins; marks of dead ones go."""
        names: set[str] = set()
        for path in self.folder.glob("*.pinned.*"):
            found = _PINNED.fullmatch(path.name)
            if found is None:
                continue
            if _is_alive(int(found["pid"])):
                names.add(found["name"])
            else:
                path.unlink(missing_ok=True)
        return names


def checked_name(name: str) -> str:
    """``name`` where it is that of a file in a folder.  Raises UnavailableError."""
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise UnavailableError(f"expected the plain name of a weight file, got {name!r}")
    return name


def _files_of(policy: str) -> re.Pattern[str]:
    return names_of(policy, endings=rf"(\.made)?({re.escape(PARTIAL)})?")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
