"""The runner: concurrency, isolation, leaving."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from wingbeat.client import Agent, AsyncSwarm, Episode, EpisodeEnd, Runner, RunnerOptions, RunnerStats, SyncEpisode
from wingbeat.client.runner import HOPELESS_FAILURES
from wingbeat.core.errors import AuthenticationError, RequestError, SetupError
from wingbeat.core.types import Split


async def rewarding(episode: Episode) -> float:
    return 1.0


async def test_runs_every_lease_until_the_server_says_stop(server: Any) -> None:
    server.add_leases(30)
    ends: list[EpisodeEnd] = []
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, rewarding, 8, on_end=ends.append).run()
    assert stats == RunnerStats(num_finished=30, num_rewards=30, reward_sum=30.0)
    assert stats.mean_reward == 1.0
    assert len(server.in_state("finished")) == 30
    assert {end.task_id for end in ends} == {f"task-{i}" for i in range(30)}
    assert all(end.reward == 1.0 and end.split is Split.TRAIN and not end.error for end in ends)


async def test_the_end_is_noticed_whenever_it_comes(server: Any) -> None:
    """Also between the look at what runs and the wait for it: nobody waits for the grace in vain."""
    for number in range(60):
        server.add_leases(number % 13 + 1)

        async def agent(episode: Episode, yields: int = number % 7) -> float:
            for _ in range(yields):
                await asyncio.sleep(0)
            return 1.0

        async with AsyncSwarm(server.url) as swarm, asyncio.timeout(5):
            await Runner(swarm, agent, 8, options=RunnerOptions(grace_s=60)).run()


@pytest.mark.parametrize(
    ("declared", "options", "asked"),
    [(None, None, None), (["a", "b"], None, ["a", "b"]), (["a", "b"], ["c"], ["c"]), (None, ["c"], ["c"])],
)
async def test_asks_for_the_sources_of_its_options_else_of_its_agent(
    server: Any, declared: list[str] | None, options: list[str] | None, asked: list[str] | None
) -> None:
    server.add_leases(1)
    async with AsyncSwarm(server.url) as swarm:
        await Runner(swarm, Agent(rewarding, sources=declared), 1, options=RunnerOptions(sources=options)).run()
    assert {str(body["sources"]) for body in server.asked} == {str(asked)}


async def test_concurrency_is_reached_and_never_exceeded(server: Any) -> None:
    server.add_leases(20)
    running, most, all_in = 0, 0, asyncio.Event()

    async def agent(episode: Episode) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            all_in.set()
        await all_in.wait()
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, agent, 4).run()
    assert stats.num_finished == 20
    assert most == 4


async def test_fast_agents_fetch_leases_ahead_in_batches(server: Any) -> None:
    server.add_leases(200)
    async with AsyncSwarm(server.url) as swarm:
        assert (await Runner(swarm, rewarding, 16).run()).num_finished == 200
    assert server.calls["POST /api/tasks/lease"] <= 60


async def test_one_exception_ends_its_own_episode_only(server: Any) -> None:
    server.add_leases(6)

    async def agent(episode: Episode) -> float:
        if episode.id == "ep-2":
            raise ValueError("this one is broken")
        return 1.0

    begins: dict[str, str] = {}
    ends: list[EpisodeEnd] = []
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(
            swarm,
            agent,
            3,
            on_begin=lambda lease, episode: begins.update({lease.lease_id: episode.id}),
            on_end=ends.append,
        ).run()
    assert len(begins) == 6 and begins == {end.lease_id: end.episode_id for end in ends}, "failed ones, too"
    assert (stats.num_finished, stats.num_failed) == (5, 1)
    aborted = server.records["ep-2"]
    assert aborted.abort["outcome"] == "client"
    assert aborted.abort["message"].rstrip().endswith("ValueError: this one is broken")
    assert [end.error for end in ends if end.error] == ["ValueError: this one is broken"]


@pytest.mark.parametrize(
    ("result", "says"), [("high", "expected a number"), (float("nan"), "finite"), (None, "without finishing")]
)
async def test_what_is_no_reward_fails_the_episode(server: Any, result: Any, says: str) -> None:
    server.add_leases(1)

    async def agent(episode: Episode) -> Any:
        return result

    ends: list[EpisodeEnd] = []
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, agent, on_end=ends.append).run()
    assert stats.num_failed == 1
    assert says in ends[0].error
    assert server.records["ep-0"].state == "aborted"


async def test_agent_may_finish_itself_or_return_many_rewards(server: Any) -> None:
    server.add_leases(2)

    async def agent(episode: Episode) -> Any:
        if episode.id == "ep-0":
            await episode.finish(0.5, metrics={"turns": 1})
            return None
        return {"solver": 1.0, "critic": 0.0}

    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, agent).run()
    assert stats.num_finished == 2
    assert server.records["ep-1"].finish["rewards"]["policies"] == {"solver": 1.0, "critic": 0.0}


async def test_sync_agents_run_beside_each_other(server: Any) -> None:
    server.add_leases(8)
    barrier = threading.Barrier(8)

    def agent(episode: SyncEpisode) -> None:
        barrier.wait(10)  # passes only if all eight run at once
        episode.finish(1.0)

    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, agent, 8).run()
    assert stats.num_finished == 8


async def test_stop_gives_running_episodes_their_time(server: Any) -> None:
    server.stop_when_empty = False
    server.add_leases(2)
    go = asyncio.Event()

    async def agent(episode: Episode) -> float:
        await go.wait()
        return 1.0

    async with AsyncSwarm(server.url) as swarm:
        runner = Runner(swarm, agent, 2)
        running = asyncio.create_task(runner.run())
        await asyncio.to_thread(server.wait_for, lambda: len(server.records) == 2)
        server.add_leases(5)
        runner.stop()
        go.set()
        stats = await running
    assert stats == RunnerStats(num_finished=2, num_rewards=2, reward_sum=2.0)
    assert runner.num_running == 0
    assert len(server.records) == 2


@pytest.mark.parametrize("how", ["grace", "now", "cancel"])
async def test_what_outlasts_the_grace_is_aborted(server: Any, how: str) -> None:
    server.stop_when_empty = False
    server.add_leases(2)
    entered = asyncio.Semaphore(0)

    async def agent(episode: Episode) -> float:
        entered.release()
        await asyncio.Event().wait()
        return 1.0

    async with AsyncSwarm(server.url) as swarm:
        runner = Runner(swarm, agent, 2, options=RunnerOptions(grace_s=0.05 if how == "grace" else 60))
        running = asyncio.create_task(runner.run())
        await entered.acquire()
        await entered.acquire()
        if how == "cancel":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            runner.stop(now=how == "now")
            await running
        assert runner.stats.num_cancelled == 2
    assert [record.state for record in server.records.values()] == ["aborted", "aborted"]


async def test_max_episodes(server: Any) -> None:
    server.add_leases(20)
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, rewarding, 4, options=RunnerOptions(max_episodes=7)).run()
    assert stats.num_finished == 7
    assert len(server.records) == 7
    assert len(server.leases) == 13


async def test_a_lapsed_lease_is_never_begun(server: Any) -> None:
    server.add_leases(1, expires_s=0.0)
    server.add_leases(1)
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, rewarding, 2).run()
    assert (stats.num_refused, stats.num_finished) == (1, 1)


async def test_a_refused_begin_is_not_the_agent_s_failure(server: Any) -> None:
    from aiohttp import web

    body = {"error": {"message": "the lease lapsed", "type": "t", "code": "conflict"}}
    server.add_leases(2)
    server.order_fault("POST /api/episodes", web.json_response(body, status=409))
    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, rewarding, 1).run()
    assert (stats.num_refused, stats.num_finished, stats.num_failed) == (1, 1, 0)


async def test_a_server_that_is_away_is_waited_for(server: Any) -> None:
    server.stop()
    async with AsyncSwarm(server.url, retry_budget_s=0) as swarm:
        running = asyncio.create_task(Runner(swarm, rewarding).run())
        done, _ = await asyncio.wait({running}, timeout=0.3)
        assert not done
        server.add_leases(3)
        server.start()
        assert (await running).num_finished == 3


async def test_a_wrong_key_ends_the_run(server: Any) -> None:
    server.admin_key = "admin"
    async with AsyncSwarm(server.url, "wrong") as swarm:
        with pytest.raises(AuthenticationError):
            await Runner(swarm, rewarding).run()


async def test_splits_are_asked_for(server: Any) -> None:
    server.add_leases(1, split="eval")
    ends: list[EpisodeEnd] = []
    async with AsyncSwarm(server.url) as swarm:
        await Runner(swarm, rewarding, options=RunnerOptions(splits=(Split.EVAL,)), on_end=ends.append).run()
    assert ends[0].split is Split.EVAL
    assert server.records["ep-0"].begin["split"] == "eval"


async def test_concurrency_must_be_positive(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(RequestError, match="at least 1"):
            Runner(swarm, rewarding, 0)


async def test_an_agent_that_always_fails_ends_the_run_with_its_error(server: Any) -> None:
    server.add_leases(200)

    async def agent(episode: Episode) -> float:
        raise ValueError("boom")

    async with AsyncSwarm(server.url) as swarm:
        runner = Runner(swarm, agent, 8)
        with pytest.raises(SetupError, match=r"all of its first \d+ episodes; the last: ValueError: boom"):
            await runner.run()
    assert HOPELESS_FAILURES <= runner.stats.num_failed < 100


async def test_an_agent_that_succeeded_once_may_fail_for_long(server: Any) -> None:
    server.add_leases(150)

    async def agent(episode: Episode) -> float:
        if episode.id != "ep-0":
            raise ValueError("boom")
        return 1.0

    async with AsyncSwarm(server.url) as swarm:
        stats = await Runner(swarm, agent, 1).run()
    assert (stats.num_finished, stats.num_failed) == (1, 149)
