"""What a leased box offers: commands run, files go in and out.

A box is the same place from the first command of a lease to the last: files stay, and so do processes that a command
left in the background. An agent works in it, and its reward looks at the very same box. Back-ends differ in how
much a box keeps from the machine around it (:doc:`security`); they do not differ in what is written here, and the
conformance suite holds them to it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

SHELL = "/bin/sh"
LIMITS = ("timeout", "memory", "pids", "cpu", "output", "disk", "file")
"""What can stop a command, in the words of ``Finished.stopped_by``."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of one command.  That it failed is an observation, not an error."""

    exit_code: int
    """Of the command; ``-N`` if signal N ended it, also if a limit did."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """From start to end, on the wall clock."""
    truncated: bool = False
    """Whether one of the outputs went beyond ``output_bytes`` and was cut there."""
    stopped_by: str | None = None
    """The limit that stopped it, one of ``LIMITS``; None if none did."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and self.stopped_by is None


class Box(Protocol):
    """Runs commands and holds files.

    Every method raises ResourceLost once the box is gone: that is a failure of infrastructure and no observation.
    Paths are relative to ``workdir``; absolute ones must lie in it. One that leaves it, by ``..`` or through a
    symbolic link, is refused with ValueError, however the box changes its files meanwhile.
    """

    @property
    def workdir(self) -> str:
        """Where commands start and paths begin, as commands see it."""
        ...

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        """Run a program with its arguments, or a line of shell (through ``sh -c``), to its end.

        ``timeout_s`` replaces the spec's ``command_timeout_s``, ``env`` adds to the spec's, ``cwd`` is a path as any
        other. A command that a limit stops takes along all that it started. One that ends leaves what it started
        in the background, which goes on until ``end_processes``, reset or close; what that still writes is dropped.
        A program that is not found gives exit code 127, one that may not be executed 126. Several may run at once.
        Raises what :func:`check_run` raises.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a regular file, and the folders on its way."""
        ...

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """A regular file's bytes.

        Raises FileNotFoundError or IsADirectoryError, and ValueError for what is no regular file (a device, a
        named pipe) or is larger than ``max_bytes``.
        """
        ...

    async def list(self, path: str = ".") -> list[str]:
        """The names in a folder, sorted; folders end with ``/``.  Raises FileNotFoundError or NotADirectoryError."""
        ...

    async def end_processes(self) -> None:
        """End all that runs in the box, as before scoring: what an agent left behind could meddle with a test."""
        ...


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_run(command: Any, *, stdin: Any = b"", timeout_s: Any = None, env: Any = None, cwd: Any = None) -> list[str]:
    """The program and its arguments of a call of :meth:`Box.run`, whose arguments are all checked.

    Every kind of box calls this before anything is sent, so that they refuse the same things in the same words, as
    faults of whoever calls.  Raises TypeError for what has another type, ValueError for what no command can have.
    """
    argv = [SHELL, "-c", command] if isinstance(command, str) else _words(command)
    if not argv or not argv[0]:
        raise ValueError(f"command: expected a program and its arguments, got {command!r}")
    for word in argv:
        if (fault := _fault_of(word)) is not None:
            raise ValueError(f"command: expected texts {fault}, got {word[:80]!r}")
    check_bytes("stdin", stdin)
    if timeout_s is not None:
        if not isinstance(timeout_s, Real) or isinstance(timeout_s, bool):
            raise TypeError(f"timeout_s: expected a number of seconds, got {_kind(timeout_s)}")
        if not 0 < float(timeout_s) < math.inf:
            raise ValueError(f"timeout_s: expected a finite time above 0, got {timeout_s}")
    if cwd is not None and not isinstance(cwd, str):
        raise TypeError(f"cwd: expected a path as text, got {_kind(cwd)}")
    if env is not None:
        check_env(env)
    return argv


def check_bytes(what: str, data: Any) -> None:
    """Raises TypeError for text, above all."""
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"{what}: expected bytes, as of text.encode(), got {_kind(data)}")


def check_env(env: Any) -> None:
    """Raises TypeError and ValueError for what is no name of a variable, or no value.

    Names are those that a shell passes on: it drops any other.
    """
    if not isinstance(env, Mapping):
        raise TypeError(f"env: expected names and values, as of a dict, got {_kind(env)}")
    pairs: Mapping[Any, Any] = env
    for name, value in pairs.items():
        if not isinstance(name, str) or not isinstance(value, str):  # values may be secrets: none is shown
            raise TypeError(f"env: expected texts, got {name!r} with a value of type {_kind(value)}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"env: expected names of letters, digits and _ that begin with no digit, got {name!r}")
        if (fault := _fault_of(value)) is not None:
            raise ValueError(f"env: expected names and values {fault}, got {name!r}")


def _words(command: Any) -> list[str]:
    if isinstance(command, bytes | bytearray | memoryview | Mapping) or not isinstance(command, Iterable):
        raise TypeError(
            f"command: expected a line of shell, or a program and its arguments as texts, got {_kind(command)}"
        )
    words: list[Any] = list(command)  # pyright: ignore[reportUnknownArgumentType]
    for index, word in enumerate(words):
        if not isinstance(word, str):
            raise TypeError(f"command: expected texts, got {_kind(word)} at {index}: {word!r}; str(...) makes one")
    return words


def _fault_of(text: str) -> str | None:
    """What no system call takes."""
    try:
        return "without zero bytes" if b"\0" in os.fsencode(text) else None
    except UnicodeEncodeError:
        return "that can be encoded"


def _kind(value: object) -> str:
    return type(value).__name__
