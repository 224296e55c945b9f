"""A client tells its server what its pool of resources did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from wingbeat.client.plans import RolloutPlan, dump_plan, load_plan, resource_urls
from wingbeat.client.pool_reports import PoolReports, classes_of
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Transport
from wingbeat.core.errors import SetupError
from wingbeat.resources import LocalSpec, Resources, Reuse


class Server:
    """Takes reports, or answers otherwise."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def take(self, request: web.Request) -> web.Response:
        self.reports.put_nowait(json.loads(await request.read()))
        return web.json_response({"report_s": 1.0} if self.status == 200 else {}, status=self.status)

    @asynccontextmanager
    async def reporting(self, pool: Resources) -> AsyncIterator[PoolReports]:
        app = web.Application()
        app.router.add_post("/api/resources", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        transport = Transport(
            f"http://127.0.0.1:{port}", key="client", timeout_s=5, retry=RetryPolicy(budget_s=5), client_id="me"
        )
        reports = PoolReports(pool, transport, client_id="me")
        try:
            yield reports
        finally:
            await reports.close()
            await transport.close()
            await runner.cleanup()


async def test_the_first_report_and_the_last_one_say_what_the_pool_did() -> None:
    server = Server()
    spec = LocalSpec(factory=object, label="tool", reuse=Reuse.SHARED)
    async with Resources() as pool, server.reporting(pool) as reports:
        async with pool.lease(spec):
            reports.start()
            reports.start()
            first = await server.reports.get()
        await reports.close()
        await reports.close()
    last = server.reports.get_nowait()
    assert server.reports.empty()
    assert (first["client_id"], first["leaving"], last["leaving"]) == ("me", False, True)
    (now,), (then,) = first["classes"], last["classes"]
    assert (now["kind"], now["label"], now["starts"], now["leased"]) == ("local", "tool", 1, 1)
    assert (then["starts"], then["leased"], then["hold"]["count"]) == (1, 0, 1)


async def test_a_server_that_takes_no_reports_is_left_alone() -> None:
    server = Server(status=404)
    async with Resources() as pool, server.reporting(pool) as reports:
        reports.start()
        await server.reports.get()
        assert reports._task is not None
        await asyncio.wait([reports._task])
        await reports.close()
    assert server.reports.empty()


async def test_many_labels_are_told_as_one_whose_counts_never_fall() -> None:
    shown: dict[tuple[str, str], None] = {}
    classes: dict[tuple[str, str], int] = {}
    async with Resources() as pool:
        starts = list[int]()
        for batch in range(2):
            for number in range(batch * 50, batch * 50 + 50):
                async with pool.lease(LocalSpec(factory=object, label=f"{99 - number:02}")):
                    pass
            classes = {(c.kind, c.label): c.starts for c in classes_of(pool.snapshot(), shown=shown)}
            starts.append(sum(classes.values()))
            assert len(classes) <= 64
            assert set(classes.values()) <= {1, 37}
        assert starts == [50, 100]
        assert classes["other", "other"] == 37


async def test_the_resources_servers_of_a_plan_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[dict[str, Any]] = []

    async def servers(request: web.Request) -> web.Response:
        return web.json_response({"servers": known})

    app = web.Application()
    app.router.add_get("/api/resources/servers", servers)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr("wingbeat.client.plans.ASK_TIMES", 1)
    monkeypatch.setattr("wingbeat.client.plans.ASK_EVERY_S", 0.0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    plan = RolloutPlan("agent.py", url=url, resource_urls=("http://a:1", "auto"))
    try:
        with pytest.raises(SetupError, match="no resources server reports"):
            await resource_urls(plan)
        known += [{"url": "http://b:2", "kinds": ["sandbox"]}, {"url": "http://a:1"}]
        assert await resource_urls(load_plan(dump_plan(plan))) == ["http://a:1", "http://b:2"]
    finally:
        await runner.cleanup()
