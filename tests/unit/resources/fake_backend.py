"""A back-end for tests whose every step can be held up, made to fail, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from wingbeat.resources import ResourceLost, Reuse, Spec


class FakeSpec(Spec, frozen=True):
    kind: Literal["fake"] = "fake"
    word: str = ""


def fake(**fields: Any) -> FakeSpec:
    """One that is reused after a reset, unless said otherwise."""
    return FakeSpec(**{"reuse": Reuse.AFTER_RESET, **fields})


class Thing:
    """An instance, and its own value."""

    def __init__(self, backend: FakeBackend, number: int, spec: Spec) -> None:
        self.backend = backend
        self.spec = spec
        self.number = number
        self.handle = f"thing {number}"
        self.dirt: list[str] = []
        self.is_alive = True
        self.num_resets = 0
        self.num_closes = 0

    @property
    def value(self) -> Thing:
        return self

    async def reset(self) -> None:
        self.num_resets += 1
        await self.backend.step("reset")
        self.dirt.clear()

    async def check(self) -> None:
        await self.backend.step("check")
        if not self.is_alive:
            raise ResourceLost("it is dead")

    async def close(self) -> None:
        self.num_closes += 1
        await self.backend.step("close")
        self.backend.alive.pop(self.handle, None)


class FakeBackend:
    """Counts what is alive."""

    kind: ClassVar[str] = "fake"
    thing: ClassVar[type[Thing]] = Thing

    def __init__(self) -> None:
        self.made: list[Thing] = []
        self.alive: dict[str, Thing] = {}
        self.num_alive_at_most = 0
        self.steps: dict[str, list[Callable[[], Any]]] = {}
        """What to do at the next steps of a name; by default each waits once for the loop."""
        self.reaped: list[str] = []
        self.num_starting = 0
        self.num_starting_at_most = 0

    def at(self, name: str, *actions: Callable[[], Any]) -> None:
        """One action for each of the next steps of this name."""
        self.steps.setdefault(name, []).extend(actions)

    async def step(self, name: str) -> None:
        actions = self.steps.get(name)
        if actions:
            result = actions.pop(0)()
            if result is not None:
                await result
        else:
            await asyncio.sleep(0)

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, FakeSpec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> Thing:
        self.num_starting += 1
        self.num_starting_at_most = max(self.num_starting_at_most, self.num_starting)
        try:
            await self.step("before start")
            thing = self.thing(self, len(self.made), spec)
            self.made.append(thing)
            self.alive[thing.handle] = thing
            self.num_alive_at_most = max(self.num_alive_at_most, len(self.alive))
            try:
                started(thing.handle)
                await self.step("start")
            except BaseException:
                self.alive.pop(thing.handle, None)
                raise
            return thing
        finally:
            self.num_starting -= 1

    async def reap(self, handle: str) -> bool:
        self.reaped.append(handle)
        return self.alive.pop(handle, None) is not None

    async def close(self) -> None:
        await self.step("end")


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def held(event: asyncio.Event) -> Callable[[], Any]:
    """Until the event."""
    return event.wait
