"""HTTP endpoints as resources: judge models, simulators, search services.

``async with resources.lease(EndpointSpec(urls=[...], model="judge")) as lease: await lease.value.chat(messages)``

One instance serves all leases of a spec, so that its limits and its breakers are of all of them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from wingbeat.core.errors import ConfigError, RequestError
from wingbeat.core.ports import Clock
from wingbeat.resources.backends.breaker import Breaker
from wingbeat.resources.backends.endpoint_calls import Answer, Caller, Patience
from wingbeat.resources.backends.endpoint_http import HttpClient, HttpReply, Message, message
from wingbeat.resources.backends.endpoint_urls import Choice, Target
from wingbeat.resources.backends.endpoint_usage import Limiter, Meters, Prices, Purse, Usage
from wingbeat.resources.meters import RateLimiter
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Spec, UnsupportedField
from wingbeat.resources.specs_remote import EndpointSpec

__all__ = ["Endpoint", "EndpointBackend", "HttpReply", "Reply", "Usage"]

THE_CALLER_S = frozenset({400, 413, 422})
"""What a server says about a request that is wrong in itself; other refusals are faults of how things are set up."""
MAX_KEPT_LIMITERS = 1000


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said."""

    text: str
    """"" where it only called tools."""
    message: Mapping[str, Any] = field(repr=False)
    """As it came, with tool calls where there are some."""
    finish_reason: str
    model: str
    usage: Usage
    cost: float

    def __str__(self) -> str:
        return self.text


class Endpoint:
    """What a lease of an endpoint (or of a model) hands out."""

    def __init__(self, send: Callable[..., Any], *, model: str) -> None:
        """``send``: as :meth:`Caller.send`."""
        self._send = send
        self.model = model

    async def answer(self, sent: Message, *, content: Any = None, repeatable: bool | None = None) -> Answer:
        """A checked message's answer with what it took, for those who hand it on; raises as :meth:`request`."""
        return await self._send(sent, content=content, repeatable=repeatable)

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
    ) -> HttpReply:
        """Send a request below the endpoint's address; the answer, whatever its status.

        ``repeatable`` says whether it may be sent again if the other side may have acted on it already (a time-out, a
        5xx); None: as the method says (not POST).  Raises ResourceFailed where no answer can be had, RequestError for
        a path or header that is not the caller's to choose.
        """
        answer: Answer = await self._send(
            message(method, path, json=json, headers=headers), content=json, repeatable=repeatable
        )
        return answer.reply

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> Reply:
        """Ask the model (OpenAI's chat completions); a text is one message of a user.

        ``options`` are the fields of the request, such as ``temperature``, ``max_tokens`` or ``tools``.  Raises
        RequestError for a request that the server finds wrong in itself (a prompt that is too long), ResourceFailed
        for everything else: it never becomes a reward.
        """
        if options.get("stream") or options.get("n", 1) != 1:
            raise RequestError("chat: expected one whole answer, got `stream` or `n`", param="stream")
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"messages": listed, **options}
        if self.model or "model" in options:
            body["model"] = options.get("model") or self.model
        answer: Answer = await self._send(
            message("POST", "/chat/completions", json=body), content=body, repeatable=True
        )
        return _reply(answer)


def _reply(answer: Answer) -> Reply:
    if not answer.reply.ok:
        raise (RequestError if answer.reply.status in THE_CALLER_S else ResourceFailed)(answer.words)
    try:
        choice = answer.content["choices"][0]
        said = choice["message"]
        text = said.get("content") or ""
        reason = choice.get("finish_reason") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ResourceFailed(f"expected a chat completion, got {answer.words}") from None
    if not isinstance(text, str):
        raise ResourceFailed(f"expected text as content, got {answer.words}")
    return Reply(text, said, str(reason), str(answer.content.get("model") or ""), answer.usage, answer.cost)


class EndpointInstance:
    """A started endpoint (``wingbeat.resources.backend.Instance``); nothing of it outlives its process."""

    handle: str | None = None

    def __init__(self, caller: Caller, *, model: str) -> None:
        self._caller = caller
        self._closed = False
        self.value = Endpoint(caller.send, model=model)

    @property
    def cost(self) -> float:
        return self._caller.purse.cost

    async def reset(self) -> None:
        """A request leaves nothing behind here."""
        await self.check()

    async def check(self) -> None:
        """An address that fails is its breaker's business; only a closed endpoint is unfit."""
        if self._closed:
            raise ResourceLost("the endpoint is closed")

    async def close(self) -> None:
        self._closed = True
        await self._caller.close()


class EndpointBackend:
    """Makes endpoints (``wingbeat.resources.backend.Backend``)."""

    kind: ClassVar[str] = "endpoint"

    def __init__(self, *, clock: Clock = time.monotonic, rng: random.Random | None = None) -> None:
        self.meters: Meters | None = None
        """The pool's, which sets them."""
        self._clock = clock
        self._rng = rng or random.Random()
        self._limiters: dict[Any, Limiter] = {}
        """By spec: the limits of a minute outlast an instance that was idle and closed."""

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, EndpointSpec)
        if spec.needs is not None and spec.needs.gpus:
            raise UnsupportedField(self.kind, "needs.gpus", "its devices are not of this machine: leave it out")
        key_of(spec.api_key_env, field="api_key_env")
        check_budget(self.meters, self.kind, spec.budget)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> EndpointInstance:
        assert isinstance(spec, EndpointSpec)
        key = key_of(spec.api_key_env, field="api_key_env")

        def target(url: str) -> Target:
            breaker = Breaker(max_failures=spec.breaker_failures, cool_s=spec.breaker_s, clock=self._clock)
            return Target(url, breaker)

        choice = Choice([target(url) for url in spec.urls], max_concurrent=spec.max_concurrent, clock=self._clock)
        prices = Prices(spec.prompt_price, spec.completion_price)
        purse = Purse(prices, limiter=self._limiter(spec), meters=self.meters, budget=spec.budget)
        patience = Patience(spec.queue_s, spec.retry_budget_s, self._clock, self._rng)
        tls = any(url.startswith("https") for url in spec.urls)
        http = HttpClient(key=key, timeout_s=spec.request_timeout_s, tls=tls)
        return EndpointInstance(Caller(http, choice, purse, patience), model=spec.model)

    async def reap(self, handle: str) -> bool:
        """Nothing outlives the process."""
        return False

    async def close(self) -> None:
        self._limiters.clear()

    def _limiter(self, spec: EndpointSpec) -> Limiter | None:
        if spec.requests_per_minute is None and spec.tokens_per_minute is None:
            return None
        if spec.key not in self._limiters:
            while len(self._limiters) >= MAX_KEPT_LIMITERS:
                del self._limiters[next(iter(self._limiters))]
            self._limiters[spec.key] = RateLimiter(
                requests_per_minute=spec.requests_per_minute,
                tokens_per_minute=spec.tokens_per_minute,
                clock=self._clock,
            )
        return self._limiters[spec.key]


def check_budget(meters: Meters | None, kind: str, budget: str) -> None:
    """Raises ConfigError for a name that the pool does not have: it would limit nothing."""
    if meters is not None:
        meters.check(budget)
    elif budget:
        raise UnsupportedField(kind, "budget", "there is no pool here that could have one")


def key_of(variable: str, *, field: str) -> str:
    """The key that a variable of the environment holds; "" where none is named.  Raises ConfigError."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        found = "something else" if key else "nothing"
        raise ConfigError(f"{field}: expected a key in the environment variable {variable}, found {found}", param=field)
    return key
