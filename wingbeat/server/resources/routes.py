"""``/resources/v1``: leases, and what is done with what they hold."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.errors import ConfigError, NotFoundError, RequestError, WingbeatError
from wingbeat.core.lending_protocol import (
    PREFIX,
    BudgetUse,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseOrder,
    LendingStatus,
    LentValue,
    PrefetchOrder,
    Released,
    ReleaseOrder,
    RunAnswer,
    RunOrder,
    SendAnswer,
    SendOrder,
    SpecItem,
)
from wingbeat.core.protocol import CLIENT_HEADER, MAX_NAME, Wire
from wingbeat.core.resource_reports import ResourceStatus
from wingbeat.resources import Finished, ResourceFailed, ResourceLost, Resources, Spec
from wingbeat.resources.backends.endpoint import Endpoint
from wingbeat.resources.backends.endpoint_calls import Answer
from wingbeat.resources.backends.endpoint_http import message
from wingbeat.server.http.error_answers import http_fault
from wingbeat.server.http.requests import decode_json, unless_gone
from wingbeat.server.keys.principals import MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.resources.grants import Client, Grant, Grants
from wingbeat.server.resources.rules import Rules

M = TypeVar("M", bound=Wire)

FILE_FAULTS: Mapping[type[OSError], tuple[int, str]] = {
    FileNotFoundError: (404, "file_not_found"),
    IsADirectoryError: (409, "is_a_directory"),
    NotADirectoryError: (409, "not_a_directory"),
    OSError: (409, "os_error"),
}
"""What a box says of its files: an observation, which the client raises again."""


@dataclass(frozen=True, slots=True)
class Lending:
    """The parts of one resources server."""

    pool: Resources
    grants: Grants
    rules: Rules
    keys: KeyRing
    config: ResourcesConfig
    max_bytes: int
    """Of one body, either way."""


class Routes:
    """The routes, bound to one server."""

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._grants = lending.grants

    def all(self) -> list[Route]:
        lease = f"{PREFIX}/leases/{{lease_id}}"
        value = f"{lease}/{{index:int}}"
        return [
            Route(f"{PREFIX}/leases", self.lease, methods=["POST"]),
            Route(lease, self.give_back, methods=["DELETE"]),
            Route(f"{value}/run", self.run, methods=["POST"]),
            Route(f"{value}/send", self.send, methods=["POST"]),
            Route(f"{value}/file", self.write, methods=["PUT"]),
            Route(f"{value}/file", self.read, methods=["GET"]),
            Route(f"{value}/folder", self.folder, methods=["GET"]),
            Route(f"{value}/end-processes", self.end_processes, methods=["POST"]),
            Route(f"{value}/calls/{{call_id}}", self.cancel, methods=["DELETE"]),
            Route(f"{PREFIX}/heartbeat", self.heartbeat, methods=["POST"]),
            Route(f"{PREFIX}/prefetch", self.prefetch, methods=["POST"]),
            Route(f"{PREFIX}/release", self.release, methods=["POST"]),
            Route(f"{PREFIX}/status", self.status, methods=["GET"]),
        ]

    # --- leases

    async def lease(self, request: Request) -> Response:
        order, client = await self._read(request, LeaseOrder)
        specs = self._specs(order.specs)
        work = self._grants.lease(order.idempotency_key, client, owner=order.owner, specs=specs, wait_s=order.wait_s)
        grant = await unless_gone(request, work)
        held = () if grant is None else tuple(_lent(name, grant.value(i)) for i, name in enumerate(grant.specs))
        return _json(
            LeaseAnswer(
                lease_id=order.idempotency_key,
                state="waiting" if grant is None else "held",
                heartbeat_s=self._lending.config.heartbeat_s,
                values=held,
            )
        )

    async def give_back(self, request: Request) -> Response:
        client = self._client(request)
        is_lost = request.query_params.get("lost") == "true"
        await self._grants.end(_call_id(request.path_params["lease_id"]), client, is_lost=is_lost)
        return Response(status_code=204)

    async def heartbeat(self, request: Request) -> Response:
        beat, client = await self._read(request, Heartbeat)
        lost = self._grants.heartbeat(client, beat.leases)
        return _json(HeartbeatAnswer(heartbeat_s=self._lending.config.heartbeat_s, lost=lost))

    async def prefetch(self, request: Request) -> Response:
        order, client = await self._read(request, PrefetchOrder)
        self._grants.prefetch(client, owner=order.owner, specs=self._specs(order.specs))
        return Response(status_code=204)

    async def release(self, request: Request) -> Response:
        order, client = await self._read(request, ReleaseOrder)
        return _json(Released(released=await self._grants.release(client, order.owner)))

    async def status(self, request: Request) -> Response:
        self._lending.keys.require(request.headers, MAY_RUN_AGENTS)
        pool = self._lending.pool
        return _json(
            LendingStatus(
                kinds=tuple(self._lending.config.kinds),
                clients=self._grants.num_clients,
                leases=self._grants.num_leases,
                classes=tuple(classes_of(pool)),
                budgets=tuple(BudgetUse(**asdict(budget)) for budget in pool.budgets()),
            )
        )

    # --- boxes

    async def run(self, request: Request) -> Response:
        grant, index = self._grant(request)
        order = _parsed(RunOrder, await request.body())
        limit_s = self._lending.config.max_command_s
        if order.timeout_s is not None and order.timeout_s > limit_s:
            raise RequestError(
                f"timeout_s: expected at most {limit_s:g} (resources.max_command_s), got {order.timeout_s:g}",
                param="timeout_s",
            )
        box = _box(grant, index)

        def begin() -> Coroutine[Any, Any, Finished]:
            return box.run(
                order.command if isinstance(order.command, str) else list(order.command),
                stdin=order.stdin,
                timeout_s=order.timeout_s,
                env=order.env,
                cwd=order.cwd,
            )

        def size(finished: Finished) -> int:
            return len(finished.stdout) + len(finished.stderr)

        finished: Finished | None = await self._once(request, grant, index, order.call_id, begin, size=size)
        if finished is None:
            return _json(RunAnswer(state="running"))
        return _json(RunAnswer(state="done", **asdict(finished)))

    async def write(self, request: Request) -> Response:
        grant, index = self._grant(request)
        data, path = await request.body(), _query(request, "path")
        box = _box(grant, index)
        call_id = _call_id(_query(request, "call_id"))
        await self._once(request, grant, index, call_id, lambda: box.write(path, data), whole=True)
        return Response(status_code=204)

    async def read(self, request: Request) -> Response:
        grant, index = self._grant(request)
        try:
            wanted = int(_query(request, "max_bytes"))
        except ValueError:
            raise RequestError("max_bytes: expected a whole number", param="max_bytes") from None
        path = _query(request, "path")
        most = min(wanted, self._lending.max_bytes)
        data = await unless_gone(request, _observed(_box(grant, index).read(path, max_bytes=most)))
        return Response(data, media_type="application/octet-stream")

    async def folder(self, request: Request) -> Response:
        grant, index = self._grant(request)
        names = await unless_gone(request, _observed(_box(grant, index).list(_query(request, "path"))))
        return Response(orjson.dumps(names), media_type="application/json")

    async def end_processes(self, request: Request) -> Response:
        grant, index = self._grant(request)
        box = _box(grant, index)
        call_id = _call_id(_query(request, "call_id"))
        await self._once(request, grant, index, call_id, box.end_processes, whole=True)
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        grant, index = self._grant(request)
        await grant.calls[index].cancel(_call_id(request.path_params["call_id"]))
        return Response(status_code=204)

    # --- endpoints

    async def send(self, request: Request) -> Response:
        grant, index = self._grant(request)
        order = _parsed(SendOrder, await request.body())
        endpoint = grant.value(index)
        if not isinstance(endpoint, Endpoint):
            raise RequestError("expected a lease of an endpoint or a model, got one of a box")
        sent = message(order.method, order.path, json=order.body, headers=order.headers)

        def begin() -> Coroutine[Any, Any, Answer]:
            return endpoint.answer(sent, content=order.body, repeatable=order.repeatable)

        def size(answer: Answer) -> int:
            return len(answer.reply.body)

        answer: Answer | None = await self._once(request, grant, index, order.call_id, begin, size=size)
        if answer is None:
            return _json(SendAnswer(state="running"))
        reply, usage = answer.reply, answer.usage
        return _json(
            SendAnswer(
                state="done",
                status=reply.status,
                headers=dict(reply.headers),
                body=reply.body,
                url=reply.url,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cost=answer.cost,
                words=answer.words,
            )
        )

    # --- what they share

    def _client(self, request: Request, client_id: str = "") -> Client:
        """Who calls, and that it lives.  Raises AuthenticationError, PermissionDenied."""
        caller = self._lending.keys.require(request.headers, MAY_RUN_AGENTS)
        name = client_id or request.headers.get(CLIENT_HEADER, "")[:MAX_NAME]
        if not name:
            raise RequestError(f"expected the client's name in {CLIENT_HEADER}")
        client = Client(caller.key_id or caller.role, name, quota=caller.client(name))
        self._grants.seen(client)
        return client

    async def _read(self, request: Request, model: type[M]) -> tuple[M, Client]:
        """The key first: who has none is told nothing of what a body should be."""
        self._lending.keys.require(request.headers, MAY_RUN_AGENTS)
        body: Any = _parsed(model, await request.body())
        return body, self._client(request, body.client_id)

    def _grant(self, request: Request) -> tuple[Grant, int]:
        """What a path names.  Raises ResourceLost, NotFoundError."""
        client = self._client(request)
        grant = self._grants.held(request.path_params["lease_id"], client)
        index: int = request.path_params["index"]
        if index >= len(grant.leases):
            raise NotFoundError(f"this lease holds {len(grant.leases)} resources, and there is no number {index}")
        return grant, index

    def _specs(self, items: tuple[SpecItem, ...]) -> dict[str, Spec]:
        specs = {item.name: self._lending.rules.spec(item.spec) for item in items}
        if len(specs) < len(items):
            raise RequestError("specs: expected each name once", param="specs")
        return specs

    async def _once(
        self,
        request: Request,
        grant: Grant,
        index: int,
        call_id: str,
        begin: Callable[[], Coroutine[Any, Any, Any]],
        *,
        size: Callable[[Any], int] = lambda result: 0,
        whole: bool = False,
    ) -> Any:
        """The result of a call, begun or joined; None while it runs (``whole``: wait for its end)."""
        while True:
            once = grant.calls[index].once(call_id, lambda: _observed(begin()), size=size)
            task = await unless_gone(request, once)
            if grant.over.is_set():
                raise ResourceLost(grant.reason)
            if task is not None:
                if task.cancelled():
                    raise ResourceFailed("the call was cancelled")
                return task.result()
            if not whole:
                return None


def classes_of(pool: Resources) -> list[ResourceStatus]:
    """What a pool has and did, as it is told."""
    return [
        ResourceStatus.model_validate(
            {
                **{name: getattr(found, name) for name in ResourceStatus.model_fields if hasattr(found, name)},
                "wait": asdict(found.wait),
                "start": asdict(found.start),
                "reset": asdict(found.reset),
                "hold": asdict(found.hold),
                "pools": 1,
            }
        )
        for found in pool.snapshot()
    ]


async def _observed(work: Coroutine[Any, Any, Any]) -> Any:
    """What a box finds of files and paths is told as what it is, and not as a fault of this server."""
    try:
        return await work
    except WingbeatError:
        raise
    except OSError as error:
        kind = next(kind for kind in FILE_FAULTS if isinstance(error, kind))
        status, code = FILE_FAULTS[kind]
        raise coded(status, code, str(error)) from error
    except ValueError as error:
        raise coded(400, "invalid_value", str(error)) from error


def coded(status: int, code: str, text: str) -> WingbeatError:
    fault = http_fault(status, text)
    fault.code = code
    return fault


def _lent(name: str, value: Any) -> LentValue:
    if isinstance(value, Endpoint):
        return LentValue(name=name, kind="endpoint", model=value.model)
    return LentValue(name=name, kind="box", workdir=value.workdir)


def _box(grant: Grant, index: int) -> Any:
    value = grant.value(index)
    if isinstance(value, Endpoint):
        raise RequestError("expected a lease of a box, got one of an endpoint")
    return value


def _parsed(model: type[M], body: bytes) -> M:
    """Raises RequestError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        decode_json(body)  # says it better where it is no JSON
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RequestError(f"`{where}`: {fault['msg']}", param=where) from None


def _query(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise RequestError(f"{name}: expected it in the query", param=name)
    return value


def _call_id(text: str) -> str:
    if len(text) != 32 or any(c not in "0123456789abcdef" for c in text):
        raise RequestError("expected an id of 32 hexadecimal digits")
    return text


def _json(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def as_answer(error: ConfigError) -> WingbeatError:
    """A spec that cannot be leased is a fault of the request, though in a process of one's own one of the setup."""
    fault = coded(400, error.code, error.message)
    fault.param = error.param
    return fault
