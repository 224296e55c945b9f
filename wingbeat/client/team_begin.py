"""Beginning an episode on several servers: on all of them, or on none, and never waiting with a part in hand.

Every server is asked at once, on trial.  Where one refuses, what the others gave is handed back before anybody
waits, so that two teams which need the same servers cannot block each other; jitter keeps them apart.  What a
client that dies leaves on trial lapses by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from wingbeat.client.retry import RetryPolicy
from wingbeat.core.errors import AuthenticationError, ConflictError, NotFoundError, UnavailableError, WingbeatError

TENTATIVE_S = 20.0
"""How long a server keeps a begin on trial for a client that died, or whose answer was lost."""
ANSWER_S = 0.5 * TENTATIVE_S
"""How long all servers may take to answer: well before the first of them lapses."""


class Backoff:
    """For how long a team takes no leases, since another of its servers refused what it had leased.

    Nothing is held meanwhile.  Afterwards one lease shows whether there is room again; the pauses grow until then.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._retry = RetryPolicy(budget_s=None, base_s=0.5)
        self._num_refused = 0
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last that was tried was refused."""
        return self._num_refused > 0

    def refused(self, error: BaseException) -> None:
        """What was refused while it waits already is of the same round."""
        now = asyncio.get_running_loop().time()
        if now < self._until:
            return
        after_s: float | None = getattr(error, "retry_after_s", None)
        delay_s = self._retry.delay_s(self._num_refused, elapsed_s=0, retry_after_s=after_s, rng=self._rng)
        self._num_refused += 1
        self._until = now + (delay_s or 0.0)

    def accepted(self) -> None:
        self._num_refused = 0

    async def wait(self) -> None:
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)


class Trial(Protocol):
    """A begin on trial."""

    async def confirm(self) -> None: ...


E = TypeVar("E", bound=Trial)
Begin = Callable[[], Awaitable[E]]
GiveBack = Callable[[Mapping[str, Any], BaseException], Awaitable[None]]


async def begin_everywhere(begins: Mapping[str, Callable[[], Awaitable[E]]], *, give_back: GiveBack) -> dict[str, E]:
    """One begin per server, all confirmed.

    Otherwise ``give_back`` gets what was granted, and then the refusal is raised: the one that will not change, where
    there is one, since then it makes no sense to come back.
    """
    tasks = {name: asyncio.ensure_future(begin()) for name, begin in begins.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=ANSWER_S)
        refusal = _refusal(tasks)
        if refusal is None:
            granted = {name: task.result() for name, task in tasks.items()}
            refusal = await _confirm(granted)
            if refusal is None:
                return granted
    except BaseException as error:  # a cancelled client gives back what it has
        await asyncio.shield(_give_back(tasks, give_back, error))
        raise
    await _give_back(tasks, give_back, refusal)
    raise refusal


def _refusal(tasks: Mapping[str, asyncio.Future[Any]]) -> BaseException | None:
    errors: list[BaseException] = []
    for name, task in tasks.items():
        if not task.done():
            errors.append(UnavailableError(f"server {name!r} took longer than {ANSWER_S:g} s to begin an episode"))
        elif (error := task.exception()) is not None:
            errors.append(error)
    return _worst(errors)


async def _confirm(granted: Mapping[str, Trial]) -> BaseException | None:
    results = await asyncio.gather(*(trial.confirm() for trial in granted.values()), return_exceptions=True)
    return _worst([_trial_ended(result) for result in results if result is not None])


def _trial_ended(error: BaseException) -> BaseException:
    """A server that had let it begin, and knows its trial no more (it lapsed; a restart forgets trials): try anew.

    What stands in the way for good, the next begin hears.
    """
    if isinstance(error, AuthenticationError | ConflictError | NotFoundError):
        return UnavailableError(f"its trial ended before it was confirmed: {error.message}")
    return error


def _worst(errors: list[BaseException]) -> BaseException | None:
    """The error that no waiting helps against, else the one with the longest wait."""

    def weight(error: BaseException) -> tuple[bool, float]:
        lasting = not (isinstance(error, WingbeatError) and error.retryable)
        return lasting, getattr(error, "retry_after_s", 0.0)

    return max(errors, key=weight, default=None)


async def _give_back(tasks: Mapping[str, asyncio.Future[Any]], give_back: GiveBack, error: BaseException) -> None:
    """What is still on its way lapses on its server."""
    late = [task for task in tasks.values() if not task.done()]
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    granted: dict[str, Any] = {}
    for name, task in tasks.items():
        with contextlib.suppress(asyncio.CancelledError):
            if task.exception() is None:
                granted[name] = task.result()
    await give_back(granted, error)
