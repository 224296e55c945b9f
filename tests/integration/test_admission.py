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

from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role

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


async def test_admin_calls_need_a_key_of_that_role(admin: Api) -> None:
    for key in ("wrong-admin-key-of-this-test", (pair := await begin_pair(admin))[0].key):
        for method, path in (("POST", "/api/episodes"), ("POST", "/api/tasks/lease"), ("POST", "/api/stop")):
            answer = await admin.call(method, path, {}, key=key)
            answer.refused(401, "invalid_api_key", "admin key")
    foreign = await admin.call("POST", f"/api/episodes/{pair[0].id}/finish", {"rewards": 1.0}, key="wrong")
    foreign.refused(401, "invalid_api_key")
    by_admin = await admin.call("GET", f"/api/episodes/{pair[0].id}")
    assert by_admin.body["state"] == "open"
    await finish_all(admin, pair, (0.0, 1.0))


# --- keys of the key file, and where plain keys may never be ------------------------------------------

ROUTES: dict[tuple[str, str], set[str]] = {
    ("POST", "/api/episodes"): {"admin", "client"},
    ("GET", "/api/status"): {"admin", "client"},
    ("GET", "/api/policies"): {"admin", "client"},
    ("GET", "/metrics"): {"admin", "client"},
    ("PUT", "/api/mixing"): {"admin"},
    ("POST", "/api/evaluations"): {"admin"},
    ("DELETE", "/api/tasks/none"): {"admin"},
    ("GET", "/api/keys"): {"admin"},
    ("DELETE", "/api/keys/key-000000000000"): {"admin"},
}
"""Who may call what; those that may get to the body, which is wrong."""


@pytest.fixture(scope="module")
def secrets_seen() -> set[str]:
    """Every plain key that the tests of this server met."""
    return {ADMIN_KEY}


async def test_keys_of_the_file_do_what_their_role_says(admin: Api, tight: Server, secrets_seen: set[str]) -> None:
    file = KeyFile(tight.run_dir.parent / "keys.json")
    made = {role.value: file.create(NewKey(role, name=f"test-{role}")) for role in Role}
    keys = {role: key for role, (_, key) in made.items()}
    secrets_seen.update(keys.values())

    async def known() -> bool:
        return all([(await admin.call("GET", "/api/keys", key=key)).status != 401 for key in keys.values()])

    await eventually(known, what="the server to see the new keys", timeout_s=5)
    for (method, path), allowed in ROUTES.items():
        for role, key in keys.items():
            answer = await admin.call(method, path, {"nonsense": 1} if method in ("POST", "PUT") else None, key=key)
            if role in allowed:
                assert answer.status in (200, 400, 404), (path, role, answer)
            else:
                answer.refused(403, "permission_denied", f"yours is a{'n' * (role == 'admin')} {role} key")
        assert (await admin.call(method, path, key="wb-client-unknown")).status == 401
    listed = (await admin.call("GET", "/api/keys")).body
    assert {key["state"] for key in listed} == {"active"} and not any(key in str(listed) for key in keys.values())
    for body, told in (({"role": "boss"}, "role"), ({"role": "client", "train": True}, "collect keys"), ({}, "role")):
        (await admin.call("POST", "/api/keys", body)).refused(400, "invalid_request", told)
    by_http = (await admin.call("POST", "/api/keys", {"role": "client", "name": "by http", "expires_s": 3600})).body
    secrets_seen.add(by_http["key"])
    assert (await admin.call("GET", "/api/status", key=by_http["key"])).status == 200, "at once"
    assert by_http["name"] == "by http" and by_http["expires_s"] - by_http["created_s"] == pytest.approx(3600)
    record = made["client"][0]
    assert (await admin.call("DELETE", f"/api/keys/{record.id}")).body["state"] == "revoked"
    again = await admin.call("GET", "/api/status", key=keys["client"])
    again.refused(401, "invalid_api_key", record.id, "was revoked")
    assert (await admin.call("GET", "/api/keys", key=keys["admin"])).status == 200


async def test_no_plain_key_is_at_rest_or_on_a_command_line(admin: Api, tight: Server, secrets_seen: set[str]) -> None:
    episode = await begin_pair(admin)
    joined = len(tight.events_named("engine_joined"))
    engine = tight.pid("engine-0")
    own = environment_of(engine)["WINGBEAT_WORKER_KEY"]
    os.kill(engine, signal.SIGKILL)

    async def back() -> bool:
        return len(tight.events_named("engine_joined")) > joined

    await eventually(back, what="the engine to come back with its key")
    assert environment_of(tight.pid("control"))["WINGBEAT_WORKER_KEY"].startswith("sha256:")
    found = {*secrets_seen, own, *(one.key for one in episode)}
    assert all(len(secret) >= 16 for secret in found)
    folder = tight.run_dir.parent.parent
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / "config.toml"]
    assert {"ledger.sqlite", "launch.json", "config.toml", "control.log", "keys.json"} <= {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        for secret in found:
            assert secret.encode() not in data, f"a plain key in {path}"
    for pid in tight.pids().values():
        assert not any(secret in command_line_of(pid) for secret in found)
    await finish_all(admin, episode, (0.0, 1.0))


def command_line_of(pid: int) -> str:
    """As everybody on the machine can read it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def environment_of(pid: int) -> dict[str, str]:
    """As the system knows it; only the process's own user may read it."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)


async def test_a_client_may_stop_the_server(admin: Api, tight: Server) -> None:
    """The last test of this server."""
    assert (await admin.call("POST", "/api/stop")).body == {"state": "stopping"}

    async def ended() -> bool:
        return tight.supervisor.poll() is not None

    await eventually(ended, what="the supervisor to end")
    assert tight.supervisor.returncode == 0
