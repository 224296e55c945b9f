"""Turns that a client was answered with outlive control, whatever kills it; with the attempt's record they go."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
from harness import QUESTION, Api, Begun, eventually

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import ScriptedCall
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.tracking.serialize import load_turns

EPISODES = 12


def reply_of(call: ScriptedCall) -> str:
    return f"reply {call.turn} of {call.cache_key}"


def captured(server: ScriptedServer, episode: Begun) -> list[str]:
    """Turn ids, from a reader of its own."""
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        pieces = ledger.captured_turns(episode.id, episode.attempt)
    return [turn.turn_id for turn in load_turns(episode.id, pieces).turns]


async def converse(api: Api, episode: Begun, answered: list[str]) -> None:
    """Talk until the server is gone."""
    messages = list(QUESTION)
    while True:
        try:
            answer = await api.chat(episode, messages=messages, max_tokens=64)
        except (aiohttp.ClientError, OSError):
            return
        assert answer.status == 200, answer
        answered.append(answer.body["id"])
        messages += [answer.body["choices"][0]["message"], {"role": "user", "content": "go on"}]


async def test_kill_loses_no_turn_that_was_answered(tmp_path):
    with scripted_server(tmp_path, reply_of) as server:
        async with Api(server) as api:
            episodes = [await api.begin() for _ in range(EPISODES)]
            answered: list[list[str]] = [[] for _ in episodes]
            talks = [asyncio.create_task(converse(api, e, a)) for e, a in zip(episodes, answered, strict=True)]

            async def in_the_middle() -> bool:
                assert not any(talk.done() for talk in talks), "a talk ended before the kill"
                return min(map(len, answered)) >= 8

            await eventually(in_the_middle, what="every episode to be in the middle of its talk", every_s=0.01)
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.gather(*talks)
        server.kill()  # it is dead already: takes its exit status
        kept = [captured(server, episode) for episode in episodes]
        for ids, heard in zip(kept, answered, strict=True):
            assert ids[: len(heard)] == heard
            assert len(ids) <= len(heard) + 1, "at most the turn that was being answered is there, too"
        await asyncio.to_thread(server.start)
        assert [captured(server, episode) for episode in episodes] == kept, "attempts that go on keep their turns"


async def test_captured_turns_go_with_the_record(tmp_path):
    with scripted_server(tmp_path, reply_of) as server:
        async with Api(server) as api:
            finished, aborted, running = [await api.begin() for _ in range(3)]
            for episode in (finished, aborted, running):
                ids = [(await api.chat(episode)).body["id"] for _ in range(2)]
                assert captured(server, episode) == ids
            assert (await api.finish(finished)).status == 200
            assert (await api.abort(aborted)).status == 200
            assert captured(server, finished) == []

            async def forgotten() -> bool:  # an abort is answered before it is on record
                return captured(server, aborted) == []

            await eventually(forgotten, what="the aborted attempt's turns to go")
            assert len(captured(server, running)) == 2
