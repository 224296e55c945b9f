"""The OpenAPI description: FastAPI's of ``/api``, the model calls served in front of it, and every error answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from wingbeat.core.protocol import ErrorReply
from wingbeat.server.calls.dialects.schemas import ANSWERS, BODIES, OBJECT
from wingbeat.server.calls.routes import Route

ERRORS = {
    "400": "A field or the body is wrong; `param` names it.",
    "401": "No key, or one that this server does not know any more.",
    "403": "The key is not for this.",
    "404": "No such thing.",
    "409": "Contradicts what has happened.",
    "413": "The body is too large.",
    "429": "Too much at once, or no room now: come back after `Retry-After` seconds.",
    "500": "A fault of the server; its log has the details.",
    "503": "Something that the request needs is not there right now.",
    "504": "A model call that lasted too long.",
    "default": "Any other refusal.",
}
"""See `docs/reference/http-api.md`."""
ANTHROPIC = "/v1/messages"
PLAIN = {"/metrics": "text/plain; version=0.0.4", "/api/events": "text/event-stream"}
"""Answers that are no JSON."""
STREAM = "text/event-stream"


def describe(app: FastAPI, calls: Iterable[Route]) -> dict[str, Any]:
    """The whole description; made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for route in calls:
            schema["paths"].setdefault(route.path, {})[route.method.lower()] = _call(route)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        components = schema.setdefault("components", {})
        components["responses"] = _error_answers()
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, which our parser never answers with
            components.get("schemas", {}).pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


def _call(route: Route) -> dict[str, Any]:
    """A model call."""
    names = re.findall(r"{(\w+)}", route.path)
    operation: dict[str, Any] = {
        "tags": ["model calls"],
        "summary": route.summary,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names],
    }
    content: dict[str, Any] = {"application/json": {"schema": ANSWERS.get(route.path, OBJECT)}}
    body = BODIES.get(route.path)
    if body is not None:
        properties = {name: {} for name in sorted(route.fields)} | body["properties"]
        schema = {**body, "properties": properties}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "stream" in body["properties"]:
            content[STREAM] = {}
    operation["responses"] = {"200": {"description": "Successful Response", "content": content}}
    return operation


def _complete(path: str, operation: dict[str, Any]) -> None:
    """What every operation may answer besides."""
    answers: dict[str, Any] = operation["responses"]
    answers.pop("422", None)
    if path in PLAIN:
        answers["200"]["content"] = {PLAIN[path]: {}}
    kind = "Anthropic" if path.startswith(ANTHROPIC) else ""
    for status in ERRORS:
        answers.setdefault(status, {"$ref": f"#/components/responses/{kind}Error{status}"})


def _error_answers() -> dict[str, Any]:
    own = ErrorReply.model_json_schema()
    body = own["$defs"]["ErrorBody"] | {"additionalProperties": True}
    openai = {"type": "object", "properties": {"error": body}, "required": ["error"]}
    anthropic = {
        "type": "object",
        "properties": {"type": {"const": "error"}, "error": {"type": "object", "required": ["type", "message"]}},
        "required": ["type", "error"],
    }
    return {
        f"{kind}Error{status}": {"description": text, "content": {"application/json": {"schema": schema}}}
        for kind, schema in (("", openai), ("Anthropic", anthropic))
        for status, text in ERRORS.items()
    }
