"""``/api/transactions``: the second phase of episodes that several servers share."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import TypeAdapter, ValidationError

from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import DecisionRequest, TransactionId, TransactionReply
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing

ID: TypeAdapter[str] = TypeAdapter(TransactionId)
PRESUME = [{"name": "presume", "in": "query", "required": False, "schema": {"type": "string", "enum": ["abort"]}}]


def team_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(prefix="/api/transactions", tags=["teams"])

    @router.get("")
    async def in_doubt(request: Request) -> list[TransactionReply]:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return control.teams.in_doubt()

    @router.get("/{transaction_id}", openapi_extra={"parameters": PRESUME})
    async def look(request: Request, transaction_id: str) -> TransactionReply:
        """Without a key: who knows the id, 128 random bits, takes part in it."""
        presume = request.query_params.get("presume")
        if presume not in (None, "abort"):
            raise RequestError(f'`presume`: expected "abort" or nothing, got {presume!r:.80}', param="presume")
        return await control.teams.look(_checked(transaction_id), presume=presume is not None)

    @router.post("/{transaction_id}", openapi_extra=body_schema(DecisionRequest))
    async def decide(request: Request, transaction_id: str) -> TransactionReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        wanted = parse(DecisionRequest, await request.body())
        return await control.teams.decide(_checked(transaction_id), commit=wanted.decision == "commit")

    return router


def _checked(transaction_id: str) -> str:
    try:
        return ID.validate_python(transaction_id)
    except ValidationError:
        raise RequestError(
            f"transaction {transaction_id!r:.80}: expected 22 to 64 of the characters A-Z, a-z, 0-9, - and _",
            param="transaction_id",
        ) from None
