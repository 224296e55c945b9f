"""How a worker reaches weights of other hosts: the server that it dials, and other workers' relays."""

from __future__ import annotations

from wingbeat.core.config import WeightsConfig
from wingbeat.core.tls import client_context
from wingbeat.core.weight_protocol import CONTROL
from wingbeat.core.worker_protocol import Welcome
from wingbeat.weights.host import received_dir
from wingbeat.weights.pull import PullLimits, Source
from wingbeat.weights.receiver import Remote
from wingbeat.weights.relay import RelayServer
from wingbeat.weights.store import HostStore

VERSIONS_HELD = 4
"""In the store of a host: the newest two, one that is being pulled, and one that an evaluation pins."""


class Pulls:
    """Of one worker process."""

    def __init__(self, url: str, key: str, *, relay: RelayServer | None = None) -> None:
        self._url = url
        self._key = key
        self._tls = client_context() if url.startswith("https://") else True
        self._relay = relay

    def close(self) -> None:
        """Relay no more."""
        if self._relay is not None:
            self._relay.close()

    def remote(self, welcome: Welcome, host_id: str) -> Remote:
        """What a receiver needs, as this welcome has it."""
        config = WeightsConfig.model_validate(welcome.weights)
        relay = self._relay
        if relay is not None:
            relay.key = welcome.relay_key

        def open_store(size_bytes: int) -> HostStore:
            folder = received_dir(welcome.run_dir, host_id, min_free_bytes=VERSIONS_HELD * size_bytes)
            store = HostStore(folder)
            if relay is not None:
                relay.store = store
            return store

        return Remote(
            open_store=open_store,
            source=lambda name: self._source(name, welcome.relay_key),
            limits=PullLimits(stall_s=config.stall_s, give_up_s=config.give_up_s),
            expect=relay.expect if relay is not None else lambda manifest: None,
        )

    def _source(self, name: str, relay_key: str) -> Source:
        """The worker key goes to control alone."""
        return Source(self._url, self._key, self._tls) if name == CONTROL else Source(name, relay_key)
