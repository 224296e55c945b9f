"""Resources of a server, leased by clients: what ends a lease, what is refused, and calls that happen once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from lending import Lender, lender

from wingbeat.core.config.resources import ResourcesConfig, is_below
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import (
    AuthenticationError,
    ConfigError,
    LimitReached,
    PayloadTooLarge,
    PermissionDenied,
    RequestError,
    SetupError,
)
from wingbeat.resources import (
    DockerSpec,
    EndpointSpec,
    KubernetesSpec,
    LocalSpec,
    ModelSpec,
    Mount,
    ResourceFailed,
    ResourceLost,
    Reuse,
    SandboxSpec,
    Spec,
    SubprocessSpec,
    UnsupportedField,
)
from wingbeat.resources.remote import RemotePool, RemoteResources
from wingbeat.server.keys.principals import Principal, Role
from wingbeat.server.keys.ring import KeyRing, digest
from wingbeat.server.resources.calls import Calls
from wingbeat.server.resources.rules import Rules
from wingbeat.server.resources.serving import LendingLaunch, lending_keys, reached_by

BOX = SubprocessSpec(network=True, files={"a.txt": "a"})


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@contextlib.asynccontextmanager
async def lent(key: str | None = None, *, retry_budget_s: float = 0.0, **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A server and a client of it."""
    async with lender(**config) as server:
        pool = RemotePool(server.url, key, retry_budget_s=retry_budget_s)
        try:
            yield server, pool
        finally:
            await pool.close()


async def gone(server: Lender) -> None:
    """Until nothing is held."""
    async with asyncio.timeout(10):
        while server.lending.grants.num_leases:  # noqa: ASYNC110, it has no event for it
            await asyncio.sleep(0.01)
    assert server.pool.num_leases == 0


# --- leases and their ends


async def test_a_box_is_used_as_one_of_this_machine() -> None:
    async with lent() as (server, pool):
        async with pool.lease(BOX, name="repo", owner="episode") as lease:
            box = lease.value
            done = await box.run(["sh", "-c", "cat; cat a.txt; exit 3"], stdin=b"in ", env={"X": "1"})
            assert (done.exit_code, done.stdout, done.ok) == (3, b"in a", False)
            await box.write("d/b", bytes(range(256)))
            assert await box.read("d/b") == bytes(range(256))
            assert await box.list() == ["a.txt", "d/"]
            async with pool.lease(BOX, name="repo", owner="episode") as again:
                assert await again.value.list("d") == ["b"], "the same instance"
            with pytest.raises(ConfigError, match="another spec"):
                async with pool.lease(SubprocessSpec(network=True), name="repo", owner="episode"):
                    pass
            for path, kind in (("none", FileNotFoundError), ("d", IsADirectoryError), ("../x", ValueError)):
                with pytest.raises(kind):
                    await box.read(path)
            with pytest.raises(NotADirectoryError):
                await box.list("a.txt")
            with pytest.raises(ValueError, match="at most"):
                await box.read("d/b", max_bytes=10)
            await box.end_processes()
            status = await pool.status()
            assert (status.leases, status.clients, status.classes[0].live) == (1, 1, 1)
        with pytest.raises(ResourceLost, match="has ended"):
            _ = lease.value
        with pytest.raises(ResourceLost):
            await box.run("true")
        await gone(server)


async def test_a_silent_client_loses_what_it_holds_and_hears_of_it() -> None:
    async with lent(heartbeat_s=0.1) as (server, pool), pool.lease(BOX) as lease:
        running = asyncio.create_task(lease.value.run("sleep 60"))
        pool._heart.cancel()
        with pytest.raises(ResourceLost):
            await running
        await gone(server)
        with pytest.raises(ResourceLost, match=r"silent for 0\.4 s"):
            await lease.value.run("true")


async def test_heartbeats_keep_a_lease_that_nothing_else_is_asked_of() -> None:
    async with lent(heartbeat_s=0.1) as (_, pool), pool.lease(BOX) as lease:
        await asyncio.sleep(0.6)  # beyond the silence that ends it
        assert (await lease.value.run("true")).ok


async def test_a_lease_ends_with_its_owner_and_after_the_longest_hold() -> None:
    async with lent(heartbeat_s=0.1, max_hold_s=0.6) as (server, pool):
        async with pool.lease(BOX, owner="a") as first, pool.lease(BOX, owner="b") as second:
            assert await pool.release_owner("a") == 1
            with pytest.raises(ResourceLost, match="released"):
                _ = first.value
            assert (await second.value.run("true")).ok
            with pytest.raises(ResourceLost, match="max_hold_s"):
                await second.value.run("sleep 60")
                await second.value.run("true")
            await gone(server)
        assert await pool.release_owner("a") == 0


OWN_SLEEP = f"sleep 6{os.getpid()}"
"""Nobody else's: others may sleep on this machine, too."""


async def test_a_cancelled_command_ends() -> None:
    async with lent() as (_, pool), pool.lease(BOX) as lease:
        running = asyncio.create_task(lease.value.run(f"echo > began; {OWN_SLEEP}; echo > ended"))
        async with asyncio.timeout(10):
            while "began" not in await lease.value.list():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.gather(*pool._tasks)
        left = await lease.value.run(f"ps x | grep -c '[s]{OWN_SLEEP[1:]}'", timeout_s=5)
        assert left.stdout.strip() in (b"0", b"")


async def test_local_objects_stay_and_several_are_held_together() -> None:
    async with lender() as server, RemoteResources([server.url, server.url]) as pool:
        specs: dict[str, Spec] = {"tool": LocalSpec(factory=lambda: "hammer"), "box": BOX}
        pool.prefetch(specs, owner="e")
        async with pool.lease_all(specs, owner="e") as held:
            assert held["tool"].value == "hammer"
            assert (await held["box"].value.run("cat a.txt")).stdout == b"a"
        assert [found.kind for found in pool.snapshot()] == ["local"]
        assert await pool.release_owner("e") == 0
        with pytest.raises(ConfigError, match="cannot leave their process"):
            async with pool.pools[0].lease(LocalSpec(factory=object)):
                pass


# --- a server that is away


async def test_a_server_that_went_is_a_loss_and_one_that_is_not_there_a_failure() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with lender() as server:
            pool = RemotePool(server.url, retry_budget_s=0.2)
            stack.push_async_callback(pool.close)
            lease = await stack.enter_async_context(pool.lease(BOX))
        with pytest.raises(ResourceLost, match="wingbeat resources"):
            await lease.value.run("true")
        with pytest.raises(ResourceLost):
            _ = lease.value
        with pytest.raises(ResourceFailed, match="wingbeat resources"):
            async with pool.lease(BOX):
                pass


async def test_a_successor_knows_no_lease_of_its_predecessor() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with lender() as server:
            pool = RemotePool(server.url)
            stack.push_async_callback(pool.close)
            lease = await stack.enter_async_context(pool.lease(BOX))
        async with lender(port=int(server.url.rpartition(":")[2])):
            with pytest.raises(ResourceLost, match="no such lease"):
                await lease.value.run("true")


async def test_owners_that_come_anew_are_not_sent_to_a_server_that_is_away() -> None:
    async with lender() as server, RemoteResources(["http://127.0.0.1:1", server.url], retry_budget_s=0.0) as pool:
        with pytest.raises(ResourceFailed):
            async with pool.lease(BOX, owner="first"):
                pass
        await pool.release_owner("first")
        for owner in ("second", "third"):
            async with pool.lease(BOX, owner=owner) as lease:
                assert (await lease.value.run("true")).ok
        with pytest.raises(RequestError, match="specs"):
            async with pool.lease_all({str(number): BOX for number in range(33)}):
                pass


async def test_owners_are_spread_over_servers_and_those_that_have_nothing_are_forgotten() -> None:
    async with lender() as one, lender() as two, RemoteResources([one.url, two.url]) as pool:
        async with pool.lease(BOX, owner="a"), pool.lease(BOX, owner="b"), pool.lease(BOX, owner="a"):
            assert [server.pool.num_leases for server in (one, two)] == [2, 1]
        assert pool._servers._owners == {}
        pool.prefetch(BOX, owner="c")
        async with pool.lease_all({"x": BOX}, owner="c"):
            pass
        assert list(pool._servers._owners) == ["c"], "what it fetched ahead may still be there"
        await pool.release_owner("c")
        assert pool._servers._owners == {}


# --- keys and limits


def ring(**roles: Role) -> KeyRing:
    found = {digest(key): Principal(role, key_id=f"id of {key}", name=key) for key, role in roles.items()}
    return KeyRing(found, is_open=False)


async def test_a_key_is_needed_and_holds_only_its_own() -> None:
    keys = ring(client=Role.CLIENT, other=Role.CLIENT, worker=Role.WORKER)
    async with lent("client", keys=keys) as (server, pool), pool.lease(BOX) as lease:
        for key, kind in ((None, AuthenticationError), ("wrong", AuthenticationError), ("worker", PermissionDenied)):
            stranger = RemotePool(server.url, key, retry_budget_s=0)
            with pytest.raises(kind):
                async with stranger.lease(BOX):
                    pass
            await stranger.close()
        thief = RemotePool(server.url, "other", retry_budget_s=0)
        thief._http._headers["x-wingbeat-client"] = pool.client_id
        lease_id = next(iter(pool._holdings))
        with pytest.raises(ResourceLost):
            await thief._http.send("GET", f"/leases/{lease_id}/0/folder", query={"path": "."})
        await thief._http.send("DELETE", f"/leases/{lease_id}")
        await thief.close()
        assert await lease.value.list() == ["a.txt"]


async def test_one_client_holds_no_more_than_it_may() -> None:
    async with lent(leases_per_client=2) as (_, pool):
        async with pool.lease_all({"a": BOX, "b": BOX}):
            with pytest.raises(LimitReached, match="leases_per_client"):
                async with pool.lease(BOX):
                    pass
        async with pool.lease(BOX):
            pass


async def test_bodies_and_answers_are_bounded() -> None:
    async with lent(server=ServerConfig(max_body_bytes=100_000)) as (_, pool):
        small = BOX.model_copy(update={"output_bytes": 10_000})
        with pytest.raises(PermissionDenied, match="output_bytes"):
            async with pool.lease(BOX):
                pass
        async with pool.lease(small) as lease:
            with pytest.raises(PayloadTooLarge):
                await lease.value.write("big", bytes(200_000))
            await lease.value.run("head -c 300000 /dev/zero > big")
            with pytest.raises(ValueError, match="at most"):
                await lease.value.read("big")


def test_without_an_admin_key_it_listens_on_loopback_only(tmp_path: Path) -> None:
    launch = LendingLaunch(ResourcesConfig(host="0.0.0.0"), ServerConfig(), tmp_path / "keys.json")
    with pytest.raises(SetupError, match=r"resources\.host = '0\.0\.0\.0'"):
        lending_keys(launch)
    key = "an admin key of this test"
    assert not lending_keys(replace(launch, server=ServerConfig(admin_key=key))).is_open


def test_a_server_on_all_addresses_announces_the_one_that_leads_to_control() -> None:
    assert reached_by("https://0.0.0.0:9000", control="http://127.0.0.1:8321") == "https://127.0.0.1:9000"
    assert reached_by("http://10.1.2.3:9000", control="http://127.0.0.1:8321") == "http://10.1.2.3:9000"


# --- what may be leased

ALLOWED = ResourcesConfig(
    kinds=["sandbox", "endpoint", "model", "docker", "kubernetes"],
    mounts=["/usr/share", "/var/tmp:rw"],
    urls=["https://judge.example/v1"],
    key_variables={"JUDGE_KEY": ["https://judge.example/v1"]},
    images=["python:3.11", "registry.example/tools/*"],
)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SubprocessSpec(network=True), "kind"),
        (SandboxSpec(network=True), "network"),
        (SandboxSpec(reuse=Reuse.SHARED), "reuse"),
        (SandboxSpec(mounts=(Mount(source="/etc", target="/data"),)), "mounts"),
        (SandboxSpec(mounts=(Mount(source="/usr/share/../../etc", target="/data"),)), "mounts"),
        (SandboxSpec(mounts=(Mount(source="/usr/share", target="/data", read_only=False),)), "mounts"),
        (SandboxSpec(command_timeout_s=1e6), "command_timeout_s"),
        (SandboxSpec(output_bytes=1_000_000_000), "output_bytes"),
        (DockerSpec(image="python:3.12"), "image"),
        (DockerSpec(image="python:3.11", host="tcp://10.0.0.1"), "host"),
        (KubernetesSpec(image="python:3.11", network_policies=True), "network_policies"),
        (KubernetesSpec(image="python:3.11", namespace="kube-system"), "namespace"),
        (EndpointSpec(urls=("https://judge.example/v1", "http://169.254.169.254/latest")), "urls"),
        (EndpointSpec(urls=("https://judge.example/v10",)), "urls"),
        (EndpointSpec(urls=("https://judge.example/v1/../admin",)), "urls"),
        (EndpointSpec(urls=("https://judge.example/v1/%2e%2e/admin",)), "urls"),
        (EndpointSpec(urls=("http://judge.example/v1",)), "urls"),
        (EndpointSpec(urls=("https://judge.example/v1",), api_key_env="AWS_SECRET_ACCESS_KEY"), "api_key_env"),
        (ModelSpec(url="http://127.0.0.1:8321", policy="p"), "url"),
        (ModelSpec(url="https://judge.example/v1", policy="p", key_env="HOME"), "key_env"),
    ],
)
def test_what_the_operator_did_not_list_is_refused_by_name(spec: Spec, field: str) -> None:
    with pytest.raises(PermissionDenied, match=f"^{field}: ") as refusal:
        Rules(ALLOWED, max_bytes=32 * 2**20).spec(spec.model_dump(mode="json"))
    assert refusal.value.param == field


def test_what_the_operator_listed_is_lent() -> None:
    rules = Rules(ALLOWED, max_bytes=32 * 2**20)
    for spec in (
        SandboxSpec(mounts=(Mount(source="/usr/share/doc", target="/data"),)),
        SandboxSpec(mounts=(Mount(source="/var/tmp", target="/data", read_only=False),)),
        DockerSpec(image="registry.example/tools/make:1"),
        EndpointSpec(urls=("https://JUDGE.example:443/v1/chat",), api_key_env="JUDGE_KEY"),
    ):
        assert rules.spec(spec.model_dump(mode="json")) == spec
    found = [rules.spec(SandboxSpec(label=f"label {number}").model_dump(mode="json")).label for number in range(300)]
    assert (found[0], found[-1], len(set(found))) == ("label 0", "other", 200)


def test_an_address_is_below_another_by_its_parts() -> None:
    assert is_below("https://a.example/v1/x", "https://a.example/v1/")
    assert not is_below("https://a.example.evil/v1", "https://a.example/v1")
    assert not is_below("https://a.example@evil/v1", "https://a.example/v1")


async def test_bad_specs_are_refused_at_once_and_by_name() -> None:
    async with lent(kinds=["sandbox", "docker", "subprocess"], memory_mb=1000) as (_, pool):
        with pytest.raises(ConfigError, match="memory_mb"):
            async with pool.lease(BOX.model_copy(update={"memory_mb": 10_000})):
                pass
        mounted = BOX.model_copy(update={"mounts": (Mount(source="/usr", target="/data"),)})
        with pytest.raises(UnsupportedField, match="mounts") as refusal:
            async with lent(kinds=["subprocess"], mounts=["/usr"]) as (_, other), other.lease(mounted):
                pass
        assert (refusal.value.kind, refusal.value.field) == ("subprocess", "mounts")
        async with ClientSession() as http:
            order = {"client_id": "c", "idempotency_key": "0" * 32, "specs": [{"spec": {"kind": "fridge"}}]}
            answer = await http.post(f"{pool.url}/resources/v1/leases", json=order)
            error = (await answer.json())["error"]
            assert answer.status == 400
            assert "fridge" in error["message"]
            assert "sandbox" in error["message"]


# --- calls


async def test_a_call_that_is_sent_again_happened_once() -> None:
    async with lent() as (_, pool), pool.lease(BOX):
        path = f"/leases/{next(iter(pool._holdings))}/0/run"
        async with ClientSession() as http:
            for number in ("1" * 32, "1" * 32, "2" * 32):
                order = {"call_id": number, "command": "echo >> log; wc -l < log"}
                headers = {"x-wingbeat-client": pool.client_id}
                answer = await http.post(f"{pool.url}/resources/v1{path}", json=order, headers=headers)
                said = (await answer.json())["stdout"]
        assert said == "Mgo=", "two lines, of three requests"


async def test_results_are_kept_for_a_while_and_a_dropped_one_is_not_made_again() -> None:
    now = [0.0]
    calls = Calls(clock=lambda: now[0])
    count = 0

    async def work() -> int:
        nonlocal count
        count += 1
        return count

    for _ in range(2):
        task = await calls.once("a", work)
        assert task is not None
        assert task.result() == 1
    now[0] = 1000.0
    await calls.once("b", work)
    with pytest.raises(Exception, match="no longer kept"):
        await calls.once("a", work)
    await calls.cancel("c")
    with pytest.raises(Exception, match="made before"):
        await calls.once("c", work)
    assert count == 2


async def test_an_endpoint_answers_through_the_server() -> None:
    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        said = {"role": "assistant", "content": f"{body['model']}: {body['messages'][0]['content']}"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return web.json_response({"choices": [{"message": said, "finish_reason": "stop"}], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with lent(kinds=["endpoint"], urls=[url]) as (server, pool):
            spec = EndpointSpec(urls=(url,), model="judge", prompt_price=1.0)
            async with pool.lease(spec) as one, pool.lease(spec) as two:
                reply = await one.value.chat("well?", temperature=0)
                assert (reply.text, reply.usage.total_tokens) == ("judge: well?", 5)
                assert reply.cost == pytest.approx(0.003)
                found = await two.value.request("GET", "/nothing")
                assert found.status == 404
                with pytest.raises(ValueError, match="path"):
                    await two.value.request("GET", "/../admin")
                (stats,) = server.pool.snapshot()
                assert (stats.live, stats.starts) == (1, 1), "one serves both, with one budget"
    finally:
        await runner.cleanup()


async def test_health_and_metrics() -> None:
    keys = ring(client=Role.CLIENT)
    async with lent("client", keys=keys) as (server, pool), pool.lease(BOX), ClientSession() as http:

        async def get(path: str, **headers: str) -> tuple[int, str]:
            async with http.get(server.url + path, headers=headers) as answer:
                return answer.status, await answer.text()

        assert await get("/healthz") == (200, '{"status":"ok"}')
        assert (await get("/metrics"))[0] == 401
        shown = (await get("/metrics", authorization="Bearer client"))[1]
        assert 'wingbeat_resources_leased{kind="subprocess",label=""} 1.0' in shown
        assert (await get("/healthz", origin="http://evil.example"))[0] == 403
