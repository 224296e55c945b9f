"""The commands of a box: started under their limits, read, stopped, taken in when they end.

Part of the program inside a box (``sandbox_init``): nothing but the standard library, and as little of it as will do.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - ``signal`` without its enums
import ctypes
import errno
import os
import resource
import select
import time

TYPE_CHECKING = False  # ``typing`` takes time to load
if TYPE_CHECKING:
    from collections.abc import Callable

if __package__:
    from wingbeat.resources.backends import sandbox_guard as guard
else:  # inside a box
    guard = __import__("sandbox_guard")

SIGKILL, SIGPIPE, SIGSTOP, SIGXFSZ = 9, 13, 19, 25
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38

READ_BYTES = 65536
MAX_PASSES = 40
"""Rounds against a command that makes processes faster than they are ended."""


def descendants(of: int) -> set[int]:
    """The ids of all living processes below one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    todo = [of]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:  # noqa: SIM105 - contextlib takes time to load
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Run:
    """A command: under way, or ended with something still in the background."""

    def __init__(self, number: bytes, *, deadline: float, max_bytes: int) -> None:
        self.number = number
        self.began = time.monotonic()
        self.deadline = deadline
        self.max_bytes = max_bytes
        self.pid = 0
        self.status = -1
        """A pipe: what kept the command from its start under its limits; empty where it started."""
        self.outputs: dict[int, bytearray] = {}
        """Of its standard output and error, in this order."""
        self.truncated = False
        self.stopped_by = ""


class Runs:
    """All commands of a box."""

    def __init__(
        self,
        poll: select.poll,
        *,
        tell: Callable[[list[bytes]], None],
        is_full: Callable[[], bool],
        entries: list[int],
        isolated: bool,
    ) -> None:
        """``tell`` sends the answer of one that has ended; ``is_full`` says whether there is no room for files."""
        self.poll = poll
        self.tell = tell
        self.is_full = is_full
        self.entries = entries
        self.isolated = isolated
        """Whether all processes that it can see are this box's: then ``kill(-1)`` ends them at once."""
        self.libc = ctypes.CDLL(None)
        self.filter = guard.Filter(os.uname().machine)
        self.under_way: dict[int, Run] = {}
        """By the command's process id."""
        self.readers: dict[int, Run] = {}
        """By the pipe; also of commands that have ended, whose background still holds it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.nofile = min(hard, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, self.nofile), hard))

    def due(self) -> float | None:
        """The earliest end of a command's time."""
        return min((run.deadline for run in self.under_way.values() if not run.stopped_by), default=None)

    def start(self, number: bytes, rest: list[bytes], where: int) -> None:
        """Numbers, where, how many arguments, arguments, environment, input; answered when the command has ended.

        ``where``: a descriptor of its folder, which the caller closes.
        """
        timeout_s, max_bytes, cpu_s, file_bytes, memory_bytes, processes = rest[0].split()
        count = int(rest[2])
        argv, texts = rest[3 : 3 + count], rest[3 + count : -1]
        limits = {
            resource.RLIMIT_CORE: 1,  # other than 0, it also keeps the machine's program for core dumps out
            resource.RLIMIT_NOFILE: self.nofile,
            resource.RLIMIT_CPU: int(cpu_s),
            resource.RLIMIT_FSIZE: int(file_bytes),
            resource.RLIMIT_AS: int(memory_bytes),
            resource.RLIMIT_NPROC: int(processes),
        }
        run = Run(number, deadline=time.monotonic() + float(timeout_s), max_bytes=int(max_bytes))
        ours: list[int] = []
        theirs = [where]
        try:
            theirs.append(_memory(rest[-1]))
            for _ in range(3):  # its output, its errors, and what kept it from its start
                read, write = os.pipe()
                ours.append(read)
                theirs.append(write)
            run.pid = os.fork()
            if run.pid == 0:
                self.become(argv, dict(zip(texts[::2], texts[1::2])), theirs, limits)  # noqa: B905
        except OSError:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs[1:]:
                os.close(fd)
        self.under_way[run.pid] = run
        run.status = ours.pop()
        for fd in ours:
            os.set_blocking(fd, False)
            run.outputs[fd] = bytearray()
            self.readers[fd] = run
            self.poll.register(fd, select.POLLIN)

    def become(self, argv: list[bytes], env: dict[bytes, bytes], fds: list[int], limits: dict[int, int]) -> None:
        """The child: enter the control groups, take the limits, then be the command.  Never returns.

        ``fds``: its folder, its input, output and errors, and the pipe for a fault before its start.
        """
        where, *ends, status = fds
        code = 125
        fault = b"it ended before its start"
        try:
            os.setsid()
            for fd in self.entries:
                os.write(fd, b"0")
            for name, value in limits.items():
                if value >= 0:
                    guard.take_limit(name, value)
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            self.libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
            if self.isolated:
                self.filter.hold(self.libc)
            os.fchdir(where)
            os.umask(0o022)
            for number, fd in enumerate(ends):
                os.dup2(fd, number)
            for number in (SIGPIPE, SIGXFSZ):
                _signal.signal(number, 0)
            code = 126
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            if code == 125:
                fault = os.fsencode(str(error))
            elif error.errno in (errno.ENOENT, errno.ENOTDIR):
                code = 127
            os.write(2, argv[0] + b": " + os.fsencode(error.strerror or "cannot be executed") + b"\n")
        finally:
            if code == 125:
                os.write(status, fault)
            os._exit(code)

    def drain(self, fd: int, *, once: bool = False) -> None:
        """Take what a pipe holds; of a command that has ended it is dropped."""
        run = self.readers[fd]
        kept = run.outputs.get(fd)
        while True:
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.poll.unregister(fd)
                del self.readers[fd]
                os.close(fd)
                return
            if kept is not None:
                kept += data[: run.max_bytes - len(kept) + 1]
                if len(kept) > run.max_bytes:
                    run.truncated = True
                    del kept[run.max_bytes :]
                    if run.pid in self.under_way and not run.stopped_by:
                        self.stop(run, "output")
                    return
            if once:
                return

    def reap(self) -> None:
        """Take in those that ended: commands, and orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self.under_way.pop(pid, None)
            if run is not None:
                self.finish(run, status)

    def finish(self, run: Run, status: int) -> None:
        seconds = time.monotonic() - run.began
        outputs = list(run.outputs.items())
        for fd, _ in outputs:
            if fd in self.readers:
                self.drain(fd)
        run.outputs = {}  # the background may go on writing: dropped from here on
        fault = os.read(run.status, 4096)
        os.close(run.status)
        if fault:
            self.tell([run.number, b"failed", fault])
            return
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        facts = f"{code} {seconds:.6f} {int(run.truncated)} {int(self.is_full())} {run.stopped_by}".encode()
        self.tell([run.number, b"ok", facts, *(bytes(kept) for _, kept in outputs)])

    def stop_late(self) -> None:
        """Those whose time is over."""
        now = time.monotonic()
        for run in [run for run in self.under_way.values() if run.deadline <= now and not run.stopped_by]:
            self.stop(run, "timeout")

    def stop_of(self, number: bytes, reason: str) -> None:
        """The command of a request, if it is under way."""
        for run in list(self.under_way.values()):
            if run.number == number and not run.stopped_by:
                self.stop(run, reason)

    def stop(self, run: Run, reason: str) -> None:
        """End a command with all that it started.

        It adopts its descendants' orphans, so it is held still and ended last: none of them gets away. One that
        makes them faster than that loses with it whatever else the box runs.
        """
        run.stopped_by = reason
        kill(run.pid, SIGSTOP)
        for number in range(MAX_PASSES):
            left = descendants(run.pid)
            if not left:
                break
            for pid in left:
                kill(pid, SIGKILL)
            time.sleep(number * 0.001)  # a killed process takes a moment to go
        else:
            if self.isolated:
                os.kill(-1, SIGKILL)
        kill(run.pid, SIGKILL)

    def end_all(self) -> None:
        """No process but this one is left afterwards."""
        for run in self.under_way.values():
            run.stopped_by = run.stopped_by or "end"
        while True:
            try:
                if self.isolated:
                    os.kill(-1, SIGKILL)
                else:
                    for pid in descendants(os.getpid()):
                        kill(pid, SIGKILL)
            except ProcessLookupError:
                pass
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            run = self.under_way.pop(pid, None)
            if run is not None:
                self.finish(run, status)


def _memory(data: bytes) -> int:
    """A descriptor of a file that holds this, at its beginning."""
    fd = os.memfd_create("input")
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd
