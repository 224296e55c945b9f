"""What every back-end must do, as functions over a case: one suite, run by the tests of each kind.

@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_conforms(check: conformance.Check) -> None:
    await check(CASE)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cutting import Cut

from wingbeat.resources import Backend, Budgets, Instance, ResourceLost, Resources, Reuse, Spec, UnsupportedField

MAX_AWAITS = 60
"""Points of a start at which it is cancelled; a start with more is cancelled at evenly spread ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """One back-end, and what the suite must know to use it."""

    backend: Callable[[], Backend]
    """Makes a fresh one."""
    spec: Spec
    """The smallest usable one; ``after_reset`` where the kind can reset."""
    num_alive: Callable[[], int]
    """Things of this kind that exist now outside of Python objects (processes, containers of the fake, ...)."""
    refused: Spec | None = None
    """One field of it cannot be honoured."""
    refused_field: str = ""
    dirty: Callable[[Any], Awaitable[None]] | None = None
    """Changes the value, so that a reset has work to do (boxes: a file and a process by default)."""
    is_clean: Callable[[Any], Awaitable[bool]] | None = None
    use: Callable[[Any], Awaitable[None]] | None = None
    """Raises if the value cannot be used (boxes: runs a command by default)."""
    kill: Callable[[Instance], Awaitable[None]] | None = None
    """Makes it die as from outside; None: this kind cannot die alone."""
    abandon: Callable[[], str] | None = None
    """Starts one in a process that is then killed, and returns its handle; None: nothing outlives its process."""
    is_box: bool = False


Check = Callable[[Case], Awaitable[None]]


async def starts_and_is_used(case: Case) -> None:
    async with _started(case) as instance:
        await _use(case, instance)
        await instance.check()
    await _nothing_left(case)


async def reset_cleans(case: Case) -> None:
    if case.spec.reuse is not Reuse.AFTER_RESET:
        pytest.skip("this kind is not reset")
    async with _started(case) as instance:
        await _dirty(case, instance)
        assert not await _is_clean(case, instance), "the case's dirty changes nothing that its is_clean sees"
        await instance.reset()
        assert await _is_clean(case, instance)
        await instance.check()
        await _use(case, instance)
    await _nothing_left(case)


async def check_detects_death(case: Case) -> None:
    if case.kill is None:
        pytest.skip("this kind does not die by itself")
    async with _started(case) as instance:
        await case.kill(instance)
        with pytest.raises(ResourceLost):
            await instance.check()
    await _nothing_left(case)


async def close_is_idempotent(case: Case) -> None:
    async with _started(case) as instance:
        await instance.close()
        await instance.close()
        await _nothing_left(case)
    if case.kill is not None:
        async with _started(case) as instance:
            await case.kill(instance)
            await instance.close()
            await instance.close()
    await _nothing_left(case)


async def cancel_during_start_leaks_nothing(case: Case) -> None:
    """At every await: the start is cut there, and nothing is left."""
    backend = case.backend()
    number = await _num_awaits(backend, case.spec)
    step = max(1, number // MAX_AWAITS)
    for at in range(0, number, step):
        start = asyncio.ensure_future(Cut(backend.start(case.spec, started=lambda _: None), at).run())
        (result,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(result, BaseException):  # it was faster than last time
            await result.close()
        assert isinstance(result, asyncio.CancelledError) or not isinstance(result, BaseException), result
        await _nothing_left(case, f"cancelled at await {at} of {number}")
    await backend.close()


async def abandoned_is_reaped(case: Case) -> None:
    backend = case.backend()
    if case.abandon is None:
        async with _started(case) as instance:
            assert instance.handle is None, "what has a handle must be reaped: give the case an `abandon`"
        return
    handle = await asyncio.to_thread(case.abandon)
    await backend.reap(handle)
    await _nothing_left(case, f"after reaping {handle!r}")
    assert await backend.reap(handle) is False, "the second reaper finds nothing"
    await backend.close()


async def reaping_the_living_needs_its_handle(case: Case) -> None:
    """A handle that was never given out ends nothing."""
    async with _started(case) as instance:
        assert await case.backend().reap("pid 1 start 1") is False
        await instance.check()
        await _use(case, instance)


async def handles_are_told_before_they_are_needed(case: Case) -> None:
    """What outlives this process is told while it starts."""
    told: list[str] = []
    backend = case.backend()
    instance = await backend.start(case.spec, started=told.append)
    assert (instance.handle is None) or instance.handle in told
    await instance.close()
    await backend.close()


async def unsupported_is_refused(case: Case) -> None:
    backend = case.backend()
    backend.check(case.spec)
    if case.refused is None:
        return
    with pytest.raises(UnsupportedField, match=case.refused_field) as refusal:
        backend.check(case.refused)
    assert refusal.value.kind == case.refused.kind
    async with Resources(Budgets(), backends={case.refused.kind: backend}) as pool:
        with pytest.raises(UnsupportedField, match=case.refused_field):
            async with pool.lease(case.refused):
                raise AssertionError("a field that cannot be honoured was accepted")
    await _nothing_left(case)


async def through_the_pool(case: Case) -> None:
    """Used, given back, used again, lost under its holder, replaced."""
    async with Resources(Budgets(), backends={case.spec.kind: case.backend()}) as pool:
        for number in range(2):
            async with pool.lease(case.spec, name="it", owner=f"episode {number}") as lease:
                await _use_value(case, lease.value)
                if case.spec.reuse is Reuse.AFTER_RESET:
                    await _dirty_value(case, lease.value)
        with pytest.raises(ResourceLost, match="for the test"):
            async with pool.lease(case.spec) as lease:
                raise ResourceLost("for the test")
        async with pool.lease(case.spec) as lease:
            if case.spec.reuse is Reuse.AFTER_RESET:
                assert await _is_clean_value(case, lease.value)
            await _use_value(case, lease.value)
        (stats,) = pool.snapshot()
        assert (stats.quarantined, stats.leaked, stats.start_failures) == (1, 0, 0)
    await _nothing_left(case)


ALL: tuple[Check, ...] = (
    starts_and_is_used,
    reset_cleans,
    check_detects_death,
    close_is_idempotent,
    cancel_during_start_leaks_nothing,
    abandoned_is_reaped,
    reaping_the_living_needs_its_handle,
    handles_are_told_before_they_are_needed,
    unsupported_is_refused,
    through_the_pool,
)


def name_of(check: Check) -> str:
    return getattr(check, "__name__", str(check))


class _started:
    """An instance of a fresh back-end for the block."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._backend = case.backend()

    async def __aenter__(self) -> Instance:
        self._instance = await self._backend.start(self._case.spec, started=lambda _: None)
        return self._instance

    async def __aexit__(self, *_: object) -> None:
        await self._instance.close()
        await self._backend.close()


async def _nothing_left(case: Case, when: str = "afterwards") -> None:
    """What was killed may take a moment to be gone."""
    for _ in range(200):
        if case.num_alive() == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{case.num_alive()} are left {when}")


async def _use(case: Case, instance: Instance) -> None:
    await _use_value(case, instance.value)


async def _use_value(case: Case, value: Any) -> None:
    if case.use is not None:
        await case.use(value)
    elif case.is_box:
        finished = await value.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"said")
        assert (finished.exit_code, finished.stdout, finished.stderr) == (3, b"said", b"err\n")
        await value.write("folder/file.txt", b"text")
        assert await value.read("folder/file.txt") == b"text"
        assert (await value.run("cat folder/file.txt")).stdout == b"text"
    else:
        raise AssertionError("give the case a `use`")


async def _dirty(case: Case, instance: Instance) -> None:
    await _dirty_value(case, instance.value)


async def _dirty_value(case: Case, value: Any) -> None:
    if case.dirty is not None:
        await case.dirty(value)
    else:
        assert case.is_box, "give the case a `dirty`"
        await value.write("left.txt", b"by the last one")
        await value.run("(while true; do date > alive.txt; sleep 0.05; done) >/dev/null 2>&1 &")


async def _is_clean(case: Case, instance: Instance) -> bool:
    return await _is_clean_value(case, instance.value)


async def _is_clean_value(case: Case, value: Any) -> bool:
    if case.is_clean is not None:
        return await case.is_clean(value)
    names = {name.rstrip("/") for name in await value.list(".")}
    box = getattr(case.spec, "box", case.spec)
    return names == {path.partition("/")[0] for path in getattr(box, "files", {})}


async def _num_awaits(backend: Backend, spec: Spec) -> int:
    """How often a start waits for something."""
    counter = Cut(backend.start(spec, started=lambda _: None), None)
    instance = await counter.run()
    await instance.close()
    return counter.num_awaits
