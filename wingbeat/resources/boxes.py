"""What a leased box offers: commands run, files go in and out.

A box is the same place from the first command of a lease to the last: files stay, and so do processes that a command
left in the background. An agent works in it, and its reward looks at the very same box. Back-ends differ in how
much a box keeps from the machine around it (:doc:`security`); they do not differ in what is written here, and the
conformance suite holds them to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
