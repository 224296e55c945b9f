"""A good client among bad ones, and more calls at once than anybody can serve: a real server, limits and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.machine import status_kib
from bench.scripted_server import OPENER, ScriptedServer, scripted_server
from bench.scripts import Reply
from wingbeat.client import AsyncSwarm, Runner, RunnerOptions, RunnerStats
from wingbeat.client.episode import Episode
from wingbeat.core.protocol import CLIENT_HEADER

EPISODES = 24
SHARE = 0.7
AT_ONCE = 5000
SETTINGS = {
    "server.begin_wait_s": 2.0,
    "server.heartbeat_s": 2.0,
    "server.max_body_bytes": 1_000_000,
    "server.max_connections": 8000,
    "engine.max_running": 16,
    "dataflow.group_size": 4,
    "limits.open_episodes": 200,
    "limits.leases": 100,
    "limits.waiting": 100,
    "limits.calls": 20,
    "limits.requests_per_s": 100,
    "limits.request_burst": 200,
    "limits.body_bytes": 4_000_000,
}
WORST = ('limit="requests_per_s"', 'limit="leases"', "episode_deadline", "agent_raised", "client_vanished")
"""In the metrics once every bad client has done what it does."""


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[ScriptedServer]:
    """With tasks, and an engine that runs 16 calls at once."""
    with scripted_server(
        folder, lambda call: Reply("yes", delay_s=0.2), settings=SETTINGS | settings, bounded=True
    ) as running:
        body = json.dumps({"tasks": [{"id": f"t{i}"} for i in range(20)]}).encode()
        with OPENER.open(_request(running, "/api/tasks/src", body, method="PUT"), timeout=10):
            pass
        yield running


def _request(server: ScriptedServer, path: str, body: bytes | None = None, *, method: str = "GET") -> Any:
    headers = {CLIENT_HEADER: "observer"}  # not that of the client that floods the server, whose requests are refused
    return urllib.request.Request(f"{server.url}{path}", body, headers, method=method)


def get(server: ScriptedServer, path: str) -> str:
    with OPENER.open(_request(server, path), timeout=5) as answer:
        return answer.read().decode()


def memory_mib(server: ScriptedServer) -> int:
    return status_kib("VmRSS", server.pid) // 1024


async def solve(episode: Episode) -> float:
    """Three model calls, one after the other."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {episode.api_key}"}) as session:
        for turn in range(3):
            body = {"model": episode.model, "messages": [{"role": "user", "content": f"{episode.id} {turn}"}]}
            async with session.post(f"{episode.base_url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
    return 1.0


async def good_run(server: ScriptedServer) -> tuple[RunnerStats, float, str]:
    """So many episodes of a client that behaves: what became of them, seconds, and its id."""
    async with AsyncSwarm(server.url) as swarm:
        started = time.perf_counter()
        stats = await Runner(swarm, solve, 4, options=RunnerOptions(max_episodes=EPISODES)).run()
        return stats, time.perf_counter() - started, swarm.client_id


@pytest.mark.alone
async def test_bad_clients_hurt_only_themselves(tmp_path: Path) -> None:
    with serving(tmp_path, **{"dataflow.episode_deadline_s": 2.0}) as server:
        await among_bad_clients(server)


async def among_bad_clients(server: ScriptedServer) -> None:
    _, alone_s, _ = await good_run(server)
    script = Path(__file__).parent / "bad_clients.py"
    bad = await asyncio.create_subprocess_exec(
        sys.executable, str(script), server.url, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert bad.stdin is not None
    try:
        async with asyncio.timeout(30):
            while not all(mark in get(server, "/metrics") for mark in WORST):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        runs = [await good_run(server)]
        if alone_s / runs[0][1] < SHARE:  # another process of this machine may have been in the way
            runs.append(await good_run(server))
        endings = json.loads(get(server, "/api/status"))["endings"]
        metrics = get(server, "/metrics")
        memory = memory_mib(server)
    finally:
        bad.stdin.close()
        await bad.wait()
    for stats, _, _ in runs:
        assert (stats.num_finished, stats.num_failed, stats.num_refused) == (EPISODES, 0, 0)
    fastest = min(seconds for _, seconds, _ in runs)
    assert alone_s / fastest >= SHARE, f"{alone_s:.2f} s alone, {[round(s, 2) for _, s, _ in runs]} s among bad clients"
    assert endings["agent/agent_finished"] >= 2 * EPISODES
    assert endings["client/agent_raised"] > 0 and endings["timeout/episode_deadline"] > 0
    assert endings["client/client_vanished"] > 0
    refused = dict(re.findall(r'wingbeat_refused_total\{limit="(\w+)"\} (\d+)', metrics))
    assert set(refused) >= {"requests_per_s", "leases"}, refused
    assert memory < 500


@pytest.mark.alone
async def test_more_at_once_than_anybody_can_serve_is_refused_in_good_order(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        await refuses_a_crowd(server)


async def refuses_a_crowd(server: ScriptedServer) -> None:
    before = memory_mib(server)
    calls = {"model": "solver", "messages": [{"role": "user", "content": "go"}]}
    lease = {"max_leases": 1, "client_id": "crowd", "wait_s": 30}
    statuses: Counter[int] = Counter()
    health: list[float] = []
    async with aiohttp.ClientSession(
        server.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        begun = {"idempotency_key": "crowd", "task": {"id": "t"}, "split": "eval", "client_id": "crowd"}
        async with session.post("/api/episodes", json=begun) as answer:
            key = (await answer.json())["api_key"]

        async def one(number: int) -> None:
            kind = number % 3
            own = {"idempotency_key": f"c{number}", "task": {"id": "t"}, "split": "eval", "client_id": "crowd"}
            path, body = [("/v1/chat/completions", calls), ("/api/tasks/lease", lease), ("/api/episodes", own)][kind]
            headers = {"authorization": f"Bearer {key}"} if kind == 0 else {}
            async with session.post(path, json=body, headers=headers) as answer:
                await answer.read()
                statuses[answer.status] += 1
                if answer.status in (429, 503):
                    assert int(answer.headers["retry-after"]) >= 1

        async def watch() -> None:
            while True:
                started = time.perf_counter()
                async with session.get("/healthz") as answer:
                    assert (await answer.json())["status"] == "ok"
                health.append(time.perf_counter() - started)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(i) for i in range(AT_ONCE)))
        watching.cancel()
    assert sum(statuses.values()) == AT_ONCE and set(statuses) <= {200, 429, 503}, statuses
    assert statuses[429] > AT_ONCE / 2 and statuses[200] > 0
    assert len(health) > 3 and max(health) < 10
    assert memory_mib(server) - before < 200


AGENTS = """
import time

import wingbeat

HELD = []


@wingbeat.agent
def stuck(episode):
    "Blocks its thread for ever in each first attempt."
    if episode.attempt == 1:
        time.sleep(3600)
    return 1.0


@wingbeat.agent
async def leaky(episode):
    HELD.append(b"x" * (48 * 2**20))
    return 1.0
"""


async def test_processes_of_agents_that_hang_or_leak_are_replaced(tmp_path: Path) -> None:
    """Two command lines on one server; each must get its episodes done, with more than one process."""
    (tmp_path / "agents.py").write_text(AGENTS)
    rollouts = {
        "stuck": ["--episode-timeout-s", "0.3", "--concurrency", "2", "--max-episodes", "80"],
        "leaky": ["--max-memory-mb", "250", "--concurrency", "1", "--max-episodes", "12"],
    }
    with serving(tmp_path) as server:
        running = {
            name: await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "wingbeat.cli", "rollout", f"agents.py:{name}", "--server", server.url),
                *(*options, "--json", "--grace-s", "1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=tmp_path,
            )
            for name, options in rollouts.items()
        }
        said = {name: await asyncio.wait_for(process.communicate(), 60) for name, process in running.items()}
        endings = json.loads(get(server, "/api/status"))["endings"]
    assert [process.returncode for process in running.values()] == [0, 0], said
    log = {name: text.decode() for name, (_, text) in said.items()}
    counts = {name: json.loads(output) for name, (output, _) in said.items()}
    assert counts["stuck"]["timed_out"] >= 3 and counts["stuck"]["finished"] >= 3
    assert sum(counts["stuck"][end] for end in ("finished", "timed_out", "cancelled", "refused")) >= 80
    assert counts["leaky"]["finished"] + counts["leaky"]["refused"] == 12, (counts, log["leaky"])
    assert counts["leaky"]["finished"] >= 10 and counts["leaky"]["failed"] == 0
    assert endings["timeout/agent_deadline"] == counts["stuck"]["timed_out"]
    assert "agents run on although their episodes are over" in log["stuck"]
    assert "more than max_memory_mb = 250" in log["leaky"]
