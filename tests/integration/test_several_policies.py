"""Several policies through the real engine and trainers: clocks of their own, frozen members, snapshots."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from harness import QUESTION, Answer, Api, Begun, Server, config_text, eventually, read_graph, serving

from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.tracking import ChatTemplate

TEAM = ["solver", "checker", "babbler"]


def team_config(folder: Path, models: Path) -> str:
    """Two that train, of different architecture, size and tokenizer, and a frozen one."""
    return config_text(
        folder,
        models,
        server__heartbeat_s=10.0,  # a stopped process is not a dead one here
        policies__checker__model=str(models / "checker"),
        policies__checker__context_tokens=128,
        policies__checker__trainer__learning_rate=1e-3,
        policies__babbler__model=str(models / "babbler"),
        policies__babbler__trainable=False,
        dataflow__group_size=2,
        dataflow__groups_per_step=1,
        dataflow__max_staleness=3,
        eval__at_start=False,
    )


async def version_of(api: Api, policy: str) -> int:
    return next(p["version"] for p in await api.get("/api/policies") if p["name"] == policy)


async def until_version(api: Api, policy: str, version: int) -> None:
    async def reached() -> bool:
        return await version_of(api, policy) >= version

    await eventually(reached, what=f"version {version} of {policy}", timeout_s=120)


async def play(api: Api, episode: Begun, models: list[str], rewards: dict[str, float]) -> dict[str, str]:
    """One call of each model; returns the turns by model."""
    turns: dict[str, str] = {}
    for model in models:
        answer = await api.chat(episode, model=model, max_tokens=6)
        assert answer.status == 200, answer
        turns[model] = answer.body["id"]
    assert (await api.finish(episode, {"policies": rewards})).status == 200
    return turns


async def play_group(api: Api, policies: list[str]) -> list[Begun]:
    """A group of two whose rewards differ; waits for room."""
    group = {"id": uuid.uuid4().hex, "size": 2}
    episodes: list[Begun] = []
    for reward in (0.0, 1.0):
        body = api.begin_body(policies=policies, group=group)

        async def admitted(body: dict[str, Any] = body) -> Answer | None:
            answer = await api.call("POST", "/api/episodes", body)
            assert answer.status in (200, 429), answer
            return answer if answer.status == 200 else None

        episode = api.begun(await eventually(admitted, what="room for an episode"))
        await play(api, episode, policies, {policy: reward for policy in policies if policy != "babbler"})
        episodes.append(episode)
    return episodes


async def test_policies_of_any_shape_train_in_one_episode_by_clocks_of_their_own(models: Path, tmp_path: Path) -> None:
    with serving(tmp_path, team_config(tmp_path, models)) as server:
        async with Api(server) as api:
            await api.ready()
            first, _ = await play_group(api, TEAM)
            await until_version(api, "solver", 1)
            await until_version(api, "checker", 1)
            check_tokens(server, first, models)
            # A trainer that is slow holds back its own policy only, as far as its staleness bound lets joint
            # episodes go on, and never those that do not call it.
            os.kill(server.pid("trainer-checker"), signal.SIGSTOP)
            try:
                for step in (2, 3):
                    await play_group(api, TEAM)
                    await until_version(api, "solver", step)
                await play_group(api, ["solver"])
                await until_version(api, "solver", 4)
                assert await version_of(api, "checker") == 1
            finally:
                os.kill(server.pid("trainer-checker"), signal.SIGCONT)
            await until_version(api, "checker", 3)
            policies = {p["name"]: p for p in await api.get("/api/policies")}
            assert (policies["babbler"]["trainer"], policies["babbler"]["version"]) == ("frozen", 0)
            assert (policies["solver"]["version"], policies["checker"]["version"]) == (4, 3)
        run_dir = server.run_dir
    with open_read_only(run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        batches = {policy: ledger.batches_after(policy, 0) for policy in ("solver", "checker", "babbler")}
    assert {policy: [batch.step for batch in found] for policy, found in batches.items()} == {
        "solver": [1, 2, 3, 4],
        "checker": [1, 2, 3],
        "babbler": [],
    }
    for policy, found in batches.items():
        assert all(member.policy == policy for batch in found for member in batch.episodes)


def check_tokens(server: Server, episode: Begun, models: Path) -> None:
    """Each policy's turns are written and read by its own template and tokenizer."""
    graph = read_graph(server, episode.id, episode.attempt)
    prompts = {t.policy: ChatTemplate.load(models / t.policy).decode(graph.prompt_ids(t).tolist()) for t in graph.turns}
    question = QUESTION[0]["content"]
    assert list(prompts) == TEAM
    assert prompts["checker"] == f"[Q]{question}[E][A]"
    assert prompts["solver"] == prompts["babbler"] == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert len({len(graph.prompt_ids(turn)) for turn in graph.turns}) == 2


# --- snapshots ---------------------------------------------------------------------------------------


def snapshot_config(folder: Path, models: Path, **settings: Any) -> str:
    return config_text(
        folder,
        models,
        policies__rival__model=str(models / "solver"),
        policies__rival__context_tokens=128,
        policies__rival__trainable=False,
        policies__rival__snapshot_of="solver",
        policies__rival__snapshot_every=2,
        dataflow__group_size=2,
        dataflow__groups_per_step=1,
        dataflow__max_staleness=3,
        eval__at_start=False,
        **settings,
    )


async def answer(api: Api, model: str, name: str) -> tuple[list[int], list[float], list[int]]:
    """Tokens, logprobs and versions of a greedy turn; ``name`` is ``model``, or with a version to pin."""
    episode = await api.begin(split="eval", policies=[name])
    assert (await api.chat(episode, model=model, temperature=0, max_tokens=12)).status == 200
    assert (await api.finish(episode)).status == 200
    (turn,) = read_graph(api.server, episode.id, episode.attempt).turns
    return turn.sampled.tolist(), turn.logprobs.tolist(), sorted({version for version, _ in turn.versions})


def same(found: tuple[list[int], list[float], list[int]], expected: tuple[list[int], list[float], list[int]]) -> None:
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


async def until_snapshot(api: Api, version: int) -> dict[str, dict[str, Any]]:
    """Wait until engines serve it; returns the policies by name."""

    async def served() -> dict[str, dict[str, Any]] | None:
        found = {p["name"]: p for p in await api.get("/api/policies")}
        return found if found["rival"]["served_version"] == version == found["rival"]["version"] else None

    return await eventually(served, what=f"snapshot {version} to be served", timeout_s=120)


@pytest.mark.parametrize("kind", ["full", "lora"])
async def test_a_snapshot_answers_as_the_original_did_and_outlives_everything(
    models: Path, tmp_path: Path, kind: str
) -> None:
    lora: dict[str, Any] = {"policies__solver__lora__rank": 4} if kind == "lora" else {}
    config = snapshot_config(tmp_path, models, **lora)
    with serving(tmp_path, config) as server:
        async with Api(server) as api:
            await api.ready()
            same(await answer(api, "rival", "rival"), await answer(api, "solver", "solver"))
            for step in (1, 2):
                await play_group(api, ["solver"])
                await until_version(api, "solver", step)
            policies = await until_snapshot(api, 2)
            assert policies["rival"]["served_checksum"] == policies["rival"]["published_checksum"]
            assert policies["rival"]["served_checksum"] == policies["solver"]["published_checksum"]
            await pin(api, "solver")
            await play_group(api, ["solver"])
            await until_version(api, "solver", 3)
            then = await answer(api, "solver", "solver@2")
            assert then[2] == [2]
            same(await answer(api, "rival", "rival"), then)
            assert (await answer(api, "solver", "solver"))[1] != pytest.approx(then[1])
            os.kill(server.pid("control"), signal.SIGKILL)
            await eventually(lambda: _resumed(server), what="control to be back")
            await api.ready()
            await until_snapshot(api, 2)
            same(await answer(api, "rival", "rival"), then)
            assert server.events_named("snapshot_behind") == []
        run_dir = server.run_dir
    with serving(tmp_path, config, more=("--resume", str(run_dir))) as server:
        async with Api(server) as api:
            await api.ready()
            await until_snapshot(api, 2)
            same(await answer(api, "rival", "rival"), then)


async def _resumed(server: Server) -> bool:
    return bool(server.events_named("resumed"))


async def pin(api: Api, policy: str) -> None:
    """An evaluation that nobody runs holds the version."""
    tasks = [{"source": "exam", "id": "0", "payload": {}}]
    assert (await api.call("PUT", "/api/tasks/exam", {"split": "eval", "tasks": tasks})).status == 200
    started = await api.call("POST", "/api/evaluations", {"source": "exam", "policy": policy, "name": "hold"})
    assert started.body["version"] == 2, started
