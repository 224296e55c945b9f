"""``python -m bench.chaos_control``: control as ever, but with clocks that another process can make jump.

The offsets lie in a file that is mapped into memory by both, so that a jump needs no word with control and outlives
its restarts.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Self

CLOCK_FILE_VARIABLE = "WINGBEAT_CHAOS_CLOCKS"
_OFFSETS = struct.Struct("dd")


class JumpingClocks:
    """The monotonic and the wall clock, each with an offset in seconds."""

    def __init__(self, path: Path) -> None:
        """``path``: as :meth:`create` made it."""
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _OFFSETS.size)

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new file, of clocks that are right."""
        path.write_bytes(_OFFSETS.pack(0.0, 0.0))
        return cls(path)

    def monotonic(self) -> float:
        return time.monotonic() + self._offsets()[0]

    def wall(self) -> float:
        return time.time() + self._offsets()[1]

    def jump(self, *, monotonic_s: float = 0.0, wall_s: float = 0.0) -> None:
        """Move them by so much, at once.  Only the wall clock may go back: no system lets the other one."""
        if monotonic_s < 0:
            raise ValueError(f"expected the monotonic clock to go ahead, got {monotonic_s} s")
        before = self._offsets()
        _OFFSETS.pack_into(self._shared, 0, before[0] + monotonic_s, before[1] + wall_s)

    def _offsets(self) -> tuple[float, float]:
        monotonic_s, wall_s = _OFFSETS.unpack_from(self._shared)
        return monotonic_s, wall_s


def main() -> None:
    """Entry point of the process; its arguments are control's own."""
    from wingbeat.server.__main__ import main as run_control

    clocks = JumpingClocks(Path(os.environ[CLOCK_FILE_VARIABLE]))
    run_control(clock=clocks.monotonic, wall=clocks.wall)


if __name__ == "__main__":
    main()
