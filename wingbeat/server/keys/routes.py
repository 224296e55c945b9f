"""``/api/keys``: the key file over HTTP, for admins.  A key is in the answer that made it and nowhere else."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from wingbeat.core.errors import RequestError
from wingbeat.core.key_protocol import KeyReply, KeyRequest, NewKeyReply
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import MAY_ADMINISTRATE
from wingbeat.server.keys.ring import KeyRing

NO_STORE = {"cache-control": "no-store"}


def key_routes(keys: KeyRing) -> APIRouter:
    """The routes, bound to one ring."""
    router = APIRouter(prefix="/api", tags=["keys"])

    @router.post("/keys", openapi_extra=body_schema(KeyRequest))
    async def create(request: Request, response: Response) -> NewKeyReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        wanted = NewKey.of(parse(KeyRequest, await request.body()))
        record, key = await asyncio.to_thread(_file(keys).create, wanted)
        keys.refresh()
        response.headers.update(NO_STORE)
        return NewKeyReply(**record.reply(time.time()).model_dump(), key=key)

    @router.get("/keys")
    async def list_keys(request: Request) -> list[KeyReply]:
        keys.require(request.headers, MAY_ADMINISTRATE)
        return [record.reply(time.time()) for record in await asyncio.to_thread(_file(keys).read)]

    @router.delete("/keys/{key_id}")
    async def revoke(request: Request, key_id: str) -> KeyReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        record = await asyncio.to_thread(_file(keys).revoke, key_id)
        keys.refresh()
        return record.reply(time.time())

    return router


def _file(keys: KeyRing) -> KeyFile:
    if keys.file is None:
        raise RequestError("this server has no key file")
    return keys.file
