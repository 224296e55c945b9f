"""Request bodies of ``/api``: one parser with one error shape, and their description in OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from wingbeat.core.errors import InvalidReward, RequestError
from wingbeat.core.protocol import GroupModel, Rewards, TaskModel, TransactionModel, Wire
from wingbeat.core.suggestions import did_you_mean
from wingbeat.server.http.requests import decode_json

M = TypeVar("M", bound=Wire)

NESTED: Mapping[str, type[Wire]] = {
    "task": TaskModel,
    "tasks": TaskModel,
    "group": GroupModel,
    "rewards": Rewards,
    "transaction": TransactionModel,
}
"""The models of fields that hold one."""


def parse(model: type[M], body: bytes) -> M:
    """Validate a body against a wire model.  Raises RequestError (InvalidReward for rewards)."""
    data = decode_json(body) if body else {}
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = max(error.errors(), key=lambda found: len(found["loc"]))  # of a union, the member that was meant
        where = ".".join(str(part) for part in fault["loc"] if part not in ("float", "constrained-float", "Rewards"))
        kind = InvalidReward if where.startswith("rewards") else RequestError
        if fault["type"] == "extra_forbidden":
            raise kind(f"`{where}`: {_unknown_field(model, fault['loc'], fault['input'])}", param=where) from None
        raise kind(f"`{where}`: {fault['msg']}, got {fault.get('input')!r:.200}", param=where) from None


def _unknown_field(model: type[Wire], where: tuple[int | str, ...], value: Any) -> str:
    """What to write instead of a field that the model does not have."""
    owner = next((NESTED[part] for part in reversed(where[:-1]) if isinstance(part, str) and part in NESTED), model)
    name = str(where[-1])
    if owner is Rewards and isinstance(value, int | float):
        section = "agents" if ":" in name else "policies"
        example = orjson.dumps({section: {name: value}}).decode()
        return f"unknown field; the reward of one of several policies or agents goes into `{section}`: {example}"
    hint = did_you_mean(name, owner.model_fields, quote="`") or f"known are {', '.join(owner.model_fields)}"
    return f"unknown field; {hint}"


def body_schema(model: type[Wire]) -> dict[str, Any]:
    """The OpenAPI description of a body that the route parses itself."""
    schema = model.model_json_schema()
    schema = _without_references(schema, schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _without_references(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema with every definition written out: the description's own list holds only what is answered."""
    if isinstance(node, list):
        return [_without_references(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = target | {key: value for key, value in node.items() if key != "$ref"}
    return {key: _without_references(value, definitions) for key, value in node.items()}
