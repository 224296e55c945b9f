"""In-process objects do what every back-end must."""

from __future__ import annotations

import asyncio

import conformance
import pytest

from wingbeat.resources import LocalSpec, Reuse
from wingbeat.resources.backends.local import LocalBackend


class Notes:
    """Counts those that are open."""

    num_open = 0

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_alive = True

    @classmethod
    async def make(cls) -> Notes:
        await asyncio.sleep(0)
        notes = cls()
        cls.num_open += 1
        return notes

    async def reset(self) -> None:
        await asyncio.sleep(0)
        self.lines.clear()

    async def close(self) -> None:
        await asyncio.sleep(0)
        Notes.num_open -= 1


async def use(notes: Notes) -> None:
    assert notes.is_alive


async def dirty(notes: Notes) -> None:
    notes.lines.append("left")


async def is_clean(notes: Notes) -> bool:
    return notes.lines == []


async def kill(instance: conformance.Instance) -> None:
    instance.value.is_alive = False


CASE = conformance.Case(
    backend=LocalBackend,
    spec=LocalSpec(
        factory=Notes.make,
        reuse=Reuse.AFTER_RESET,
        reset=Notes.reset,
        health=lambda notes: notes.is_alive,
        close=Notes.close,
    ),
    num_alive=lambda: Notes.num_open,
    use=use,
    dirty=dirty,
    is_clean=is_clean,
    kill=kill,
)


@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_local_objects_conform(check: conformance.Check) -> None:
    await check(CASE)
