"""What a lease from a resources server hands out: boxes and endpoints with the faces they have anywhere."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from wingbeat.core.errors import PayloadTooLarge, RequestError, WingbeatError
from wingbeat.core.lending_protocol import POLL_S, LentValue, RunAnswer, RunOrder, SendAnswer, SendOrder
from wingbeat.core.protocol import Wire
from wingbeat.resources.backends.endpoint import Endpoint
from wingbeat.resources.backends.endpoint_calls import Answer
from wingbeat.resources.backends.endpoint_http import HttpReply, Message
from wingbeat.resources.backends.endpoint_usage import Usage
from wingbeat.resources.boxes import Finished, check_bytes, check_run
from wingbeat.resources.remote_http import Connection, Unreachable
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Spec
from wingbeat.resources.specs_remote import answer_timeout_s, command_timeout_s

CANCEL_S = 5.0
OVERDUE_S = 60.0
"""Beyond what a call may take there, what its server may take to say that it is over."""
A = TypeVar("A", RunAnswer, SendAnswer)
T = TypeVar("T")


class Line:
    """To one value of one lease: its calls end at once when the lease is lost."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        *,
        lost: asyncio.Future[ResourceLost],
        on_lost: Callable[[ResourceLost], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        """``lost`` is done once the lease is, ``spawn`` begins what nobody waits for."""
        self._connection = connection
        self._path = path
        self._lost = lost
        self._on_lost = on_lost
        self._spawn = spawn

    async def send(self, method: str, path: str, body: Wire | None = None, **more: Any) -> bytes:
        """Raises what the value raised there; ResourceLost where the lease or the server is gone."""
        if self._lost.done():
            raise self._lost.result().with_traceback(None)
        try:
            return await unless_lost(self._lost, self._connection.send(method, self._path + path, body, **more))
        except Unreachable as error:
            fault = ResourceLost(f"the lease is lost with its server: {error.message}")
            self._on_lost(fault)
            raise fault from error
        except (RequestError, PayloadTooLarge, ResourceFailed):
            raise
        except WingbeatError as error:  # keys, limits, a server of another release: not what the caller did in the box
            raise ResourceFailed(error.message) from error

    async def call(self, model: type[A], path: str, order: RunOrder | SendOrder, *, within_s: float) -> A:
        """A call that may take long, to its end; cancelled, it ends there, too.

        Raises ResourceLost where it goes on though it should long be over.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s + OVERDUE_S
        try:
            while loop.time() < until:
                answer = await self._connection.parsed(model, await self.send("POST", path, order), where=path)
                if answer.state == "done":
                    return answer
        except asyncio.CancelledError:
            self._spawn(self.cancel(order.call_id))
            raise
        self._spawn(self.cancel(order.call_id))
        raise ResourceLost(f"a call did not end within {within_s + OVERDUE_S:g} s, nor did its server say why")

    async def cancel(self, call_id: str) -> None:
        await self.send("DELETE", f"/calls/{call_id}", budget_s=CANCEL_S, timeout_s=POLL_S)


async def unless_lost(lost: asyncio.Future[ResourceLost], work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns.  Raises what it raises, and what is lost as soon as it is."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise lost.result().with_traceback(None)
    return task.result()


class RemoteBox:
    """A box on a resources server (:class:`wingbeat.resources.boxes.Box`)."""

    def __init__(self, line: Line, spec: Spec, *, workdir: str) -> None:
        self._line = line
        self._command_timeout_s = command_timeout_s(spec)
        self._workdir = workdir

    @property
    def workdir(self) -> str:
        return self._workdir

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        argv = check_run(command, stdin=stdin, timeout_s=timeout_s, env=env, cwd=cwd)
        order = RunOrder(
            call_id=uuid.uuid4().hex,
            command=command if isinstance(command, str) else tuple(argv),
            stdin=bytes(stdin),
            timeout_s=timeout_s,
            env=None if env is None else dict(env),
            cwd=cwd,
        )
        limit_s = self._command_timeout_s if timeout_s is None else timeout_s
        done = await self._line.call(RunAnswer, "/run", order, within_s=limit_s)
        return Finished(
            exit_code=done.exit_code,
            stdout=done.stdout,
            stderr=done.stderr,
            seconds=done.seconds,
            truncated=done.truncated,
            stopped_by=done.stopped_by,
        )

    async def write(self, path: str, data: bytes) -> None:
        check_bytes("data", data)
        query = {"path": path, "call_id": uuid.uuid4().hex}
        await self._line.send("PUT", "/file", data=data, query=query)

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        return await self._line.send("GET", "/file", query={"path": path, "max_bytes": str(max_bytes)})

    async def list(self, path: str = ".") -> list[str]:
        return json.loads(await self._line.send("GET", "/folder", query={"path": path}))

    async def end_processes(self) -> None:
        await self._line.send("POST", "/end-processes", query={"call_id": uuid.uuid4().hex})


def remote_value(lent: LentValue, line: Line, spec: Spec) -> RemoteBox | Endpoint:
    """What a lease of this spec hands out."""
    if lent.kind == "box":
        return RemoteBox(line, spec, workdir=lent.workdir)

    async def send(message: Message, *, content: Any = None, repeatable: bool | None = None) -> Answer:
        order = SendOrder(
            call_id=uuid.uuid4().hex,
            method=message.method,
            path=message.path,
            body=content,
            headers=dict(message.headers),
            repeatable=repeatable,
        )
        limit_s = 2 * answer_timeout_s(spec)  # an episode that is over there is followed by another
        done = await line.call(SendAnswer, "/send", order, within_s=limit_s)
        reply = HttpReply(done.status, done.headers, done.body, done.url)
        usage = Usage(done.prompt_tokens, done.completion_tokens)
        return Answer(reply, _json_of(done.body), usage, done.cost, done.words)

    return Endpoint(send, model=lent.model)


def _json_of(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
