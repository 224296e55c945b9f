"""A small server of the episode contract, in a thread of its own, with faults on order."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from wingbeat.core.protocol import ErrorBody, ErrorReply

Json = dict[str, Any]


@dataclass
class Record:
    """What the server knows of one episode."""

    key: str
    begin: Json
    task: Json
    state: str = "running"
    finish: Json | None = None
    abort: Json | None = None
    num_heartbeats: int = 0


def error(status: int, code: str, message: str = "no", **headers: str) -> web.Response:
    body = ErrorReply(error=ErrorBody(message=message, type="test", code=code)).model_dump_json()
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


@dataclass
class FakeServer:
    """``faults["POST /api/episodes"].append("lose")`` drops the reply of that route's next call, after acting.

    "refuse" hangs up without acting, "garble" answers with what is no HTTP.
    """

    admin_key: str | None = None
    heartbeat_s: float = 5.0
    warning: str = ""
    """In the reply of every finish."""
    port: int = 0
    leases: deque[Json] = field(default_factory=deque)
    stop_when_empty: bool = True
    records: dict[str, Record] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    faults: dict[str, deque[Any]] = field(default_factory=dict)
    evaluations: list[Json] = field(default_factory=list)
    tasks: dict[str, Json] = field(default_factory=dict)
    asked: list[Json] = field(default_factory=list)
    """Bodies of lease calls."""
    released: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of every call, their names in lower case."""
    ratios: dict[str, float] = field(default_factory=dict)
    max_running: int = 0
    stopped: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _by_idempotency_key: dict[str, str] = field(default_factory=dict)
    _reissued: str = ""

    # --- control by tests

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @staticmethod
    def answer(body: Json, status: int = 200) -> web.Response:
        """For :meth:`order_fault`."""
        return web.json_response(body, status=status)

    def order_fault(self, route: str, *faults: Any) -> None:
        self.faults.setdefault(route, deque()).extend(faults)

    def reissue(self, episode_id: str) -> None:
        """The next begin is another attempt of this episode."""
        self._reissued = episode_id

    def add_leases(self, count: int, *, expires_s: float = 60.0, split: str = "train") -> None:
        for _ in range(count):
            number = len(self.records) + len(self.leases)
            self.leases.append(
                {
                    "lease_id": f"lease-{self.calls['leases made']}",
                    "task": {"source": "test", "id": f"task-{number}", "payload": {"number": number}},
                    "group": {"id": f"group-{number}", "size": 1},
                    "split": split,
                    "policies": ["solver"],
                    "expires_s": expires_s,
                }
            )
            self.calls["leases made"] += 1

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Block this thread until the condition holds; it is looked at after every call the server got."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "the server never saw it"

    def in_state(self, state: str) -> list[Record]:
        return [record for record in self.records.values() if record.state == state]

    # --- the contract

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware])
        app.router.add_post("/api/tasks/lease", self._lease)
        app.router.add_post("/api/tasks/release", self._release)
        app.router.add_put("/api/tasks/{source}", self._put_tasks)
        app.router.add_delete("/api/tasks/{source}", self._remove_tasks)
        app.router.add_get("/api/mixing", self._mixing)
        app.router.add_put("/api/mixing", self._mixing)
        app.router.add_post("/api/episodes", self._begin)
        app.router.add_get("/api/episodes/{id}", self._get_episode)
        app.router.add_post("/api/episodes/{id}/{verb}", self._verb)
        app.router.add_get("/api/policies", self._policies)
        app.router.add_get("/api/status", self._status)
        app.router.add_get("/api/events", self._events)
        app.router.add_post("/api/evaluations", self._start_evaluation)
        app.router.add_get("/api/evaluations/{id}", self._evaluation)
        app.router.add_post("/api/stop", self._stop)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        verb = request.match_info.get("verb")
        resource = request.match_info.route.resource
        assert resource is not None
        route = f"{request.method} {resource.canonical}".replace("{verb}", verb or "")
        self.calls[route] += 1
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        waiting = self.faults.get(route)
        fault = waiting.popleft() if waiting else None
        if isinstance(fault, web.Response):
            reply: web.StreamResponse = fault
        elif fault == "garble":
            request.transport.write(b"no HTTP\r\n\r\n")
            request.transport.close()
            reply = web.Response()
        elif fault == "refuse":
            request.transport.close()
            reply = web.Response()
        else:
            reply = await self._authorised(request, handler)
        if fault == "lose":
            request.transport.close()
        with self.changed:
            self.changed.notify_all()
        return reply

    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        record = self.records.get(request.match_info.get("id", ""))
        allowed = {self.admin_key, record.key} if record is not None else {self.admin_key}
        if self.admin_key is not None and token not in allowed:
            return error(401, "invalid_api_key", "expected a key")
        return await handler(request)

    async def _release(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.released.append(body)
        return web.json_response({"released": len(body["lease_ids"])})

    async def _lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        count = min(body["max_leases"], len(self.leases))
        leases = [self.leases.popleft() for _ in range(count)]
        done = not leases and self.stop_when_empty
        return web.json_response({"leases": leases, "stop": done, "reason": "" if leases else "nothing to do"})

    async def _put_tasks(self, request: web.Request) -> web.Response:
        body = await request.json()
        source = request.match_info["source"]
        self.tasks[source] = body
        reply = {"source": source, "split": body["split"], "num_tasks": len(body["tasks"]), "ratio": body["ratio"]}
        return web.json_response(reply)

    async def _remove_tasks(self, request: web.Request) -> web.Response:
        source = request.match_info["source"]
        del self.tasks[source]
        return web.json_response({"source": source, "num_open_groups": 2, "ratios": {}})

    async def _mixing(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            self.ratios = (await request.json())["ratios"]
        return web.json_response({"ratios": self.ratios, "sources": {}})

    async def _begin(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = body["idempotency_key"]
        if self._reissued:
            self._by_idempotency_key[key], self._reissued = self._reissued, ""
        if key not in self._by_idempotency_key:
            episode_id = f"ep-{len(self.records)}"
            self._by_idempotency_key[key] = episode_id
            task = body["task"] or {"source": "test", "id": body["lease_id"], "payload": {}}
            self.records[episode_id] = Record(key=f"key-{episode_id}", begin=body, task=task)
            self.max_running = max(self.max_running, len(self.in_state("running")))
        episode_id = self._by_idempotency_key[key]
        record = self.records[episode_id]
        return web.json_response(
            {
                "episode_id": episode_id,
                "attempt": 0,
                "base_url": f"{self.url}/v1",
                "api_key": record.key,
                "policies": body["policies"] or ["solver", "critic"],
                "heartbeat_s": self.heartbeat_s,
                "task": record.task,
                "group": body["group"] or {"id": "g", "size": 1},
                "split": body["split"],
                "from_a_newer_server": True,
            }
        )

    async def _get_episode(self, request: web.Request) -> web.Response:
        episode_id = request.match_info["id"]
        record = self.records[episode_id]
        return web.json_response(
            {
                "episode_id": episode_id,
                "attempt": 0,
                "state": record.state,
                "task": record.task,
                "group": {"id": "g", "size": 1},
                "split": "train",
                "policies": ["solver"],
                "num_turns": 0,
                "num_sampled_tokens": 0,
                "label": record.begin["label"],
            }
        )

    async def _verb(self, request: web.Request) -> web.Response:
        episode_id, verb = request.match_info["id"], request.match_info["verb"]
        record = self.records.get(episode_id)
        if record is None:
            return error(404, "episode_not_found", f"no episode {episode_id}")
        if verb == "heartbeat":
            if record.state != "running":
                return error(409, "episode_closed", f"episode is {record.state}")
            record.num_heartbeats += 1
            return web.json_response({"episode_id": episode_id, "state": record.state, "heartbeat_s": self.heartbeat_s})
        body = await request.json()
        if verb == "abort":
            record.state, record.abort = "aborted", body
            return web.json_response({"episode_id": episode_id, "state": "aborted"})
        if record.finish is not None and record.finish != body:
            return error(409, "idempotency_conflict", "finished with another body")
        if record.state not in ("running", "finished"):
            return error(409, "episode_closed", f"episode is {record.state}")
        record.state, record.finish = "finished", body
        reply = {"episode_id": episode_id, "attempt": 0, "state": "finished", "num_turns": 1, "num_sampled_tokens": 2}
        return web.json_response({**reply, "warning": self.warning})

    async def _policies(self, request: web.Request) -> web.Response:
        return web.json_response([self._policy()])

    def _policy(self) -> Json:
        return {
            "name": "solver",
            "model": "m",
            "version": 3,
            "context_tokens": 64,
            "trainer": "ready",
            "engines": 1,
            "served_version": 3,
            "served_checksum": None,
            "published_checksum": None,
        }

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "state": "stopping" if self.stopped else "running",
                "blockers": [],
                "policies": [self._policy()],
                "open_episodes": len(self.in_state("running")),
                "groups_in_flight": 0,
                "groups_buffered": 0,
                "train_steps": 3,
                "total_steps": 10,
                "metrics": {"reward/mean": 0.5},
            }
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in (1, 2):
            await response.write(b'data: {"event": "step", "step": %d}\n\n: keep-alive\n\n' % step)
        return response

    def _evaluation_reply(self, index: int) -> Json:
        entry = self.evaluations[index]
        entry["asked"] += 1
        done = entry["asked"] > 2
        return {
            "evaluation_id": f"eval-{index}",
            "policy": entry["body"]["policy"] or "solver",
            "version": 3,
            "state": "done" if done else "running",
            "num_expected": 4,
            "num_finished": 4 if done else entry["asked"],
            "mean_reward": 0.75 if done else None,
            "stderr": 0.25 if done else None,
            "rewards": {"a": [1.0, 1.0], "b": [1.0, 0.0]} if done else {},
        }

    async def _start_evaluation(self, request: web.Request) -> web.Response:
        self.evaluations.append({"body": await request.json(), "asked": 0})
        return web.json_response(self._evaluation_reply(len(self.evaluations) - 1))

    async def _evaluation(self, request: web.Request) -> web.Response:
        return web.json_response(self._evaluation_reply(int(request.match_info["id"].removeprefix("eval-"))))

    async def _stop(self, request: web.Request) -> web.Response:
        self.stopped = True
        return web.json_response({})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()
