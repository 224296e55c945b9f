"""Tells control where a resources server is and what its pool does, as long as it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from wingbeat.client.pool_reports import ONE_TRY, classes_of
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import WingbeatError
from wingbeat.core.protocol_resources import ReportReply, ResourceReport
from wingbeat.core.resource_reports import REPORT_EVERY_S
from wingbeat.resources import Resources

logger = logging.getLogger(__name__)

LAST_S = 2.0


class Announcer:
    """Reports from :meth:`start` until :meth:`close`; without a control it only says that it is ready."""

    def __init__(
        self,
        pool: Resources,
        *,
        url: str,
        kinds: tuple[str, ...],
        control: str,
        key: str | None,
        on_ready: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._url = url
        self._kinds = kinds
        self._control = control.rstrip("/")
        self._key = key
        self._on_ready = on_ready
        self._name = f"resources-{socket.gethostname()[:100]}-{os.getpid()}"
        self._shown: dict[tuple[str, str], None] = {}
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal = ""

    def start(self) -> None:
        """The server takes requests now."""
        if self._control:
            self._transport = Transport(
                self._control, key=self._key, timeout_s=REPORT_EVERY_S, retry=ONE_TRY, client_id=self._name
            )
            self._task = asyncio.get_running_loop().create_task(self._run(), name="announce")
        self._on_ready()

    async def close(self) -> None:
        """Say that it is over."""
        task, transport = self._task, self._transport
        if task is None or transport is None:
            return
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._report(transport, leaving=True)
        await transport.close()

    async def _run(self) -> None:
        assert self._transport is not None
        while True:
            pause_s = await self._report(self._transport)
            await asyncio.sleep(pause_s)

    async def _report(self, transport: Transport, *, leaving: bool = False) -> float:
        """Returns in how many seconds to report again.  Control may be away for a while, or another one come."""
        report = ResourceReport(
            client_id=self._name,
            url=self._url,
            kinds=self._kinds,
            leaving=leaving,
            classes=tuple(classes_of(self._pool.snapshot(), shown=self._shown)),
        )
        try:
            reply = await transport.send(Call("POST", "/api/resources", body=report, retry=ONE_TRY), ReportReply)
        except WingbeatError as error:
            if error.message != self._refusal and not leaving:  # once
                logger.warning("%s does not know of this server: %s", self._control, error.message)
            self._refusal = error.message
            return REPORT_EVERY_S
        self._refusal = ""
        return max(1.0, reply.report_s)
