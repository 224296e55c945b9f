"""Model calls that last too long, are too many, too fast or too big; over the application itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from wingbeat.core.types import Cause, FinishReason, Split, Task
from wingbeat.core.worker_protocol import Abort, Generate
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.routes import MODELS, ModelCalls
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.keys.ring import digest
from wingbeat.tracking.graph import EpisodeGraph

KEY = "wb-ep-key"
CHAT = "/v1/chat/completions"


class Caller:
    """Calls an ASGI application, as a server would."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def call(
        self,
        path: str = CHAT,
        body: Any = None,
        *,
        raw: bytes | None = None,
        chunked: bool = False,
        key: str = KEY,
        declared: int | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        content = json.dumps({"model": "solver", "messages": [{"role": "user", "content": "hi"}], **(body or {})})
        data = content.encode() if raw is None else raw
        size = len(data) if declared is None else declared
        length = (b"transfer-encoding", b"chunked") if chunked else (b"content-length", str(size).encode())
        scope = {
            "type": "http",
            "method": "GET" if path == MODELS else "POST",
            "path": path,
            "headers": [(b"authorization", f"Bearer {key}".encode()), length],
            "client": ("10.0.0.1", 1),
        }
        pieces = [data[at : at + 50_000] for at in range(0, len(data), 50_000)] or [b""]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], headers, answer if body and body.get("stream") else json.loads(answer)


class Site:
    def __init__(self, desk: Any, join_engine: Any, *, client: str = "shop") -> None:
        self.desk, self.engine = desk, join_engine(desk.engines)
        self.engine.serve()
        group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        self.episode = OpenEpisode(
            "ep", 1, group, {"solver": None}, "", digest(KEY), 1e9, 0.0, 0.0, EpisodeGraph("ep"), client=client
        )
        desk.registry.add(self.episode)
        self.call = Caller(ModelCalls(desk, self._rest)).call

    async def _rest(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("only model calls here")

    async def sent(self, count: int) -> list[Generate]:
        """The engine's requests, once there are so many."""
        async with asyncio.timeout(5):
            while len(found := self.engine.of(Generate)) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return found


@pytest.fixture
def open_site(open_desk: Any, join_engine: Any) -> Callable[..., Site]:
    def build(**limits: Any) -> Site:
        desk = open_desk(limits=limits, policies={"solver": {"context_tokens": 200}}, server={"retry_grace_s": 60})
        return Site(desk, join_engine)

    return build


async def test_a_call_that_lasts_too_long_is_ended_here_and_in_the_engine(open_site: Callable[..., Site]) -> None:
    site = open_site(call_s=0.02)
    status, headers, answer = await site.call()
    assert (status, answer["error"]["code"]) == (504, "call_timeout")
    assert headers["x-should-retry"] == "false" and "limits.call_s = 0.02 s" in answer["error"]["message"]
    (request,) = await site.sent(1)
    assert [abort.request_id for abort in site.engine.of(Abort)] == [request.request_id]
    assert site.episode.call_fault is Cause.CALL_DEADLINE and site.desk.limits.calls.num_held == 0


async def test_a_stream_that_lasts_too_long_ends_with_the_error_and_keeps_its_tokens(
    open_site: Callable[..., Site],
) -> None:
    site = open_site(call_s=0.1)
    running = asyncio.create_task(site.call(body={"stream": True}))
    (request,) = await site.sent(1)
    site.engine.say(request.request_id, *site.desk.solver.template.encode("one two"))
    status, _, answer = await running
    assert status == 200 and b"call_timeout" in answer
    (turn,) = site.episode.graph.turns
    assert turn.finish_reason is FinishReason.ABORT and turn.num_sampled


async def test_calls_in_flight_are_bounded_by_client_and_given_back(open_site: Callable[..., Site]) -> None:
    site = open_site(calls=3)
    running = [asyncio.create_task(site.call()), asyncio.create_task(site.call(body={"n": 2}))]
    first = await site.sent(3)
    status, headers, answer = await site.call()
    assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "1", "limit_reached")
    assert "client 'shop' has 3 of 3 model calls" in answer["error"]["message"]
    for request in first:
        site.engine.say(request.request_id, 5, finish=FinishReason.STOP)
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]
    assert site.desk.limits.calls.num_held == 0 and site.episode.call_fault is None
    status, _, answer = await site.call(body={"n": 4})
    assert status == 400 and "takes 4 model calls" in answer["error"]["message"]  # no wait would help
    failing = asyncio.create_task(site.call())
    last = (await site.sent(4))[-1]
    site.engine.say(last.request_id, finish=FinishReason.ERROR, error="out of memory")
    assert (await failing)[0] == 503
    assert site.episode.call_fault is Cause.MODEL_CALL_FAILED and site.desk.limits.calls.num_held == 0


async def test_bodies_count_while_they_are_read_whether_their_length_is_told_or_not(
    open_site: Callable[..., Site],
) -> None:
    site = open_site(body_bytes=200_000, total_body_bytes=200_000)
    big = b"[" + b" " * 250_000 + b"]"
    for chunked in (False, True):
        status, _, answer = await site.call(raw=big, chunked=chunked)
        assert (status, answer["error"]["code"]) == (413, "payload_too_large"), chunked  # no wait would help
        assert "limits.body_bytes" in answer["error"]["message"]
    status, _, answer = await site.call(raw=b"[" + b" " * 150_000 + b"]")
    assert status == 400 and site.desk.limits.bodies.num_held == 0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How long refusals wait, instead of waiting."""
    seen: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        seen.append(seconds)
        await real(0)

    with monkeypatch.context() as patched:
        patched.setattr("wingbeat.server.calls.routes.asyncio.sleep", sleep)
        yield seen


async def test_keys_are_guessed_slowly_and_lists_of_models_count(
    open_site: Callable[..., Site], pauses: list[float]
) -> None:
    site = open_site(request_burst=2, requests_per_s=4)
    assert [(await site.call(key="guess"))[0] for _ in range(3)] == [401, 401, 429]
    assert [(await site.call(MODELS))[0] for _ in range(3)] == [200, 200, 429]
    assert pauses == [0.25, 0.25]


@pytest.mark.usefixtures("pauses")
async def test_what_is_only_announced_costs_nothing_and_what_comes_in_pieces_costs_as_much(
    open_site: Callable[..., Site],
) -> None:
    site = open_site(request_burst=2, requests_per_s=4, body_bytes=200_000, total_body_bytes=200_000)
    assert (await site.call(declared=10**15))[0] == 413
    assert (await site.call(raw=b"[" + b" " * 150_000 + b"]", chunked=True))[0] == 400  # within the burst, and owed
    assert (await site.call(raw=b"?"))[0] == 429


async def test_calls_too_fast_are_refused_after_a_pause(open_site: Callable[..., Site], pauses: list[float]) -> None:
    site = open_site(request_burst=2, requests_per_s=4)
    assert (await site.call(raw=b"?"))[0] == (await site.call(raw=b"?"))[0] == 400
    status, headers, answer = await site.call(raw=b"?")
    assert (status, headers["retry-after"]) == (429, "1") and "limits.requests_per_s" in answer["error"]["message"]
    assert pauses == [0.25]
