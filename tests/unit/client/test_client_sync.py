"""The synchronous twin."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from wingbeat.client import Swarm, SyncEpisode
from wingbeat.client.episode import EpisodeState
from wingbeat.core.errors import RequestError, UnavailableError
from wingbeat.core.protocol import EvaluationRequest
from wingbeat.core.types import Group, Outcome, Split, Task

TASK = Task("arithmetic", "1", {"question": "1+1"})


def test_episode(server: Any) -> None:
    with Swarm(server.url) as swarm, swarm.episode(task=TASK, group=Group("g", 2)) as episode:
        assert (episode.id, episode.attempt, episode.split) == ("ep-0", 0, Split.TRAIN)
        assert (episode.task, episode.group) == (TASK, Group("g", 2))
        assert episode.base_url.endswith("/v1")
        assert (episode.model, episode.model_for(agent="a")) == ("solver", "solver:a")
        assert (episode.policies, episode.api_key) == (("solver", "critic"), "key-ep-0")
        assert episode.status().state == "running"
        assert episode.finish({"solver": 1.0}, metrics={"turns": 1}).state == "finished"
        assert episode.closed
    assert server.records["ep-0"].finish["rewards"]["policies"] == {"solver": 1.0}


def test_exception_and_abort(server: Any) -> None:
    with Swarm(server.url) as swarm:
        with pytest.raises(KeyError), swarm.episode(task=TASK):
            raise KeyError("missing")
        with swarm.episode(task=TASK) as episode:
            episode.abort("no tool", outcome=Outcome.INFRASTRUCTURE)
        assert episode.state is EpisodeState.ABORTED
        with swarm.begin(task=TASK, tentative_s=5.0) as left:
            server.order_fault("POST /api/episodes/{id}/confirm", server.answer({}))
            left.confirm()
            assert isinstance(left, SyncEpisode)
    assert "KeyError" in server.records["ep-0"].abort["message"]
    assert server.records["ep-1"].abort["outcome"] == "infrastructure"
    assert server.records["ep-2"].state == "aborted"


def test_other_calls(server: Any) -> None:
    server.add_leases(1)
    with Swarm(server.url) as swarm:
        assert swarm.url == server.url
        assert len(swarm.lease(3, sources=["arithmetic"]).leases) == 1
        assert server.asked[-1]["sources"] == ["arithmetic"]
        assert swarm.put_tasks("arithmetic", [TASK], ratio=0.5).ratio == 0.5
        assert swarm.set_mixing({"arithmetic": 1.0}) == swarm.mixing()
        assert swarm.remove_tasks("arithmetic").source == "arithmetic"
        assert swarm.status().total_steps == 10
        assert swarm.policies()[0].version == 3
        assert swarm.evaluate(poll_s=0.01).state == "done"
        evaluation = swarm.start_evaluation(EvaluationRequest())
        assert swarm.evaluation(evaluation.evaluation_id).state == "running"
        assert [event["step"] for event in swarm.events()] == [1, 2]
        assert next(swarm.events()) == {"event": "step", "step": 1}
        swarm.stop()
    assert server.stopped


def test_many_threads_share_one_client(server: Any) -> None:
    def work(swarm: Swarm) -> None:
        with swarm.episode(task=TASK) as episode:
            episode.finish(1.0)

    with Swarm(server.url) as swarm:
        threads = [threading.Thread(target=work, args=(swarm,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.in_state("finished")) == 8


def test_close_ends_its_threads_and_twice_is_harmless(server: Any) -> None:
    swarm = Swarm(server.url)
    with swarm.episode(task=TASK) as episode:
        episode.finish(1.0)
    swarm.close()
    swarm.close()
    assert not [t for t in threading.enumerate() if t.name in ("wingbeat-client", "wingbeat-heartbeats")]
    with pytest.raises(RequestError, match="closed"):
        swarm.status()


def test_errors_pass_through(server: Any) -> None:
    server.stop()
    with Swarm(server.url, retry_budget_s=0) as swarm, pytest.raises(UnavailableError):
        swarm.status()
