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
import os
import select
import stat
import sys
import time

SIGINT, SIGKILL, SIGCHLD = 2, 9, 17
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

if __package__:
    from wingbeat.resources.backends import sandbox_files as files
    from wingbeat.resources.backends import sandbox_guard as guard
    from wingbeat.resources.backends import sandbox_runs as runs
else:  # inside a box, where it has neighbours and no package
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    files, guard, runs = __import__("sandbox_files"), __import__("sandbox_guard"), __import__("sandbox_runs")

READ_BYTES = 65536
MAX_POLL_S = 3600.0


class Init:
    """Serves its owner until the socket ends."""

    def __init__(self, control: int, owner: int, entries: list[int], *, isolated: bool) -> None:
        self.control = control
        self.owner = owner
        self.isolated = isolated
        libc = ctypes.CDLL(None)
        guard.go_first()
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if isolated:
            if os.getpid() != 1:
                raise SystemExit("isolated: expected to be process 1 of its own namespace")
            guard.join_own_keyring(libc)
            libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # bwrap waits for this process, and is its name outside
        _signal.signal(SIGINT, 0)
        self.is_over = False
        self.buffer = bytearray()
        self.at = ""
        self.root = -1
        self.modes: dict[str, int] = {}
        """Of the folders that can be written: the working folder, then the others."""
        self.poll = select.poll()
        self.runs = runs.Runs(
            self.poll,
            tell=self.send,
            is_full=lambda: files.is_full(self.modes),
            entries=entries,
            isolated=isolated,
        )
        self.wake = _waked_by_children()
        for fd in (control, owner, self.wake):
            self.poll.register(fd, select.POLLIN)

    # messages

    def serve(self) -> None:
        """Until the owner is gone or says so."""
        while not self.is_over:
            due = self.runs.due()
            left_s = None if due is None else min(max(0.0, due - time.monotonic()), MAX_POLL_S)
            for fd, _ in self.poll.poll(None if left_s is None else left_s * 1000 + 1):
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
                elif fd in self.runs.readers:
                    self.runs.drain(fd, once=True)
            self.runs.reap()
            self.runs.stop_late()

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
        self.runs.end_all()
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
        self.runs.end_all()
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
        self.runs.stop_of(rest[0], rest[1].decode())

    def do_run(self, number: bytes, rest: list[bytes]) -> None:
        """See :meth:`sandbox_runs.Runs.start`."""
        where = files.open_beneath(self.root, os.fsdecode(rest[1]), os.O_PATH | os.O_DIRECTORY, at=self.at)
        try:
            self.runs.start(number, rest, where)
        finally:
            os.close(where)


def _waked_by_children() -> int:
    """A descriptor that can be read once a child has ended."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _signal.signal(SIGCHLD, lambda *_: None)
    return wake


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
            init.runs.end_all()
            if init.root >= 0:
                fd = os.open(init.at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                files.wipe(fd)
                os.rmdir(init.at)


if __name__ == "__main__":
    main()
