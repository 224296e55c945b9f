"""Several task sources through the real control: shares, partial clients, sources that come and go, exhaustion."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Api, eventually

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat import AsyncSwarm, Split, Task
from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import EvaluationRequest
from wingbeat.dataflow.ledger_reader import open_read_only

RATIOS = {"a": 0.5, "b": 0.3, "c": 0.2}


def tasks(source: str, count: int = 20) -> list[Task]:
    return [Task(source, f"{source}{i}") for i in range(count)]


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[ScriptedServer]:
    table = {
        "dataflow.groups_per_step": 4,
        "dataflow.group_size": 2,
        "dataflow.max_staleness": 1,
        "server.begin_wait_s": 0.2,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    with scripted_server(folder, lambda call: "yes", settings=table) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., ScriptedServer]]:
    """Starts a server with these settings; ends it after the test."""
    open_ones = []

    def start(**settings: Any) -> ScriptedServer:
        context = serving(tmp_path, **settings)
        server = context.__enter__()
        open_ones.append(context)
        return server

    yield start
    for context in open_ones:
        context.__exit__(None, None, None)


async def put_all(api: Api, *sources: str, count: int = 20) -> None:
    async with AsyncSwarm(api.url) as swarm:
        for source in sources:
            await swarm.put_tasks(source, tasks(source, count))


async def lease(api: Api, *sources: str, count: int = 1) -> Answer:
    body: dict[str, Any] = {"max_leases": count, "wait_s": 0.2}
    return await api.call("POST", "/api/tasks/lease", {**body, **({"sources": list(sources)} if sources else {})})


async def told(api: Api, blocker: str, *sources: str) -> Answer:
    """The answer to a client of these sources, while whose question the status says this."""
    answers: list[Answer] = []

    async def says() -> bool:
        asks = asyncio.create_task(lease(api, *sources))
        found = [(await api.get("/api/status"))["blockers"] for _ in range(5)]
        answers.append(await asks)
        return any(blocker in blockers for blockers in found)

    await eventually(says, what=blocker, every_s=0.0)
    return answers[-1]


async def play(api: Api, *sources: str, rewards: Callable[[str, int], float] | None = None) -> str | None:
    """One group's worth of leases, begun, answered and finished; returns its source."""
    leases = (await lease(api, *sources, count=2)).body["leases"]
    for number, found in enumerate(leases):
        episode = await api.begin_leased(found["lease_id"])
        assert (await api.chat(episode)).status == 200
        reward = rewards(found["task"]["source"], number) if rewards else float(number % 2)
        assert (await api.finish(episode, reward)).status == 200
    return leases[0]["task"]["source"] if leases else None


async def play_until(api: Api, count: int, *sources: str, **more: Any) -> Counter[str]:
    """Groups by source, ``count`` of them."""
    played: Counter[str] = Counter()

    async def one() -> bool:
        source = await play(api, *sources, **more)
        if source is not None:
            played[source] += 1
        return played.total() >= count

    await eventually(one, what=f"{count} groups; so far {played}", every_s=0.0)
    return played


def trained_groups(server: ScriptedServer) -> Counter[str]:
    """Groups of the logged batches, by source."""
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        batches = ledger.batches_after("solver", 0)
    return Counter(source for source, _ in {(m.source, m.group_id) for b in batches for m in b.episodes})


async def test_shares_hold_over_a_run_with_groups_that_do_not_count(run):
    server = run(tasks__ratios=RATIOS, dataflow__dynamic_sampling=True)
    async with Api(server) as api:
        await put_all(api, *RATIOS)
        seen: Counter[str] = Counter()

        def rewards(source: str, number: int) -> float:
            seen[source] += number == 0
            wasted = source == "c" and seen[source] % 2 == 0  # every other group of c teaches nothing
            return 1.0 if wasted else float(number % 2)

        played = await play_until(api, 120, rewards=rewards)
        mixing = await api.get("/api/mixing")
    assert played["c"] > 0.3 * played.total(), "its wasted groups were made up for"
    trained = trained_groups(server)
    assert trained.total() >= 80
    for source, ratio in RATIOS.items():
        assert abs(trained[source] / trained.total() - ratio) < 0.02
        assert abs(mixing["sources"][source]["share"] - ratio) < 0.02


async def test_a_client_of_one_source_waits_and_the_status_names_who_is_missing(run):
    server = run(tasks__ratios=RATIOS)
    async with Api(server) as api:
        await put_all(api, "a", "b")
        nothing = (await lease(api, "a")).body
        assert "source 'c' has no training tasks yet, and dealing waits for it" in nothing["reason"]
        await put_all(api, "c")
        played: Counter[str] = Counter()

        async def held() -> bool:
            played[str(await play(api, "a"))] += 1
            return played["None"] > 3

        await eventually(held, what="the client of a to wait")
        assert played["a"] == 4, "2 groups above half of all, so that b and c are 4 behind at most"
        answer = await told(api, "source 'b' is behind its share: no client asks for it, and those of a wait", "a")
        assert answer.body["reason"] == "a is ahead of its share and waits for b, c"
        assert (await lease(api, "b")).body["leases"][0]["task"]["source"] == "b"
        unknown = (await lease(api, "d")).body["reason"]
        assert unknown == "no tasks of source d; sources are: a, b, c"


async def test_a_source_comes_and_goes_and_ratios_change_while_training_runs(run):
    server = run(tasks__ratios={"a": 0.5, "b": 0.5})
    async with Api(server) as api, AsyncSwarm(server.url) as swarm:
        await put_all(api, "a", "b")
        await play_until(api, 8)
        bad = {"tasks": [{"id": "1", "source": "c"}]}
        (await api.call("PUT", "/api/tasks/c", bad)).refused(400, "invalid_request", "leave nothing for source 'c'")
        (await api.call("PUT", "/api/tasks/c", {**bad, "ratio": 1.5})).refused(400, "invalid_request", "`ratio`")
        refused = await api.call("PUT", "/api/tasks/c", {"tasks": [{"id": "1", "source": "x"}], "ratio": 0.2})
        refused.refused(400, "invalid_request", "names source 'x'")
        assert (await api.get("/api/mixing"))["ratios"] == {"a": 0.5, "b": 0.5}, "a refused source changes nothing"
        assert (await swarm.put_tasks("c", tasks("c"), ratio=0.5)).ratio == 0.5
        assert (await swarm.mixing()).ratios == {"a": 0.25, "b": 0.25, "c": 0.5}
        assert (await play_until(api, 20))["c"] in (9, 10, 11)
        removed = await swarm.remove_tasks("a")
        assert removed.ratios == pytest.approx({"b": 1 / 3, "c": 2 / 3})
        assert set(await play_until(api, 12)) == {"b", "c"}
        (await api.call("DELETE", "/api/tasks/a")).refused(404, "not_found", "no source 'a'; sources are: b, c")
        for ratios, message in (
            ({"b": 0.5, "c": 0.4}, "sum to 1"),
            ({"b": 1.0}, "leave out source 'c'"),
            ({"b": 0.5, "c": 0.5, "a": 0.0}, "no training tasks of source 'a'"),
        ):
            answer = await api.call("PUT", "/api/mixing", {"ratios": ratios})
            answer.refused(400, "invalid_request", message)
        await swarm.set_mixing({"b": 0.9, "c": 0.1})
        server.kill()
        server.start()
        await api.ready()
        assert (await api.get("/api/mixing"))["ratios"] == {"b": 0.9, "c": 0.1}
        played = await play_until(api, 20)
    assert 17 <= played["b"] <= 19 and set(played) == {"b", "c"}, "what was removed stays away, also after a crash"
    trained_groups(server)


async def test_a_run_ends_when_its_tasks_are_exhausted(run):
    server = run(tasks__epochs=2, run__steps=50, dataflow__groups_per_step=3, eval__at_end=False)
    async with Api(server) as api:
        await put_all(api, "a", count=4)
        assert dict(await play_until(api, 8)) == {"a": 8}

        async def complete() -> bool:
            return (await api.get("/api/status"))["state"] == "complete"

        await eventually(complete, what="completion")
        status = await api.get("/api/status")
        assert status["ended"] == (
            "the tasks are exhausted (tasks.epochs = 2): 'solver' at step 2 of 50 ends;"
            " 2 groups are left, which fill no batch of 3"
        )
        assert (await lease(api)).body["stop"]
        (await api.call("POST", "/api/episodes", api.begin_body())).refused(429, "admission_full", "run is complete")
    trained_groups(server)


async def test_an_evaluation_tells_every_source_apart(run):
    server = run(policies__solver__trainable=False)
    async with Api(server) as api, AsyncSwarm(server.url) as swarm:
        for source, count in (("a", 3), ("b", 9)):
            await swarm.put_tasks(source, tasks(source, count), split=Split.EVAL)
        started = (await api.call("POST", "/api/evaluations", {"policy": "solver", "max_tasks": 6})).body
        assert started["num_expected"] == 6
        assert [found["task"]["source"] for found in (await lease(api, "b", count=9)).body["leases"]] == ["b"] * 3
        await told(api, "an evaluation waits for a client of source 'a'", "b")
        for found in (await lease(api, "a", count=9)).body["leases"]:
            episode = await api.begin_leased(found["lease_id"])
            assert (await api.chat(episode)).status == 200
            assert (await api.finish(episode, 0.5)).status == 200
        sources = (await api.get(f"/api/evaluations/{started['evaluation_id']}"))["sources"]
    assert sources["a"] == {"mean_reward": 0.5, "stderr": 0.0, "num_tasks": 3}
    assert sources["b"] == {"mean_reward": None, "stderr": None, "num_tasks": 0}


async def test_names_of_sources_and_evaluations_may_hold_what_is_special_in_paths(run):
    server = run()
    odd = "org/data set?#%2F"
    async with Api(server) as api, AsyncSwarm(server.url) as swarm:
        for name in ("..", "a\n"):
            with pytest.raises(RequestError, match="printable characters"):
                await swarm.put_tasks(name, [Task(name, "1")])
        refused = await api.call("PUT", f"/api/tasks/{'x' * 201}", {"tasks": [{"id": "1"}]})
        refused.refused(400, "invalid_request", "expected a name of 1 to 200")
        await swarm.put_tasks(odd, tasks(odd))
        await swarm.put_tasks(odd, tasks(odd, 1), split=Split.EVAL)
        assert set((await swarm.mixing()).sources) == {odd}
        started = await swarm.start_evaluation(EvaluationRequest(source=odd, name="a/b?c"))
        assert await play(api, odd) == odd

        async def done() -> bool:
            return (await swarm.evaluation(started.evaluation_id)).state == "done"

        await eventually(done, what="the evaluation")
        removed = await swarm.remove_tasks(odd)
        assert removed.source == odd and (await swarm.mixing()).sources == {}
        started = [asyncio.create_task(swarm.put_tasks("s", tasks("s", count))) for count in range(1, 9)]
        await asyncio.gather(*started)
        left = (await swarm.mixing()).sources["s"].num_tasks
        server.kill()
        server.start()
        await api.ready()
        assert (await swarm.mixing()).sources["s"].num_tasks == left, "the disk has what came last"
