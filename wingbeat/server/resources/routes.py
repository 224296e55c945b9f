"""``/resources/v1``: leases, and what is done with what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.errors import NotFoundError, RequestError
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
from wingbeat.resources import Finished, ResourceLost, Resources, Spec
from wingbeat.resources.backends.endpoint import Endpoint
from wingbeat.resources.backends.endpoint_calls import Answer
from wingbeat.resources.backends.endpoint_http import message
from wingbeat.resources.specs_remote import command_timeout_s
from wingbeat.server.http.requests import read_body, unless_gone
from wingbeat.server.keys.principals import MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.resources.exchange import (
    call_id_of,
    in_time,
    json_answer,
    keep_body,
    long_answer,
    observed,
    parsed,
    query_of,
    release_body,
)
from wingbeat.server.resources.grants import Client, Grant, Grants
from wingbeat.server.resources.rules import Rules

M = TypeVar("M", bound=Wire)
T = TypeVar("T")
OVERDUE_S = 30.0
"""How long after a command's own deadline its box may take to say that it was stopped."""


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
        release_body(request)  # what waits for its turn is no body under way
        work = self._grants.lease(order.idempotency_key, client, owner=order.owner, specs=specs, wait_s=order.wait_s)
        grant = await unless_gone(request, work)
        held = () if grant is None else tuple(_lent(name, grant.value(i)) for i, name in enumerate(grant.specs))
        return json_answer(
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
        await self._grants.end(call_id_of(request.path_params["lease_id"]), client, is_lost=is_lost)
        return Response(status_code=204)

    async def heartbeat(self, request: Request) -> Response:
        beat, client = await self._read(request, Heartbeat)
        lost = self._grants.heartbeat(client, beat.leases)
        return json_answer(HeartbeatAnswer(heartbeat_s=self._lending.config.heartbeat_s, lost=lost))

    async def prefetch(self, request: Request) -> Response:
        order, client = await self._read(request, PrefetchOrder)
        self._grants.prefetch(order.call_id, client, owner=order.owner, specs=self._specs(order.specs))
        return Response(status_code=204)

    async def release(self, request: Request) -> Response:
        order, client = await self._read(request, ReleaseOrder)
        return json_answer(Released(released=await self._grants.release(client, order.owner)))

    async def status(self, request: Request) -> Response:
        self._lending.keys.require(request.headers, MAY_RUN_AGENTS)
        pool = self._lending.pool
        return json_answer(
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
        order = await parsed(RunOrder, await self._body(request))
        most_s = self._lending.config.max_command_s
        if order.timeout_s is not None and order.timeout_s > most_s:
            raise RequestError(
                f"timeout_s: expected at most {most_s:g} (resources.max_command_s), got {order.timeout_s:g}",
                param="timeout_s",
            )
        box = _box(grant, index)

        async def begin() -> Finished:
            running = box.run(
                order.command if isinstance(order.command, str) else list(order.command),
                stdin=order.stdin,
                timeout_s=order.timeout_s,
                env=order.env,
                cwd=order.cwd,
            )
            limit_s = min(most_s, order.timeout_s or command_timeout_s(list(grant.specs.values())[index]))
            return await in_time(running, limit_s + OVERDUE_S)

        def size(finished: Finished) -> int:
            return len(finished.stdout) + len(finished.stderr)

        finished: Finished | None = await self._once(request, grant, index, order.call_id, begin, size=size)
        if finished is None:
            return json_answer(RunAnswer(state="running"))
        return await long_answer(RunAnswer(state="done", **asdict(finished)), size(finished))

    async def write(self, request: Request) -> Response:
        grant, index = self._grant(request)
        path, call_id = query_of(request, "path"), call_id_of(query_of(request, "call_id"))
        data = await self._body(request)
        box = _box(grant, index)
        await self._once(request, grant, index, call_id, lambda: box.write(path, data), whole=True)
        return Response(status_code=204)

    async def read(self, request: Request) -> Response:
        grant, index = self._grant(request)
        try:
            wanted = int(query_of(request, "max_bytes"))
        except ValueError:
            raise RequestError("max_bytes: expected a whole number", param="max_bytes") from None
        path = query_of(request, "path")
        most = min(wanted, self._lending.max_bytes)
        box = _box(grant, index)
        data = await self._unnamed(request, grant, index, lambda: box.read(path, max_bytes=most))
        return Response(data, media_type="application/octet-stream")

    async def folder(self, request: Request) -> Response:
        grant, index = self._grant(request)
        path, box = query_of(request, "path"), _box(grant, index)
        names = await self._unnamed(request, grant, index, lambda: box.list(path))
        return Response(json.dumps(names), media_type="application/json")  # in ASCII: a name may be no UTF-8

    async def end_processes(self, request: Request) -> Response:
        grant, index = self._grant(request)
        box = _box(grant, index)
        call_id = call_id_of(query_of(request, "call_id"))
        await self._once(request, grant, index, call_id, box.end_processes, whole=True)
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        grant, index = self._grant(request)
        await grant.calls[index].cancel(call_id_of(request.path_params["call_id"]))
        return Response(status_code=204)

    # --- endpoints

    async def send(self, request: Request) -> Response:
        grant, index = self._grant(request)
        order = await parsed(SendOrder, await self._body(request))
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
            return json_answer(SendAnswer(state="running"))
        reply, usage = answer.reply, answer.usage
        sent_back = SendAnswer(
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
        return await long_answer(sent_back, size(answer))

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
        body: Any = await parsed(model, await self._body(request))
        return body, self._client(request, body.client_id)

    async def _body(self, request: Request) -> bytes:
        """Kept by nobody but the caller, unlike ``request.body()``."""
        return await read_body(request.receive, max_bytes=self._lending.max_bytes)

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
            once = grant.calls[index].once(call_id, lambda: observed(begin), size=size, hold=lambda: keep_body(request))
            outcome = await unless_gone(request, once)
            if grant.over.is_set():
                raise ResourceLost(grant.reason)
            if outcome is not None:
                return outcome.result()
            if not whole:
                return None

    async def _unnamed(
        self, request: Request, grant: Grant, index: int, begin: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """The result of a call that changes nothing; ended with the lease, as all are."""
        work = grant.calls[index].unnamed(lambda: observed(begin))
        try:
            return await unless_gone(request, work)
        except ResourceLost:
            if grant.over.is_set():
                raise ResourceLost(grant.reason) from None
            raise


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


def _lent(name: str, value: Any) -> LentValue:
    if isinstance(value, Endpoint):
        return LentValue(name=name, kind="endpoint", model=value.model)
    return LentValue(name=name, kind="box", workdir=value.workdir)


def _box(grant: Grant, index: int) -> Any:
    value = grant.value(index)
    if isinstance(value, Endpoint):
        raise RequestError("expected a lease of a box, got one of an endpoint")
    return value
