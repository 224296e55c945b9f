"""A policy of a Wingbeat server as a resource, against a server of the test that keeps to the episode contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import conformance
import pytest
from aiohttp import web

from wingbeat.core.errors import ConfigError, RequestError
from wingbeat.core.protocol import BeginRequest, FinishRequest
from wingbeat.core.types import Split
from wingbeat.resources import Budgets, ModelSpec, ResourceFailed, Resources, Reuse, UnsupportedField
from wingbeat.resources.backends.model import ModelBackend

KEY = "wb-client-secret"


class Server:
    """Episodes and their calls, as a Wingbeat server answers them."""

    def __init__(self) -> None:
        self.begun: list[BeginRequest] = []
        self.open: dict[str, str] = {}
        """Key -> episode."""
        self.finished: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.versions = {7}
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/api/episodes", self.begin),
                web.post("/api/episodes/{id}/finish", self.finish),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return app

    async def begin(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return fault(401, "invalid_api_key", "who are you?")
        assert request.headers["x-wingbeat-protocol"] == "1"
        body = BeginRequest.model_validate_json(await request.read())
        name, _, version = (body.policies or [""])[0].partition("@")
        if name != "judge":
            return fault(404, "model_not_found", f"no policy {name!r} here; this server has judge")
        if version and int(version) not in self.versions:
            return fault(503, "version_gone", f"'judge@{version}' is not held")
        self.begun.append(body)
        number = len(self.begun)
        self.open[f"key-{number}"] = f"episode-{number}"
        return web.json_response(
            {
                "episode_id": f"episode-{number}",
                "attempt": 1,
                "base_url": "http://elsewhere.invalid/v1",
                "api_key": f"key-{number}",
                "policies": body.policies,
                "heartbeat_s": 10,
                "task": {"source": body.task.source if body.task else "", "id": "x"},
                "group": {"id": "g", "size": 1},
                "split": body.split,
            }
        )

    async def finish(self, request: web.Request) -> web.Response:
        assert FinishRequest.model_validate_json(await request.read()) == FinishRequest(rewards=0.0)
        key = request.headers["Authorization"].removeprefix("Bearer ")
        if self.open.pop(key, None) != request.match_info["id"]:
            return fault(409, "episode_closed", "it is over")
        self.finished.append(request.match_info["id"])
        return web.json_response({})

    async def chat(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        if key not in self.open:
            return fault(409, "episode_closed", "it is over")
        body = await request.json()
        self.calls.append((self.open[key], body))
        if body["messages"][0]["content"] == "too long":
            return fault(400, "context_length_exceeded", "shorter, please")
        message = {"role": "assistant", "content": "fine"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


def fault(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": code}}, status=status)


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_KEY", KEY)


def spec_of(server: Server, **more: Any) -> ModelSpec:
    return ModelSpec(**{"url": server.url, "policy": "judge", "key_env": "WINGBEAT_KEY", **more})


async def test_a_lease_is_an_episode_that_trains_nothing() -> None:
    async with serving() as server, Resources(Budgets()) as pool:
        async with pool.lease(spec_of(server, url=f"{server.url}/v1", label="scoring")) as lease:
            reply = await lease.value.chat("is it good?", temperature=0)
            assert (str(reply), reply.usage.total_tokens) == ("fine", 5)
        [begun] = server.begun
        assert begun.split is Split.EVAL and begun.policies == ["judge"] and begun.label == "scoring"
        assert begun.task is not None and begun.task.source == "resource"
        [(episode, body)] = server.calls
        assert (episode, body["model"], body["temperature"]) == ("episode-1", "judge", 0)
        assert server.finished == ["episode-1"] and server.open == {}


async def test_a_version_is_asked_for_by_name_and_one_that_is_gone_is_a_failure() -> None:
    async with serving() as server:
        backend = ModelBackend()
        instance = await backend.start(spec_of(server, version=7), started=lambda handle: None)
        assert server.begun[0].policies == ["judge@7"]
        await instance.close()
        with pytest.raises(ResourceFailed, match=r"'judge@8' is not held.*"):
            await backend.start(spec_of(server, version=8), started=lambda handle: None)


async def test_an_episode_that_the_server_ended_is_followed_by_another() -> None:
    async with serving() as server:
        instance = await ModelBackend().start(spec_of(server), started=lambda handle: None)
        await instance.value.chat("1")
        server.open.clear()
        replies = await asyncio.gather(*(instance.value.chat("2") for _ in range(5)))
        assert [str(reply) for reply in replies] == ["fine"] * 5
        assert {episode for episode, _ in server.calls} == {"episode-1", "episode-2"}
        await instance.reset()
        await instance.value.chat("3")
        assert server.calls[-1][0] == "episode-3"
        server.open.clear()
        await instance.close()  # though there is nothing left to finish
        with pytest.raises(ResourceFailed, match="closed"):
            await instance.value.chat("4")


async def test_what_the_server_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        backend = ModelBackend()
        instance = await backend.start(spec_of(server), started=lambda handle: None)
        with pytest.raises(RequestError, match="shorter, please"):
            await instance.value.chat("too long")
        await instance.close()
        with pytest.raises(ResourceFailed, match="no policy 'jury' here"):
            await backend.start(spec_of(server, policy="jury"), started=lambda handle: None)
        monkeypatch.setenv("WINGBEAT_KEY", "wrong")
        with pytest.raises(ResourceFailed, match="who are you"):
            await backend.start(spec_of(server), started=lambda handle: None)


def test_a_policy_is_a_name_and_sharing_is_refused() -> None:
    with pytest.raises(ConfigError, match="its version is a field"):
        ModelSpec(url="http://h", policy="judge@7")
    with pytest.raises(UnsupportedField, match="'reuse'"):
        ModelBackend().check(ModelSpec(url="http://h", policy="judge", reuse=Reuse.SHARED))


@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_models_conform(check: conformance.Check) -> None:
    async def use(value: Any) -> None:
        assert str(await value.chat("x")) == "fine"

    async def is_clean(value: Any) -> bool:
        return not any(episode == server.open.get(newest_key(server)) for episode, _ in server.calls)

    async with serving() as server:
        case = conformance.Case(
            backend=ModelBackend,
            spec=spec_of(server, reuse=Reuse.AFTER_RESET),
            num_alive=lambda: 0,
            refused=spec_of(server, reuse=Reuse.SHARED),
            refused_field="reuse",
            use=use,
            dirty=use,
            is_clean=is_clean,
        )
        await check(case)


def newest_key(server: Server) -> str:
    return f"key-{len(server.begun)}"
