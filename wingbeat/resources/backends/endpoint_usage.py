"""What requests use and cost: drawn before a request is sent, put right by what its reply says.

A request waits its turn with an estimate (a token for every four bytes of its body, and the ``max_tokens`` that it
allows); the reply's own ``usage`` replaces the estimate, up or down.  A try that brought no answer gives its tokens
back, but stays a request: the other side counts it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

BYTES_PER_TOKEN = 4
MAX_TOKENS = 100_000_000
"""Of one request.  A count beyond it is a fault of the other side, and would be a debt that stops all for weeks."""
PER = 1000.0
"""Tokens that a price is for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a thousand tokens, in the unit of the budget."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, usage: Usage) -> float:
        return (usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion) / PER


class Meters(Protocol):
    """The pool's named budgets."""

    def check(self, name: str) -> None: ...
    async def take(self, name: str, *, requests: float = ..., tokens: float = ..., cost: float = ...) -> float | None:
        """Returns the tokens drawn, which are no more than the budget ever holds; None: all of them."""
        ...

    def settle(self, name: str, *, tokens: float = ..., cost: float = ...) -> None: ...


class Limiter(Protocol):
    """The limits that a spec itself carries."""

    async def take(self, *, requests: float = ..., tokens: float = ...) -> float | None: ...
    def settle(self, *, tokens: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was taken for one request before it was sent."""

    own_tokens: float
    """Of the spec's own limits."""
    pooled_tokens: float
    """Of the pool's budget."""
    cost: float


class Purse:
    """What pays for the requests of one instance."""

    def __init__(self, prices: Prices, *, limiter: Limiter | None, meters: Meters | None, budget: str) -> None:
        """``budget``: the name of the pool's; "": none."""
        self._prices = prices
        self._limiter = limiter
        self._meters = meters if budget else None
        self._budget = budget
        self.cost = 0.0
        """Spent since the start."""
        self.used = Usage()

    async def draw(self, estimate: Usage) -> Drawn:
        """Wait for the turn of one request.  Raises ResourceFailed once the pool's cost budget is spent."""
        wanted = float(estimate.total_tokens)
        own: float | None = None
        pooled: float | None = None
        cost = self._prices.of(estimate)
        if self._limiter is not None:
            own = await self._limiter.take(requests=1, tokens=wanted)
        try:
            if self._meters is not None:
                pooled = await self._meters.take(self._budget, requests=1, tokens=wanted, cost=cost)
        except BaseException:
            self._give_back(wanted if own is None else own)
            raise
        return Drawn(wanted if own is None else own, wanted if pooled is None else pooled, cost)

    def settle(self, drawn: Drawn, actual: Usage) -> float:
        """Put what was used in the place of what was drawn; returns the cost."""
        cost = self._prices.of(actual)
        self.cost += cost
        self.used = Usage(
            self.used.prompt_tokens + actual.prompt_tokens, self.used.completion_tokens + actual.completion_tokens
        )
        self._give_back(drawn.own_tokens - actual.total_tokens)
        if self._meters is not None:
            tokens = actual.total_tokens - drawn.pooled_tokens
            self._meters.settle(self._budget, tokens=tokens, cost=cost - drawn.cost)
        return cost

    def _give_back(self, tokens: float) -> None:
        """To the spec's own limits; more than was drawn is taken with a negative amount."""
        if self._limiter is not None:
            self._limiter.settle(tokens=-tokens)


def estimate_of(body: bytes | None, content: Any) -> Usage:
    """What a request may use, by what it says."""
    if body is None:
        return Usage()
    allowed = 0
    if isinstance(content, Mapping):
        limits = (content.get(name) for name in ("max_completion_tokens", "max_tokens"))
        allowed = next((int(limit) for limit in limits if isinstance(limit, int) and limit > 0), 0)
    return Usage(len(body) // BYTES_PER_TOKEN, allowed)


def usage_of(content: Any) -> Usage | None:
    """What a reply says it used, in the words of OpenAI (chat, completions, embeddings, responses); None: nothing."""
    told = content.get("usage") if isinstance(content, Mapping) else None
    if not isinstance(told, Mapping):
        return None
    prompt, completion = (
        next((told[name] for name in names if _is_count(told.get(name))), None)
        for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    )
    return None if prompt is None and completion is None else Usage(prompt or 0, completion or 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
