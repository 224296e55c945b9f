"""Policies of a LoRA group through real processes: one trainer for all, adapters of different ranks in one engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

from harness import Api, Begun, Server, config_text, eventually, serving

from wingbeat.dataflow.ledger_reader import open_read_only

RANKS = {"solver": 4, "coder": 8}


def group_config(folder: Path, models: Path) -> str:
    """Two that train, and the base model itself as a judge."""
    settings: dict[str, Any] = {}
    for name in (*RANKS, "judge"):
        settings |= {
            f"policies__{name}__model": str(models / "solver"),
            f"policies__{name}__context_tokens": 128,
            f"policies__{name}__lora__group": "team",
        }
    for name, rank in RANKS.items():
        settings |= {
            f"policies__{name}__lora__rank": rank,
            f"policies__{name}__trainer__learning_rate": 2e-2,
            f"policies__{name}__trainer__checkpoint_every": 2,
        }
    return config_text(
        folder,
        models,
        policies__judge__trainable=False,
        dataflow__group_size=2,
        dataflow__groups_per_step=1,
        dataflow__max_staleness=2,
        eval__at_start=False,
        **settings,
    )


async def play_group(api: Api, policies: list[str]) -> None:
    """Two episodes of opposite rewards, each with one call of every policy at once, so that batches mix adapters."""
    group = {"id": uuid.uuid4().hex, "size": 2}

    async def play(reward: float) -> None:
        async def admitted() -> Begun | None:
            answer = await api.call("POST", "/api/episodes", body)
            assert answer.status in (200, 429), answer
            return api.begun(answer) if answer.status == 200 else None

        body = api.begin_body(policies=policies, group=group)
        episode = await eventually(admitted, what="room for an episode")
        assert episode is not None
        answers = await asyncio.gather(*(api.chat(episode, model=name, max_tokens=8) for name in policies))
        assert [answer.status for answer in answers] == [200] * len(policies), answers
        rewards = {name: reward for name in policies if name != "judge"}
        assert (await api.finish(episode, {"policies": rewards})).status == 200

    await asyncio.gather(play(0.0), play(1.0))


async def until(api: Api, **versions: int) -> dict[str, dict[str, Any]]:
    """Wait until these versions are served, as their trainers published them."""

    async def reached() -> dict[str, dict[str, Any]] | None:
        found = {p["name"]: p for p in await api.get("/api/policies")}
        there = all(
            found[name]["served_version"] == version
            and found[name]["served_checksum"] == found[name]["published_checksum"]
            for name, version in versions.items()
        )
        return found if there else None

    found = await eventually(reached, what=f"versions {versions}", timeout_s=60)
    assert found is not None
    return found


def step_metrics(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (server.run_dir / "metrics.jsonl").read_text().splitlines()]


async def test_one_trainer_and_one_engine_train_and_serve_a_whole_group(models: Path, tmp_path: Path) -> None:
    with serving(tmp_path, group_config(tmp_path, models)) as server:
        async with Api(server) as api:
            await api.ready()
            assert set(server.pids()) == {"control", "engine-0", "trainers-team"}
            for step in (1, 2):
                await play_group(api, [*RANKS, "judge"])
                found = await until(api, solver=step, coder=step)
            assert len({found[name]["served_checksum"] for name in RANKS}) == 2
            await play_group(api, ["solver"])
            before = await until(api, solver=3, coder=2)
            os.kill(server.pid("trainers-team"), signal.SIGKILL)
            await play_group(api, list(RANKS))
            after = await until(api, solver=4, coder=3)
            assert after["coder"]["served_checksum"] != before["coder"]["served_checksum"]
            assert {event["policy"] for event in server.events_named("trainer_lost")} == set(RANKS)
            replayed = server.events_named("replayed")
            assert [(event["policy"], event["exact"]) for event in replayed] == [("solver", True)]
            assert (after["judge"]["trainer"], after["judge"]["version"]) == ("frozen", 0)
        lines = step_metrics(server)
    # What sampled and what trained agree, token by token, for every policy and version in mixed batches.
    assert {(line["policy"], line["step"]) for line in lines} == {
        *(("solver", step) for step in (1, 2, 3, 4)),
        *(("coder", step) for step in (1, 2, 3)),
    }
    assert all(abs(line["mismatch_kl"]) < 1e-5 for line in lines), [line["mismatch_kl"] for line in lines]
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
