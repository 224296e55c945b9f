"""Tells a server what this client's pool of resources has and did, for its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import AuthenticationError, NotFoundError, PermissionDenied, WingbeatError
from wingbeat.core.ports import MeasuredPool
from wingbeat.core.protocol_resources import ReportReply, ResourceReport
from wingbeat.core.resource_reports import MAX_CLASSES, OTHER, REPORT_EVERY_S, ResourceClass

logger = logging.getLogger("wingbeat.client")

ONE_TRY = RetryPolicy(budget_s=0)
LAST_S = 2.0
"""For the report at the end: an agent's process must not stay for it."""


class PoolReports:
    """Reports from :meth:`start` until :meth:`close`, from tasks of its event loop.  A report that fails is skipped."""

    def __init__(self, pool: MeasuredPool, transport: Transport, *, client_id: str) -> None:
        self._pool = pool
        self._transport = transport
        self._client_id = client_id
        self._shown: dict[tuple[str, str], None] = {}
        """Classes that are told by themselves: the first ones, so that none of the counts ever falls."""
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = True

    def start(self) -> None:
        """Begin to report; again is harmless."""
        if self._task is None and self._is_wanted:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="resource-reports")

    async def close(self) -> None:
        """Report once more, so that what a short life did counts, and that it is over."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if self._is_wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._report(leaving=True)
        self._is_wanted = False

    async def _run(self) -> None:
        while True:
            pause_s = await self._report()
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    async def _report(self, *, leaving: bool = False) -> float | None:
        """Returns in how many seconds to report again; None: never."""
        report = ResourceReport(client_id=self._client_id, leaving=leaving, classes=tuple(self._classes()))
        call = Call("POST", "/api/resources", body=report, timeout_s=REPORT_EVERY_S, retry=ONE_TRY)
        try:
            return max(1.0, (await self._transport.send(call, ReportReply)).report_s)
        except (NotFoundError, AuthenticationError, PermissionDenied) as error:
            logger.info("the server takes no reports of resources: %s", error.message)
            self._is_wanted = False
            return None
        except WingbeatError as error:
            logger.debug("a report of resources was not taken: %s", error.message)
        return REPORT_EVERY_S

    def _classes(self) -> list[ResourceClass]:
        return classes_of(self._pool.snapshot(), shown=self._shown)


def classes_of(stats: Iterable[Any], *, shown: dict[tuple[str, str], None]) -> list[ResourceClass]:
    """For a report; ``shown`` gains the classes that are told by themselves."""
    classes: dict[tuple[str, str], ResourceClass] = {}
    for found in stats:
        one = ResourceClass.model_validate(found, from_attributes=True)
        if len(shown) < MAX_CLASSES - 1:
            shown.setdefault(one.key)
        if one.key in shown:
            classes[one.key] = one
        else:
            rest = classes.get((OTHER, OTHER)) or ResourceClass(kind=OTHER, label=OTHER)
            classes[OTHER, OTHER] = rest.plus(one)
    return list(classes.values())
