"""What clients of a resources server cannot do to it, nor to each other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from fake_backend import held
from fake_boxes import FakeBoxes, box_spec
from lending import Lender, lender

from wingbeat.core.config.load import validate_config
from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import ConfigError, LimitReached, PayloadTooLarge, PermissionDenied, RequestError
from wingbeat.resources import (
    EndpointSpec,
    ModelSpec,
    Mount,
    Needs,
    RaySpec,
    ResourceFailed,
    ResourceLost,
    Resources,
    ResourceWait,
    SandboxSpec,
    Spec,
)
from wingbeat.resources.remote import RemotePool
from wingbeat.server.keys.principals import Principal, Role
from wingbeat.server.keys.ring import KeyRing, digest
from wingbeat.server.resources import calls, grants, routes
from wingbeat.server.resources.app import LendingServer
from wingbeat.server.resources.calls import Calls
from wingbeat.server.resources.rules import Rules


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@contextlib.asynccontextmanager
async def lent(key: str | None = None, **config: Any) -> AsyncIterator[tuple[Lender, RemotePool, FakeBoxes]]:
    boxes = FakeBoxes()
    async with lender({"subprocess": boxes}, **{"cpus": 4, **config}) as server:
        pool = RemotePool(server.url, key, retry_budget_s=0.0)
        try:
            yield server, pool, boxes
        finally:
            await pool.close()


async def ask(server: Lender, path: str, body: dict[str, Any], *, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        ClientSession() as http,
        http.post(f"{server.url}/resources/v1/{path}", json=body, headers=headers) as answer,
    ):
        return answer.status, (await answer.json()) if answer.content_type == "application/json" else None


def wire(spec: Spec, name: str = "") -> dict[str, Any]:
    return {"name": name, "spec": spec.model_dump(mode="json")}


def ring(*names: str) -> KeyRing:
    return KeyRing({digest(name): Principal(Role.CLIENT, key_id=f"id of {name}") for name in names}, is_open=False)


# --- quotas


async def test_what_was_fetched_ahead_counts_once_when_it_is_leased() -> None:
    async with lent(leases_per_client=2) as (_, pool, boxes):
        pool.prefetch({"a": box_spec(label="a"), "b": box_spec(label="b")}, owner="e")
        async with pool.lease(box_spec(label="a"), owner="e"), pool.lease(box_spec(label="b"), owner="e"):
            assert len(boxes.made) == 2
            with pytest.raises(LimitReached, match=r"has 2 of 2 resources .* \(resources\.leases_per_client\): give"):
                async with pool.lease(box_spec(), owner="e"):
                    pass
        async with pool.lease_all({"x": box_spec(), "y": box_spec()}, owner="f"):
            pass


async def test_what_was_fetched_ahead_and_not_leased_counts_until_it_is_released() -> None:
    async with lent(leases_per_client=2) as (_, pool, _boxes):
        pool.prefetch(box_spec(label="ahead"), owner="e")
        async with pool.lease(box_spec(), owner="e"):
            with pytest.raises(LimitReached):
                async with pool.lease(box_spec(), owner="e"):
                    pass
        await pool.release_owner("e")
        async with pool.lease_all({"x": box_spec(), "y": box_spec()}):
            pass
        with pytest.raises(RequestError, match=r"3 resources .*, and one client may have 2"):
            async with pool.lease_all({name: box_spec() for name in "xyz"}):
                pass


async def test_owners_that_took_all_they_fetched_are_not_kept_though_nobody_releases_them() -> None:
    now = [0.0]
    async with Resources(backends={"subprocess": FakeBoxes()}) as pool:
        config = ResourcesConfig(kinds=["subprocess"], leases_per_client=2, heartbeat_s=1e9)
        held = grants.Grants(pool, config, clock=lambda: now[0])
        client = grants.Client("account", "name", quota="quota")
        for number in range(6):
            held.prefetch("1" * 32, client, owner=str(number), specs={"": box_spec()})
            grant = await held.lease(f"{number}" * 32, client, owner=str(number), specs={"": box_spec()}, wait_s=1.0)
            assert grant is not None
            await held.end(grant.lease_id, client)
            now[0] += calls.KEPT_S
        assert len(held._ahead[client].owners) <= 3  # pyright: ignore[reportPrivateUsage]
        await held.close()


async def test_a_prefetch_that_is_sent_again_fetches_once() -> None:
    async with lent() as (server, pool, boxes):
        order = {"client_id": pool.client_id, "call_id": "1" * 32, "owner": "e", "specs": [wire(box_spec())]}
        for _ in range(2):
            assert (await ask(server, "prefetch", order))[0] == 204
        assert (await ask(server, "release", {"client_id": pool.client_id, "owner": "e"}))[0] == 200
        (stats,) = server.pool.snapshot()
        assert (stats.starts, len(boxes.made)) == (1, 1)


async def test_one_that_takes_all_there_is_does_not_shut_the_others_out() -> None:
    keys = ring("greedy", "late")
    async with lent("greedy", keys=keys, leases_per_client=4, total_leases=4) as (server, pool, _):
        late = RemotePool(server.url, "late", retry_budget_s=0.0)
        four = pool.lease_all({name: box_spec() for name in "abcd"})
        async with four, late.lease_all({name: box_spec() for name in "ab"}):
            with pytest.raises(LimitReached, match=r"all clients together have 6 of 4 .*resources\.total_leases"):
                async with late.lease(box_spec()):
                    pass
        await late.close()


async def test_names_that_a_client_invents_are_not_kept() -> None:
    async with lent() as (server, pool, _):
        for number in range(100):
            await ask(server, "heartbeat", {"client_id": f"name {number}"})
            await ask(server, "release", {"client_id": f"name {number}", "owner": "e"})
        assert (await pool.status()).clients == 0


async def test_a_client_that_asks_too_fast_is_slowed_down_and_no_other() -> None:
    limits = {"requests_per_s": 2.0, "request_burst": 3}
    async with lent("quick", keys=ring("quick", "other"), **limits) as (server, _, _boxes):
        beat = {"client_id": "c"}
        answers = [await ask(server, "heartbeat", beat, key="quick") for _ in range(4)]
        assert [status for status, _ in answers] == [200, 200, 200, 429]
        words = answers[-1][1]["error"]["message"]
        assert "client 'id of quick' sends more than 2 requests per second (resources.requests_per_s)" in words
        assert (await ask(server, "heartbeat", beat, key="other"))[0] == 200
        async with ClientSession(headers={"authorization": "Bearer other"}) as http:
            for _ in range(9):
                assert (await http.get(f"{server.url}/healthz")).status == 200
            shown = await (await http.get(f"{server.url}/metrics")).text()
        assert 'wingbeat_refused_total{limit="requests_per_s"} 1.0' in shown


async def test_a_client_that_is_slowed_down_keeps_what_it_holds() -> None:
    limits = {"requests_per_s": 20.0, "request_burst": 5, "heartbeat_s": 0.3}
    async with lent(**limits) as (_, pool, _boxes), pool.lease(box_spec()) as lease:
        for _ in range(8):
            with contextlib.suppress(ResourceFailed):
                await lease.value.list()
        await asyncio.sleep(0.3)
        assert await lease.value.list() == []


async def test_bodies_under_way_are_bounded() -> None:
    limits = {"body_bytes": 200_000, "total_body_bytes": 200_000}
    async with lent(**limits) as (_, pool, boxes), pool.lease(box_spec()) as lease:
        go_on = asyncio.Event()
        boxes.at("write", held(go_on))
        first = asyncio.create_task(lease.value.write("first", bytes(150_000)))
        async with asyncio.timeout(5):
            while boxes.steps["write"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(ResourceFailed, match=r"resources\.body_bytes.*send fewer or smaller ones"):
            await lease.value.write("second", bytes(150_000))
        with pytest.raises(PayloadTooLarge, match=r"resources\.body_bytes = 200000"):
            await lease.value.write("third", bytes(250_000))
        go_on.set()
        await first
        assert await lease.value.list() == ["first"]


async def test_a_lease_that_waits_for_its_turn_is_no_body_under_way() -> None:
    large = box_spec(limit=1, files={"a.txt": "x" * 150_000})
    async with lent(body_bytes=200_000, total_body_bytes=200_000) as (_, pool, _boxes), pool.lease(large):
        waiting = asyncio.create_task(pool.lease(large).__aenter__())
        async with asyncio.timeout(5):
            while (await pool.status()).leases < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with pool.lease(box_spec()) as other:
            await other.value.write("b.txt", bytes(150_000))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


# --- calls


async def test_too_many_calls_at_once_are_a_failure_and_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_RUNNING", 2)
    async with lent() as (_, pool, boxes), pool.lease(box_spec()) as lease:
        go_on = asyncio.Event()
        boxes.at("run", held(go_on))
        boxes.at("read", held(go_on))
        running = [asyncio.create_task(lease.value.run("true")), asyncio.create_task(lease.value.read("x"))]
        async with asyncio.timeout(5):
            while boxes.steps["run"] or boxes.steps["read"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(ResourceFailed, match="2 calls at once, which is all it takes: wait for one"):
            await lease.value.list()
        go_on.set()
        await asyncio.gather(*running)


async def test_a_command_that_its_box_does_not_end_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "OVERDUE_S", 0.02)
    async with lent() as (server, pool, boxes):
        boxes.at("run", held(asyncio.Event()))
        with pytest.raises(ResourceLost, match="did not end a command within"):
            async with pool.lease(box_spec()) as lease:
                await lease.value.run("true", timeout_s=0.02)
        (stats,) = server.pool.snapshot()
        assert stats.quarantined == 1


async def test_a_call_that_cannot_be_ended_takes_its_box_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CANCEL_S", 0.02)
    go_on = asyncio.Event()

    async def stubborn() -> None:
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()

    async with lent() as (server, pool, boxes):
        boxes.at("run", stubborn)
        async with pool.lease(box_spec()) as lease:
            running = asyncio.create_task(lease.value.run("true"))
            async with asyncio.timeout(5):
                while not boxes.num_running:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        with pytest.raises(ResourceFailed):
            await running
        (stats,) = server.pool.snapshot()
        go_on.set()
        assert (stats.quarantined, stats.idle) == (1, 0), "nobody else gets a box in which something still runs"


async def test_nothing_begins_in_a_lease_that_is_over_though_its_box_is_not_cleaned_yet() -> None:
    """It would run in the box of whoever has it next."""
    async with lent() as (server, pool, boxes), pool.lease(box_spec()):
        (grant,) = server.lending.grants._grants.values()  # pyright: ignore[reportPrivateUsage]
        grant.end("for the test")
        with pytest.raises(ResourceLost, match="the lease is over"):
            await grant.calls[0].once("1" * 32, boxes.made[0].check)
        with pytest.raises(ResourceLost, match="for the test"):
            grant.value(0)


async def test_results_are_forgotten_in_time() -> None:
    now = [0.0]
    kept = Calls(clock=lambda: now[0])

    async def work() -> bytes:
        return bytes(100)

    await kept.once("a", work, size=len)
    now[0] = calls.KEPT_S + 1
    kept.forget()
    with pytest.raises(Exception, match="no longer kept; give it another call_id"):
        await kept.once("a", work)
    assert await kept.close()
    for late in (kept.once("b", work), kept.unnamed(work)):
        with pytest.raises(ResourceLost, match="the lease is over"):
            await late


async def test_a_call_has_its_body_until_it_is_done_though_its_caller_hung_up() -> None:
    kept, go_on, taken = Calls(), asyncio.Event(), list[str]()

    def hold() -> Callable[[], None]:
        taken.append("body")
        return taken.clear

    asked = [asyncio.create_task(kept.once("a", go_on.wait, hold=hold)) for _ in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.wait(asked[:1])
    assert taken == ["body"], "which whoever joins has not"
    go_on.set()
    outcome = await asked[1]
    assert outcome is not None and outcome.result() is True
    assert taken == []


async def test_a_call_that_failed_keeps_nothing_of_what_it_had() -> None:
    class Body:
        pass

    kept, bodies = Calls(), list[weakref.ref[Body]]()

    async def work() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise RequestError("not here", param="path")

    for _ in range(2):
        outcome = await kept.once("a", work)
        assert outcome is not None
        with pytest.raises(RequestError, match="not here") as told:
            outcome.result()
        assert told.value.param == "path"
    gc.collect()
    assert [body() for body in bodies] == [None]


async def test_results_are_bounded_in_number_though_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_KEPT", 3)
    kept, count = Calls(), 0

    async def work() -> bytes:
        nonlocal count
        count += 1
        return b"x"

    for number in range(10):
        await kept.once(str(number), work, size=len)
    assert kept.kept_bytes == 3
    for number in (7, 8, 9):
        assert await kept.once(str(number), work) is not None
    with pytest.raises(Exception, match="no longer kept"):
        await kept.once("6", work)
    assert count == 10


async def test_results_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "KEPT_BYTES", 1000)
    async with lent() as (server, pool, _), pool.lease(box_spec()) as one, pool.lease(box_spec()) as two:
        await one.value.run("x" * 800)
        await two.value.run("x" * 300)
        server.lending.grants.sweep()
        kept = [calls.kept_bytes for grant in server.lending.grants._grants.values() for calls in grant.calls]  # pyright: ignore[reportPrivateUsage]
        assert kept == [0, 300], "whoever has most of them loses its own"


# --- ends


async def test_a_box_that_cannot_be_cleaned_does_not_keep_what_other_silent_clients_left() -> None:
    async with lent(heartbeat_s=0.1) as (server, pool, boxes):
        go_on = asyncio.Event()
        boxes.at("reset", held(go_on))
        ids = [str(number) * 32 for number in (1, 2)]
        for lease_id, name in zip(ids, "ab", strict=True):
            order = {"client_id": name, "idempotency_key": lease_id, "owner": "e", "specs": [wire(box_spec())]}
            assert (await ask(server, "leases", order))[1]["state"] == "held"
            order = {"client_id": name, "call_id": lease_id, "owner": "ahead", "specs": [wire(box_spec())]}
            assert (await ask(server, "prefetch", order))[0] == 204
        async with asyncio.timeout(5):
            while server.pool.num_leases or (await pool.status()).leases > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        go_on.set()
        async with asyncio.timeout(5):
            while (await pool.status()).clients or any(c.leased for c in server.pool.snapshot()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_why_a_lease_did_not_come_is_told_again_to_those_who_ask_again() -> None:
    async with lent() as (server, pool, _):
        one = box_spec(limit=1)
        async with pool.lease(one):
            order = {"client_id": "c", "idempotency_key": "1" * 32, "wait_s": 0.01, "specs": [wire(one)]}
            told = [await ask(server, "leases", order) for _ in range(2)]
            assert told[0] == told[1]
            assert told[1][1]["error"]["code"] == ResourceWait.code
        too_large = {"client_id": "c", "idempotency_key": "2" * 32, "specs": [wire(box_spec(cpus=99))]}
        told = [await ask(server, "leases", too_large) for _ in range(2)]
        assert told[0] == told[1]
        assert (told[1][0], told[1][1]["error"]["code"]) == (400, ConfigError.code)


async def test_a_server_that_ends_tells_those_who_wait_and_begins_nothing_more() -> None:
    async with lent() as (server, pool, _), pool.lease(box_spec(limit=1)) as lease:
        waiting = asyncio.create_task(pool.lease(box_spec(limit=1)).__aenter__())
        async with asyncio.timeout(5):
            while (await pool.status()).leases < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await server.lending.grants.close()
        with pytest.raises(ResourceLost, match="the resources server ended"):
            await waiting
        with pytest.raises(ResourceLost, match="the resources server ended"):
            await lease.value.run("true")
        with pytest.raises(ResourceFailed, match="this resources server ends now"):
            async with pool.lease(box_spec()):
                pass


# --- what may be leased

URL, OTHER_URL = "https://judge.example/v1", "https://search.example"


def refused(spec: Spec, **config: Any) -> PermissionDenied:
    with pytest.raises(PermissionDenied) as refusal:
        Rules(ResourcesConfig(**config), max_bytes=2**25).spec(spec.model_dump(mode="json"))
    return refusal.value


def test_a_key_goes_only_to_the_addresses_that_it_is_for() -> None:
    config = {
        "kinds": ["endpoint", "model"],
        "urls": [URL, OTHER_URL],
        "key_variables": {"JUDGE_KEY": [URL], "SEARCH_KEY": [OTHER_URL]},
    }
    rules = Rules(ResourcesConfig(**config), max_bytes=2**25)
    for spec in (
        EndpointSpec(urls=(f"{URL}/chat",), api_key_env="JUDGE_KEY"),
        ModelSpec(url=OTHER_URL, policy="p", key_env="SEARCH_KEY"),
    ):
        assert rules.spec(spec.model_dump(mode="json")) == spec
    for spec, field in (
        (EndpointSpec(urls=(URL, OTHER_URL), api_key_env="JUDGE_KEY"), "api_key_env"),
        (ModelSpec(url=OTHER_URL, policy="p", key_env="JUDGE_KEY"), "key_env"),
    ):
        error = refused(spec, **config)
        assert error.param == field
        assert f"JUDGE_KEY is not sent to {OTHER_URL}; who runs this server may allow it" in error.message


@pytest.mark.parametrize(
    "resources",
    [
        {"key_variables": {"JUDGE_KEY": [URL]}},
        {"key_variables": {"JUDGE_KEY": []}},
        {"mounts": ["/data:rw", "/data/corpora"]},
        {"total_leases": 10},
        {"total_body_bytes": 10},
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(resources))):
        validate_config({"policies": {"p": {"model": "tiny"}}, "resources": resources})


def test_of_a_folder_that_boxes_write_to_nothing_within_is_mounted(tmp_path: Path) -> None:
    """Between the check and the start of a box another one could put a link to anything there."""
    scratch, data = tmp_path / "scratch", tmp_path / "data"
    (scratch / "mine").mkdir(parents=True)
    (data / "set").mkdir(parents=True)
    (scratch / "link").symlink_to(data / "set")
    config = {"mounts": [f"{scratch}:rw", str(data)]}
    for read_only in (True, False):
        spec = SandboxSpec(mounts=(Mount(source=str(scratch / "mine"), target="/x", read_only=read_only),))
        assert "within a folder that boxes write to" in refused(spec, **config).message
    rules = Rules(ResourcesConfig(**config, kinds=["sandbox", "ray"]), max_bytes=2**25)
    whole = SandboxSpec(mounts=(Mount(source=str(scratch), target="/x", read_only=False),))
    assert rules.spec(whole.model_dump(mode="json")) == whole
    linked = SandboxSpec(mounts=(Mount(source=str(scratch / "link"), target="/x"),))
    for found in (rules.spec(linked.model_dump(mode="json")), rules.spec({"kind": "ray", "box": wire(linked)["spec"]})):
        box = found.box if isinstance(found, RaySpec) else found
        assert isinstance(box, SandboxSpec)
        assert box.mounts[0].source == str(data / "set"), "with links resolved, so that nobody can change them"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(cpus=4, needs=Needs(cpus=1)), "needs"),
        (SandboxSpec(memory_mb=1000, needs=Needs(cpus=1)), "needs"),
        (SandboxSpec(close_timeout_s=1e9), "close_timeout_s"),
        (SandboxSpec(reset_timeout_s=1e9), "reset_timeout_s"),
        (SandboxSpec(start_timeout_s=1e9), "start_timeout_s"),
    ],
)
def test_no_spec_takes_what_it_does_not_pay_for(spec: Spec, field: str) -> None:
    error = refused(spec)
    assert error.param == field
    assert error.message.startswith(f"{field}: expected at")


async def test_what_is_no_route_says_what_this_server_is() -> None:
    async with lent() as (server, _, _boxes), ClientSession() as http:
        answer = await http.get(f"{server.url}/api/status")
        assert answer.status == 404
        assert "this is a resources server" in (await answer.json())["error"]["message"]


async def test_a_machine_without_what_it_is_to_lend_says_so_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        LendingServer(ResourcesConfig(), ServerConfig(), KeyRing({}, is_open=True)).check()
