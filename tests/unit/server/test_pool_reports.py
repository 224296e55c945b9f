"""What pools report: sums that never fall, pools that are gone, and bounds on what anybody can make control keep."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest

from wingbeat.core.errors import PermissionDenied, RequestError
from wingbeat.core.protocol_resources import ResourceReport
from wingbeat.core.resource_reports import Durations, ResourceClass
from wingbeat.server.keys.principals import Principal, Role
from wingbeat.server.keys.ring import KeyRing, digest
from wingbeat.server.resources import reports
from wingbeat.server.resources.report_routes import resource_report_routes
from wingbeat.server.resources.reports import GONE_AFTER_S, PoolReports


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def boxes(*, starts: int, live: int = 0, label: str = "", **more: Any) -> ResourceClass:
    return ResourceClass(kind="sandbox", label=label, starts=starts, live=live, **more)


def report(name: str, *classes: ResourceClass, **more: Any) -> ResourceReport:
    return ResourceReport(client_id=name, classes=classes, **more)


def lines(pools: PoolReports) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(pools)
    text = generate_latest(registry).decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("wingbeat_resources_"): float(value) for name, value in pairs}


def test_reports_of_several_pools_are_added_up_by_kind_and_label() -> None:
    pools = PoolReports(clock=Time())
    hold = Durations(count=2, total_s=3.0, max_s=2.5)
    pools.take("", report("a", boxes(starts=3, live=2, hold=hold, live_s=8.0, busy_s=2.0, cost=0.5)))
    pools.take("", report("b", boxes(starts=4, live=1, hold=Durations(count=1, total_s=1.0, max_s=1.0), live_s=2.0)))
    (seen,) = pools.classes()
    assert (seen.starts, seen.live, seen.pools, seen.hold) == (7, 3, 2, Durations(count=3, total_s=4.0, max_s=2.5))
    assert seen.utilisation == pytest.approx(0.2)
    shown = lines(pools)
    names = '{kind="sandbox",label=""}'
    assert shown["starts_total" + names] == 7
    assert shown["live" + names] == 3
    assert shown["utilisation" + names] == pytest.approx(0.2)
    assert shown["cost_total" + names] == 0.5
    assert (shown["hold_seconds_count" + names], shown["hold_seconds_sum" + names]) == (3, 4.0)
    assert shown["hold_seconds_max" + names] == 2.5


def test_sums_never_fall_and_what_is_there_goes_with_its_pool() -> None:
    time, sums = Time(), list[int]()
    pools = PoolReports(clock=time)

    def see(now: int, starts: int, live: int) -> None:
        (seen,) = pools.classes()
        assert (seen.starts, seen.live) == (starts, live)
        sums.append(seen.starts)
        time.now += now

    pools.take("", report("a", boxes(starts=5, live=2)))
    see(5, 5, 2)
    pools.take("", report("a", boxes(starts=6, live=2)))
    see(int(GONE_AFTER_S) + 1, 6, 2)
    see(0, 6, 0)  # silent for too long
    pools.take("", report("a", boxes(starts=8, live=1)))  # and back
    see(0, 8, 1)
    pools.take("", report("a", boxes(starts=1, live=1)))  # another process of this name
    see(0, 9, 1)
    pools.take("", report("a", boxes(starts=2), leaving=True))
    see(0, 10, 0)
    pools.take("", report("a", boxes(starts=2, live_s=1.0)))
    pools.take("", report("a", boxes(starts=2, live_s=1.0 - 1e-12)))  # a rounding is no new process
    see(0, 10, 0)
    assert sums == sorted(sums)


def test_labels_and_pools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_CLASSES", 3)
    monkeypatch.setattr(reports, "MAX_POOLS", 2)
    pools = PoolReports(clock=Time())
    for number in range(10):
        pools.take("key-1", report(f"client {number}", boxes(starts=1, live=1, label=f"label {number}")))
    shown = {(c.kind, c.label): c.starts for c in pools.classes()}
    assert shown == {**{("sandbox", f"label {n}"): 1 for n in range(3)}, ("other", "other"): 7}
    assert sum(c.live for c in pools.classes()) == 2, "those that were silent longest are forgotten"
    pools.take("key-2", report("mine", boxes(starts=1, live=1, label="label 0")))
    assert sum(c.live for c in pools.classes()) == 3, "one key cannot push out another's"


def routes(keys: KeyRing) -> tuple[PoolReports, Callable[..., Any]]:
    pools = PoolReports(clock=Time())
    control: Any = SimpleNamespace(metrics=SimpleNamespace(pools=pools))
    found = {
        (method, route.path): route.endpoint
        for route in resource_report_routes(control, keys).routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }

    async def call(method: str, path: str, key: str, body: bytes = b"") -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return await found[method, path](Mock(headers=headers, body=AsyncMock(return_value=body)))

    return pools, call


async def test_a_client_may_report_and_only_those_who_are_trusted_say_where_others_send_their_keys() -> None:
    roles = {"admin": Role.ADMIN, "client": Role.CLIENT, "worker": Role.WORKER, "collect": Role.COLLECT}
    keys = KeyRing({digest(key): Principal(role, name=key) for key, role in roles.items()}, is_open=False)
    pools, call = routes(keys)
    plain = report("a", boxes(starts=1)).model_dump_json().encode()
    announced = report("s", url="http://10.0.0.1:8322", kinds=("sandbox",)).model_dump_json().encode()
    assert (await call("POST", "/api/resources", "client", plain)).report_s > 0
    with pytest.raises(PermissionDenied, match="a client key, a worker key or an admin key"):
        await call("POST", "/api/resources", "collect", plain)
    with pytest.raises(PermissionDenied, match="worker key or an admin key"):
        await call("POST", "/api/resources", "client", announced)
    await call("POST", "/api/resources", "worker", announced)
    (server,) = (await call("GET", "/api/resources/servers", "client")).servers
    assert (server.url, server.kinds) == ("http://10.0.0.1:8322", ("sandbox",))
    (seen,) = await call("GET", "/api/resources", "client")
    assert (seen.kind, seen.starts) == ("sandbox", 1)
    assert pools.classes() == [seen]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"client_id": "a", "classes": [{"kind": "sandbox", "starts": -1}]}',
        b'{"client_id": "a", "classes": [{"kind": "sandbox", "live_s": 1e999}]}',
        b'{"client_id": "a", "classes": [{"kind": ""}]}',
        b'{"client_id": "a", "url": "file:///etc/passwd"}',
        b'{"client_id": "a", "classes": [' + b", ".join([b'{"kind": "sandbox"}'] * 65) + b"]}",
    ],
)
async def test_what_is_no_report_is_refused(body: bytes) -> None:
    pools, call = routes(KeyRing({}, is_open=True))
    with pytest.raises(RequestError):
        await call("POST", "/api/resources", "", body)
    assert pools.classes() == []
