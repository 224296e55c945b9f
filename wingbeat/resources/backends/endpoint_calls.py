"""Requests to a pool of addresses, tried again where infrastructure failed.

A try waits for its turn (rates, budgets, then an address), is sent, and says what came of it.  Again is tried what
could not have been acted on (no connection, 429, 503 with Retry-After), and, of what may be repeated, also what brought
no answer or a 5xx.  Everything else is an answer.  Retries are in this one layer, with full jitter (Brooker,
"Exponential Backoff And Jitter", 2015), and all tries of a request begin within ``retry_budget_s``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from wingbeat.core.ports import Clock
from wingbeat.resources.backends.endpoint_http import (
    REPEATABLE_METHODS,
    Ending,
    HttpClient,
    HttpReply,
    Message,
    Try,
)
from wingbeat.resources.backends.endpoint_urls import Choice, Passage
from wingbeat.resources.backends.endpoint_usage import BYTES_PER_TOKEN, Drawn, Purse, Usage, estimate_of, usage_of
from wingbeat.resources.specs import ResourceFailed, ResourceWait

FINAL_CODES = frozenset({"insufficient_quota", "version_gone"})
"""Refusals that come as 429 or 503, and that trying again does not change."""
BACKOFF_S = 0.25
MAX_BACKOFF_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and what it took."""

    reply: HttpReply
    content: Any
    """The reply's JSON; None where it is none."""
    usage: Usage
    cost: float
    words: str
    """Who answered what, for errors: in it the key is not shown, should the other side quote it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is worth trying."""

    queue_s: float
    retry_budget_s: float
    clock: Clock
    rng: random.Random = field(default_factory=random.Random)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def pause(self, tries: int) -> float:
        """Seconds to wait after the ``tries``-th try (from 1)."""
        return self.rng.random() * min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(tries, 16))

    def respected(self, retry_after_s: float) -> float:
        """A Retry-After, and up to a quarter more: who was refused together must not come back together."""
        return retry_after_s * (1 + 0.25 * self.rng.random())


class Caller:
    """Sends the requests of one instance; of one event loop."""

    def __init__(self, http: HttpClient, choice: Choice, purse: Purse, patience: Patience) -> None:
        self.http = http
        self.choice = choice
        self.purse = purse
        self._patience = patience

    async def close(self) -> None:
        """Whoever waits gets ResourceFailed; requests under way end with their connections."""
        self.choice.close()
        await self.http.close()

    async def send(self, message: Message, *, content: Any = None, repeatable: bool | None = None) -> Answer:
        """The answer; statuses below 500 other than 429 and redirects are one.

        ``content``: the JSON that the message carries.  ``repeatable``: whether to try again where the other side may
        have acted; None: as the method says.  Raises ResourceFailed once tries are over, ResourceWait where the turn
        does not come.
        """
        if repeatable is None:
            repeatable = message.method in REPEATABLE_METHODS
        patience = self._patience
        estimate = estimate_of(message.body, content)
        began = patience.clock()
        give_up_at = began + patience.retry_budget_s
        tries = 0
        while True:
            result, answer = await self._try(message, estimate, give_up_at=give_up_at, tries=tries)
            if answer is not None:
                return answer
            tries += 1
            pause = 0.0 if result.is_throttled else patience.pause(tries)  # then its address is what is waited for
            may_again = repeatable or result.ending is not Ending.FAULT
            if not may_again or patience.clock() + pause >= give_up_at:
                spent = patience.clock() - began
                count = "one try" if tries == 1 else f"{tries} tries in {spent:.1f} s"
                unsure = "" if may_again else "; not sent again, as it may have been acted on"
                raise ResourceFailed(f"{message.where}: no answer after {count}: {result.words}{unsure}")
            await patience.sleep(pause)

    async def _try(
        self, message: Message, estimate: Usage, *, give_up_at: float, tries: int
    ) -> tuple[Try, Answer | None]:
        """One try, from its place in the line to its bill."""
        passage, drawn = await self._admitted(estimate, give_up_at=give_up_at)
        actual = Usage()
        cost = 0.0
        content: Any = None
        try:
            result = await self.http.send(message, passage.target.url)
            content = None if result.reply is None else _json_or_none(result.reply)
            if error_code(content) in FINAL_CODES:
                result = replace(result, ending=Ending.ANSWERED)
            self._tell(passage, result, tries=tries)
            if result.ending is Ending.ANSWERED and result.reply is not None:
                actual = usage_of(content) or unsaid(estimate, result.reply)
        finally:
            passage.abandon()  # where nothing was told: cancelled, or refused as what it is
            cost = self.purse.settle(drawn, actual)
        if result.ending is not Ending.ANSWERED or result.reply is None:
            return result, None
        return result, Answer(result.reply, content, actual, cost, result.words)

    async def _admitted(self, estimate: Usage, *, give_up_at: float) -> tuple[Passage, Drawn]:
        """Its turn: rates and budgets first, so that nobody holds an address and waits."""
        drawn: Drawn | None = None
        passage: Passage | None = None
        try:
            async with asyncio.timeout(self._patience.queue_s):
                drawn = await self.purse.draw(estimate)
                passage = await self.choice.enter(give_up_at=give_up_at)
                return passage, drawn
        except TimeoutError:
            raise ResourceWait(
                f"a request waited {self._patience.queue_s} s for its turn (rates, budgets, max_concurrent): raise"
                " queue_s or a limit"
            ) from None
        finally:
            if drawn is not None and passage is None:
                self.purse.settle(drawn, Usage())

    def _tell(self, passage: Passage, result: Try, *, tries: int) -> None:
        """What the try says of its address."""
        if result.ending is Ending.ANSWERED:
            passage.succeeded()
            return
        if result.is_throttled:
            asked = result.retry_after_s or 0.0
            is_said = asked >= BACKOFF_S  # "0" would have it asked again and again without a pause
            passage.throttled(self._patience.respected(asked) if is_said else self._patience.pause(tries + 1))
        else:
            passage.failed()


def unsaid(estimate: Usage, reply: HttpReply) -> Usage:
    """What an answer took that does not say so."""
    return Usage(estimate.prompt_tokens, len(reply.body) // BYTES_PER_TOKEN) if reply.ok else Usage()


def error_code(content: Any) -> str:
    """The code of a refusal, in the words of OpenAI; "" where there is none."""
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("code") or "") if isinstance(error, dict) else ""


def _json_or_none(reply: HttpReply) -> Any:
    try:
        return orjson.loads(reply.body) if reply.body else None
    except orjson.JSONDecodeError:
        return None
