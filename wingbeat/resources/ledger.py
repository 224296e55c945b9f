"""What was started and has not ended, on disk: so that somebody ends it if this process cannot.

One file per pool, in a folder of this user's, made when the first thing is started that would outlive the process.
Its owner holds a lock on it for as long as it lives (the system frees it however the process ends), and its first
line says which process that is.  Appended lines go to the operating system at once: they survive the process.

    {"owner": {"host": ..., "boot": ..., "space": ..., "pid": 123, "start": "4711"}}
    {"started": ["sandbox", "pid 130 start 4712"]}
    {"ended": ["sandbox", "pid 130 start 4712"]}
    {"closed": true}
    {"looked": ["docker", "wingbeat-5f1c...", 1764500000.0]}

A pool that closes with something left says that nobody uses it.  The last line is written by whoever reaps: what may be
made after its owner's death is looked for a second time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from wingbeat.core.errors import SetupError
from wingbeat.core.files import OWNER_ONLY
from wingbeat.core.process_facts import boot_id, exists, start_time
from wingbeat.resources.specs import ResourceFailed

logger = logging.getLogger("wingbeat.resources")

SUFFIX = ".jsonl"
UNSEEN = ".new"
STATE_VARIABLE = "WINGBEAT_STATE_DIR"
MAX_DEAD_LINES = 4096
"""Lines of what has ended that a file may hold before it is written anew."""

PROCESS = "pid "
"""How a handle begins that names a process by its number."""

Entry = tuple[str, str]
"""Kind and handle."""


def state_folder() -> Path:
    """Where this user's processes keep their ledgers: ``$WINGBEAT_STATE_DIR``, else as the XDG standard says."""
    base = os.environ.get(STATE_VARIABLE)
    if base:
        return Path(base) / "resources"
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a container's user who has no home and no name
        return Path(tempfile.gettempdir()) / f"wingbeat-{os.geteuid()}" / "resources"
    return Path(home) / "wingbeat" / "resources"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with its number, and from one with its number in another container."""

    host: str
    boot: str
    """Of the kernel; "" where it cannot be told."""
    space: str
    """The namespace that ``pid`` is of; "" where there are none."""
    pid: int
    start: str
    """When it began, in the kernel's words; "" where that cannot be told."""

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), boot_id(), _space(), pid, _start_of(pid))

    def is_dead(self, here: Owner) -> bool | None:
        """As seen by the process ``here``; None where that cannot be told: it belongs to another machine."""
        if self.host != here.host:
            return None
        if self.boot != here.boot:
            return True  # this machine has been started again since
        if self.space != here.space:
            return None  # its numbers mean other processes here, see LeftLedger
        return _start_of(self.pid) != self.start if self.start else not exists(self.pid)


class Ledger:
    """The file of one pool."""

    def __init__(self, folder: Path) -> None:
        """Touches nothing yet."""
        self._folder = folder
        self._path: Path | None = None
        self._file = -1
        self._live: dict[Entry, None] = {}
        self._num_dead = 0
        _LEDGERS.add(self)

    @property
    def path(self) -> Path | None:
        """None before anything was written."""
        return self._path

    def started(self, kind: str, handle: str) -> None:
        """Raises ResourceFailed where it cannot be written (what was started must not live on), SetupError where its
        folder cannot be used."""
        entry = (kind, handle)
        if entry in self._live:
            return
        if self._file < 0:
            self._open()
        try:
            _append(self._file, _line("started", entry))
        except OSError as error:
            raise ResourceFailed(f"the resource ledger {self._path} cannot be written: {error}") from error
        self._live[entry] = None

    def ended(self, kind: str, handle: str) -> None:
        """A ledger that cannot say so tells of too much, which is looked for in vain: no reason to fail."""
        entry = (kind, handle)
        if entry not in self._live:
            return
        del self._live[entry]
        self._num_dead += 2
        try:
            _append(self._file, _line("ended", entry))
            if self._num_dead > MAX_DEAD_LINES + 2 * len(self._live):
                self._compact()
        except (OSError, SetupError) as error:
            self._num_dead = 0  # not at once again
            logger.warning("the resource ledger %s keeps what has ended: %s", self._path, error)

    def close(self) -> None:
        """Nobody here uses what has not ended: it stays on disk, for another to end."""
        if self._file < 0:
            return
        if not self._live and self._path is not None:
            self._path.unlink(missing_ok=True)
        else:
            try:
                _append(self._file, json.dumps({"closed": True}))
            except OSError as error:
                logger.warning("what is left stays until this process ends: %s: %s", self._path, error)
                return  # with the lock: its owner lives, and has not said that it is done
        os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        secure(self._folder)
        owner = Owner.this_process()
        name = f"{owner.host}-{owner.pid}-{uuid.uuid4().hex[:8]}"
        path, unseen = self._folder / f"{name}{SUFFIX}", self._folder / f"{name}{UNSEEN}"
        file = -1
        try:
            file = os.open(unseen, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
            _append(file, json.dumps({"owner": asdict(owner)}))
            for entry in self._live:
                _append(file, _line("started", entry))
            unseen.rename(path)  # whole and locked before anyone can see it
        except OSError as error:
            if file >= 0:  # nobody reads a file of that name, so nothing may be written there
                unseen.unlink(missing_ok=True)
                os.close(file)
            raise SetupError(f"the resource ledger {path} cannot be written: {error}") from error
        self._file, self._path, self._num_dead = file, path, 0

    def _compact(self) -> None:
        """A new file first: if this process ends in between, both say the same."""
        old_path, old_file = self._path, self._file
        self._open()
        if old_path is not None:
            old_path.unlink(missing_ok=True)
        os.close(old_file)

    def forked(self) -> None:
        """The child must not keep its parent's lock, nor write to its file."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # of one ledger, which must not keep the child from the others
                os.close(self._file)
        self._file, self._path = -1, None
        self._live.clear()


_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _forked() -> None:
    for ledger in tuple(_LEDGERS):
        ledger.forked()


os.register_at_fork(after_in_child=_forked)


class LeftLedger:
    """A dead owner's file, locked for whoever reaps it."""

    def __init__(self, path: Path, file: int, entries: Mapping[Entry, float | None], *, num_others: int = 0) -> None:
        self.path = path
        self._file = file
        self.entries = tuple(entries)
        self.looked_at = {entry: at for entry, at in entries.items() if at is not None}
        """When somebody first looked for it after its owner's death, in seconds since 1970."""
        self._num_left = len(self.entries) + num_others

    def looked(self, entry: Entry, at: float) -> None:
        """Somebody looks for it, and will have to again."""
        self._note(json.dumps({"looked": [*entry, at]}))

    def ended(self, entry: Entry) -> None:
        """It is no more."""
        self._note(_line("ended", entry))
        self._num_left -= 1

    def _note(self, line: str) -> None:
        """Where it cannot be written (a full disk) it is looked for once more: no reason not to end the others."""
        try:
            _append(self._file, line)
        except OSError as error:
            logger.warning("the resource ledger %s keeps what has been seen to: %s", self.path, error)

    def close(self) -> None:
        """Delete the file if nothing is left of it."""
        if self._num_left == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def left_in(folder: Path) -> Iterator[LeftLedger]:
    """The ledgers of owners that are dead, each locked: two reapers never have the same one.

    A ledger is a dead owner's if nobody holds its lock *and* no process of the owner's number and start is there, or
    that has closed its pool.
    Those of other machines are left alone, and of those of other containers what is named by process numbers.
    Raises SetupError for a folder of somebody else, who could have anything of this user's ended.
    """
    if not folder.is_dir():
        return
    _check_ours(folder)
    here = Owner.this_process()
    for path in sorted(folder.glob(f"*{UNSEEN}")):
        file = _lock(path)
        if file is not None:  # killed before it could start anything
            path.unlink(missing_ok=True)
            os.close(file)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        file = _lock(path)
        if file is None:
            continue
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            owner, entries, is_closed = _read(path)
            is_dead = None if owner is None else owner.is_dead(here)
            if is_dead is False:
                is_dead = is_closed
            if owner is None or owner.host != here.host or is_dead is False:
                continue
            mine = {entry: at for entry, at in entries.items() if is_dead or not entry[1].startswith(PROCESS)}
            undo.pop_all()
        yield LeftLedger(path, file, mine, num_others=len(entries) - len(mine))


def secure(folder: Path) -> None:
    """Make a folder of this user's alone.  Raises SetupError where it is, or may become, somebody else's."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _check_ours(folder).st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise SetupError(
            f"the resource ledger's folder {folder} cannot be made: {error}; set {STATE_VARIABLE} to one that can"
        ) from error


def _check_ours(folder: Path) -> os.stat_result:
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode):
        raise SetupError(f"the resource ledger's folder {folder}: expected a folder, got a link or a file")
    if seen.st_uid != os.geteuid():
        raise SetupError(
            f"the resource ledger's folder {folder} belongs to user {seen.st_uid}: set {STATE_VARIABLE} to your own"
        )
    return seen


def _lock(path: Path) -> int | None:
    """Open and lock a file; None where somebody else has it or it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = os.fstat(file)
        if seen.st_nlink and seen.st_uid == os.geteuid():  # without a name: another reaper has just done all of it
            return file
    except OSError:
        pass
    os.close(file)
    return None


def _read(path: Path) -> tuple[Owner | None, dict[Entry, float | None], bool]:
    """What has not ended, when it was first looked for, and whether its owner is done with all of it.

    A last line that was cut off by the death counts as not written: nothing was handed out by then.
    """
    owner, live, is_closed = None, dict[Entry, float | None](), False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            said = json.loads(line)
            if "owner" in said:
                owner = Owner(**said["owner"])
            elif "started" in said:
                kind, handle = said["started"]
                live[str(kind), str(handle)] = None
            elif "ended" in said:
                kind, handle = said["ended"]
                live.pop((str(kind), str(handle)), None)
            elif "closed" in said:
                is_closed = True
            elif "looked" in said:
                kind, handle, at = said["looked"]
                if (str(kind), str(handle)) in live:
                    live[str(kind), str(handle)] = float(at)
        except (ValueError, TypeError):
            logger.warning("the resource ledger %s has a line that cannot be read: %.80r", path, line)
    return owner, live, is_closed


def _append(file: int, line: str) -> None:
    """All of a line or nothing of it: what came after half a line could not be read.  Raises OSError."""
    data = line.encode() + b"\n"
    num_written = os.write(file, data)
    if num_written != len(data):
        os.ftruncate(file, os.fstat(file).st_size - num_written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(verb: str, entry: Entry) -> str:
    return json.dumps({verb: list(entry)})


def _start_of(pid: int) -> str:
    """ "" where there is no such process or it cannot be told."""
    began = start_time(pid)
    return "" if began is None else str(began)


def _space() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
