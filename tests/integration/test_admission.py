"""A server with room for one group at a time and an admin key: admission, its blockers in words, roles."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Api, Begun, Server, config_text, eventually, serving

ADMIN_KEY = "an-admin-key-of-this-test"


class AdminApi(Api):
    """Carries the admin key wherever no other is given."""

    async def call(self, method: str, path: str, body: Any = None, *, key: str = "", raw: Any = None) -> Answer:
        return await super().call(method, path, body, key=key or ADMIN_KEY, raw=raw)


@pytest.fixture(scope="module")
def tight(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tight")
    config = config_text(
        folder,
        models,
        server__admin_key=ADMIN_KEY,
        dataflow__group_size=2,
        dataflow__groups_per_step=1,
        dataflow__max_staleness=0,
        eval__at_start=False,
    )
    with serving(folder, config) as running:
        yield running


@pytest.fixture
async def admin(tight: Server) -> AsyncIterator[Api]:
    async with AdminApi(tight) as client:
        await client.ready()
        yield client


async def blockers(api: Api) -> str:
    return "\n".join((await api.get("/api/status"))["blockers"])


async def until_blocked_by(api: Api, cause: str) -> None:
    async def named() -> bool:
        return cause in await blockers(api)

    await eventually(named, what=f"a blocker with {cause!r}", every_s=0.02)


async def until_version(api: Api, version: int) -> None:
    async def reached() -> bool:
        return (await api.get("/api/policies"))[0]["version"] >= version

    await eventually(reached, what=f"version {version}")


async def begin_pair(api: Api) -> list[Begun]:
    """A group of two; waits for admission as a patient client does."""
    declared = {"id": uuid.uuid4().hex, "size": 2}

    async def admitted() -> Begun | None:
        answer = await api.call("POST", "/api/episodes", api.begin_body(group=declared))
        return api.begun(answer) if answer.status == 200 else None

    return [await eventually(admitted, what="admission") for _ in range(2)]


async def finish_all(api: Api, pair: list[Begun], rewards: tuple[float, float]) -> None:
    for episode, reward in zip(pair, rewards, strict=True):
        assert (await api.chat(episode)).status == 200
        assert (await api.finish(episode, reward)).status == 200


async def test_status_names_what_stands_in_the_way(admin: Api) -> None:
    assert "no tasks: PUT /api/tasks/{source}" in await blockers(admin)
    task = {"source": "s", "id": "1", "payload": {}}
    assert (await admin.call("PUT", "/api/tasks/s", {"tasks": [task]})).status == 200
    assert await blockers(admin) == "no agent is running: wingbeat rollout agent.py --server URL"
    pair = await begin_pair(admin)
    assert "admission of 'solver' is full: staleness bound 0" in await blockers(admin)
    refused = await admin.call("POST", "/api/episodes", admin.begin_body())
    refused.refused(429, "admission_full", "no room for another episode now", "staleness bound 0")
    assert int(refused.headers["Retry-After"]) >= 1
    nothing = (await admin.call("POST", "/api/tasks/lease", {"wait_s": 0})).body
    assert (nothing["leases"], nothing["stop"]) == ([], False)
    assert "staleness bound 0" in nothing["reason"]
    assert (await admin.finish(pair[0], 0.0)).status == 200
    assert f"group {pair[0].reply['group']['id']} has 1 of 2 episodes; 1 are running" in await blockers(admin)
    assert (await admin.finish(pair[1], 1.0)).status == 200


async def test_a_waiting_begin_is_admitted_when_room_appears(admin: Api) -> None:
    before = (await admin.get("/api/policies"))[0]["version"]
    await finish_all(admin, await begin_pair(admin), (0.0, 1.0))
    await until_version(admin, before + 1)
    await finish_all(admin, await begin_pair(admin), (1.0, 0.0))
    await until_version(admin, before + 2)


async def test_equal_rewards_are_named(admin: Api) -> None:
    for _ in range(5):
        await finish_all(admin, await begin_pair(admin), (1.0, 1.0))
    await until_blocked_by(admin, "all rewards equal in the last 5 groups of 'solver': nothing to learn from")
    await finish_all(admin, await begin_pair(admin), (1.0, 0.0))

    async def learning_again() -> bool:
        return "all rewards equal" not in await blockers(admin)

    await eventually(learning_again, what="the blocker to go")


async def test_missing_workers_are_named(admin: Api, tight: Server) -> None:
    os.kill(tight.pid("engine-0"), signal.SIGKILL)
    await until_blocked_by(admin, "no engine is connected")
    os.kill(tight.pid("trainer-solver"), signal.SIGKILL)
    await until_blocked_by(admin, "policy 'solver' has no trainer connected")
    assert (await admin.get("/healthz")) == {"status": "ok"}
    await admin.ready()
    await finish_all(admin, await begin_pair(admin), (1.0, 0.0))


async def test_admin_calls_need_the_admin_key(admin: Api) -> None:
    for key in ("wrong-admin-key-of-this-test", (pair := await begin_pair(admin))[0].key):
        for method, path in (("POST", "/api/episodes"), ("POST", "/api/tasks/lease"), ("POST", "/api/stop")):
            answer = await admin.call(method, path, {}, key=key)
            answer.refused(401, "invalid_api_key", "needs the server's admin key")
    foreign = await admin.call("POST", f"/api/episodes/{pair[0].id}/finish", {"rewards": 1.0}, key="wrong")
    foreign.refused(401, "invalid_api_key")
    by_admin = await admin.call("GET", f"/api/episodes/{pair[0].id}")
    assert by_admin.body["state"] == "open"
    await finish_all(admin, pair, (0.0, 1.0))


async def test_a_client_may_stop_the_server(admin: Api, tight: Server) -> None:
    """The last test of this server."""
    assert (await admin.call("POST", "/api/stop")).body == {"state": "stopping"}

    async def ended() -> bool:
        return tight.supervisor.poll() is not None

    await eventually(ended, what="the supervisor to end")
    assert tight.supervisor.returncode == 0
