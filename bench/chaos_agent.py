"""The agents of the chaos benchmark: two quick turns with a tool between, and a log of what was acknowledged.

Loaded by ``wingbeat rollout``.  As any agent would, it tries a model call again where the connection breaks; what it
cannot save raises, and its episode is aborted.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

import wingbeat

ACKS_VARIABLE = "WINGBEAT_CHAOS_ACKS"
"""The folder in which each process keeps its log."""
CALL_S = 15.0
"""How long one try at a model call may take."""
GIVE_UP_S = 60.0
RETRY_S = 0.25
RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})


@cache
def _session() -> aiohttp.ClientSession:
    """One pool of connections; each process has one loop."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))


@cache
def _log() -> int:
    """The file of this process."""
    path = Path(os.environ[ACKS_VARIABLE]) / f"{os.getpid()}-{time.time_ns()}.acks"
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note_acknowledged(episode: wingbeat.Episode) -> None:
    """One whole line per acknowledged finish, handed to the system before anything else happens."""
    os.write(_log(), f"{time.time():.3f} {episode.id} {episode.attempt}\n".encode())


async def ask(episode: wingbeat.Episode, messages: list[dict[str, Any]]) -> str:
    """One model call, again until it is answered.  Raises ClientError or TimeoutError where it never is."""
    body = {"model": "solver", "messages": messages, "max_tokens": episode.task.payload["reply_tokens"]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    give_up = time.monotonic() + GIVE_UP_S
    while True:
        try:
            async with _session().post(f"{episode.base_url}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                content: str = (await answer.json())["choices"][0]["message"]["content"]
                return content
        except aiohttp.ClientResponseError as error:
            if error.status not in RETRIED_STATUS or time.monotonic() > give_up:
                raise
        except (aiohttp.ClientError, TimeoutError):
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(RETRY_S)


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> None:
    """Rewarded is the share of characters that the task wants."""
    payload = episode.task.payload
    messages: list[dict[str, Any]] = [{"role": "user", "content": payload["question"]}]
    replies: list[str] = []
    for sleep_s in payload["sleep_s"]:
        replies.append(await ask(episode, messages))
        await asyncio.sleep(sleep_s)
        messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": payload["result"]}]
    wanted = sum(character in payload["wanted"] for reply in replies for character in reply)
    await episode.finish(wanted / (len(replies) * payload["reply_tokens"]))
    note_acknowledged(episode)
