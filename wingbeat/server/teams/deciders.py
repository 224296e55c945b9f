"""Asks another server how it decided a transaction.

The address came from a client, so only those of ``server.peers`` are ever called: by GET, without a key, without
redirects or proxies, within a time and a size.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
from pydantic import ValidationError

from wingbeat.core.protocol import TransactionReply
from wingbeat.core.tls import client_context
from wingbeat.server.teams.transactions import TransactionState

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 65_536


class Deciders:
    """Connections to peers; opened with the first question."""

    def __init__(self, peers: frozenset[str]) -> None:
        self._peers = peers
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, decider: str, transaction_id: str, presume: bool) -> TransactionState | None:
        """What ``decider`` says; None where it is away or its answer is none.

        Raises SetupError where ``WINGBEAT_CA_FILE`` names no certificates.
        """
        if decider not in self._peers:
            return None
        if self._session is None:
            # as for all clients, WINGBEAT_CA_FILE says who vouches for a peer
            tls = client_context() if any(peer.startswith("https:") for peer in self._peers) else True
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=tls),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        url = f"{decider}/api/transactions/{transaction_id}"
        parameters: dict[str, Any] = {"presume": "abort"} if presume else {}
        try:
            async with self._session.get(url, params=parameters, allow_redirects=False) as response:
                body = await response.content.read(MAX_ANSWER_BYTES)
                status = response.status
            if status != 200:
                logger.warning(
                    "%s: expected where transaction %s stands, got status %d", decider, transaction_id, status
                )
                return None
            reply = TransactionReply.model_validate_json(body, extra="ignore")
            if reply.transaction_id != transaction_id:
                logger.warning("%s: asked for transaction %s, was told of another", decider, transaction_id)
                return None
            return TransactionState(reply.state)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("%s does not say how it decided transaction %s: %r", decider, transaction_id, error)
        except (ValidationError, ValueError) as error:
            logger.warning("%s: its answer about transaction %s does not validate: %s", decider, transaction_id, error)
        return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
