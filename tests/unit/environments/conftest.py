"""Episodes of built-in environments, against an endpoint that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from wingbeat.client.episode import Episode
from wingbeat.client.retry import RetryPolicy
from wingbeat.core.ports import ResourcePool
from wingbeat.core.protocol import BeginReply, FinishReply, GroupModel, TaskModel
from wingbeat.core.types import Split, Task
from wingbeat.environments import client_of

Says = Callable[[dict[str, Any]], dict[str, Any]]
"""A request's body -> the message that the model answers with."""
Open = Callable[..., AbstractAsyncContextManager[Episode]]


class Answers:
    """A transport whose server says yes."""

    async def send(self, call: Any, reply: type[Any]) -> Any:
        return FinishReply(episode_id="e1", attempt=1, state="finished", num_turns=0, num_sampled_tokens=0)

    async def send_unread(self, call: Any) -> bytes:
        return b""


@asynccontextmanager
async def _endpoint(says: Says) -> AsyncIterator[str]:
    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", **says(body)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.fixture
def open_episode() -> Open:
    """``async with open_episode(task, says, policies=[...], resources=pool) as episode``."""

    @asynccontextmanager
    async def opened(
        task: Task, says: Says, *, policies: list[str] | None = None, resources: ResourcePool | None = None
    ) -> AsyncIterator[Episode]:
        async with _endpoint(says) as url:
            reply = BeginReply(
                episode_id="e1",
                attempt=1,
                base_url=url,
                api_key="key",
                policies=policies or ["solver"],
                heartbeat_s=10,
                task=TaskModel(source=task.source, id=task.id, payload=task.payload),
                group=GroupModel(id="g", size=1),
                split=Split.TRAIN,
            )
            beats: Any = SimpleNamespace(add=lambda beat: None, remove=lambda key: None)
            transport: Any = Answers()
            episode = Episode(
                reply,
                transport=transport,
                heartbeats=beats,
                finish_retry=RetryPolicy(budget_s=1),
                resources=resources,
            )
            yield episode
            await episode.abort()
            await client_of(episode).close()

    return opened
