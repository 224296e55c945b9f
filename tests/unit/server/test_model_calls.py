"""Model calls over real sockets: keys, errors, retries, hang-ups, and which replies count as delivered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.core.worker_protocol import Abort, Generate
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.replays import ReplayBook
from wingbeat.server.calls.routes import ModelCalls
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.keys.ring import digest
from wingbeat.tracking.graph import EpisodeGraph

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

KEY = "wb-ep-key"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
RETRY = {"x-stainless-retry-count": "1"}
PATIENCE_S = 10.0


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, without the end mark."""
        pieces = [part.partition(b"data: ")[2] for part in self.body.split(b"\n\n") if part]
        return [json.loads(piece) for piece in pieces if piece != b"[DONE]"]


class Caller:
    """One connection that can be dropped at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: here", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def reply(self) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            status, headers = await self.head()
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([piece async for piece in self._chunks()])
            else:
                body = await self._reader.readexactly(int(headers["content-length"]))
        return Reply(status, headers, body)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in raw[1:] if line)
        return int(raw[0].split()[1]), headers

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(text)

    async def hang_up(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@dataclass
class Site:
    """A desk behind a real server, with one open episode and one engine."""

    desk: Any
    engine: Any
    url: tuple[str, int]
    episode: OpenEpisode
    callers: list[Caller] = field(default_factory=list)

    async def caller(self) -> Caller:
        caller = Caller(*await asyncio.open_connection(*self.url))
        self.callers.append(caller)
        return caller

    async def ask(
        self, path: str = CHAT, *, headers: Mapping[str, str] | None = None, raw: bytes | None = None, **fields: Any
    ) -> Caller:
        """Send a request; what it is answered comes later."""
        body = {"model": "solver", "messages": HI, **fields}
        caller = await self.caller()
        own = {"authorization": f"Bearer {KEY}"} if headers is None or "x-api-key" not in headers else {}
        data = json.dumps(body).encode() if raw is None else raw
        caller.send("POST", path, data, {**own, **(headers or {})})
        return caller

    async def call(self, text: str = "yes<|im_end|>", path: str = CHAT, **more: Any) -> Reply:
        """A request that the engine answers at once."""
        before = len(self.requests)
        caller = await self.ask(path, **more)
        await self.until(lambda: len(self.requests) > before, "a generation to begin")
        self.say(text)
        return await caller.reply()

    @property
    def requests(self) -> list[Generate]:
        return self.engine.of(Generate)

    def say(self, text: str, *, number: int = -1, finish: FinishReason | None = FinishReason.STOP) -> None:
        """The engine's answer to a request, token by token where it streams."""
        sent, ids = self.requests[number], self.desk.solver.template.encode(text)
        pieces = [[i] for i in ids] if sent.stream else [ids]
        for count, piece in enumerate(pieces, start=1):
            self.engine.say(sent.request_id, *piece, finish=finish if count == len(pieces) else None)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what the server knows has no event
                await asyncio.sleep(0.001)
        assert condition(), what

    async def alone(self) -> None:
        """Until the server knows that nobody waits for anything any more."""
        await self.until(lambda: all(run.is_orphan or run.delivered for run in self.episode.seen.order), "hang-ups")

    async def idle(self) -> None:
        await self.until(lambda: not self.episode.calls, "calls to end")

    @property
    def superseded(self) -> dict[str, str]:
        """As the episode's end would find it."""
        graph = self.episode.graph
        for turn in graph.turns:
            mark = graph.mark_undelivered if turn.turn_id in self.episode.undelivered else graph.mark_delivered
            mark(turn.turn_id)
            if turn.turn_id in self.episode.resampled:
                graph.mark_resampled(turn.turn_id)
        return graph.superseded()


async def listen(app: Any) -> asyncio.Server:
    """Uvicorn's own protocol on a free port; the whole of its server takes 0.2 s to stop."""
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="warning", access_log=False)
    config.load()
    state, kind = ServerState(), config.http_protocol_class
    make = partial(kind, config=config, server_state=state, app_state={})  # type: ignore[arg-type]
    return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)


async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
    """What is behind the model calls."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def open_site(open_desk: Any, join_engine: Any) -> AsyncIterator[Callable[..., Any]]:
    """Opens a site; ``grace_s`` is how long a call outlives its caller."""
    servers: list[asyncio.Server] = []
    sites: list[Site] = []

    async def build(*, grace_s: float = 60.0, context: int = 200, **more: Any) -> Site:
        server_config = {"retry_grace_s": grace_s, "max_body_bytes": 100_000, **more}
        desk = open_desk(server=server_config, policies={"solver": {"context_tokens": context}})
        engine = join_engine(desk.engines)
        engine.serve()
        group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        episode = OpenEpisode("ep", 1, group, {"solver": None}, "", digest(KEY), 100.0, 0.0, 0.0, EpisodeGraph("ep"))
        desk.registry.add(episode)
        servers.append(await listen(ModelCalls(desk, elsewhere)))
        sites.append(Site(desk, engine, servers[-1].sockets[0].getsockname()[:2], episode))
        return sites[-1]

    yield build
    for site in sites:
        for caller in site.callers:
            await caller.hang_up()
    for server in servers:
        server.close()


@pytest.fixture
async def site(open_site: Any) -> Site:
    return await open_site()


# --- plain calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, {"authorization": f"Bearer {KEY}"}),
        (CHAT, {"x-api-key": KEY, "anthropic-version": "2023-06-01"}),
        (CHAT, {"authorization": "Bearer a-stray-one", "x-api-key": KEY}),
        (f"/s/{KEY}{CHAT}", {"authorization": "Bearer none"}),
    ],
)
async def test_the_key_travels_in_a_header_or_in_the_path(site: Site, path: str, headers: dict[str, str]) -> None:
    reply = await site.call(path=path, headers=headers)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json["choices"][0]["message"]["content"] == "yes"
    assert reply.headers["x-wingbeat-temperature"] == "1"
    assert site.superseded == {} and not site.episode.undelivered


async def test_every_dialect_answers_and_refuses_in_its_own_shape(site: Site) -> None:
    paths = {
        CHAT: {"messages": HI},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": HI, "max_tokens": 9},
    }
    for path, fields in paths.items():
        body = json.dumps({"model": "solver", **fields}).encode()
        assert (await site.call(path=path, raw=body)).status == 200
        refused = await (await site.ask(path, raw=b'{"model": "solver"}')).reply()
        foreign = await (await site.ask(path, headers={"x-api-key": "no"})).reply()
        wrong_method = await site.caller()
        wrong_method.send("GET", path, b"", {"x-api-key": KEY})
        assert (refused.status, foreign.status, (await wrong_method.reply()).status) == (400, 401, 405)
        for reply in (refused, foreign):
            assert reply.json.get("type") == ("error" if path == "/v1/messages" else None)
    assert site.episode.graph.num_turns == 4


async def test_tokens_can_be_counted_without_sampling_any(site: Site) -> None:
    raw = json.dumps({"model": "solver", "messages": HI}).encode()
    reply = await (await site.ask("/v1/messages/count_tokens", raw=raw)).reply()
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert reply.json == {"input_tokens": len(site.desk.solver.template.encode(prompt))}
    assert not site.requests


@pytest.mark.parametrize("prefix", ["", f"/s/{KEY}"])
async def test_the_models_are_the_episodes_policies(site: Site, prefix: str) -> None:
    found = []
    for path in ("/v1/models", "/v1/models/solver:me", "/v1/models/gpt"):
        caller = await site.caller()
        caller.send("GET", prefix + path, b"", {} if prefix else {"authorization": f"Bearer {KEY}"})
        found.append(await caller.reply())
    listed, one, none = found
    assert [model["id"] for model in listed.json["data"]] == ["solver"]
    assert (one.json["id"], none.status) == ("solver:me", 404)


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b'{"model":', 400, "invalid_request"),
        (b"", 400, "invalid_request"),
        (b'{"model": "solver", "messages": [{"role": "user", "content": "\xff"}]}', 400, "invalid_request"),
        (b'{"model": "solver", "messages": [{"role": "wizard", "content": "a"}]}', 400, "invalid_request"),
        (b'{"model": "solver", "messages": []}', 400, "invalid_request"),
        (b'{"model": "solver", "messages": [{"role": "user", "content": "' + b"a" * 90_000 + b'"}]}', 400, None),
        (b" " * 100_001, 413, "payload_too_large"),
        (b"[" * 90_000, 400, "invalid_request"),
        (b'{"model": "solver", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, None),
    ],
    ids=["cut", "empty", "utf-8", "role", "none", "long", "large", "deep", "image"],
)
async def test_bad_input_is_a_defined_answer(site: Site, raw: bytes, status: int, code: str | None) -> None:
    reply = await (await site.ask(raw=raw)).reply()
    assert reply.status == status
    assert code is None or reply.json["error"]["code"] == code
    assert reply.headers["x-should-retry"] == "false"
    assert (await site.call()).status == 200


async def test_no_answer_repeats_the_key_of_the_path(site: Site) -> None:
    for method, path in (("GET", CHAT), ("POST", "/v1/models"), ("PUT", "/v1/messages")):
        caller = await site.caller()
        caller.send(method, f"/s/{KEY}{path}", b"", {})
        reply = await caller.reply()
        assert (reply.status, reply.json["error"]["type"]) == (405, "invalid_request_error")
        assert KEY.encode() not in reply.body and f"/s/...{path}".encode() in reply.body


async def test_everything_else_is_served_behind(site: Site) -> None:
    for path in ("/healthz", "/v1/embeddings", f"/s/{KEY}/v1/embeddings"):
        caller = await site.caller()
        caller.send("GET", path, b"", {})
        assert (await caller.head())[0] == 204


async def test_a_thousand_turns_at_once(site: Site) -> None:
    callers = [await site.ask() for _ in range(1000)]
    await site.until(lambda: len(site.requests) == 1000, "all to reach the engine")
    for number in range(1000):
        site.say(f"{number}<|im_end|>", number=number)
    replies = [await caller.reply() for caller in callers]
    assert {reply.status for reply in replies} == {200}
    assert sorted(int(reply.json["choices"][0]["message"]["content"]) for reply in replies) == list(range(1000))
    assert len({reply.json["id"] for reply in replies}) == 1000
    await site.idle()
    assert site.desk.engines.in_flight == 0 and not site.episode.undelivered


async def test_an_episode_that_ends_answers_its_running_calls(site: Site) -> None:
    whole, stream = await site.ask(), await site.ask(stream=True)
    await site.until(lambda: len(site.requests) == 2, "both to begin")
    site.say("a", finish=None)
    await stream.until(b'"content":"a"')
    site.episode.become(EpisodeState.ABORTED)
    for task in tuple(site.episode.calls):
        task.cancel()
    reply = await whole.reply()
    assert (reply.status, reply.json["error"]["code"]) == (409, "episode_closed")
    assert reply.headers["x-should-retry"] == "false"
    await stream.until(b"episode_closed")
    assert site.episode.graph.num_turns == 0


# --- retries ---------------------------------------------------------------------------------------


async def test_a_retry_of_an_answered_call_gets_the_very_same_bytes(site: Site) -> None:
    first = await site.call(logprobs=True)
    again = await (await site.ask(logprobs=True, headers=RETRY)).reply()
    assert (again.status, again.body) == (200, first.body)
    assert again.headers["x-wingbeat-temperature"] == "1"
    assert len(site.requests) == 1 and site.episode.graph.num_turns == 1
    assert b"wingbeat_replays_total 1.0" in site.desk.metrics.render()


async def test_an_equal_body_without_a_mark_is_a_sample_of_its_own(site: Site) -> None:
    first = await site.call("a<|im_end|>")
    second = await site.call("b<|im_end|>", headers={"x-stainless-retry-count": "0"})
    assert first.json["id"] != second.json["id"] and site.episode.graph.num_turns == 2
    assert site.superseded == {}


async def test_a_retry_of_a_body_that_never_came_is_sampled(site: Site) -> None:
    assert (await site.call(headers=RETRY)).status == 200
    assert site.superseded == {}


async def test_a_retry_joins_the_call_that_its_caller_left(site: Site) -> None:
    first = await site.ask()
    await site.until(lambda: site.requests, "the call to begin")
    await first.hang_up()
    await site.alone()
    again = await site.ask(headers=RETRY)
    await site.until(lambda: not next(iter(site.episode.seen.order)).is_orphan, "the retry to join")
    site.say("yes<|im_end|>")
    assert (await again.reply()).json["choices"][0]["message"]["content"] == "yes"
    assert len(site.requests) == 1 and not site.engine.of(Abort)
    assert site.superseded == {}


async def test_what_ended_meanwhile_is_undelivered_until_a_retry_fetches_it(site: Site) -> None:
    first = await site.ask()
    await site.until(lambda: site.requests, "the call to begin")
    await first.hang_up()
    await site.alone()
    site.say("yes<|im_end|>")
    await site.idle()
    (turn,) = site.episode.graph.turns
    assert site.superseded == {turn.turn_id: "undelivered"}
    again = await (await site.ask(headers=RETRY)).reply()
    assert again.json["id"] == turn.turn_id
    assert site.superseded == {} and site.episode.graph.num_turns == 1


async def test_without_a_retry_a_left_call_is_aborted(open_site: Any) -> None:
    site = await open_site(grace_s=0.01)
    first = await site.ask()
    await site.until(lambda: site.requests, "the call to begin")
    await first.hang_up()
    await site.until(lambda: site.engine.of(Abort), "the abort")
    await site.idle()
    assert site.desk.engines.in_flight == 0 and site.episode.graph.num_turns == 0
    assert (await site.call(headers=RETRY)).status == 200
    assert site.superseded == {}


async def test_of_several_equal_calls_a_retry_belongs_to_the_one_that_was_left(site: Site) -> None:
    callers = [await site.ask() for _ in range(3)]
    await site.until(lambda: len(site.requests) == 3, "all to begin")
    order = list(site.episode.seen.order)
    await callers[1].hang_up()
    await site.until(lambda: any(run.is_orphan for run in order), "the hang-up")
    left = next(number for number, run in enumerate(order) if run.is_orphan)
    again = await site.ask(headers=RETRY)
    await site.until(lambda: not order[left].is_orphan, "the retry to join")
    for number in range(3):
        site.say(f"{number}<|im_end|>", number=number)
    assert (await again.reply()).json["choices"][0]["message"]["content"] == str(left)
    assert site.episode.graph.num_turns == 3
    for caller in (callers[0], callers[2]):
        assert (await caller.reply()).status == 200
    assert site.superseded == {}


async def test_of_two_equal_calls_the_one_that_failed_is_sampled_again(site: Site) -> None:
    answered = await site.call("a<|im_end|>")
    failed = await site.ask()
    await site.until(lambda: len(site.requests) == 2, "the second to begin")
    site.say("", finish=None)
    site.engine.say(site.requests[-1].request_id, finish=FinishReason.ERROR, error="out of memory")
    assert (await failed.reply()).status == 503
    again = await site.call("b<|im_end|>", headers=RETRY)
    assert again.json["id"] != answered.json["id"] and again.json["choices"][0]["message"]["content"] == "b"
    third = await (await site.ask(headers=RETRY)).reply()
    assert third.body == again.body
    assert site.superseded == {} and site.episode.graph.num_turns == 2


async def test_an_idempotency_key_is_for_one_body(site: Site) -> None:
    key = {"idempotency-key": "one"}
    first = await site.call(headers=key)
    again = await (await site.ask(headers=key)).reply()
    assert again.body == first.body and len(site.requests) == 1
    other = await (await site.ask(headers=key, seed=3)).reply()
    assert (other.status, other.json["error"]["code"]) == (409, "idempotency_conflict")
    assert (await site.call(headers={"idempotency-key": "two"})).json["id"] != first.json["id"]


async def test_a_retry_of_a_stream_replays_the_stream(site: Site) -> None:
    first = await site.call("hey<|im_end|>", stream=True, headers={"idempotency-key": "k"})
    again = await (await site.ask(stream=True, headers={"idempotency-key": "k"})).reply()
    assert again.body == first.body and again.body.endswith(b"data: [DONE]\n\n")
    assert again.headers["content-type"].startswith("text/event-stream")
    assert len(site.requests) == 1


async def test_a_second_reader_of_a_running_stream_gets_all_of_it(site: Site) -> None:
    key = {"idempotency-key": "k"}
    first = await site.ask(stream=True, headers=key)
    await site.until(lambda: site.requests, "the call to begin")
    site.say("he", finish=None)
    await first.until(b'"content":"e"')
    second = await site.ask(stream=True, headers=key)
    await second.until(b'"content":"e"')
    await first.hang_up()
    site.say("y<|im_end|>")
    assert b'"content":"y"' in await second.until(b"[DONE]")
    await site.idle()
    assert not site.engine.of(Abort) and site.superseded == {}


async def test_an_error_is_no_answer_to_repeat(site: Site) -> None:
    failed = await site.ask()
    await site.until(lambda: site.requests, "the call to begin")
    site.say("a", finish=FinishReason.ERROR)
    reply = await failed.reply()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert "x-should-retry" not in reply.headers
    assert (await site.call(headers=RETRY)).status == 200
    assert len(site.requests) == 2


async def test_where_the_answer_is_gone_the_retry_supersedes_the_earlier_turn(site: Site) -> None:
    site.desk.registry.replays = ReplayBook(max_answers=1)
    first = await site.call("a<|im_end|>")
    await site.call("b<|im_end|>", messages=[{"role": "user", "content": "other"}])
    again = await site.call("c<|im_end|>", headers=RETRY)
    assert again.json["id"] != first.json["id"]
    assert site.superseded == {first.json["id"]: "resampled"}


async def test_long_requests_are_prepared_in_a_thread_and_still_counted_once(open_site: Any) -> None:
    site = await open_site(context=80_000)
    long = [{"role": "user", "content": "x" * 50_000}]
    headers = {"idempotency-key": "long"}
    twins = [await site.ask(messages=long, headers=headers) for _ in range(3)]
    await site.until(lambda: site.requests, "the call to begin")
    site.say("yes<|im_end|>")
    bodies = {(await twin.reply()).body for twin in twins}
    assert len(bodies) == 1 and len(site.requests) == 1
    again = [*long, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    await site.call(messages=again)
    assert [turn.parent_id is None for turn in site.episode.graph.turns] == [True, False]


# --- streams ---------------------------------------------------------------------------------------


async def test_a_stream_arrives_token_by_token(site: Site) -> None:
    caller = await site.ask(stream=True, stream_options={"include_usage": True})
    await site.until(lambda: site.requests, "the call to begin")
    for letter in "hey":
        site.say(letter, finish=None)
        await caller.until(f'"content":"{letter}"'.encode())
    site.say("<|im_end|>")
    end = await caller.until(b"[DONE]")
    assert b'"finish_reason":"stop"' in end and b'"usage"' in end
    await site.idle()
    assert site.superseded == {}


async def test_a_caller_that_leaves_while_its_turn_waits_to_be_kept_leaves_an_abandoned_one(site: Site) -> None:
    caller = await site.ask(stream=True)
    await site.until(lambda: site.requests, "the call to begin")
    async with site.episode.graph_lock:  # as a long request of the same episode holds it
        site.say("no<|im_end|>")
        await caller.until(b'"content":"o"')
        await site.until(lambda: not site.desk.engines.in_flight, "the end of the generation")
        await caller.hang_up()
        await site.until(lambda: next(iter(site.episode.seen.order)).is_orphan, "the hang-up")
        await asyncio.sleep(0)
    await site.idle()
    (turn,) = site.episode.graph.turns
    assert (turn.finish_reason, turn.reply.content) == (FinishReason.ABORT, "no")
    assert site.superseded == {turn.turn_id: "undelivered"}


async def test_a_connection_that_closed_before_anyone_noticed_is_no_delivery(site: Site) -> None:
    closed, told = asyncio.Event(), asyncio.Event()
    body = iter([{"type": "http.request", "body": json.dumps({"model": "solver", "messages": HI}).encode()}])

    async def receive() -> Any:
        if (message := next(body, None)) is not None:
            return message
        if not closed.is_set():
            await told.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        closed.set()  # while the head of the answer leaves

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"x-api-key", KEY.encode())]}
    call = asyncio.create_task(ModelCalls(site.desk, elsewhere)(scope, receive, send))
    await site.until(lambda: site.requests, "the call to begin")
    site.say("yes<|im_end|>")
    await call
    (turn,) = site.episode.graph.turns
    assert site.superseded == {turn.turn_id: "undelivered"}


async def test_a_caller_that_leaves_a_stream_aborts_it_at_once(site: Site) -> None:
    """What it had seen is kept: untrained, unless the agent goes on from it."""
    caller = await site.ask(stream=True)
    await site.until(lambda: site.requests, "the call to begin")
    site.say("no", finish=None)
    await caller.until(b'"content":"o"')
    await caller.hang_up()
    await site.until(lambda: site.engine.of(Abort), "the abort")
    await site.idle()
    (turn,) = site.episode.graph.turns
    assert (turn.finish_reason, turn.reply.content) == (FinishReason.ABORT, "no")
    assert [run.frames for run in site.episode.seen.order] == [[]], "what nobody can ask for is not kept"
    assert site.superseded == {turn.turn_id: "undelivered"}
    messages = [*HI, {"role": "assistant", "content": "no"}, {"role": "user", "content": "go"}]
    await site.call(messages=messages)
    assert site.episode.graph.turns[1].parent_id == turn.turn_id
    assert site.superseded == {}


async def test_leaving_a_stream_after_its_last_event_is_no_abort(site: Site) -> None:
    caller = await site.ask(stream=True)
    await site.until(lambda: site.requests, "the call to begin")
    site.say("no<|im_end|>")
    await caller.until(b'"finish_reason":"stop"')
    await caller.hang_up()
    await site.idle()
    assert [turn.finish_reason for turn in site.episode.graph.turns] == [FinishReason.STOP]
    assert site.superseded == {}


async def test_an_error_before_the_first_token_is_an_ordinary_answer(site: Site) -> None:
    caller = await site.ask(stream=True)
    await site.until(lambda: site.requests, "the call to begin")
    site.engine.say(site.requests[-1].request_id, finish=FinishReason.ERROR, error="out of memory")
    reply = await caller.reply()
    assert reply.status == 503 and "out of memory" in reply.json["error"]["message"]


async def test_an_error_after_it_is_the_last_event(site: Site) -> None:
    caller = await site.ask(stream=True)
    await site.until(lambda: site.requests, "the call to begin")
    site.say("a", finish=None)
    site.engine.say(site.requests[-1].request_id, finish=FinishReason.ERROR, error="out of memory")
    reply = await caller.reply()
    assert reply.status == 200 and reply.events[-1]["error"]["code"] == "unavailable"
    assert b"[DONE]" not in reply.body and b'"stop"' not in reply.body
    (turn,) = site.episode.graph.turns
    assert site.superseded == {turn.turn_id: "undelivered"}


async def test_the_choices_of_a_stream_are_delivered_one_by_one(site: Site) -> None:
    caller = await site.ask(stream=True, n=2)
    await site.until(lambda: len(site.requests) == 2, "both to begin")
    site.say("a<|im_end|>", number=0)
    await caller.until(b'"finish_reason":"stop"')
    site.say("b", number=1, finish=None)
    await caller.until(b'"content":"b"')
    await caller.hang_up()
    await site.idle()
    reasons = {turn.reply.content: turn.finish_reason for turn in site.episode.graph.turns}
    assert reasons == {"a": FinishReason.STOP, "b": FinishReason.ABORT}
    (lost,) = site.superseded
    assert site.episode.graph.turn(lost).reply.content == "b"
