"""Running what a back-end does: bounded in time, and failing in one way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from wingbeat.core.errors import SetupError
from wingbeat.resources.specs import ResourceFailed, Spec

T = TypeVar("T")


async def guarded(work: Awaitable[T], *, timeout_s: float, doing: str) -> T:
    """What ``work`` returns.  Raises ResourceFailed for whatever it raises and after ``timeout_s`` (it is cancelled).

    A SetupError passes, since it says what a person has to put right, and so does the cancellation of the task that
    waits here.  One that comes out of ``work`` itself (it waited for something that was cancelled) is a failure like
    any other: taken for ours, it would end the task that cleans up, and the instance would be lost for good.
    """
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await work
    except (ResourceFailed, SetupError):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ResourceFailed(f"{doing} failed: what it waited for was cancelled") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and scope.expired():
            raise ResourceFailed(f"{doing} took longer than {timeout_s:g} s") from error
        raise ResourceFailed(f"{doing} failed: {type(error).__name__}: {error}") from error


def at_once(work: Callable[[], T], spec: Spec, *, doing: str) -> T:
    """As :func:`guarded`, of what does not wait."""
    try:
        return work()
    except ResourceFailed:
        raise
    except (Exception, SystemExit) as error:
        raise ResourceFailed(f"the {doing} of a {spec.title} failed: {type(error).__name__}: {error}") from error
