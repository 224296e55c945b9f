"""Running what a back-end does: bounded in time, and failing in one way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from wingbeat.core.errors import SetupError
from wingbeat.resources.specs import ResourceFailed, Spec

logger = logging.getLogger("wingbeat.resources")

T = TypeVar("T")

END_S = 30.0
"""What something that was cancelled may take to end, unless told otherwise."""

_LEFT: set[asyncio.Task[Any]] = set()
"""What did not end though it was cancelled; kept from the garbage collector."""


async def guarded(work: Awaitable[T], *, timeout_s: float, doing: str, end_s: float = END_S) -> T:
    """What ``work`` returns.  Raises ResourceFailed for whatever it raises and after ``timeout_s`` (it is cancelled).

    A SetupError passes, since it says what a person has to put right, and so does the cancellation of the task that
    waits here.  One that comes out of ``work`` itself (it waited for something that was cancelled) is a failure like
    any other: taken for ours, it would end the task that cleans up, and the instance would be lost for good.

    ``work`` runs in a task of its own: one that swallows its cancellation is waited for ``end_s`` and then left to
    itself, and keeps nobody else.
    """
    task = asyncio.get_running_loop().create_task(_contained(work, doing), name=f"wingbeat-{doing}")
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _end(task, doing, end_s)
        raise
    is_late = not task.done()
    if is_late:
        await _end(task, doing, end_s)
    if task.done() and not task.cancelled() and (not is_late or task.exception() is None):
        return task.result()
    if is_late:
        raise ResourceFailed(f"{doing} took longer than {timeout_s:g} s")
    raise ResourceFailed(f"{doing} failed: what it waited for was cancelled")


async def _contained(work: Awaitable[T], doing: str) -> T:
    """An exit must not end the loop, which a task's does."""
    try:
        return await work
    except (ResourceFailed, SetupError):
        raise
    except (Exception, SystemExit) as error:
        raise ResourceFailed(f"{doing} failed: {type(error).__name__}: {error}") from error


async def _end(task: asyncio.Task[Any], doing: str, end_s: float) -> None:
    """Cancel it and wait until it has cleaned up, within reason."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=end_s)
    finally:
        if task.done():
            _look(task)
        else:
            logger.warning("%s goes on though it was cancelled, and is left to itself", doing)
            _LEFT.add(task)
            task.add_done_callback(_look)


def _look(task: asyncio.Task[Any]) -> None:
    """What comes of it is nobody's affair any more."""
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()


def at_once(work: Callable[[], T], spec: Spec, *, doing: str) -> T:
    """As :func:`guarded`, of what does not wait."""
    try:
        return work()
    except ResourceFailed:
        raise
    except (Exception, SystemExit) as error:
        raise ResourceFailed(f"the {doing} of a {spec.title} failed: {type(error).__name__}: {error}") from error
