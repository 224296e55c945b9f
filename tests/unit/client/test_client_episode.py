"""Episodes over HTTP: what reaches the server, and how often, whatever fails on the way."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.client import AsyncSwarm, Episode
from wingbeat.client.episode import EpisodeState
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.core.errors import (
    AuthenticationError,
    EpisodeClosed,
    IdempotencyConflict,
    InvalidReward,
    RequestError,
    UnavailableError,
    VersionGone,
)
from wingbeat.core.ports import EpisodeSession
from wingbeat.core.protocol import EvaluationRequest, Lease
from wingbeat.core.types import Group, Outcome, Split, Task

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

TASK = Task("arithmetic", "1", {"question": "1+1", "hint": None})
BEGIN = "POST /api/episodes"
FINISH = "POST /api/episodes/{id}/finish"


def refusal(server: Any, status: int, code: str, **headers: str) -> Any:
    from aiohttp import web

    body = {"error": {"message": "not now", "type": "t", "code": code}}
    return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})


def said(body: dict[str, Any] | None) -> dict[str, Any]:
    """What a body says, without what it leaves to the server."""
    assert body is not None
    return {name: value for name, value in body.items() if value is not None}


async def test_begin_and_finish(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        async with swarm.episode(task=TASK, group=Group("g1", 4), split=Split.EVAL, label="hello") as episode:
            assert episode.task == TASK
            assert episode.group == Group("g1", 4)
            assert episode.split is Split.EVAL
            assert episode.base_url == f"{server.url}/v1"
            assert episode.api_key == "key-ep-0"
            assert episode.policies == ("solver", "critic")
            assert episode.model == "solver"
            assert episode.model_for("critic", agent="judge") == "critic:judge"
            assert (await episode.status()).state == "running"
            reply = await episode.finish(0.5, metrics={"turns": 2})
        assert reply.num_sampled_tokens == 2
    record = server.records["ep-0"]
    assert record.begin["label"] == "hello"
    assert record.begin["task"]["payload"] == {"question": "1+1", "hint": None}
    assert said(record.finish) == {"outcome": "agent", "rewards": 0.5, "metrics": {"turns": 2.0}, "message": ""}


async def test_the_servers_warning_about_a_finish_is_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.warning = "this training episode made no model call"
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        assert (await episode.finish(1)).warning == server.warning
    assert f"episode ep-0: {server.warning}" in caplog.messages


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/"])
async def test_the_address_of_model_calls_will_do_for_the_server(server: Any, path: str) -> None:
    async with AsyncSwarm(server.url + path) as swarm:
        assert swarm.url == server.url
        assert (await swarm.status()).state


async def test_pinned_policy_is_called_by_its_name(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK, policies=["solver@12"]) as episode:
        assert episode.model == "solver"
        with pytest.raises(RequestError, match="critic"):
            episode.model_for("critic")
        await episode.finish(1)


async def test_exception_aborts_with_the_traceback_s_end_and_passes_through(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(ZeroDivisionError):
            async with swarm.episode(task=TASK):
                1 / 0  # noqa: B018
    record = server.records["ep-0"]
    assert record.state == "aborted"
    assert record.abort["outcome"] == "client"
    assert record.abort["message"].rstrip().endswith("ZeroDivisionError: division by zero")


async def test_infrastructure_failures_are_not_the_agent_s(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(UnavailableError):
            async with swarm.episode(task=TASK):
                raise UnavailableError("no engine")
    assert server.records["ep-0"].abort["outcome"] == "infrastructure"


async def test_leaving_without_finish_aborts(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        pass
    assert episode.state is EpisodeState.ABORTED
    assert "without calling episode.finish" in server.records["ep-0"].abort["message"]


async def test_explicit_abort_is_sent_once(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        await episode.abort("the simulator broke", outcome=Outcome.ENVIRONMENT)
        await episode.abort("again")
        with pytest.raises(EpisodeClosed):
            await episode.finish(1.0)
    assert said(server.records["ep-0"].abort) == {"outcome": "environment", "message": "the simulator broke"}
    assert server.calls["POST /api/episodes/{id}/abort"] == 1


async def test_cancelled_episode_is_aborted(server: Any) -> None:
    entered = asyncio.Event()

    async def agent(swarm: AsyncSwarm) -> None:
        async with swarm.episode(task=TASK):
            entered.set()
            await asyncio.Event().wait()

    async with AsyncSwarm(server.url) as swarm:
        task = asyncio.create_task(agent(swarm))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "cancelled" in server.records["ep-0"].abort["message"]


async def test_a_lost_reply_begins_only_one_episode(server: Any) -> None:
    server.order_fault(BEGIN, "lose", "lose")
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        await episode.finish(1.0)
    assert server.calls[BEGIN] == 3
    assert len(server.records) == 1


async def test_finish_is_sent_until_acknowledged(server: Any) -> None:
    server.order_fault(FINISH, "lose", "refuse", refusal(server, 503, "unavailable", Retry_After="0"))
    async with AsyncSwarm(server.url, retry_budget_s=0) as swarm, swarm.episode(task=TASK) as episode:
        await episode.finish(1.0)
    assert server.calls[FINISH] == 4
    assert server.records["ep-0"].finish["rewards"] == 1.0


async def test_an_answer_that_is_no_http_costs_no_episode(server: Any) -> None:
    """A proxy on the way may break down, too."""
    server.order_fault(FINISH, "garble")
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        await episode.finish(1.0)
    assert server.calls[FINISH] == 2 and server.records["ep-0"].state == "finished"


async def test_finish_survives_a_restart_of_the_server(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        server.stop()
        finishing = asyncio.create_task(episode.finish(1.0))
        done, _ = await asyncio.wait({finishing}, timeout=0.3)
        assert not done
        server.start()
        await finishing
    assert server.records["ep-0"].finish["rewards"] == 1.0


async def test_the_same_finish_twice_counts_once_and_another_is_refused(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        await episode.finish(1.0)
        await episode.finish(1.0)
        with pytest.raises(IdempotencyConflict):
            await episode.finish(0.0)
    assert server.records["ep-0"].finish["rewards"] == 1.0


async def test_a_part_of_a_teams_episode_does_not_finish_alone(server: Any) -> None:
    """It would count on one server only."""
    async with AsyncSwarm(server.url) as one, AsyncSwarm(server.url) as other:
        parts = {"east": await one.begin(task=TASK), "west": await other.begin(task=TASK)}
        team: Any = SimpleNamespace(lead="east")
        with pytest.raises(RequestError, match="part of a team's episode: finish that one"):
            await TeamEpisode(team, parts)["west"].finish(1.0)
        assert server.calls[FINISH] == 0


async def test_late_finish_is_told(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(EpisodeClosed, match="lost"):
            async with swarm.episode(task=TASK) as episode:
                server.records["ep-0"].state = "lost"
                await episode.finish(1.0)


async def test_not_a_number_is_refused_before_it_is_sent(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        with pytest.raises(InvalidReward):
            await episode.finish(float("nan"))
        await episode.finish(0)


async def test_admission_full_waits_as_long_as_asked(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wingbeat.client")
    server.order_fault(BEGIN, refusal(server, 429, "admission_full", Retry_After="0.3"))
    started = time.monotonic()
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        assert time.monotonic() - started >= 0.3
        await episode.finish(1.0)
    assert "takes it now" in caplog.text and "answers again" not in caplog.text, "it was never away"


async def test_budget_ends_retries_and_final_refusals_are_not_retried(server: Any) -> None:
    server.order_fault(BEGIN, *(refusal(server, 503, "unavailable", Retry_After="60") for _ in range(2)))
    async with AsyncSwarm(server.url, retry_budget_s=1.0) as swarm:
        with pytest.raises(UnavailableError, match="not now"):
            await swarm.begin(task=TASK)
        assert server.calls[BEGIN] == 1
        server.faults[BEGIN].clear()
        server.order_fault(BEGIN, refusal(server, 503, "version_gone"))
        with pytest.raises(VersionGone):
            await swarm.begin(task=TASK)
        assert server.calls[BEGIN] == 2


async def test_unreachable_server_says_where_and_what_to_do(server: Any) -> None:
    server.stop()
    async with AsyncSwarm(server.url, retry_budget_s=0) as swarm:
        with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:\d+.*wingbeat serve"):
            await swarm.status()


async def test_heartbeats_go_on_while_the_agent_blocks_the_loop(server: Any) -> None:
    server.heartbeat_s = 0.05
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        server.wait_for(lambda: server.records["ep-0"].num_heartbeats >= 3)  # blocks this loop's thread
        await episode.finish(1.0)


async def test_no_heartbeat_after_the_end(server: Any) -> None:
    server.heartbeat_s = 0.02
    heartbeat = "POST /api/episodes/{id}/heartbeat"
    async with AsyncSwarm(server.url) as swarm:
        async with swarm.episode(task=TASK) as first:
            server.wait_for(lambda: server.records["ep-0"].num_heartbeats >= 1)
            await first.finish(1.0)
        async with swarm.episode(task=TASK) as second:
            before = server.records["ep-0"].num_heartbeats
            calls = server.calls[heartbeat]
            server.wait_for(lambda: server.records["ep-1"].num_heartbeats >= 5)
            await second.finish(1.0)
        assert server.records["ep-0"].num_heartbeats == before
        assert server.calls[heartbeat] - calls <= server.records["ep-1"].num_heartbeats + 1


async def test_agent_learns_that_its_episode_is_lost(server: Any) -> None:
    server.heartbeat_s = 0.02
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        server.records["ep-0"].state = "lost"
        async with asyncio.timeout(10):
            assert await episode.wait_closed() is EpisodeState.LOST
        server.records["ep-0"].state = "running"
        await episode.finish(1.0)  # no successor began, so it still counts
        assert episode.state is EpisodeState.FINISHED


async def test_keys(server: Any) -> None:
    server.admin_key = "admin"
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(AuthenticationError):
            await swarm.begin(task=TASK)
    async with AsyncSwarm(server.url, "admin") as swarm, swarm.episode(task=TASK) as episode:
        await episode.finish(1.0)


async def test_all_tries_of_a_lease_call_have_one_key(server: Any) -> None:
    server.add_leases(1)
    server.order_fault("POST /api/tasks/lease", "lose")
    async with AsyncSwarm(server.url) as swarm:
        await swarm.lease()
        await swarm.lease()
    keys = [body["idempotency_key"] for body in server.asked]
    assert keys[0] == keys[1] != keys[2] and len(keys) == 3


async def test_begin_under_a_lease(server: Any) -> None:
    server.add_leases(1)
    async with AsyncSwarm(server.url) as swarm:
        reply = await swarm.lease(4)
        assert [lease.task.id for lease in reply.leases] == ["task-0"]
        async with swarm.episode(lease=reply.leases[0]) as episode:
            await episode.finish(1.0)
    assert server.records["ep-0"].begin["lease_id"] == "lease-0"
    assert server.records["ep-0"].begin["task"] is None


@pytest.mark.parametrize("given", [{}, {"task": TASK, "lease": "a lease"}, {"task": TASK, "idle_timeout_s": -1}])
async def test_wrong_begin_is_refused_without_a_call(server: Any, given: dict[str, Any]) -> None:
    if given.get("lease"):
        server.add_leases(1)
        given = {**given, "lease": Lease.model_validate(server.leases[0])}
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(RequestError):
            await swarm.begin(**given)
    assert server.calls[BEGIN] == 0


async def test_put_tasks(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        odd = await swarm.put_tasks("a b/c?d", [Task("a b/c?d", "1")])
        assert odd.source == "a b/c?d"
        reply = await swarm.put_tasks("arithmetic", [TASK], split=Split.EVAL)
        assert (reply.source, reply.split, reply.num_tasks) == ("arithmetic", Split.EVAL, 1)
        with pytest.raises(RequestError, match="JSON"):
            await swarm.put_tasks("arithmetic", [Task("arithmetic", "2", {"x": float("nan")})])
        with pytest.raises(RequestError, match="JSON"):
            await swarm.put_tasks("arithmetic", [Task("arithmetic", "2", {"x": object()})])
        with pytest.raises(RequestError, match="other"):
            await swarm.put_tasks("arithmetic", [Task("other", "2")])
        with pytest.raises(RequestError):
            await swarm.put_tasks("arithmetic", [])
        assert (await swarm.put_tasks("arithmetic", [TASK], ratio=0.25)).ratio == 0.25
        with pytest.raises(RequestError, match=r"ratio: expected a ratio above 0 and below 1 \(got 2\)"):
            await swarm.put_tasks("arithmetic", [TASK], ratio=2)
        removed = await swarm.remove_tasks("a b/c?d")
        assert (removed.source, removed.num_open_groups) == ("a b/c?d", 2)
        assert (await swarm.set_mixing({"arithmetic": 1.0})).ratios == {"arithmetic": 1.0}
        assert (await swarm.mixing()).ratios == {"arithmetic": 1.0}
        with pytest.raises(RequestError, match="ratios"):
            await swarm.set_mixing({"arithmetic": float("nan")})
    assert server.tasks["arithmetic"]["tasks"][0]["id"] == "1"
    assert set(server.tasks) == {"arithmetic"}


async def test_status_policies_events_and_stop(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        assert (await swarm.status()).train_steps == 3
        assert [policy.name for policy in await swarm.policies()] == ["solver"]
        assert [event["step"] async for event in swarm.events()] == [1, 2]
        await swarm.stop()
    assert server.stopped


async def test_evaluate_waits_for_the_end(server: Any) -> None:
    seen: list[int] = []
    async with AsyncSwarm(server.url) as swarm:
        reply = await swarm.evaluate(
            EvaluationRequest(policy="solver"), poll_s=0.01, on_progress=lambda reply: seen.append(reply.num_finished)
        )
    assert reply.mean_reward == 0.75
    assert seen == [1, 2]
    assert len(server.evaluations) == 1


async def test_an_evaluation_whose_reply_was_lost_is_not_started_twice(server: Any) -> None:
    server.order_fault("POST /api/evaluations", "lose")
    async with AsyncSwarm(server.url) as swarm:
        with pytest.raises(UnavailableError):
            await swarm.evaluate()
        server.order_fault("POST /api/evaluations", refusal(server, 503, "unavailable", Retry_After="0"))
        assert (await swarm.evaluate(poll_s=0.01)).state == "done"
    assert len(server.evaluations) == 2


async def test_close_twice_and_use_after(server: Any) -> None:
    swarm = AsyncSwarm(server.url)
    episode = await swarm.begin(task=TASK)
    assert isinstance(episode, Episode)
    await swarm.close()
    await swarm.close()
    with pytest.raises(RequestError, match="closed"):
        await swarm.status()


@pytest.mark.parametrize("url", ["localhost:8321", "http://", "ftp://host", ""])
def test_wrong_url(url: str) -> None:
    with pytest.raises(RequestError, match=r"http://127\.0\.0\.1:8321"):
        AsyncSwarm(url)


def test_episodes_are_the_port() -> None:
    annotations = {name for name in vars(EpisodeSession) if not name.startswith("_")}
    assert annotations == {"id", "task", "base_url", "api_key", "model"}
    made: type[EpisodeSession] = Episode
    assert all(hasattr(made, name) or name == "task" for name in annotations)
