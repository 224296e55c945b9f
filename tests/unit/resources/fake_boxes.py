"""Boxes without processes, whose every step can be held up, for pools here and on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fake_backend import FakeBackend, Thing

from wingbeat.resources import Finished, Reuse, Spec, SubprocessSpec, UnsupportedField


def box_spec(**fields: Any) -> SubprocessSpec:
    """One that is reused after a reset, unless said otherwise."""
    return SubprocessSpec(**{"network": True, "reuse": Reuse.AFTER_RESET, **fields})


class FakeBox(Thing):
    """A :class:`wingbeat.resources.boxes.Box`: a command says its own words, and leaves them as a file."""

    backend: FakeBoxes
    workdir = "/work"

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        words = command if isinstance(command, str) else " ".join(command)
        self.backend.num_running += 1
        try:
            await self.backend.step("run")
        finally:
            self.backend.num_running -= 1
        self.dirt.append(words)
        return Finished(0, words.encode(), b"", 0.0)

    async def write(self, path: str, data: bytes) -> None:
        await self.backend.step("write")
        self.dirt.append(path)

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        await self.backend.step("read")
        return f"{path} of {self.spec.label}: {self.dirt}".encode()

    async def list(self, path: str = ".") -> list[str]:
        await self.backend.step("list")
        return list(self.dirt)

    async def end_processes(self) -> None:
        await self.backend.step("end_processes")


class FakeBoxes(FakeBackend):
    """Of kind ``subprocess``."""

    kind: ClassVar[str] = "subprocess"
    thing: ClassVar[type[Thing]] = FakeBox

    def __init__(self) -> None:
        super().__init__()
        self.num_running = 0

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, SubprocessSpec)
        if spec.disk_mb is not None:
            raise UnsupportedField("subprocess", "disk_mb", "for the test")
