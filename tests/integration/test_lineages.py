"""A trainer that gives its lost steps up: a new lineage, engines that go back, and nothing that trains twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from harness import Api, Server, check_ledger, eventually, serving, train_config

from wingbeat.dataflow.ledger_reader import open_read_only

STEPS = 12


async def until_step(server: Server, step: int, *, after: int = 0) -> None:
    """``after``: events that are older do not count."""

    async def reached() -> bool:
        return any(e["event"] == "step" and e["step"] >= step for e in server.events()[after:])

    await eventually(reached, what=f"step {step}", timeout_s=120)


@pytest.mark.slow
async def test_without_replay_training_completes_in_a_new_lineage(models: Path, tmp_path: Path) -> None:
    config = train_config(
        tmp_path,
        models,
        run__steps=STEPS,
        policies__solver__trainer__checkpoint_every=1000,  # whenever the trainer is killed, steps are lost
        policies__solver__trainer__replay=False,
        eval__at_end=False,
    )
    with serving(tmp_path, config, command="train") as server:
        await until_step(server, 5)
        os.kill(server.pid("trainer-solver"), signal.SIGKILL)

        async def began() -> bool:
            return bool(server.events_named("lineage_began"))

        await eventually(began, what="the new lineage")
        (lineage,) = server.events_named("lineage_began")
        assert (lineage["lineage"], lineage["reason"]) == (1, "replay is off")
        assert lineage["base_step"] == 0 and lineage["lost_steps"] >= 5
        before = len(server.events())
        await until_step(server, lineage["base_step"] + 2, after=before)
        async with Api(server) as api:

            async def served() -> bool:
                (policy,) = await api.get("/api/policies")
                return policy["served_checksum"] == policy["published_checksum"]

            await eventually(served, what="the engine to serve the new lineage", every_s=0.005)
        os.kill(server.pid("control"), signal.SIGKILL)  # it reads its lineages again
        assert await asyncio.to_thread(server.supervisor.wait, 200) == 0
    check_ledger(server.run_dir, steps=STEPS)
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        (begun,) = ledger.lineages()
        batches = ledger.batches_after("solver", 0)
        summary = ledger.summary()
    assert [batch.lineage for batch in batches] == [int(batch.step > begun.base_step) for batch in batches]
    assert {count.state for count in summary.samples} <= {"trained", "finished", "dropped"}
    restarts = server.events_named("resumed")
    assert restarts and restarts[-1]["versions"]["solver"] > begun.base_step
