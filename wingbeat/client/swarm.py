"""The asynchronous client of a Wingbeat server.

async with AsyncSwarm("http://127.0.0.1:8321") as swarm:
    async with swarm.episode(task=Task("arithmetic", "1", {"question": "1+1"})) as episode:
        ...
        await episode.finish(1.0)
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from wingbeat.client.episode import Episode
from wingbeat.client.heartbeats import HeartbeatThread
from wingbeat.client.pool_reports import PoolReports
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import RequestError
from wingbeat.core.ports import MeasuredPool, ResourcePool
from wingbeat.core.protocol import (
    BeginReply,
    BeginRequest,
    DecisionRequest,
    DrainRequest,
    EvaluationReply,
    EvaluationRequest,
    GroupModel,
    Lease,
    LeaseReply,
    LeaseRequest,
    MixingReply,
    MixingRequest,
    PolicyReply,
    RemovedSourceReply,
    StatusReply,
    TaskModel,
    TaskSourceReply,
    TaskSourceRequest,
    TransactionReply,
    source_fault,
)
from wingbeat.core.protocol_deployment import DeploymentReply, DeploymentRequest
from wingbeat.core.protocol_resources import ResourceServers
from wingbeat.core.protocol_variants import ReleaseReply, ReleaseRequest, VariantsReply, VariantsRequest
from wingbeat.core.types import Group, Split, Task

M = TypeVar("M", bound=BaseModel)

_LONG_POLL_EXTRA_S = 30.0
"""The server answers a waiting call after at most 30 s; the time-out comes on top of that."""

_RELEASE_RETRY = RetryPolicy(budget_s=1.0)
"""A lease that is not given back lapses."""
_POLICIES = TypeAdapter(list[PolicyReply])


class BeginOptions(TypedDict, total=False):
    """How an episode begins: under a ``lease`` that the server dealt out, or with a ``task`` of one's own."""

    lease: Lease
    task: Task
    group: Group
    """Episodes of one task that share a baseline; all members name the same id and size."""
    split: Split
    """``Split.EVAL`` measures only."""
    policies: Sequence[str]
    """``"solver"`` follows the live weights, ``"solver@12"`` pins a version (eval only); unset: all."""
    label: str
    code: str
    """Digest of the agent's code; with ``label`` it names the agent's version.  Under a lease, that of the lease."""
    idle_timeout_s: float
    tentative_s: float
    """On trial, as one server of several: unless ``Episode.confirm`` comes within so many seconds, it lapses."""


class AgentVersion(TypedDict, total=False):
    """Which version of an agent asks for work."""

    label: str
    code: str
    """Hexadecimal digest of its files (:attr:`Agent.code`)."""
    instance: str
    """Tells several runners of one client apart."""


class LeaseOptions(AgentVersion, total=False):
    """What work is asked for, and how long; the defaults are those of :meth:`AsyncSwarm.lease`."""

    splits: Sequence[Split]
    sources: Sequence[str] | None
    wait_s: float
    patient: bool


class AsyncSwarm:
    """A server and this client's connections to it; use it on one event loop.

    ``url`` is the server's address; the ``/v1`` of a model-call address is left off.
    ``timeout_s`` bounds one request, ``retry_budget_s`` the tries at one call (None: forever).  An
    episode's finish has its own ``finish_budget_s``, by default None: it is retried until acknowledged.
    ``resources`` is where ``episode.lease(spec)`` takes tools and sandboxes from; the caller closes it.
    ``ca`` is a PEM file with the certificates that vouch for an ``https`` server (None: the file that
    ``WINGBEAT_CA_FILE`` names, else those that the system trusts).
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8321",
        key: str | None = None,
        *,
        timeout_s: float = 60.0,
        retry_budget_s: float | None = 120.0,
        finish_budget_s: float | None = None,
        resources: ResourcePool | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self.resources = resources
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client_id = own_client_id()
        self._retry = RetryPolicy(budget_s=retry_budget_s)
        self._finish_retry = RetryPolicy(budget_s=finish_budget_s)
        self._transport = Transport(
            self.url, key=key, timeout_s=timeout_s, retry=self._retry, client_id=self.client_id, ca=ca
        )
        self._heartbeats = HeartbeatThread(self.url, client_id=self.client_id, ca=ca)
        self._reports: PoolReports | None = None
        if isinstance(resources, MeasuredPool):
            self._reports = PoolReports(resources, self._transport, client_id=self.client_id)
        self._long_timeout_s = timeout_s + _LONG_POLL_EXTRA_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End connections and heartbeats; twice is harmless.  Running episodes are not aborted."""
        await asyncio.to_thread(self._heartbeats.close)
        if self._reports is not None:
            await self._reports.close()
        await self._transport.close()

    async def begin(self, **options: Unpack[BeginOptions]) -> Episode:
        """Begin an episode that the caller ends; :meth:`episode` is safer.

        Waits while admission is full, up to the retry budget.  Sent again after a failed connection
        under the same idempotency key, so that at most one episode begins.  On trial (``tentative_s``) it neither
        waits nor tries again.
        """
        body = _begin_request(options, client_id=self.client_id)
        retry = None if body.tentative_s is None else RetryPolicy(budget_s=0)
        call = Call("POST", "/api/episodes", body=body, timeout_s=self._long_timeout_s, retry=retry)
        reply = await self._transport.send(call, BeginReply)
        if self._reports is not None:
            self._reports.start()
        return Episode(
            reply,
            transport=self._transport,
            heartbeats=self._heartbeats,
            finish_retry=self._finish_retry,
            resources=self.resources,
        )

    @asynccontextmanager
    async def episode(self, **options: Unpack[BeginOptions]) -> AsyncGenerator[Episode]:
        """An episode for the block; leaving it without ``finish`` aborts the episode."""
        async with await self.begin(**options) as episode:
            yield episode

    async def lease(
        self,
        max_leases: int = 1,
        *,
        splits: Sequence[Split] = (Split.TRAIN, Split.EVAL),
        sources: Sequence[str] | None = None,
        wait_s: float = 30.0,
        patient: bool = False,
        **version: Unpack[AgentVersion],
    ) -> LeaseReply:
        """Ask the server what to run next; waits up to ``wait_s`` for work.

        ``sources`` are the task sources that this client can run (None: all).  ``patient`` asks until
        there is an answer, however long the server is away.  ``label`` and ``code`` name the version of the agent:
        a group is dealt to one version only, unless the server mixes them.
        """
        body = checked(
            LeaseRequest,
            max_leases=max_leases,
            splits=list(splits),
            wait_s=wait_s,
            client_id=self.client_id,
            sources=None if sources is None else list(sources),
            idempotency_key=uuid.uuid4().hex,  # of all tries of this call: a lost answer must not cost its slots
            **version,
        )
        retry = RetryPolicy(budget_s=None) if patient else self._retry
        call = Call("POST", "/api/tasks/lease", body=body, timeout_s=self._long_timeout_s, retry=retry)
        return await self._transport.send(call, LeaseReply)

    async def release(
        self, leases: Iterable[Lease] = (), *, leaving: bool = False, **version: Unpack[AgentVersion]
    ) -> int:
        """Give back leases under which nothing was begun; returns how many the server still held.

        ``leaving`` also says that this version of the agent (of ``instance``, else of this client) asks no more, so
        that its groups need not wait for it.
        """
        held = [lease.lease_id for lease in leases]
        body = checked(ReleaseRequest, lease_ids=held, client_id=self.client_id, leaving=leaving, **version)
        call = Call("POST", "/api/tasks/release", body=body, timeout_s=2.0, retry=_RELEASE_RETRY)
        return (await self._transport.send(call, ReleaseReply)).released

    async def variants(self) -> VariantsReply:
        """The versions of agents at work, and their labels' shares of the training groups."""
        return await self._transport.send(Call("GET", "/api/variants"), VariantsReply)

    async def set_weights(self, weights: Mapping[str, float]) -> VariantsReply:
        """Deal the training groups to labels by these shares from now on; ``{}`` deals to whoever asks."""
        call = Call("PUT", "/api/variants", body=checked(VariantsRequest, weights=dict(weights)))
        return await self._transport.send(call, VariantsReply)

    async def put_tasks(
        self, source: str, tasks: Iterable[Task], *, split: Split = Split.TRAIN, ratio: float | None = None
    ) -> TaskSourceReply:
        """Add (or replace) the tasks of a source that the server deals out to its clients.

        ``ratio`` is the share of a new training source where the server mixes by ratios; the others
        shrink in proportion.
        """
        models = [_task_model(task) for task in tasks]
        foreign = next((task.source for task in models if task.source != source), None)
        if foreign is not None:
            raise RequestError(f"expected tasks of source {source!r}, got one of {foreign!r}", param="tasks")
        body = checked(TaskSourceRequest, split=split, tasks=models, ratio=ratio)
        call = Call("PUT", _source_path(source), body=body)
        return await self._transport.send(call, TaskSourceReply)

    async def remove_tasks(self, source: str) -> RemovedSourceReply:
        """Take a source out: no new groups of it begin, those that run go on to their end."""
        # not repeated after a lost answer, since the second time there would be no such source
        call = Call("DELETE", _source_path(source), repeatable=False)
        return await self._transport.send(call, RemovedSourceReply)

    async def mixing(self) -> MixingReply:
        """How the task sources are mixed, and where each stands."""
        return await self._transport.send(Call("GET", "/api/mixing"), MixingReply)

    async def set_mixing(self, ratios: Mapping[str, float]) -> MixingReply:
        """Mix the training sources by these shares from now on; ``{}`` mixes by their number of tasks."""
        call = Call("PUT", "/api/mixing", body=checked(MixingRequest, ratios=dict(ratios)))
        return await self._transport.send(call, MixingReply)

    async def status(self) -> StatusReply:
        """Where the run stands and what it waits for."""
        return await self._transport.send(Call("GET", "/api/status"), StatusReply)

    async def policies(self) -> list[PolicyReply]:
        """The policies and the versions being served."""
        data = await self._transport.send_unread(Call("GET", "/api/policies"))
        return _POLICIES.validate_json(data, extra="ignore")

    async def start_evaluation(self, request: EvaluationRequest) -> EvaluationReply:
        """Begin an evaluation; its episodes are leased like all others.

        Not repeated after a lost answer, since that could start it twice.
        """
        call = Call("POST", "/api/evaluations", body=request, repeatable=False)
        return await self._transport.send(call, EvaluationReply)

    async def evaluation(self, evaluation_id: str) -> EvaluationReply:
        """How far an evaluation is."""
        return await self._transport.send(Call("GET", f"/api/evaluations/{evaluation_id}"), EvaluationReply)

    async def evaluate(
        self,
        request: EvaluationRequest | None = None,
        *,
        poll_s: float = 1.0,
        on_progress: Callable[[EvaluationReply], None] | None = None,
    ) -> EvaluationReply:
        """Run an evaluation to its end and return its scores; some client must be running its episodes."""
        reply = await self.start_evaluation(request or EvaluationRequest())
        while reply.state != "done":
            if on_progress is not None:
                on_progress(reply)
            await asyncio.sleep(poll_s)
            reply = await self.evaluation(reply.evaluation_id)
        return reply

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The run's events from now on, until the server ends the stream."""
        async for line in self._transport.stream_lines(Call("GET", "/api/events")):
            if line.startswith(b"data:"):
                yield orjson.loads(line[5:])

    async def decide(self, transaction_id: str, *, commit: bool, budget_s: float | None = None) -> TransactionReply:
        """Settle a transaction on this server: the second phase of ``Episode.prepare``.

        Sent until it is answered, or for ``budget_s``.  Raises NotFoundError for a commit of what is not prepared
        here, ConflictError against an earlier decision.
        """
        body = DecisionRequest(decision="commit" if commit else "abort")
        call = Call("POST", f"/api/transactions/{transaction_id}", body=body, retry=RetryPolicy(budget_s=budget_s))
        return await self._transport.send(call, TransactionReply)

    async def transaction(self, transaction_id: str) -> TransactionReply:
        """Where a transaction stands on this server."""
        return await self._transport.send(Call("GET", f"/api/transactions/{transaction_id}"), TransactionReply)

    async def resource_servers(self) -> ResourceServers:
        """The resources servers that report to this server, the least busy first."""
        return await self._transport.send(Call("GET", "/api/resources/servers"), ResourceServers)

    async def deployment(self) -> DeploymentReply:
        """How many engines the server's supervisor is to run, and which are connected."""
        return await self._transport.send(Call("GET", "/api/deployment"), DeploymentReply)

    async def scale(self, *, engines: int) -> DeploymentReply:
        """Have so many engines from now on: more are started, those that are too many drain and end."""
        call = Call("PUT", "/api/deployment", body=checked(DeploymentRequest, engines=engines))
        return await self._transport.send(call, DeploymentReply)

    async def drain(self, engine: str, *, drain_s: float) -> None:
        """Have an engine leave: it takes no more work, ends what it can within ``drain_s``, and hands the rest over."""
        body = checked(DrainRequest, drain_s=drain_s)
        await self._transport.send_unread(Call("POST", f"/api/engines/{quote(engine, safe='')}/drain", body=body))

    async def stop(self) -> None:
        """Ask the server to end the run."""
        await self._transport.send_unread(Call("POST", "/api/stop"))


def own_client_id() -> str:
    """Says where this client runs, and is no other's."""
    return f"{socket.gethostname()[:150]}-{os.getpid()}-{uuid.uuid4().hex[:4]}"


def checked(model: type[M], **fields: Any) -> M:
    """A wire model, with RequestError in place of pydantic's report."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where}: {first['msg']} (got {first['input']!r})", param=where) from error


def check_work(lease: Lease | None, task: Task | None) -> None:
    """Raises RequestError unless it is one of them that an episode begins with."""
    if (lease is None) == (task is None):
        got = "both" if lease is not None else "neither"
        raise RequestError(f"expected a lease or a task to begin an episode with, got {got}", param="task")


def _begin_request(options: BeginOptions, *, client_id: str) -> BeginRequest:
    lease, task, group = options.get("lease"), options.get("task"), options.get("group")
    check_work(lease, task)
    policies = options.get("policies")
    return checked(
        BeginRequest,
        idempotency_key=uuid.uuid4().hex,
        lease_id=None if lease is None else lease.lease_id,
        task=None if task is None else _task_model(task),
        group=None if group is None else GroupModel(id=group.id, size=group.size),
        split=options.get("split", Split.TRAIN if lease is None else lease.split),
        policies=None if policies is None else list(policies),
        label=options.get("label", ""),
        code=options.get("code", ""),
        client_id=client_id,
        heartbeats=True,
        idle_timeout_s=options.get("idle_timeout_s"),
        tentative_s=options.get("tentative_s"),
    )


def _source_path(source: str) -> str:
    """Raises RequestError for a name that cannot stand in a path."""
    if fault := source_fault(source):
        raise RequestError(fault, param="source")
    return f"/api/tasks/{quote(source, safe='')}"


def _task_model(task: Task) -> TaskModel:
    try:
        json.dumps(task.payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"task {task.id!r}: expected a payload of JSON data, got {error}", param="payload"
        ) from error
    return checked(TaskModel, source=task.source, id=task.id, payload=task.payload)
