"""What keeps an episode alive: heartbeats from the first moment on, one version of the contract, no wall clock."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
from aiohttp import web

from wingbeat.client import AsyncSwarm, Swarm
from wingbeat.client.model_clients import MODEL_CALL_RETRIES
from wingbeat.core.errors import UnsupportedProtocol
from wingbeat.core.protocol import PROTOCOL_HEADER
from wingbeat.core.types import Task

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

TASK = Task("test", "1", {})
SUPERSEDED = {"error": {"message": "the attempt is superseded", "type": "t", "code": "episode_closed"}}


async def test_the_begin_promises_heartbeats_and_they_come_inside_the_period(server: Any) -> None:
    """So a client that dies at once is noticed as soon as one that dies later."""
    server.heartbeat_s = 0.2
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        began = time.monotonic()
        assert server.records["ep-0"].begin["heartbeats"] is True
        server.wait_for(lambda: server.records["ep-0"].num_heartbeats == 2)
        assert time.monotonic() - began < 4 * server.heartbeat_s, "before the server would call it lost"
        assert server.records["ep-0"].begin["client_id"] == swarm.client_id
        await episode.finish(1.0)


async def test_a_server_that_comes_back_with_a_shorter_period_is_told_as_often_as_it_asks(server: Any) -> None:
    server.heartbeat_s = 0.4
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        server.heartbeat_s = 0.01
        server.wait_for(lambda: server.records["ep-0"].num_heartbeats >= 12, timeout_s=2.0)
        await episode.finish(1.0)


async def test_the_end_of_a_lost_attempt_does_not_silence_the_next_one_of_its_episode(server: Any) -> None:
    """A client that was slow may be dealt the same member again while its agent still works at the lost attempt."""
    server.heartbeat_s = 0.02
    async with AsyncSwarm(server.url) as swarm:
        first = await swarm.begin(task=TASK)
        record = server.records["ep-0"]
        server.wait_for(lambda: record.num_heartbeats >= 1)
        record.key = "key-of-the-next-attempt"
        server.reissue("ep-0")
        second = await swarm.begin(task=TASK)
        assert (second.id, second.api_key) == (first.id, "key-of-the-next-attempt")
        server.order_fault("POST /api/episodes/{id}/abort", server.answer(SUPERSEDED, 409))
        await first.abort("its agent gave up")
        before = record.num_heartbeats
        server.wait_for(lambda: record.num_heartbeats >= before + 3)
        await second.finish(1.0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_neither_beats_nor_ends_its_parents_episode(server: Any) -> None:
    server.heartbeat_s = 0.02
    async with AsyncSwarm(server.url) as swarm:
        episode = await swarm.begin(task=TASK)
        record = server.records["ep-0"]
        server.wait_for(lambda: record.num_heartbeats >= 2)
        child = os.fork()
        if child == 0:  # a tool that leaves the block by an exception and takes others along
            code = 1
            try:
                step = episode.__aexit__(RuntimeError, RuntimeError("in the child"), None)
                step.send(None)
            except StopIteration:
                swarm._heartbeats.remove(episode.api_key)
                swarm._heartbeats.close()
                code = 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        before = record.num_heartbeats
        server.wait_for(lambda: record.num_heartbeats >= before + 2)
        assert record.state == "running"
        await episode.finish(1.0)


async def test_a_server_that_no_longer_knows_the_key_ends_the_heartbeats(server: Any) -> None:
    server.heartbeat_s = 0.02
    heartbeat = "POST /api/episodes/{id}/heartbeat"
    body = {"error": {"message": "belongs to no episode", "type": "t", "code": "invalid_api_key"}}
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        server.order_fault(heartbeat, web.json_response(body, status=401))
        assert (await episode.wait_closed()).value == "lost"
        await episode.finish(1.0)  # it is the server that decides


async def test_client_and_server_tell_each_other_their_versions(server: Any) -> None:
    async with AsyncSwarm(server.url) as swarm:
        await swarm.status()
        assert server.headers[-1][PROTOCOL_HEADER] == "1"
        server.order_fault("GET /api/status", web.json_response({}, headers={PROTOCOL_HEADER: "7"}))
        with pytest.raises(UnsupportedProtocol, match=r"answers in version 7 .* speaks version 1"):
            await swarm.status()
        body = {"error": {"message": "versions 3-4 here", "type": "t", "code": "unsupported_protocol"}}
        server.order_fault("GET /api/status", web.json_response(body, status=400))
        with pytest.raises(UnsupportedProtocol, match="versions 3-4 here"):
            await swarm.status()


async def test_nothing_on_the_wire_is_a_wall_clocks_time(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a_day_off = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: a_day_off)
    server.add_leases(1)
    async with AsyncSwarm(server.url) as swarm:
        (lease,) = (await swarm.lease()).leases
        async with swarm.episode(lease=lease) as episode:
            await episode.finish(1.0, metrics={"steps": 3})
    record = server.records["ep-0"]
    numbers = list(_numbers([record.begin, record.finish, *server.asked]))
    assert record.state == "finished" and numbers
    assert max(numbers) < 1e6, "no time since 1970 in it"


def _numbers(node: Any) -> Any:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _numbers(child)
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield node


async def test_model_clients_outlive_a_restart_of_a_minute(server: Any) -> None:
    waits = [0.75 * min(0.5 * 2**n, 8.0) for n in range(MODEL_CALL_RETRIES)]
    assert sum(waits) > 60
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        async with episode.openai() as client, episode.openai(max_retries=3) as other:
            assert (str(client.base_url), client.max_retries) == (f"{episode.base_url}/", MODEL_CALL_RETRIES)
            assert (client.api_key, other.max_retries) == (episode.api_key, 3)
        await episode.finish(0.0)


def test_synchronous_episodes_have_a_synchronous_model_client(server: Any) -> None:
    with Swarm(server.url) as swarm, swarm.episode(task=TASK) as episode:
        with episode.openai() as client:
            assert (client.api_key, client.max_retries) == (episode.api_key, MODEL_CALL_RETRIES)
        episode.finish(0.0)
