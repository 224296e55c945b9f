"""A port whose connections begin with a TLS handshake, bounded from their first byte.

A server of asyncio makes them known once the handshake is over: until then anyone could open so many that control had
no file left to open, its ledger's among them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Set

from wingbeat.server.http.protocol import Bounds, reserved_for

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""After a connection that could not be accepted."""


class TlsPort:
    """Accepts connections until :meth:`close`."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        bounds: Bounds,
        *,
        make: Callable[[], asyncio.Protocol],
        connections: Set[object],
    ) -> None:
        """``make``: what speaks behind the TLS; ``connections``: those that it has.  Needs a running loop."""
        self._listener = listener
        self._context = context
        self._bounds = bounds
        self._make = make
        self._connections = connections
        self._shaking: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="tls-accept")

    @property
    def num_connections(self) -> int:
        """Those whose handshake goes on among them."""
        return len(self._shaking) + len(self._connections)

    def close(self) -> None:
        """Accept no more; connections stay."""
        self._accepting.cancel()
        for task in self._shaking:
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                caller, address = await loop.sock_accept(self._listener)
            except OSError as error:  # it left again, or the system has no room
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if self.num_connections >= self._bounds.max_connections + reserved_for(address):
                caller.close()  # telling why would take a handshake
                continue
            task = asyncio.create_task(self._shake(caller), name="tls-handshake")
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, caller: socket.socket) -> None:
        timeout_s = self._bounds.request_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                caller,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
        except OSError as error:  # no TLS, another version, too slow, or gone; a line for each could fill the disk
            logger.debug("a handshake failed: %r", error)
            caller.close()
