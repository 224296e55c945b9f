"""One client team on two servers, killed between the phases in every place: both ledgers count an episode, or none."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness import environment, eventually

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat.client import AsyncSwarm, AsyncTeam, Runner, RunnerOptions, TeamEpisode
from wingbeat.core.errors import RequestError
from wingbeat.core.types import Group, Task
from wingbeat.dataflow.ledger_reader import open_read_only

CLIENT = Path(__file__).with_name("team_client.py")
SETTINGS: dict[str, Any] = {"server.transaction_timeout_s": 3600.0, "dataflow.group_size": 2}
COUNTED, ENDED = "finished", "aborted"


class Pair:
    """The lead and the other server."""

    def __init__(self, east: ScriptedServer, west: ScriptedServer) -> None:
        self.east, self.west = east, west

    @property
    def both(self) -> tuple[ScriptedServer, ScriptedServer]:
        return self.east, self.west

    def states(self, *episode_ids: str) -> list[str]:
        """As the ledgers say, of the newest attempts on east and west."""
        found: list[str] = []
        for server, episode_id in zip(self.both, episode_ids, strict=True):
            with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
                found.append(ledger.episode(episode_id)[-1].state.value)
        return found

    @asynccontextmanager
    async def team(self, journal: Path | None = None) -> AsyncIterator[AsyncTeam]:
        async with AsyncTeam({"east": self.east.url, "west": self.west.url}, journal=journal) as team:
            yield team


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        servers: list[ScriptedServer] = []
        for name in ("east", "west"):
            (folder / name).mkdir()
            peers = [server.url for server in servers]
            settings = {**SETTINGS, "run.name": name, "server.peers": peers}
            servers.append(
                stack.enter_context(
                    scripted_server(folder / name, lambda _, name=name: f"I am {name}", settings=settings)
                )
            )
        yield Pair(*servers)


def killed_and_restarted(server: ScriptedServer, **settings: Any) -> None:
    server.kill()
    if settings:
        config = server._config
        server._config = config.model_copy(update={"server": config.server.model_copy(update=settings)})
    server.start()


def killed_client(pair: Pair, *points: str, journal: Path | None = None) -> dict[str, list[str]]:
    """The ids of the episodes of a client that was killed when they were at these points of their finish."""
    command = [sys.executable, str(CLIENT), pair.east.url, pair.west.url, str(journal or "-"), *points]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        ids = json.loads(client.stdout.readline())
        client.kill()
    return ids


async def talk(episode: TeamEpisode) -> None:
    async with aiohttp.ClientSession() as http:
        for name in episode.servers:
            part = episode[name]
            call = {"model": part.model, "messages": [{"role": "user", "content": "who are you?"}]}
            headers = {"Authorization": f"Bearer {part.api_key}"}
            async with http.post(f"{part.base_url}/chat/completions", json=call, headers=headers) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == f"I am {name}"


async def test_a_runner_runs_a_team_on_the_leads_tasks(pair: Pair) -> None:
    """Both servers count the same groups of the same tasks, each with its own reward."""
    finished: list[dict[str, str]] = []

    async def solve(episode: TeamEpisode) -> dict[str, float]:
        await talk(episode)
        finished.append({name: episode[name].id for name in episode.servers})
        return {"east": 1.0, "west": 0.5 if len(finished) % 2 else 0.0}

    async with pair.team() as team:
        await team.swarms["east"].put_tasks("sums", [Task("sums", f"sum-{i}") for i in range(8)])
        options = RunnerOptions(max_episodes=8, sources=["sums"])
        stats = await Runner(team, solve, concurrency=4, options=options).run()
    assert stats.num_finished == 8, stats
    for ids in finished:
        assert pair.states(ids["east"], ids["west"]) == [COUNTED, COUNTED]
    groups: list[dict[str, list[float]]] = []
    for server, name in zip(pair.both, ("east", "west"), strict=True):
        with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
            members = [ledger.episode(ids[name])[-1] for ids in finished]
        found: dict[str, list[float]] = {}
        for member in members:
            assert member.record is not None
            found.setdefault(member.group.task.id, []).extend(member.record.rewards.values())
        groups.append(found)
    assert groups[0].keys() == groups[1].keys()
    assert [len(rewards) for rewards in groups[0].values()] == [2, 2, 2, 2]


async def test_transactions_over_http(pair: Pair) -> None:
    """Without the SDK: a finish is prepared, looked at, refused otherwise, and committed."""
    transaction = "transaction-of-a-test-1234"
    async with aiohttp.ClientSession(f"{pair.east.url}") as http, AsyncSwarm(pair.east.url) as swarm:

        async def call(path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
            method = "GET" if body is None else "POST"
            async with http.request(method, f"/api/{path}", json=body, **options) as answer:
                return answer.status, await answer.json()

        assert (await call("transactions"))[1] == []
        for bad in ("short", "x" * 65, "%2e%2e%2fkeys-and-more-dots-dots"):
            assert (await call(f"transactions/{bad}"))[0] in (400, 404)
        assert (await call(f"transactions/{transaction}?presume=commit"))[0] == 400
        assert (await call(f"transactions/{transaction}"))[1]["state"] == "unknown"
        assert (await call(f"transactions/{transaction}", {"decision": "perhaps"}))[0] == 400
        assert (await call(f"transactions/{transaction}", {"decision": "commit"}))[0] == 404
        episode = await swarm.begin(task=Task("own", "http"))
        body = {"rewards": 1.0, "transaction": {"id": transaction, "decider": "https://west.example"}}
        key = {"Authorization": f"Bearer {episode.api_key}"}
        finish = f"episodes/{episode.id}/finish"
        assert (await call(finish, body, headers=key))[1]["state"] == "prepared"
        assert (await call(f"episodes/{episode.id}/abort", {}, headers=key))[0] == 409
        assert (await call(f"episodes/{episode.id}", headers=key))[1]["state"] == "prepared"
        ((waiting),) = (await call("transactions"))[1]
        assert (waiting["episodes"], waiting["decider"]) == ([episode.id], "https://west.example:443")
        assert (await call(f"transactions/{transaction}", {"decision": "commit"}))[1]["state"] == "committed"
        assert (await call(f"transactions/{transaction}", {"decision": "abort"}))[0] == 409
        assert (await call(finish, body, headers=key))[1]["state"] == "finished"


async def test_what_one_server_refuses_no_server_counts(pair: Pair) -> None:
    async with pair.team() as team, team.episode(task=Task("own", "refused"), group=Group("refused", 1)) as episode:
        await talk(episode)
        ids = [episode[name].id for name in episode.servers]
        with pytest.raises(RequestError, match=r"server 'west' does not count episode .*, so none does: .*nobody"):
            await episode.finish({"east": 1.0, "west": {"solver:nobody": 1.0}})
        assert episode.closed

    async def both_ended() -> bool:  # an abort is answered before it is on disk
        return pair.states(*ids) == [ENDED, ENDED]

    await eventually(both_ended, what="both ledgers to know")


async def test_servers_killed_between_the_phases(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """West once both have prepared; east once it has committed and before anybody hears of it."""
    decide, kills = AsyncSwarm.decide, [pair.west, pair.east]

    async def decide_and_die(self: AsyncSwarm, *given: Any, **more: Any) -> Any:
        if self.url == pair.east.url and len(kills) == 2:
            await asyncio.to_thread(killed_and_restarted, kills.pop(0))
            await decide(self, *given, **more)
            await asyncio.to_thread(killed_and_restarted, kills.pop(0))  # its answer is lost, so it is asked again
        return await decide(self, *given, **more)

    monkeypatch.setattr(AsyncSwarm, "decide", decide_and_die)
    async with pair.team() as team, team.episode(task=Task("own", "restarts")) as episode:
        ids = [episode[name].id for name in episode.servers]
        await episode.finish(1.0)
    assert not kills
    assert pair.states(*ids) == [COUNTED, COUNTED]


async def test_a_killed_client_leaves_nothing_half_counted(pair: Pair, tmp_path: Path) -> None:
    """Killed before, between and after the phases.  A successor ends what the journal says; without one, the
    servers do, which are killed too while nobody knows the end."""
    journal = tmp_path / "journal"
    left = killed_client(pair, "preparing", "prepared", "decided", journal=journal)
    alone = killed_client(pair, "prepared", "decided")
    assert pair.states(*left["prepared"]) == pair.states(*alone["prepared"]) == ["prepared", "prepared"]
    assert pair.states(*left["decided"]) == pair.states(*alone["decided"]) == [COUNTED, "prepared"]
    await asyncio.to_thread(killed_and_restarted, pair.east)  # it waits on, for an hour
    async with pair.team(journal):

        async def is_empty() -> bool:
            return not os.listdir(journal)

        await eventually(is_empty, what="the journal to be empty")
    assert pair.states(*left["prepared"]) == pair.states(*left["decided"]) == [COUNTED, COUNTED]
    lead, other = pair.states(*left["preparing"])
    assert lead == ENDED and other != COUNTED

    assert pair.states(*alone["prepared"]) == ["prepared", "prepared"]
    for server in pair.both:
        await asyncio.to_thread(killed_and_restarted, server, transaction_timeout_s=1.0)

    async def agree() -> bool:
        return "prepared" not in [*pair.states(*alone["prepared"]), *pair.states(*alone["decided"])]

    await eventually(agree, what="nobody to be in doubt")
    assert pair.states(*alone["prepared"]) == [ENDED, ENDED]
    assert pair.states(*alone["decided"]) == [COUNTED, COUNTED]
