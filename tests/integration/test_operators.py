"""Operators in a real control: killed at any moment, no group meets them twice and none is forgotten."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness import Api, Server, eventually, serving, train_config

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat.dataflow.ledger_reader import open_read_only

OPERATORS = """
from wingbeat.dataflow.operators import Operator, OperatorOptions


class Journal(Operator[OperatorOptions]):
    \"\"\"Writes down which groups it met, and drops the first episode of every other one.\"\"\"

    def __init__(self, options, context):
        super().__init__(options, context)
        self.met = []

    def on_group(self, group):
        self.met.append(group.id)
        return [group.episodes[0].drop("odd")] if len(self.met) % 2 else []

    def state_dict(self):
        return {"met": self.met}

    def load_state_dict(self, state):
        self.met = state["met"]


class Broken(Operator[OperatorOptions]):
    def on_group(self, group):
        raise RuntimeError("boom")
"""


def settings(folder: Path, use: str, **more: Any) -> dict[str, Any]:
    (folder / "mine.py").write_text(OPERATORS)
    entry = {"use": f"{folder / 'mine.py'}:{use}", **more}
    return {"dataflow.operators": [entry], "dataflow.groups_per_step": 64}


async def close_group(api: Api, group: str, *, size: int = 2) -> None:
    """Retries what a kill interrupts: a finish is safe to repeat."""
    for index in range(size):
        done = False
        while not done:
            try:
                episode = await api.begin(group={"id": group, "size": size}, idempotency_key=f"{group}-{index}")
                if (await api.chat(episode)).status == 200:
                    done = (await api.finish(episode, float(index))).status == 200
            except (aiohttp.ClientError, AssertionError, OSError):
                await asyncio.sleep(0.05)


def journal(server: ScriptedServer) -> list[str]:
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        saved = ledger.load_operator_states().get("solver")
    return json.loads(saved["operators"]["Journal"]["state"])["met"] if saved else []


async def test_kills_make_no_operator_meet_a_group_twice_or_forget_one(tmp_path: Path) -> None:
    groups, kills = 12, 4
    with scripted_server(tmp_path, ["an answer"], settings=settings(tmp_path, "Journal")) as server:
        async with Api(server) as api:  # pyright: ignore[reportArgumentType]
            for number in range(groups):
                await close_group(api, f"g{number}")
                if number % (groups // kills) == 0:  # the finish is acknowledged; what follows it may or may not be
                    os.kill(server.pid, signal.SIGKILL)
                    server.kill()
                    await asyncio.to_thread(server.start)
                    await asyncio.to_thread(server.until_served)

            async def all_closed() -> bool:
                return len(journal(server)) == groups

            await eventually(all_closed, what="every group to close")
    met = journal(server)
    assert len(set(met)) == len(met) == groups
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        waiting = {group.group_id: len(group.members) for group in ledger.unconsumed("solver")}
    # the first, third, ... group that it met lost one of its two episodes
    assert waiting == {group: 1 if place % 2 == 0 else 2 for place, group in enumerate(met)}


async def test_an_operator_that_raises_is_left_out_and_people_are_told(tmp_path: Path) -> None:
    with scripted_server(tmp_path, ["an answer"], settings=settings(tmp_path, "Broken")) as server:
        async with Api(server) as api:  # pyright: ignore[reportArgumentType]
            await close_group(api, "g")
            status = await api.get("/api/status")
            assert status["groups_buffered"] == 1
            assert any("operator 'Broken' of 'solver' failed in on_group" in text for text in status["warnings"])
        events = (server.run_dir / "events.jsonl").read_text()
        assert '"event":"operator_quarantined","policy":"solver","operator":"Broken","hook":"on_group"' in events


async def test_an_operator_that_must_not_fail_stops_training_with_its_reason(tmp_path: Path) -> None:
    broken = settings(tmp_path, "Broken", on_error="stop")
    with scripted_server(tmp_path, ["an answer"], settings=broken) as server:
        async with Api(server) as api:  # pyright: ignore[reportArgumentType]
            await close_group(api, "g")
            status = await api.get("/api/status")
            said = "operator 'Broken' of 'solver' failed in on_group: RuntimeError: boom; training stopped"
            assert said in status["blockers"]
            os.kill(server.pid, signal.SIGKILL)
            server.kill()
            await asyncio.to_thread(server.start)

            async def still_stopped() -> bool:
                return said in (await api.get("/api/status"))["blockers"]

            await eventually(still_stopped, what="the reason, after a restart")


# --- a training run with replay -----------------------------------------------------------------------

STEPS = 10
CHAIN = """[
    {use = "reward_shaping", per_token = -0.001},
    {use = "zero_variance_filter"},
    {use = "curriculum_solved"},
    {use = "replay", ratio = 1.0, max_uses = 2},
]"""


async def until_step(server: Server, step: int) -> None:
    async def reached() -> bool:
        return max((e["step"] for e in server.events_named("step")), default=0) >= step

    await eventually(reached, what=f"step {step}", timeout_s=180)


@pytest.mark.slow
async def test_a_run_that_replays_loses_control_and_trainer_and_trains_what_it_should(
    models: Path, tmp_path: Path
) -> None:
    config = train_config(
        tmp_path,
        models,
        run__steps=STEPS,
        dataflow__max_staleness=3,
        policies__solver__trainer__checkpoint_every=4,
        policies__solver__trainer__threads=1,
    )
    more = ("--dataflow.operators=" + " ".join(CHAIN.split()),)
    with serving(tmp_path, config, command="train", more=more) as server:
        await until_step(server, 3)
        os.kill(server.pid("control"), signal.SIGKILL)
        await until_step(server, 6)
        os.kill(server.pid("trainer-solver"), signal.SIGKILL)
        assert await asyncio.to_thread(server.supervisor.wait, 240) == 0
        assert all(event["exact"] for event in server.events_named("replayed"))
        assert server.events_named("operator_quarantined") == []
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        batches = ledger.batches_after("solver", 0)
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    fresh: list[tuple[str, int]] = []
    uses: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        keys = [(member.episode_id, member.attempt) for member in batch.episodes]
        assert len(set(keys)) == len(keys)
        assert set(batch.replayed) <= set(fresh), "only what was trained before is repeated"
        fresh += [key for key in keys if key not in batch.replayed]
        uses.update(batch.replayed)
        for member in batch.episodes:
            assert member.shaping == pytest.approx(-0.001 * member.num_sampled)
            assert member.min_version is not None
            assert batch.step - 1 - member.min_version <= 3
    assert len(set(fresh)) == len(fresh), "nothing is trained twice as new"
    assert 0 < max(uses.values()) <= 2
