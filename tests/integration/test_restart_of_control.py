"""SIGKILL to control while agents work: everybody goes on with the same episode, and each counts once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Api, eventually

from bench.scripted_server import scripted_server
from bench.scripts import Reply
from wingbeat.client import AsyncSwarm, Episode, Runner, RunnerOptions
from wingbeat.core.types import Task
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.tracking.serialize import load_graph

AGENTS = 8
TURNS = 10
SETTINGS = {"dataflow.group_size": 2, "server.heartbeat_s": 2.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    def answer(call: Any) -> Reply:
        return Reply(f"reply {call.turn}", delay_s=0.03)

    with scripted_server(tmp_path_factory.mktemp("restarts"), answer, settings=SETTINGS) as running:
        yield running


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await event.wait()


async def test_agents_do_not_notice_that_control_was_killed(server: Any) -> None:
    answered: Counter[str] = Counter()
    killed = asyncio.Event()

    async def solve(episode: Episode) -> float:
        """Ten turns; every fourth agent ends its work while control is away."""
        messages: list[Any] = [{"role": "user", "content": episode.task.payload["question"]}]
        async with episode.openai() as client:
            for turn in range(TURNS):
                reply = await client.chat.completions.create(model=episode.model, messages=messages, max_tokens=64)
                answered[episode.id] += 1
                messages += [reply.choices[0].message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "go on"}]
                if turn == 3 and episode.task.payload["number"] % 2:  # in the middle, and between two calls
                    await until(killed)
        if episode.task.payload["number"] % 4 == 0:
            await until(killed)
        return 0.5

    async with AsyncSwarm(server.url) as swarm:
        tasks = [Task("qa", str(i), {"question": f"question {i}", "number": i}) for i in range(AGENTS)]
        await swarm.put_tasks("qa", tasks)
        runner = Runner(swarm, solve, AGENTS, options=RunnerOptions(max_episodes=AGENTS))
        running = asyncio.create_task(runner.run())

        async def in_the_middle() -> bool:
            assert not running.done(), running
            return len(answered) == AGENTS and min(answered.values()) >= 2

        await eventually(in_the_middle, what="all agents to be in the middle", every_s=0.01)
        server.kill()
        killed.set()
        await asyncio.to_thread(server.start)
        stats = await asyncio.wait_for(running, 60)
    assert (stats.num_finished, stats.num_failed, stats.num_refused) == (AGENTS, 0, 0)
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        for episode_id in answered:
            (attempt,) = ledger.episode(episode_id)
            assert attempt.record is not None, attempt
            graph = load_graph(attempt.record.graph)
            kept = [turn for turn in graph.turns if turn.turn_id not in graph.superseded()]
            assert len(kept) == TURNS == len(graph.path(kept[-1])), "one line, nothing tokenised twice"
            assert sum(s.num_sampled for s in attempt.record.samples) == sum(turn.num_sampled for turn in kept)


async def test_begin_finish_and_abort_are_the_same_after_a_restart(server: Any) -> None:
    async with Api(server) as api:
        body = api.begin_body(client_id="me", label="v2")
        running = api.begun(await api.call("POST", "/api/episodes", body))
        once = api.begin_body()
        finished = api.begun(await api.call("POST", "/api/episodes", once))
        aborted, trial = await api.begin(), await api.begin(tentative_s=300)
        for episode in (running, finished):
            assert (await api.chat(episode)).status == 200
        reply = await api.finish(finished, 0.25)
        assert reply.status == (await api.abort(aborted)).status == 200
    server.kill()
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.until_served)
    async with Api(server) as api:
        again = api.begun(await api.call("POST", "/api/episodes", body))
        assert (again.id, again.attempt) == (running.id, running.attempt) and again.key != running.key
        over = await api.call("POST", "/api/episodes", once)
        over.refused(409, "episode_closed", "which this key began, is finished")
        repeated = await api.finish(finished, 0.25)
        assert (repeated.status, repeated.body) == (200, reply.body)
        (await api.finish(finished, 0.5)).refused(409, "idempotency_conflict", "another body")
        assert (await api.abort(aborted)).body["state"] == "aborted"
        (await api.finish(aborted)).refused(409, "episode_closed", "is aborted")
        (await api.call("POST", f"/api/episodes/{trial.id}/confirm", key=trial.key)).refused(
            401, "invalid_api_key", "belongs to no episode"
        )
        for key in (running.key, again.key):
            state = await api.get(f"/api/episodes/{running.id}", key=key)
            assert (state["state"], state["num_turns"], state["client_id"]) == ("open", 1, "me")
        assert (await api.chat(again)).status == 200
        assert (await api.finish(running)).body["num_turns"] == 2
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []


async def test_trials_over_http(server: Any) -> None:
    async with Api(server) as api:
        episode = await api.begin(tentative_s=60)
        (await api.chat(episode)).refused(409, "episode_closed", "/confirm")
        for _ in range(2):
            confirmed = await api.call("POST", f"/api/episodes/{episode.id}/confirm", key=episode.key)
            assert (confirmed.status, confirmed.body["state"]) == (200, "open")
        assert (await api.chat(episode)).status == 200
        assert (await api.finish(episode)).status == 200
        withdrawn = await api.begin(tentative_s=60)
        assert (await api.abort(withdrawn)).body["state"] == "aborted"
        again = await api.call("POST", f"/api/episodes/{withdrawn.id}/confirm", key=withdrawn.key)
        again.refused(409, "episode_closed", "begin again")
        lapsing = await api.begin(tentative_s=0.05)

        async def lapsed() -> bool:
            return (await api.get(f"/api/episodes/{lapsing.id}", key=lapsing.key))["state"] == "aborted"

        await eventually(lapsed, what="the trial to lapse")


async def test_versions_of_the_contract_are_negotiated(server: Any) -> None:
    async with Api(server) as api:
        assert api._session is not None
        for sent, status in (("1", 200), ("1-9", 200), ("", 200), ("2-3", 400), ("0", 400), ("soon", 400)):
            headers = {"x-wingbeat-protocol": sent} if sent else {}
            async with api._session.get(f"{api.url}/api/status", headers=headers) as response:
                answer = await response.json()
                assert (response.status, response.headers["x-wingbeat-protocol"]) == (status, "1"), sent
                if sent in ("2-3", "0"):
                    assert answer["error"]["code"] == "unsupported_protocol"
                    assert f"version 1 of the episode contract, the client version {sent}" in answer["error"]["message"]
