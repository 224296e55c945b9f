"""A chat endpoint as a mock engine offers it: the least an OpenAI-compatible server can do for a scripted text.

Tool calls in the script stay text here: this is a baseline for time, not for agents.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

MAX_BODY_BYTES = 64 * 2**20
WORD = 4
"""Characters per streamed piece, about a token."""

Answer = Callable[[dict[str, Any]], str]


class DirectEndpoint:
    """``POST /v1/chat/completions`` on a free loopback port; entering it gives the base URL."""

    def __init__(self, answer: Answer) -> None:
        """``answer`` maps a request's body to the reply's text."""
        self._answer = answer
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> str:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = orjson.loads(await request.read())
        text = self._answer(body)
        head = {"id": f"direct-{next(self._numbers)}", "created": int(time.time()), "model": body["model"]}
        if body.get("stream"):
            return await self._stream(request, head, text)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 0, "completion_tokens": len(text) // WORD, "total_tokens": len(text) // WORD}
        choices = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _stream(self, request: web.Request, head: dict[str, Any], text: str) -> web.StreamResponse:
        """A piece per token, each an event of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
        deltas += [({"content": text[at : at + WORD]}, None) for at in range(0, len(text), WORD)]
        deltas.append(({}, "stop"))
        for delta, finish in deltas:
            choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
            event = {**head, "object": "chat.completion.chunk", "choices": choices}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
