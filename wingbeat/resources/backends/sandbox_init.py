"""The first process of a box: it runs commands, keeps files and ends with its owner.

This file is a program of its own. It runs inside the box, under whatever ``python3`` (3.9 or newer) is there, with
nothing but the standard library: imports cost start-up time, so it avoids ``signal`` (whose enums take 5 ms),
``json`` and the like. Its owner sends requests over a socket; the box ends when the socket does, and when the owner
does, whose process descriptor it holds: another process may have inherited the socket.

What it withstands: commands of its box run under the same user. It cannot be traced and its memory and files cannot
be opened by them (``PR_SET_DUMPABLE``); in a process namespace of its own it is process 1, which signals from
inside do not reach, nor calls that change another process (``sandbox_guard``); and it is in none of the box's control
groups, so that no limit of the box stops it.

A message is a line of decimal lengths, then as many fields; the first field is the request's number.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - ``signal`` without its enums
import ctypes
import errno
import os
import resource
import select
import stat
import sys
import time

SIGINT, SIGKILL, SIGPIPE, SIGCHLD, SIGSTOP, SIGXFSZ = 2, 9, 13, 17, 19, 25
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

if __package__:
    from wingbeat.resources.backends import sandbox_files as files
    from wingbeat.resources.backends import sandbox_guard as guard
else:  # inside a box, where it has neighbours and no package
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    files, guard = __import__("sandbox_files"), __import__("sandbox_guard")

READ_BYTES = 65536
MAX_POLL_S = 3600.0
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


class Init:
    """Serves its owner until the socket ends."""

    def __init__(self, control: int, owner: int, entries: list[int], *, isolated: bool) -> None:
        self.control = control
        self.owner = owner
        self.entries = entries
        self.isolated = isolated
        """Whether all processes that it can see are this box's: then ``kill(-1)`` ends them at once."""
        self.libc = ctypes.CDLL(None)
        self.filter = guard.Filter(os.uname().machine)
        guard.go_first()
        self.libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if isolated:
            if os.getpid() != 1:
                raise SystemExit("isolated: expected to be process 1 of its own namespace")
            guard.join_own_keyring(self.libc)
            self.libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # bwrap waits for this process, and is its name outside
        self.is_over = False
        self.poll = select.poll()
        self.runs: dict[int, Run] = {}
        """By the command's process id, those under way."""
        self.readers: dict[int, Run] = {}
        """By the pipe; also of commands that have ended, whose background still holds it."""
        self.buffer = bytearray()
        self.at = ""
        self.root = -1
        self.modes: dict[str, int] = {}
        """Of the folders that can be written: the working folder, then the others."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.nofile = min(hard, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, self.nofile), hard))
        _signal.signal(SIGINT, 0)
        wake, self.wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self.wake_write, False)
        _signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, lambda *_: None)
        self.wake = wake
        for fd in (control, owner, wake):
            self.poll.register(fd, select.POLLIN)

    # messages

    def serve(self) -> None:
        """Until the owner is gone or says so."""
        while not self.is_over:
            now = time.monotonic()
            due = min((run.deadline for run in self.runs.values() if not run.stopped_by), default=None)
            for fd, _ in self.poll.poll(None if due is None else min(max(0.0, due - now), MAX_POLL_S) * 1000 + 1):
                if fd == self.control:
                    data = os.read(fd, READ_BYTES)
                    if not data:
                        return
                    self.buffer += data
                    self.take()
                elif fd == self.owner:
                    return
                elif fd == self.wake:
                    os.read(fd, READ_BYTES)
                elif fd in self.readers:
                    self.drain(fd, once=True)
            self.reap()
            now = time.monotonic()
            for run in [run for run in self.runs.values() if run.deadline <= now and not run.stopped_by]:
                self.stop(run, "timeout")

    def take(self) -> None:
        """All messages that have come in whole."""
        while True:
            end = self.buffer.find(b"\n")
            if end < 0:
                return
            lengths = [int(word) for word in self.buffer[:end].split()]
            if len(self.buffer) < end + 1 + sum(lengths):
                return
            start = end + 1
            fields: list[bytes] = []
            for length in lengths:
                fields.append(bytes(self.buffer[start : start + length]))
                start += length
            del self.buffer[:start]
            self.answer(fields)

    def answer(self, fields: list[bytes]) -> None:
        number, verb, *rest = fields
        try:
            result = getattr(self, "do_" + verb.decode())(number, rest)
        except files.Refused as error:
            self.send([number, b"refused", os.fsencode(str(error))])
        except OSError as error:
            self.send([number, b"error", b"%d" % (error.errno or 0), os.fsencode(error.strerror or str(error))])
        else:
            if result is not None:
                self.send([number, b"ok", *result])

    def send(self, fields: list[bytes]) -> None:
        """Waits for the owner to read; drops what an owner that is gone will not."""
        data = memoryview(b" ".join(b"%d" % len(field) for field in fields) + b"\n" + b"".join(fields))
        try:
            while data:
                data = data[os.write(self.control, data) :]
        except BrokenPipeError:
            self.is_over = True

    # requests

    def do_open(self, _: bytes, rest: list[bytes]) -> list[bytes]:
        """The working folder, then what else can be written, then path and text of each file."""
        self.at, count = os.fsdecode(rest[0]), int(rest[1])
        self.root = os.open(self.at, os.O_PATH | os.O_DIRECTORY)
        for path in (self.at, *map(os.fsdecode, rest[2 : 2 + count])):
            self.modes[path] = stat.S_IMODE(os.stat(path).st_mode)
        self.write_all(rest[2 + count :])
        return []

    def write_all(self, given: list[bytes]) -> None:
        for path, text in zip(given[::2], given[1::2]):  # noqa: B905 - `strict` is newer than the oldest python3
            files.write_file(self.root, os.fsdecode(path), text, at=self.at)

    def do_reset(self, _: bytes, rest: list[bytes]) -> list[bytes]:
        """As new: no processes, no files but those given, nothing left in the kernel."""
        self.end_all()
        for path, mode in self.modes.items():
            os.chmod(path, mode)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                files.wipe(fd)
                files.strip(fd)
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
        if self.isolated:
            guard.check_kernel_objects()
        self.write_all(rest)
        return []

    def do_check(self, _: bytes, __: list[bytes]) -> list[bytes]:
        os.stat(".", dir_fd=self.root)
        return []

    def do_end(self, _: bytes, __: list[bytes]) -> list[bytes]:
        self.end_all()
        return []

    def do_read(self, _: bytes, rest: list[bytes]) -> list[bytes]:
        return [files.read_file(self.root, os.fsdecode(rest[0]), at=self.at, max_bytes=int(rest[1]))]

    def do_write(self, _: bytes, rest: list[bytes]) -> list[bytes]:
        files.write_file(self.root, os.fsdecode(rest[0]), rest[1], at=self.at)
        return []

    def do_list(self, _: bytes, rest: list[bytes]) -> list[bytes]:
        return [os.fsencode("\0".join(files.list_folder(self.root, os.fsdecode(rest[0]), at=self.at)))]

    def do_stop(self, _: bytes, rest: list[bytes]) -> None:
        """End the command of another request; it is answered there."""
        for run in list(self.runs.values()):
            if run.number == rest[0] and not run.stopped_by:
                self.stop(run, rest[1].decode())

    def do_run(self, number: bytes, rest: list[bytes]) -> None:
        """Numbers, where, how many arguments, arguments, environment, input; answered when the command has ended."""
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
        where = files.open_beneath(self.root, os.fsdecode(rest[1]), os.O_PATH | os.O_DIRECTORY, at=self.at)
        run = Run(number, deadline=time.monotonic() + float(timeout_s), max_bytes=int(max_bytes))
        source = os.memfd_create("input")
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        try:
            left = memoryview(rest[-1])
            while left:
                left = left[os.write(source, left) :]
            os.lseek(source, 0, os.SEEK_SET)
            run.pid = os.fork()
            if run.pid == 0:
                fds = (where, pipes[2][1], source, pipes[0][1], pipes[1][1])
                self.become(argv, dict(zip(texts[::2], texts[1::2])), fds, limits)  # noqa: B905
        except OSError:
            for fd, _ in pipes:
                os.close(fd)
            raise
        finally:
            for fd in (where, source, *(write for _, write in pipes)):
                os.close(fd)
        run.status = pipes[2][0]
        self.runs[run.pid] = run
        for fd, _ in pipes[:2]:
            os.set_blocking(fd, False)
            run.outputs[fd] = bytearray()
            self.readers[fd] = run
            self.poll.register(fd, select.POLLIN)

    def become(self, argv: list[bytes], env: dict[bytes, bytes], fds: tuple[int, ...], limits: dict[int, int]) -> None:
        """The child: enter the control groups, take the limits, then be the command.  Never returns.

        ``fds``: its folder, the pipe for a fault before its start, its input, output and errors.
        """
        where, status, *ends = fds
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

    # what comes of commands

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
                    if run.pid in self.runs and not run.stopped_by:
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
            run = self.runs.pop(pid, None)
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
            self.send([run.number, b"failed", fault])
            return
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        facts = f"{code} {seconds:.6f} {int(run.truncated)} {int(files.is_full(self.modes))} {run.stopped_by}".encode()
        self.send([run.number, b"ok", facts, *(bytes(kept) for _, kept in outputs)])

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
        for run in self.runs.values():
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
            run = self.runs.pop(pid, None)
            if run is not None:
                self.finish(run, status)


def main() -> None:
    """Arguments: the socket, the owner, the control groups' entries (descriptors all), whether it is isolated."""
    control, owner = int(sys.argv[1]), int(sys.argv[2])
    entries = [int(word) for word in sys.argv[3].split(",") if word]
    for fd in [control, owner, *entries]:
        os.set_inheritable(fd, False)
    init = Init(control, owner, entries, isolated=sys.argv[4] == "isolated")
    init.send([b"0", b"ok"])
    try:
        init.serve()
    finally:
        if not init.isolated:
            init.end_all()
            if init.root >= 0:
                fd = os.open(init.at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                files.wipe(fd)
                os.rmdir(init.at)


if __name__ == "__main__":
    main()
