"""A resources server tells control where it is, from when it serves until it ends."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_boxes import FakeBoxes, box_spec

from wingbeat.resources import Budgets, Resources
from wingbeat.server.resources import announcing
from wingbeat.server.resources.announcing import Announcer

URL = "https://tools.example:8322"


async def test_it_is_told_where_a_server_is_what_it_has_and_that_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcing, "REPORT_EVERY_S", 0.02)
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    keys: set[str] = set()
    is_away = True

    async def take(request: web.Request) -> web.Response:
        if is_away:
            raise web.HTTPServiceUnavailable()
        keys.add(request.headers["authorization"])
        reports.put_nowait(await request.json())
        return web.json_response({"report_s": 60.0})

    app = web.Application()
    app.router.add_post("/api/resources", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    control = f"http://127.0.0.1:{runner.addresses[0][1]}"
    backends = {"subprocess": FakeBoxes()}
    ready = list[bool]()
    async with Resources(Budgets(), backends=backends, ledger=tmp_path) as pool, pool.lease(box_spec(label="mine")):
        announcer = Announcer(
            pool,
            url=URL,
            kinds=("subprocess",),
            control=control,
            key="wb-worker-1",
            on_ready=lambda: ready.append(True),
        )
        with caplog.at_level(logging.WARNING):
            announcer.start()
            async with asyncio.timeout(10):
                while not caplog.messages:  # noqa: ASYNC110, it is told to the log only
                    await asyncio.sleep(0.01)
            is_away = False
            async with asyncio.timeout(10):
                first = await reports.get()
            await announcer.close()
        last = reports.get_nowait()
        assert ready == [True]
        assert len(caplog.messages) == 1, "once, however often it is tried"
        assert "does not know of this server" in caplog.messages[0]
    assert (first["url"], first["kinds"], first["leaving"]) == (URL, ["subprocess"], False)
    assert [(c["label"], c["leased"]) for c in first["classes"]] == [("mine", 1)]
    assert (last["leaving"], last["client_id"], keys) == (True, first["client_id"], {"Bearer wb-worker-1"})
    await runner.cleanup()


async def test_without_a_control_it_only_says_that_it_is_ready(tmp_path: Path) -> None:
    ready = list[bool]()
    async with Resources(Budgets(), ledger=tmp_path) as pool:
        announcer = Announcer(pool, url=URL, kinds=(), control="", key=None, on_ready=lambda: ready.append(True))
        announcer.start()
        await announcer.close()
    assert ready == [True]
