"""What pools of resources did, in `/metrics` and `/api/status`: nothing that a pool measures is lost on the way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from wingbeat.client.pool_reports import classes_of
from wingbeat.core.protocol_resources import ResourceReport
from wingbeat.core.resource_reports import Durations, ResourceClass
from wingbeat.resources import LocalSpec, ResourceFailed, Resources, Reuse
from wingbeat.server.resources.reports import PoolReports


async def worked(folder: Path) -> tuple[ResourceClass, ...]:
    """Of a pool in which one of three starts failed, two waited and each of three was reset."""
    faults: list[Exception] = [OSError("no")]

    def make() -> list[str]:
        if faults:
            raise faults.pop()
        return []

    spec = LocalSpec(factory=make, reuse=Reuse.AFTER_RESET, reset=list.clear, limit=1, label="tool")
    async with Resources(ledger=folder) as pool:

        async def use() -> None:
            async with pool.lease(spec):
                await asyncio.sleep(0.002)

        with pytest.raises(ResourceFailed):
            await use()
        await asyncio.gather(use(), use(), use())
        return tuple(classes_of(pool.snapshot(), shown={}))


async def test_every_figure_of_a_pool_is_in_the_metrics_and_in_the_status(tmp_path: Path) -> None:
    (told,) = await worked(tmp_path)
    told = told.model_copy(update={"cost": 1.25, "quarantined": 3, "leaked": 2})
    pools = PoolReports()
    pools.take("", ResourceReport(client_id="me", classes=(told,)))
    registry = CollectorRegistry()
    registry.register(pools)
    lines = [line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    shown = {name.replace('{kind="local",label="tool"}', ""): float(value) for name, value in lines}
    (seen,) = pools.classes()
    status: dict[str, Any] = json.loads(seen.model_dump_json())
    for name in ("wait", "start", "reset", "hold"):
        figure: Durations = getattr(told, name)
        assert figure.count >= 1
        assert shown[f"wingbeat_resources_{name}_seconds_count"] == figure.count
        assert shown[f"wingbeat_resources_{name}_seconds_sum"] == pytest.approx(figure.total_s)
        assert shown[f"wingbeat_resources_{name}_seconds_max"] == pytest.approx(figure.max_s)
        assert status[name] == json.loads(figure.model_dump_json())
    assert (told.start_failures, told.starts, told.reset.count, told.hold.count) == (1, 2, 3, 4)
    assert told.hold.total_s >= 0.006 and told.wait.total_s > 0
    for name, field in (("failures", "start_failures"), ("quarantined", "quarantined"), ("leaked", "leaked")):
        assert shown[f"wingbeat_resources_{name}_total"] == status[field] == getattr(told, field)
    assert shown["wingbeat_resources_cost_total"] == status["cost"] == 1.25
    utilisation = told.busy_s / told.live_s
    assert 0 < utilisation <= 1
    assert shown["wingbeat_resources_utilisation"] == pytest.approx(utilisation)
    assert status["utilisation"] == pytest.approx(utilisation)
