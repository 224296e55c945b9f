"""Alarms through a real control process: events, status, metrics, and the end of training where they demand it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
from harness import eventually

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat import AsyncSwarm, Group, Task
from wingbeat.core.worker_protocol import Failed

SETTINGS = {"dataflow.group_size": 2, "dataflow.groups_per_step": 1, "dataflow.max_staleness": 0}


async def train_one_step(swarm: AsyncSwarm, number: int) -> None:
    group = Group(f"g{number}", 2)
    for reward in (0.0, 1.0):
        async with swarm.episode(task=Task("t", "1"), group=group) as episode:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {episode.api_key}"}) as session:
                body = {"model": episode.model, "messages": [{"role": "user", "content": "what is 3 plus 8 ?"}]}
                async with session.post(f"{episode.base_url}/chat/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
            await episode.finish(reward)

    async def trained() -> bool:
        return (await swarm.status()).train_steps >= number

    await eventually(trained, what=f"step {number}", every_s=0.02)


def events(server: ScriptedServer, name: str) -> list[dict[str, Any]]:
    lines = (server.run_dir / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == name]


async def test_an_alarm_is_told_while_it_sounds_and_training_goes_on(tmp_path: Path) -> None:
    with scripted_server(tmp_path, ["11"], settings=SETTINGS) as server:
        server.engine.step_metrics = lambda batch: {
            "trained_tokens": 100.0,
            "excluded_tokens": 50.0 if batch.step == 1 else 0.0,
        }
        async with AsyncSwarm(server.url) as swarm:
            await train_one_step(swarm, 1)

            async def sounds() -> bool:  # (the step counts before its record is durable and its metrics are looked at)
                return any("tokens of 'solver': 33%" in warning for warning in (await swarm.status()).warnings)

            await eventually(sounds, what="the alarm", every_s=0.02)
            async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
                assert 'wingbeat_alarm{alarm="tokens",policy="solver"} 1.0' in await reply.text()
            await train_one_step(swarm, 2)

            async def is_silent() -> bool:
                return (await swarm.status()).warnings == []

            await eventually(is_silent, what="the alarm to end", every_s=0.02)
        (began,) = events(server, "alarm")
        assert (began["alarm"], began["step"], began["action"]) == ("tokens", 1, "warn")
        assert [record["step"] for record in events(server, "alarm_ended")] == [2]
        first, second = map(json.loads, (server.run_dir / "metrics.jsonl").read_text().splitlines())
        assert first["alarm/tokens"] == 1.0
        assert "alarm/tokens" not in second


async def test_an_alarm_stops_training_where_the_configuration_says_so(tmp_path: Path) -> None:
    with scripted_server(tmp_path, ["11"], settings={**SETTINGS, "health.tokens.action": "stop"}) as server:
        server.engine.step_metrics = lambda batch: {"trained_tokens": 0.0}
        async with AsyncSwarm(server.url) as swarm:
            await train_one_step(swarm, 1)
            (blocker,) = [b for b in (await swarm.status()).blockers if "stopped by the alarm tokens" in b]
            assert "trained 0 tokens" in blocker


async def test_weights_that_reach_nobody_end_training_and_lost_checkpoints_do_not(tmp_path: Path) -> None:
    """A scripted trainer saves nothing, which is told; its second step's weights are refused for good."""
    settings = {**SETTINGS, "policies.solver.trainer.checkpoint_every": 1}
    with scripted_server(tmp_path, ["11"], settings=settings) as server:
        server.engine.publish_fault = lambda batch: (
            Failed("solver", "publish_weights", "it answers 404", final=True) if batch.step == 2 else None
        )
        async with AsyncSwarm(server.url) as swarm:
            await train_one_step(swarm, 1)

            async def sounds() -> bool:
                return any("no checkpoint could be written" in warning for warning in (await swarm.status()).warnings)

            await eventually(sounds, what="the alarm", every_s=0.02)
            await train_one_step(swarm, 2)

            async def is_stopped() -> bool:
                return any("no engine would get its weights" in b for b in (await swarm.status()).blockers)

            await eventually(is_stopped, what="the end of training", every_s=0.02)
            assert any("publish of 'solver': " in warning for warning in (await swarm.status()).warnings)
            async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
                text = await reply.text()
        for alarm in ("publish", "checkpoint"):
            assert f'wingbeat_alarm{{alarm="{alarm}",policy="solver"}} 1.0' in text
