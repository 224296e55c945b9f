"""A generation that goes on in another engine: what its KV is on the wire, on both sides of the move."""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

from wingbeat.core.errors import UnavailableError
from wingbeat.core.ports import GenerateRequest, KvExport
from wingbeat.engines.embedded.kv_moves import decode_kv, encode_kv
from wingbeat.workers.hosting import ModelHost

logger = logging.getLogger(__name__)


@runtime_checkable
class MovesKv(Protocol):
    """A model host whose KV can leave it; the requests of others move by their tokens alone."""

    def kv_bytes(self, request_id: str) -> int: ...
    def export_kv(self, request_id: str) -> KvExport | None: ...
    def import_kv(self, request: GenerateRequest, export: KvExport) -> int: ...


def take_kv(host: ModelHost, request_id: str, *, max_bytes: int) -> bytes:
    """The KV of a running request; empty where there is none to give, or more than ``max_bytes``."""
    if not isinstance(host, MovesKv) or not 0 < host.kv_bytes(request_id) <= max_bytes:
        return b""
    export = host.export_kv(request_id)
    return b"" if export is None else encode_kv(export)


def submit_with_kv(host: ModelHost, request: GenerateRequest, kv: bytes) -> None:
    """Submit a request that may come with KV.  What does not fit here is computed from the tokens."""
    if not kv or not isinstance(host, MovesKv):
        host.submit(request)
        return
    try:
        export = decode_kv(kv)
    except UnavailableError as error:
        logger.warning("request %s is prefilled: %s", request.request_id, error.message)
        host.submit(request)
        return
    usable = host.import_kv(request, export)
    logger.debug("request %s: %d of %d tokens came with KV", request.request_id, usable, len(request.prompt_ids))
