"""The process of a box as its owner sees it: started, named so that it can be ended later, ended.

A box ends with its owner in two ways: its socket ends, and its first process holds a descriptor of its owner's
process, which tells when that is gone. What is left nevertheless, control groups above all, is found by its handle.

``bwrap --die-with-parent`` is not used: should the owner die while a sandbox starts, it ends the process outside,
and leaves the one inside waiting for it for ever. For the same reason, whoever ends a box before the process inside
is known looks for it by its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wingbeat.core.process_facts import boot_id, facts_of, process_ids, start_time
from wingbeat.resources.backends.limits_cgroups import Group
from wingbeat.resources.backends.limits_homes import hint_of
from wingbeat.resources.specs import ResourceFailed

logger = logging.getLogger("wingbeat.resources")

FOLDER_PREFIX = "wingbeat-box-"
"""Of folders that boxes have outside of them."""
GONE_S = 10.0
"""What SIGKILL may take, on a machine that is very busy."""
MAX_COMPLAINT_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Handle:
    """What is needed to end a box whose owner is gone, and only that box."""

    pid: int
    began: int
    boot: str
    groups: tuple[str, ...] = ()
    version: int = 0
    folder: str = ""
    """To be removed with it."""
    mark: str = ""
    """Of the processes in its session."""

    def __str__(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if name not in ("pid", "began")}
        return f"pid {self.pid} start {self.began} {json.dumps(fields, separators=(',', ':'))}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Raises ValueError for what is no handle of a box."""
        try:
            _, pid, _, began, more = text.split(" ", 4)
            fields = json.loads(more)
            return cls(int(pid), int(began), **{**fields, "groups": tuple(fields["groups"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"expected the handle of a box, got {text[:200]!r}") from error

    @property
    def is_alive(self) -> bool:
        """Whether this very process lives."""
        return self.boot == boot_id() and start_time(self.pid) == self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start the process of a box."""

    argv: Callable[[Sequence[str]], Sequence[str]]
    """From the first arguments of ``sandbox_init``: numbers of descriptors."""
    pass_fds: Sequence[int] = ()
    user: int | None = None
    """The user and group to become first; None: stay who we are."""
    folder: str = ""
    mark: str = ""
    """What is on the command line of all its processes that it starts in its own session; "": it starts none."""


class BoxProcess:
    """A started process, and the owner's end of its socket."""

    def __init__(self, popen: subprocess.Popen[bytes], end: socket.socket, group: Group | None, launch: Launch) -> None:
        self.end = end
        self.group = group
        self._popen = popen
        self._inner: int | None = None
        self._inner_pid = popen.pid
        began = start_time(popen.pid)
        self.handle = Handle(
            pid=popen.pid,
            began=-1 if began is None else began,
            boot=boot_id(),
            groups=tuple(map(str, group.folders)) if group is not None else (),
            version=group.version if group is not None else 0,
            folder=launch.folder,
            mark=launch.mark,
        )
        self._complaints = -1

    @classmethod
    def start(cls, launch: Launch, group: Group | None) -> BoxProcess:
        """Raises ResourceFailed, and leaves nothing open; the process may still fail by itself, see
        :meth:`complaint`."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            try:
                ours, end = socket.socketpair()
                theirs.callback(end.close)
                undo.callback(ours.close)
                complaints = os.memfd_create("complaints")
                undo.callback(os.close, complaints)
                owner = os.pidfd_open(os.getpid())
                theirs.callback(os.close, owner)
                entries = group.open_entries() if group is not None else []
                for fd in entries:
                    theirs.callback(os.close, fd)
                popen = subprocess.Popen(
                    launch.argv([str(end.fileno()), str(owner), ",".join(map(str, entries))]),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    cwd="/",
                    env={},
                    pass_fds=(end.fileno(), owner, *entries, *launch.pass_fds),
                    start_new_session=True,
                    user=launch.user,
                    group=launch.user,
                    extra_groups=None if launch.user is None else [],
                )
                undo.callback(popen.wait)
                undo.callback(popen.kill)
                process = cls(popen, ours, group, launch)
            except OSError as error:
                raise not_started(error) from error
            undo.pop_all()
        process._complaints = complaints
        return process

    def adopt(self, pid: int) -> None:
        """The process inside that ends all others there; held by a descriptor, so that its id is no other's."""
        if self._inner is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._inner = os.pidfd_open(pid)
            self._inner_pid = pid

    @property
    def is_stopped(self) -> bool:
        """Whether somebody stopped its first process (SIGSTOP), which then answers nothing."""
        facts = facts_of(self._inner_pid)
        return facts is not None and facts.state in "Tt"

    def complaint(self) -> str:
        """What it wrote to its standard error."""
        return os.pread(self._complaints, MAX_COMPLAINT_BYTES, 0).decode(errors="replace").strip()

    def kill(self) -> None:
        """At once; the kernel ends whatever runs inside."""
        if self._inner is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
        else:
            self._popen.kill()

    async def gone(self, *, within_s: float = GONE_S) -> bool:
        """Wait until it and all inside it have ended; False if that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                if self._inner is not None:
                    await _readable(self._inner)
                if self._popen.returncode is None:
                    waiting = os.pidfd_open(self._popen.pid)
                    try:
                        await _readable(waiting)
                    finally:
                        os.close(waiting)
        except TimeoutError:
            return False
        self._popen.wait()
        if self._inner is None:
            await asyncio.to_thread(_end_all, {pid: start_time(pid) for pid in strays_of(self.handle)})
        return True

    async def clean(self) -> None:
        """After its end: give back descriptors and control groups."""
        self.end.close()
        for fd in (self._inner, self._complaints):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._inner, self._complaints = None, -1
        if self.handle.folder:  # its process may not have been able to
            await asyncio.to_thread(shutil.rmtree, self.handle.folder, ignore_errors=True)
        if self.group is not None:
            until = time.monotonic() + GONE_S
            while not self.group.remove():  # the kernel does not tell when it lets go
                if time.monotonic() > until:
                    raise ResourceFailed(f"control group {self.group.folders[0].name} cannot be removed")
                self.group.kill()
                await asyncio.sleep(0.001)


def not_started(error: OSError) -> ResourceFailed:
    """In words that say what to do."""
    return ResourceFailed(f"the process of a box does not start: {error}{hint_of(error)}")


async def _readable(fd: int) -> None:
    """Until a process descriptor says that its process has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)


def kill_process(pid: int) -> None:
    """SIGKILL to one that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The processes right below one."""
    return [child for child in process_ids() if (facts := facts_of(child)) is not None and facts.parent == pid]


async def reap_box(text: str) -> bool:
    """End what a handle names: processes, then control groups, then the folder; whether any was there."""
    try:
        handle = Handle.parse(text)
    except ValueError as error:
        logger.warning("nothing is reaped: %s", error)
        return False
    found = [await asyncio.to_thread(reap, handle) for reap in (reap_processes, reap_groups, reap_folder)]
    return any(found)


def reap_folder(handle: Handle) -> bool:
    """Remove the folder of a handle; nothing but a folder of ours is removed, whatever a handle says."""
    if not Path(handle.folder).name.startswith(FOLDER_PREFIX) or not Path(handle.folder).is_dir():
        return False
    shutil.rmtree(handle.folder)
    return True


def reap_processes(handle: Handle) -> bool:
    """End the processes of a handle; blocks for a moment.  Raises ResourceFailed if they stay."""
    if handle.boot != boot_id():
        return False
    known: dict[int, int | None] = {pid: start_time(pid) for pid in strays_of(handle)}
    todo = [handle.pid] if handle.is_alive else []
    while todo:
        pid = todo.pop()
        known[pid] = start_time(pid)
        todo += children_of(pid)
    _end_all(known)
    return bool(known)


def strays_of(handle: Handle) -> list[int]:
    """Processes that a box which was ended while it started has left: no other's, since an id that is still a
    session's is not given to another process."""
    if not handle.mark or start_time(handle.pid) not in (None, handle.began):
        return []
    return [pid for pid in process_ids() if pid != handle.pid and _strayed(pid, handle)]


def _strayed(pid: int, handle: Handle) -> bool:
    facts = facts_of(pid)
    if facts is None or facts.session != handle.pid:
        return False
    with contextlib.suppress(OSError):
        return handle.mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end_all(known: Mapping[int, int | None]) -> None:
    """Kill processes (id -> when it began) and wait; blocks for a moment."""
    for pid, began in known.items():
        if began is not None and start_time(pid) == began:
            kill_process(pid)
    until = time.monotonic() + GONE_S
    while any(began is not None and start_time(pid) == began for pid, began in known.items()):
        if time.monotonic() > until:
            raise ResourceFailed(f"processes {sorted(known)} of a box do not end")
        time.sleep(0.002)


def reap_groups(handle: Handle) -> bool:
    """Remove the control groups of a handle, and end what is in them."""
    if handle.boot != boot_id() or not handle.groups:
        return False
    return Group([Path(folder) for folder in handle.groups], handle.version).end()


def environment(given: Mapping[str, str], *, home: str, path: str) -> dict[str, str]:
    """Of commands: nothing of the owner's, which holds keys."""
    return {"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **given}
